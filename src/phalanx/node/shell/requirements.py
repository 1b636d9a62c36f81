"""Bring the Python packages that a job names to this node: an environment for each hash, made once, which the member then runs in.

The work is done by `requirements_main` in the member's containment; here it is asked for, and what it made is kept while the member lives.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Final

from phalanx.core.work.requirements import NONE
from phalanx.node.logic.requirements import used_by_itself, with_environment
from phalanx.node.shell.aside import REQUIREMENTS_TASK, run_aside
from phalanx.node.shell.cache import make_cache
from phalanx.node.shell.present import Present
from phalanx.node.shell.refusal import Refusal
from phalanx.node.shell.venvs import Venvs

_PROGRAM: Final = (sys.executable, "-I", "-m", "phalanx.node.shell.requirements_main")


def file_of(present: Present) -> str:
    """Which file of the working directory is installed; "" for none. A copy brings its own, unless the job says otherwise."""
    spec = present.prepare.spec
    if spec.requirements:
        return "" if spec.requirements == NONE else spec.requirements
    if not spec.upload or spec.image:
        return ""
    return used_by_itself(lambda name: _bytes(os.path.join(present.workdir, name)))


def bring(
    present: Present, file: str, *, cache: str, variables: Mapping[str, str], open_output: Callable[[], int]
) -> None:
    """Let the member run in the environment of this file; a restart in place finds that of before.

    Args:
        present: with its processes open.
        file: in the working directory.
        cache: folder of what attempts share.
        variables: what the installer's environment is, the job's own PIP_ and UV_ variables in it.
        open_output: as `run_aside` takes it.

    Raises:
        Refusal: it cannot be made; the installer's words are in it.
        OSError: the disk.
    """
    make_cache(cache)
    answer = os.path.join(present.scratch.path, "requirements.json")
    name = _name_in(answer)
    if name is None or (name and not _take(present, Venvs(cache), name)):
        order = os.path.join(present.scratch.path, "requirements.order")
        with open(order, "w", encoding="utf-8") as out:
            what = {"file": file, "workdir": present.workdir, "cache": cache, "argv": present.prepare.spec.role.argv}
            json.dump({**what, "answer": answer}, out)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(answer)  # of a try that failed
        run_aside(present, REQUIREMENTS_TASK, (*_PROGRAM, order), variables, open_output)
        name = _name_in(answer)
        if name is None:
            raise Refusal(_why(answer, file), charge=_charged(answer))
        if name and not _take(present, Venvs(cache), name):
            raise Refusal(f"{file}: its packages were removed as soon as they were installed", charge=False)


def dressed(present: Present, variables: dict[str, str]) -> dict[str, str]:
    """The variables, with the member's environment activated if it has one."""
    return with_environment(variables, present.venv) if present.venv else variables


def _take(present: Present, venvs: Venvs, name: str) -> bool:
    """Use it until the member is wound up; False where it is gone."""
    descriptor = venvs.use(name)
    if not venvs.complete(name):
        os.close(descriptor)
        return False
    present.closing.callback(os.close, descriptor)
    present.venv = venvs.path(name)
    return True


def _answer(path: str) -> dict[str, object]:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _name_in(path: str) -> str | None:
    name = _answer(path).get("name")
    return name if isinstance(name, str) else None


def _why(path: str, file: str) -> str:
    return str(_answer(path).get("why") or f"installing {file} was cut short on this node")


def _charged(path: str) -> bool:
    return _answer(path).get("charge") is True


def _bytes(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None

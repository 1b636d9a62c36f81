"""Bring the Python packages that a job names to this node: an environment for each hash, made once, which the member then runs in.

The work is done by `requirements_main` in the member's containment; here it is asked for, and what it made is kept while the member lives.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Mapping
from typing import Final

from phalanx.core.work.requirements import NONE
from phalanx.node.logic.requirements import used_by_itself, with_environment
from phalanx.node.shell.accounts import acting_as, open_to_write
from phalanx.node.shell.aside import REQUIREMENTS_TASK, run_aside
from phalanx.node.shell.cache import make_cache
from phalanx.node.shell.present import Present
from phalanx.node.shell.refusal import Refusal
from phalanx.node.shell.venvs import Venvs

_PROGRAM: Final = (sys.executable, "-I", "-m", "phalanx.node.shell.requirements_main")


_ANSWER_CHARACTERS_MAX: Final = 1 << 20  # the installer's last words are in it
_FILE_BYTES_MAX: Final = 16 << 20  # a list of packages; the installer reads it again, with the job's memory
_NAME: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)?")  # a folder's in the cache, and nothing above it


def file_of(member: Present) -> str:
    """Which file of the working directory is installed; "" for none. A copy brings its own, unless the job says otherwise."""
    spec = member.prepare.spec
    if spec.requirements:
        return "" if spec.requirements == NONE else spec.requirements
    if not spec.upload or spec.image:
        return ""
    return used_by_itself(lambda name: _bytes(os.path.join(member.workdir, name)))


def bring(
    member: Present, file: str, *, cache: str, variables: Mapping[str, str], open_output: Callable[[], int]
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
    answer, order = (os.path.join(member.scratch.path, name) for name in ("requirements.json", "requirements.order"))
    with acting_as(member.account):
        make_cache(cache, member.account)
        name = _name_in(answer)
        fresh = name is None or (name and not _take(member, Venvs(cache), name))
        if fresh:
            with open(open_to_write(order), "w", encoding="utf-8") as out:
                what = {
                    "file": file,
                    "workdir": member.workdir,
                    "cache": cache,
                    "argv": member.prepare.spec.role.argv,
                }
                json.dump({**what, "answer": answer}, out)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(answer)  # of a try that failed
    if fresh:
        run_aside(member, REQUIREMENTS_TASK, (*_PROGRAM, order), variables, open_output)
        with acting_as(member.account):
            name = _name_in(answer)
            if name is None:
                raise Refusal(_why(answer, file), charge=_charged(answer))
            taken = not name or _take(member, Venvs(cache), name)
        if not taken:
            raise Refusal(f"{file}: its packages were removed as soon as they were installed", charge=False)


def dressed(member: Present, variables: dict[str, str]) -> dict[str, str]:
    """The variables, with the member's environment activated if it has one."""
    return with_environment(variables, member.venv) if member.venv else variables


def _take(member: Present, venvs: Venvs, name: str) -> bool:
    """Use it until the member is wound up; False where it is gone.

    Raises:
        Refusal: the member was stopped, or somebody holds the environment.
    """
    try:
        descriptor = venvs.use(name, member.cancelled.is_set)
    except TimeoutError as error:
        stopped = member.cancelled.is_set()
        why = (
            "stopped while it was being prepared" if stopped else f"{venvs.path(name)}: another process holds its lock"
        )
        raise Refusal(why, charge=not stopped) from error
    if not venvs.complete(name):
        os.close(descriptor)
        return False
    member.closing.callback(os.close, descriptor)
    member.venv = venvs.path(name)
    return True


def _answer(path: str) -> dict[str, object]:
    try:
        # The installer's word, and with that of whatever it installs: neither a pipe nor a long text may hold us up.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, encoding="utf-8") as file:
            found = json.loads(file.read(_ANSWER_CHARACTERS_MAX))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _name_in(path: str) -> str | None:
    name = _answer(path).get("name")
    return name if isinstance(name, str) and _NAME.fullmatch(name) else None


def _why(path: str, file: str) -> str:
    return str(_answer(path).get("why") or f"installing {file} was cut short on this node")


def _charged(path: str) -> bool:
    return _answer(path).get("charge") is True


def _bytes(path: str) -> bytes | None:
    try:
        descriptor = os.open(
            path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        )  # a pipe without a writer must not hold us up
    except (FileNotFoundError, NotADirectoryError):
        return None
    with open(descriptor, "rb") as file:
        return file.read(_FILE_BYTES_MAX) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None

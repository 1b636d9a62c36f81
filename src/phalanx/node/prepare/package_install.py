"""Provides the Python packages that a job requires: one virtual environment per hash, created once, in which the member runs.

`package_install_main` installs in the member's containment; this module starts it and holds the environment while the member lives.
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

from phalanx.node.files.cache_folder import make_cache
from phalanx.node.files.folder_cache import FolderCache
from phalanx.node.files.job_accounts import acting_as, open_for_writing
from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.logic.requirements import default_requirements_file
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.prepare.cached_folders import hold_folder, read_answer
from phalanx.node.prepare.setup_runner import REQUIREMENTS_TASK, run_setup_command

_PROGRAM: Final = (sys.executable, "-I", "-m", "phalanx.node.prepare.package_install_main")

_FILE_BYTES_MAX: Final = 16 << 20  # a list of packages; the installer reads it again, within the job's memory
_NAME: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)?")  # a folder in the cache, never above it


def file_of(member: MemberRuntime) -> str:
    """The requirements or lock file in the working directory; "" for none. An uploaded directory may provide one, unless the job specifies another."""
    spec = member.prepare.spec
    if spec.packages_file or spec.requirements:
        return spec.packages_file
    if not spec.upload or spec.image or spec.software.has_python:
        return ""
    return default_requirements_file(lambda name: _bytes(os.path.join(member.workdir, name)))


def bring(
    member: MemberRuntime, file: str, *, cache: str, variables: Mapping[str, str], open_output: Callable[[], int]
) -> None:
    """Make the member run in the environment of this file; a restart in place reuses the earlier one.

    Args:
        member: its processes must be open.
        file: in the working directory.
        cache: the node's cache folder.
        variables: the installer's environment, including the job's PIP_ and UV_ variables.
        open_output: as in `run_setup_command`.

    Raises:
        PreparationFailed: it cannot be created; contains the installer's error.
        OSError: the disk failed.
    """
    answer, order = (os.path.join(member.scratch.path, name) for name in ("requirements.json", "requirements.order"))
    with acting_as(member.account):
        make_cache(cache, member.account)
        name = _name_in(answer)
        fresh = name is None or (name and not _take(member, FolderCache(cache), name))
        if fresh:
            with open(open_for_writing(order), "w", encoding="utf-8") as out:
                request = {
                    "file": file,
                    "workdir": member.workdir,
                    "cache": cache,
                    "argv": member.prepare.spec.role.argv,
                }
                json.dump({**request, "answer": answer}, out)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(answer)  # of a failed try
    if fresh:
        run_setup_command(member, REQUIREMENTS_TASK, (*_PROGRAM, order), variables, open_output)
        with acting_as(member.account):
            name = _name_in(answer)
            if name is None:
                raise PreparationFailed(_why(answer, file), charge=_charged(answer))
            taken = not name or _take(member, FolderCache(cache), name)
        if not taken:
            raise PreparationFailed(f"{file}: its packages were removed right after their installation", charge=False)
    with acting_as(member.account):
        source = read_answer(answer).get("source")
    if source and isinstance(source, str):
        parts = filter(None, (source, variables.get("PYTHONPATH")))
        member.software = {**member.software, "PYTHONPATH": os.pathsep.join(parts)}


def _take(member: MemberRuntime, venvs: FolderCache, name: str) -> bool:
    """Hold the environment until the member is wound up; False if it is gone.

    Raises:
        PreparationFailed: as `hold_folder`.
    """
    if not hold_folder(member, venvs, name):
        return False
    member.venv = venvs.path(name)
    return True


def _name_in(path: str) -> str | None:
    name = read_answer(path).get("name")
    return name if isinstance(name, str) and _NAME.fullmatch(name) else None


def _why(path: str, file: str) -> str:
    return str(read_answer(path).get("why") or f"installing {file} was interrupted on this node")


def _charged(path: str) -> bool:
    return read_answer(path).get("charge") is True


def _bytes(path: str) -> bytes | None:
    try:
        # A pipe without a writer must not block us.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with open(descriptor, "rb") as file:
        return file.read(_FILE_BYTES_MAX) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None

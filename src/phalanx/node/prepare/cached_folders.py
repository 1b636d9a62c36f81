"""What the supervisor does with a folder that a program of the member has put into a cache: read the program's answer, and hold the folder."""

from __future__ import annotations

import json
import os
from typing import Final

from phalanx.node.files.folder_cache import FolderCache
from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.member.member_runtime import MemberRuntime

_ANSWER_CHARACTERS_MAX: Final = 1 << 20  # includes an installer's last lines


def hold_folder(member: MemberRuntime, cache: FolderCache, name: str) -> bool:
    """Hold the folder until the member is wound up; False if it is gone.

    Raises:
        PreparationFailed: the member was stopped, or another process holds the folder.
    """
    try:
        descriptor = cache.acquire(name, member.cancelled.is_set)
    except TimeoutError as error:
        stopped = member.cancelled.is_set()
        why = (
            "the job was stopped during preparation"
            if stopped
            else f"{cache.path(name)}: another process holds its lock"
        )
        raise PreparationFailed(why, charge=not stopped) from error
    if not cache.complete(name):
        os.close(descriptor)
        return False
    member.cleanup.callback(os.close, descriptor)
    return True


def read_answer(path: str) -> dict[str, object]:
    """The answer of a program; empty without one. Job code may have written it, so a pipe or a long text does not block us."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, encoding="utf-8") as file:
            found = json.loads(file.read(_ANSWER_CHARACTERS_MAX))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}

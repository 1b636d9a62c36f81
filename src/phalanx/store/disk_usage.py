"""How much of the disk folders occupy, and which folders belong to jobs."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Final

from phalanx.core.ids import JobId

_BLOCK_BYTES: Final = 512  # of st_blocks, on every file system
_JOB_FOLDER: Final = re.compile(r"([0-9]+(?:_[0-9]+)?)-[0-9a-z]+")


def tree_bytes(root: str) -> int:
    """What a folder occupies on the disk; 0 if it does not exist. A file with several names counts for each."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                total += os.lstat(os.path.join(folder, name)).st_blocks * _BLOCK_BYTES
    return total


def job_folders(root: str) -> list[tuple[str, JobId]]:
    """The folders of jobs in a root, by name, with the id of the job; empty if the root does not exist."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    return sorted((name, JobId(match[1])) for name in names if (match := _JOB_FOLDER.fullmatch(name)))

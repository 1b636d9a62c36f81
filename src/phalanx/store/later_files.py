"""After a restore: files of jobs and attempts that the restored records do not know, out of the way of those that get their numbers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

from phalanx.failpoints import around

FOLDERS: Final = ("logs", "outputs", "checkpoints")
_JOB: Final = re.compile(r"[0-9]+(_[0-9]+)?")
_ATTEMPT: Final = re.compile(r"(?:epoch-)?([0-9]+)")


def set_aside(folder: str, epochs: Mapping[str, int], stamp: str) -> list[str]:
    """Move what is of a later job, or of a later attempt of a known one, into folders beside; those that were made.

    Args:
        folder: that holds `logs`, `outputs` and `checkpoints`.
        epochs: of every job that is known, its newest.
        stamp: of the restore, for the folders' names.
    """
    made = []
    for name in FOLDERS:
        later = [path for path in _entries(os.path.join(folder, name)) if _is_later(path, epochs)]
        aside = os.path.join(folder, f"{name}.before-restore-{stamp}")
        for path in later:
            target = os.path.join(aside, *path)
            with around("restore.later_folder"):
                os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
            with around("restore.later_files"):
                os.rename(os.path.join(folder, name, *path), target)
        if later:
            made.append(aside)
    return made


def _entries(folder: str) -> list[tuple[str, ...]]:
    """Folders of jobs, and in them those of attempts, outermost first."""
    found: list[tuple[str, ...]] = []
    for job in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        if _JOB.fullmatch(job):
            found.append((job,))
            inside = os.path.join(folder, job)
            found += [(job, name) for name in sorted(os.listdir(inside)) if os.path.isdir(os.path.join(inside, name))]
    return found


def _is_later(path: tuple[str, ...], epochs: Mapping[str, int]) -> bool:
    job, *inside = path
    if job not in epochs:
        return not inside  # the whole folder goes, with what is in it
    attempt = _ATTEMPT.fullmatch(inside[0]) if inside else None
    return attempt is not None and int(attempt[1]) > epochs[job]

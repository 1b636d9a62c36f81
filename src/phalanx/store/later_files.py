"""After a restore: files of jobs and attempts that the restored records do not know, out of the way of those that get their numbers."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Final

from phalanx.failpoints import around, sync_directory

FOLDERS: Final = ("logs", "outputs", "checkpoints")
ENDED: Final = sys.maxsize  # in place of the newest attempt of a job that has ended: no later one was ever made
NOTES: Final = ".from"  # below outputs, a file for each job
_JOB: Final = re.compile(r"[0-9]+(_[0-9]+)?")
# How the folders of attempts are called below a job's. Its outputs are of all of them, and what stands there has whatever names its ranks gave.
_ATTEMPT: Final = {"logs": re.compile(r"([0-9]+)"), "checkpoints": re.compile(r"epoch-([0-9]+)")}


def set_aside(
    folder: str, epochs: Mapping[str, int], stamp: str, *, may: Callable[[], None] = lambda: None
) -> list[str]:
    """Move what is of a later job, or of a later attempt of a known one, into folders beside; those that were made.

    Of outputs whole jobs alone move: nothing in them says of which attempt it is.

    Args:
        folder: that holds `logs`, `outputs` and `checkpoints`.
        epochs: of every job that is known, its newest.
        stamp: of the restore, for the folders' names.
        may: raises where nothing may be moved any more; asked before each.
    """
    made = []
    for name in FOLDERS:
        there, aside = os.path.join(folder, name), os.path.join(folder, f"{name}.before-restore-{stamp}")
        # First what nobody looks for on its own, should this be cut short.
        later = [*_later_notes(there, epochs), *_later(there, epochs, _ATTEMPT.get(name))]
        changed = {folder}
        for path in later:
            target = os.path.join(aside, *path)
            with around("restore.later_folder"):
                os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
            may()
            with around("restore.later_files"):
                os.rename(os.path.join(there, *path), target)
            # Where it stood, where it stands, and above that, as far as it may be new.
            changed |= {os.path.dirname(os.path.join(there, *path)), os.path.dirname(target), aside}
        if later:
            for one in sorted(changed):
                sync_directory("restore.later_sync", one)
            made.append(aside)
    return made


def _later_notes(folder: str, epochs: Mapping[str, int]) -> list[tuple[str, ...]]:
    """What is noted of the outputs of jobs that are not known: which node each file came from."""
    notes = os.path.join(folder, NOTES)
    names = sorted(os.listdir(notes)) if os.path.isdir(notes) else []
    jobs = [(name.removesuffix(".json"), name) for name in names]
    return [(NOTES, name) for job, name in jobs if _JOB.fullmatch(job) and job not in epochs]


def _later(folder: str, epochs: Mapping[str, int], attempt: re.Pattern[str] | None) -> list[tuple[str, ...]]:
    """Folders of jobs that are not known, and in those of the others what is of later attempts."""
    found: list[tuple[str, ...]] = []
    for job in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        if not _JOB.fullmatch(job):
            continue
        if job not in epochs:
            found.append((job,))  # with all that is in it
        elif attempt is not None and epochs[job] < ENDED:
            for name in listed(os.path.join(folder, job)):
                seen = attempt.fullmatch(name)
                if seen is not None and int(seen[1]) > epochs[job]:
                    found.append((job, name))
    return found


def listed(folder: str) -> list[str]:
    """What is in a folder, sorted; nothing of one that is not there, or not ours to read."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # its owner's, on a disk that knows no root
        return []

"""After a restore: moves files of jobs and attempts that the restored records do not contain, since their numbers will be used again."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Final

from phalanx.durable_files import make_directory, rename_path, sync_directory

FOLDERS: Final = ("logs", "outputs", "checkpoints")
ENDED: Final = sys.maxsize  # newest attempt of an ended job: no later one can exist
NOTES: Final = ".from"  # below outputs, one file for each job
_JOB: Final = re.compile(r"[0-9]+(_[0-9]+)?")
# Names of the attempts' folders below a job's. Outputs have none: they are shared by all attempts, with names that the ranks choose.
_ATTEMPT: Final = {"logs": re.compile(r"([0-9]+)"), "checkpoints": re.compile(r"epoch-([0-9]+)")}


def move_orphaned(
    folder: str, epochs: Mapping[str, int], stamp: str, *, check_allowed: Callable[[], None] = lambda: None
) -> list[str]:
    """Move the files of unknown jobs, and of unknown attempts of known jobs, into new folders; return those folders.

    Outputs move only for whole jobs: they are not separated by attempt.

    Args:
        folder: contains `logs`, `outputs` and `checkpoints`.
        epochs: newest epoch of every known job.
        stamp: of the restore, for the folders' names.
        check_allowed: raises if nothing may be moved any longer; called before each move.
    """
    made = []
    for name in FOLDERS:
        there, aside = os.path.join(folder, name), os.path.join(folder, f"{name}.before-restore-{stamp}")
        # Notes first, in case this is interrupted: nothing else searches for them.
        later = [*_later_notes(there, epochs), *_later(there, epochs, _ATTEMPT.get(name))]
        changed = {folder}
        for path in later:
            target = os.path.join(aside, *path)
            make_directory("restore.later", os.path.dirname(target))
            check_allowed()
            rename_path("restore.later", os.path.join(there, *path), target)
            # The old and the new folder, and those above that may be new.
            changed |= {os.path.dirname(os.path.join(there, *path)), os.path.dirname(target), aside}
        if later:
            for one in sorted(changed):
                sync_directory("restore.later", one)
            made.append(aside)
    return made


def _later_notes(folder: str, epochs: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Notes about the outputs of unknown jobs: which node each file came from."""
    notes = os.path.join(folder, NOTES)
    names = sorted(os.listdir(notes)) if os.path.isdir(notes) else []
    jobs = [(name.removesuffix(".json"), name) for name in names]
    return [(NOTES, name) for job, name in jobs if _JOB.fullmatch(job) and job not in epochs]


def _later(folder: str, epochs: Mapping[str, int], attempt: re.Pattern[str] | None) -> list[tuple[str, ...]]:
    """Folders of unknown jobs, and entries of unknown attempts in those of known jobs."""
    found: list[tuple[str, ...]] = []
    for job in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        if not _JOB.fullmatch(job):
            continue
        if job not in epochs:
            found.append((job,))  # with everything in it
        elif attempt is not None and epochs[job] < ENDED:
            for name in list_folder(os.path.join(folder, job)):
                match = attempt.fullmatch(name)
                if match is not None and int(match[1]) > epochs[job]:
                    found.append((job, name))
    return found


def list_folder(folder: str) -> list[str]:
    """Sorted entries of a folder; none if it does not exist or is not readable."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # PermissionError: a shared disk with root squash
        return []

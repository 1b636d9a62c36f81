"""Checkpoint folders on this node: find the newest one that verifies, and remove those that retention dropped."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterable
from typing import Final

from phalanx.core.ids import JobId
from phalanx.core.work.job import PublishedCheckpoint
from phalanx.node.files.rmtree import remove_tree
from phalanx.wire import manifest

COPIES_PER_ATTEMPT: Final = 2  # per attempt, if the head keeps copies: as many as it publishes
# Jobs that left this node and whose local copies stay; two checkpoints each, which bounds the disk space.
DEPARTED_JOBS_MAX: Final = 4
_FOLDER: Final = re.compile(r"/(?P<job>[^/-]+)-[^/-]+/epoch-\d+-[^/-]+/step-\d{8,}")
_STEP: Final = re.compile(r"step-\d{8,}")


def newest_valid(
    candidates: Iterable[PublishedCheckpoint], note: Callable[[str], None], cancelled: Callable[[], bool]
) -> PublishedCheckpoint | None:
    """The first candidate whose bytes all match its published manifest. Cost: one pass over the candidates tried.

    `note` receives the reason for each rejected candidate; once `cancelled` is true no further one is tried.
    """
    for candidate in candidates:
        if cancelled():
            return None
        try:
            manifest.verify(candidate.path, expected_digest=candidate.digest)
        except manifest.CheckpointInvalid as error:
            note(f"checkpoint of step {candidate.step} is rejected: {error}")
            continue
        return candidate
    return None


def remove_empty_folders(epoch_folder: str) -> None:
    """Remove an attempt's checkpoint folder and its job's if they are empty. Another node or attempt may create them again."""
    if not epoch_folder or "://" in epoch_folder:
        return
    with contextlib.suppress(OSError):  # not empty, or another node removed it first
        os.rmdir(epoch_folder)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(epoch_folder))


def remove_unneeded_copies(own: str, keep: Collection[str]) -> None:
    """Remove a job's local copies on this node except those in `keep`. The head holds the published ones."""
    for epoch_folder in _below(own):
        for path in _below(epoch_folder):
            if path not in keep:
                _retire(path)
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(epoch_folder)


def remove_old_copies(epoch_folder: str, keep: Collection[str]) -> None:
    """Keep the newest two checkpoints that an attempt saved here, those in `keep`, and unfinished ones; remove the others."""
    saved = sorted((path for path in _below(epoch_folder) if _STEP.fullmatch(os.path.basename(path))), reverse=True)
    for path in saved[COPIES_PER_ATTEMPT:]:
        if path not in keep:
            _retire(path)


def remove_departed_jobs(root: str, live_jobs: Collection[str]) -> None:
    """Keep the local copies of `live_jobs` and of the last few other jobs: these may return and then download less."""
    others = [path for path in _below(root) if os.path.basename(path) not in live_jobs]
    for path in sorted(others, key=_changed_s, reverse=True)[DEPARTED_JOBS_MAX:]:
        remove_tree(path)


def _below(folder: str) -> list[str]:
    """The folders in a folder; none if it does not exist."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _changed_s(path: str) -> float:
    """The last change of a folder or one below it; 0 if it is gone."""
    found = 0.0
    for each in (path, *_below(path)):
        with contextlib.suppress(OSError):
            found = max(found, os.stat(each).st_mtime)
    return found


def _retire(path: str) -> None:
    doomed = f"{path}.tmp-retired"
    with contextlib.suppress(OSError):  # already removed
        os.rename(path, doomed)
    remove_tree(doomed)


def delete_checkpoints(job_id: JobId, paths: Iterable[str]) -> list[str]:
    """Remove the checkpoint folders of this job, and epoch folders that become empty; returns the paths that are not its checkpoints.

    Each is renamed first: a crash during deletion leaves no partial checkpoint under a name that a job could resume from.
    """
    refused = []
    for path in paths:
        found = _FOLDER.search(path)
        if found is None or found["job"] != job_id or found.end() != len(path) or os.path.normpath(path) != path:
            refused.append(path)
            continue
        _retire(path)
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(os.path.dirname(path))
    return refused

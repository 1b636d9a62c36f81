"""Checkpoint folders as a supervisor handles them: the newest one that verifies, and the removal of those that retention gave up."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterable
from typing import Final

from phalanx.core.ids import JobId
from phalanx.core.work.job import Resume
from phalanx.node.shell.trees import remove_tree
from phalanx.wire import manifest

OWN_KEPT: Final = 2  # of an attempt, where the head keeps copies: as many as it publishes
JOBS_KEPT: Final = (
    4  # jobs that left this node and whose own copies stay; with two checkpoints each, that bounds the disk
)
_FOLDER: Final = re.compile(r"/(?P<job>[^/]+)/epoch-\d+/step-\d{8,}")
_STEP: Final = re.compile(r"step-\d{8,}")


def newest_valid(
    candidates: Iterable[Resume], note: Callable[[str], None], broken_off: Callable[[], bool]
) -> Resume | None:
    """The first candidate whose every byte matches its published manifest. Cost: one pass over the ones tried.

    `note` is told of each that does not, and why; after `broken_off` no further one is tried.
    """
    for candidate in candidates:
        if broken_off():
            return None
        try:
            manifest.verify(candidate.path, expected_digest=candidate.digest)
        except manifest.CheckpointInvalid as error:
            note(f"checkpoint of step {candidate.step} is not used: {error}")
            continue
        return candidate
    return None


def tidy(epoch_folder: str) -> None:
    """Remove the folder that an attempt saved to, and its job's, where nothing is in it. Another node or attempt may make it again."""
    if not epoch_folder or "://" in epoch_folder:
        return
    with contextlib.suppress(OSError):  # it holds checkpoints, or another node was faster
        os.rmdir(epoch_folder)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(epoch_folder))


def tidy_own(own: str, keep: Collection[str]) -> None:
    """Leave of a job's own copies on this node those in `keep`, and what is on its way there. The head holds what is published."""
    for epoch_folder in _below(own):
        for path in _below(epoch_folder):
            if path not in keep:
                _retire(path)
        with contextlib.suppress(OSError):  # it holds one
            os.rmdir(epoch_folder)


def retain_own(epoch_folder: str, keep: Collection[str]) -> None:
    """Leave of what an attempt saved on this node the newest two, those in `keep`, and what is being written."""
    saved = sorted((path for path in _below(epoch_folder) if _STEP.fullmatch(os.path.basename(path))), reverse=True)
    for path in saved[OWN_KEPT:]:
        if path not in keep:
            _retire(path)


def sweep_own(root: str, member: Collection[str]) -> None:
    """Leave the own copies of jobs that are `present`, and of the last few that were: they may come back, and then fetch less."""
    others = [path for path in _below(root) if os.path.basename(path) not in member]
    for path in sorted(others, key=_changed_s, reverse=True)[JOBS_KEPT:]:
        remove_tree(path)


def _below(folder: str) -> list[str]:
    """The folders in a folder; none where it is not there."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _changed_s(path: str) -> float:
    """When a folder or one below it changed last; 0 for one that is gone."""
    found = 0.0
    for each in (path, *_below(path)):
        with contextlib.suppress(OSError):
            found = max(found, os.stat(each).st_mtime)
    return found


def _retire(path: str) -> None:
    doomed = f"{path}.tmp-retired"
    with contextlib.suppress(OSError):  # somebody was faster: it shall be gone, and is
        os.rename(path, doomed)
    remove_tree(doomed)


def delete(job_id: JobId, paths: Iterable[str]) -> list[str]:
    """Remove folders that have a checkpoint's name under this job, and epoch folders that are empty then; returns those refused.

    Renamed first, so that a crash in mid-deletion leaves nothing torn under a name that could be resumed from.
    """
    refused = []
    for path in paths:
        found = _FOLDER.search(path)
        if found is None or found["job"] != job_id or found.end() != len(path) or os.path.normpath(path) != path:
            refused.append(path)
            continue
        _retire(path)
        with contextlib.suppress(OSError):  # it holds others, or is written to
            os.rmdir(os.path.dirname(path))
    return refused

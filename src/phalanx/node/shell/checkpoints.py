"""Checkpoint folders as a supervisor handles them: the newest one that verifies, and the removal of those that retention gave up."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterable
from typing import Final

from phalanx.core.ids import JobId
from phalanx.core.work.job import Resume
from phalanx.wire import manifest

_FOLDER: Final = re.compile(r"/(?P<job>[^/]+)/epoch-\d+/step-\d{8,}")


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
        doomed = f"{path}.tmp-retired"
        with contextlib.suppress(OSError):  # somebody was faster: it shall be gone, and is
            os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
        with contextlib.suppress(OSError):  # it holds others, or is written to
            os.rmdir(os.path.dirname(path))
    return refused

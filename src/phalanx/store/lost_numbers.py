"""Job and attempt numbers that a restored database has lost, and the files that a head still has under them.

A restored database assigns these numbers again, and a stream's file defines the stream's end. So a head that begins to lead first moves
such files away. It knows the extent of its database now. A restore into a database that several heads share also records the extent at
that time in the database, for heads that lead only later, when lost numbers have been assigned again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from phalanx.durable_files import create_file, make_directory, sync_directory
from phalanx.store.errors import StoreUnusable
from phalanx.store.orphaned_files import (
    ENDED,
    FOLDERS,
    list_folder,
    move_orphaned,
)

RESTORES: Final = "restores"  # key in table `shared` of the text that `with_restore` writes
TERMS: Final = "makes_way"  # key of the range of consecutive terms whose leaders all support restore records
RESTORES_KEPT: Final = 16  # the newest; a head that was a standby during more of them knows only these
_JOB: Final = re.compile(r"([0-9]+)(?:_[0-9]+)?")
_ATTEMPT: Final = {"logs": "", "checkpoints": "epoch-"}  # name prefix of the attempts' folders below a job's
_ID: Final = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseExtent(Mapping[str, int]):
    """Extent of a database at one moment; as a mapping, the highest possible attempt number of each known job.

    Attributes:
        last_job_seq: jobs with greater numbers are unknown.
        epochs: newest epoch of each live job; 0 for none.
    """

    last_job_seq: int
    epochs: Mapping[str, int]

    def __getitem__(self, job: str) -> int:
        number = _JOB.fullmatch(job)
        if number is None or int(number[1]) > self.last_job_seq:
            raise KeyError(job)
        return self.epochs.get(job, ENDED)

    def __iter__(self) -> Iterator[str]:
        return iter(self.epochs)

    def __len__(self) -> int:
        return len(self.epochs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRecord:
    """A restore into a database that several heads share.

    Attributes:
        id: name of the marker file in a folder that was cleared for this restore.
        extent: extent of the database at the restore.
        term: the term that the restore took.
        certain: every leader since has marked its folder first. Heads of older releases do not: then a folder without the marker may
            contain newer files, and this restore moves nothing.
    """

    id: str
    extent: DatabaseExtent
    term: int
    certain: bool = True


def intersection(reaches: Sequence[DatabaseExtent]) -> DatabaseExtent:
    """The intersection: jobs and attempts that all of them contain."""
    epochs: dict[str, int] = {}
    for reach in reaches:
        for job, epoch in reach.epochs.items():
            epochs[job] = min(epoch, epochs.get(job, epoch))
    return DatabaseExtent(last_job_seq=min(reach.last_job_seq for reach in reaches), epochs=epochs)


def move_lost_files(
    folder: str,
    now: DatabaseExtent,
    restores: Iterable[RestoreRecord],
    stamp: str,
    *,
    check_allowed: Callable[[], None],
) -> list[str]:
    """Move files under lost numbers away; return the new folders. Called before a new leader does anything else.

    Files exist only for jobs and attempts whose commit was durable. So files that the database does not know when a head begins to lead
    belong to lost records. Files beyond the extent of a restore are lost if they were written before it. A head marks
    its folder when it first leads after a restore, before it writes: so all files in a folder without the marker are older.

    Args:
        folder: contains `logs`, `outputs` and `checkpoints`.
        now: extent of the database, read in this term.
        restores: restores into the database.
        stamp: for the folders' names.
        check_allowed: raises if another head leads; called before anything is moved.

    Raises:
        OSError: a file could not be moved or marked; the head must not write to the folder.
    """
    unmarked = [restore for restore in restores if not _exists(_marker(folder, restore))]
    known = intersection([now, *(restore.extent for restore in unmarked if restore.certain)])
    made: list[str] = []
    if _holds_lost(folder, known):
        made = move_orphaned(folder, known, stamp, check_allowed=check_allowed)
    for restore in unmarked:
        check_allowed()
        _create_marker(folder, restore)
    return made


def _holds_lost(folder: str, known: DatabaseExtent) -> bool:
    """Whether there is anything to move. Cost: three listings, and two for each live job that has files."""
    for name in FOLDERS:
        path = os.path.join(folder, name)
        names = set(list_folder(path))
        if any(_number(job) > known.last_job_seq for job in names):
            return True
        prefix = _ATTEMPT.get(name)
        if prefix is not None:
            for job in known.epochs.keys() & names:
                epoch = known.epochs[job]
                if any(_number(one.removeprefix(prefix)) > epoch for one in list_folder(f"{path}/{job}")):
                    return True
    return False


def _number(name: str) -> int:
    """Number of a job's or attempt's folder; 0 for other names. Without a regular expression, since it is called for each: 0.2 us."""
    text = name.partition("_")[0]
    return int(text) if text.isdecimal() else 0


def _marker(folder: str, restore: RestoreRecord) -> str:
    """Path of the marker file; beside the logs, so that it is copied together with them."""
    return os.path.join(folder, "logs", f".restored-{restore.id}")


def _exists(path: str) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True  # other errors are raised: a missed marker would move the files of known jobs away


def _create_marker(folder: str, restore: RestoreRecord) -> None:
    path = _marker(folder, restore)
    make_directory("restore.mark", os.path.dirname(path))
    os.close(create_file("restore.mark", path, os.O_WRONLY))
    for one in (os.path.dirname(path), folder):
        sync_directory("restore.mark", one)


# ---- records of restores in the database ------------------------------------------------------------------------------


def parse_restores(text: str) -> list[RestoreRecord]:
    """Parse the text that `with_restore` wrote; empty for none.

    Raises:
        StoreUnusable: the text is malformed.
    """
    try:
        found = [
            RestoreRecord(
                id=_id(text_id),
                extent=DatabaseExtent(last_job_seq=int(last), epochs={job: int(epochs[job]) for job in epochs}),
                term=int(term),
            )
            for text_id, last, epochs, term in json.loads(text or "[]")
        ]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StoreUnusable(
            f"row {RESTORES!r} of table shared cannot be read: {error}",
            hint="remove the row if every head has led since the last restore",
        ) from error
    return found


def _id(text: str) -> str:
    if not _ID.fullmatch(text):
        raise ValueError(f"{text!r} is not the id of a restore")
    return text


def with_restore(text: str, restore: RestoreRecord) -> str:
    """Append a restore to the text; only the newest RESTORES_KEPT are kept."""
    kept = [*parse_restores(text), restore][-RESTORES_KEPT:]
    return json.dumps([[one.id, one.extent.last_job_seq, dict(one.extent.epochs), one.term] for one in kept])


def extend_terms(text: str, term: int) -> str:
    """Extend the range of consecutive terms by one, of a leader or a restore; start a new range if a term is missing before it."""
    first, last = _terms(text)
    return f"{first if last == term - 1 else term} {term}"


def with_certainty(restores: Iterable[RestoreRecord], text: str, term: int) -> list[RestoreRecord]:
    """The restores with `certain` set, for a head that begins to lead in this term."""
    first, last = _terms(text)
    return [replace(one, certain=last == term - 1 and first <= one.term) for one in restores]


def _terms(text: str) -> tuple[int, int]:
    """Parse the range; (-1, -1) if malformed, so that nothing is certain."""
    words = text.split()
    if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal():
        return int(words[0]), int(words[1])
    return -1, -1

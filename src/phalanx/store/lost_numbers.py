"""Which numbers of jobs and attempts a database has lost, and what lies in a head's files under them.

A database that was taken back gives numbers out again, and a stream's file is the truth about its end. So a head that begins to lead makes
way first. It knows how far its database reaches now; a restore into a database that several heads share leaves word there how far it
reached then, for the folder of a head that leads only later, when lost numbers have been given out again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from phalanx.failpoints import around, sync_directory
from phalanx.store.errors import StoreUnusable
from phalanx.store.later_files import ENDED, FOLDERS, listed, set_aside

RESTORES: Final = "restores"  # under this name what `with_restore` writes is in table `shared`
TERMS: Final = "makes_way"  # and under this one the terms in a row, up to the newest, of those who know of restores
RESTORES_KEPT: Final = 16  # a head that stood by during more of them in a row is told of the newest
_JOB: Final = re.compile(r"([0-9]+)(?:_[0-9]+)?")
_ATTEMPT: Final = {"logs": "", "checkpoints": "epoch-"}  # how the folders of attempts are called below a job's
_ID: Final = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach(Mapping[str, int]):
    """How far a database reached at one moment; as a mapping, the newest attempt that each known job can have had.

    Attributes:
        last_job_seq: jobs with greater numbers are unknown.
        epochs: of each job that had not ended, its newest; 0 for none.
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
class Restore:
    """A restore into a database that several heads share.

    Attributes:
        id: of the mark in a folder that has made way for it.
        reach: of the database then.
        term: the one that it took.
        certain: whoever has led since marks its folder first. A head of an older release does not: then a folder without the mark
            may hold what was written since, and this restore moves nothing.
    """

    id: str
    reach: Reach
    term: int
    certain: bool = True


def least(reaches: Sequence[Reach]) -> Reach:
    """What is known to all of them."""
    epochs: dict[str, int] = {}
    for reach in reaches:
        for job, epoch in reach.epochs.items():
            epochs[job] = min(epoch, epochs.get(job, epoch))
    return Reach(last_job_seq=min(reach.last_job_seq for reach in reaches), epochs=epochs)


def make_way(folder: str, now: Reach, restores: Iterable[Restore], stamp: str, *, may: Callable[[], None]) -> list[str]:
    """Set aside what lies under numbers that are lost; the folders that were made. Called before a head that leads does anything else.

    A file is there only if the commit that made its job or attempt was durable. So what the database does not know when a lead begins is
    lost, whoever wrote it. What it does not know as of a restore is lost if it was written before; and a head marks its folder at the
    first lead after a restore, before it writes: what a folder without the mark holds was written before.

    Args:
        folder: that holds `logs`, `outputs` and `checkpoints`.
        now: of the database, read in this term.
        restores: into it.
        stamp: for the folders' names.
        may: raises where another head leads; asked before anything moves.

    Raises:
        OSError: something could not be moved or marked: it must not be written beside.
    """
    unmarked = [restore for restore in restores if not _is_there(_mark(folder, restore))]
    known = least([now, *(restore.reach for restore in unmarked if restore.certain)])
    made: list[str] = []
    if _holds_lost(folder, known):
        made = set_aside(folder, known, stamp, may=may)
    for restore in unmarked:
        may()
        _put_mark(folder, restore)
    return made


def _holds_lost(folder: str, known: Reach) -> bool:
    """Whether there is anything to move: three listings, and two for each job that has not ended and has written."""
    for name in FOLDERS:
        there = os.path.join(folder, name)
        names = set(listed(there))
        if any(_number(job) > known.last_job_seq for job in names):
            return True
        prefix = _ATTEMPT.get(name)
        if prefix is not None:
            for job in known.epochs.keys() & names:
                epoch = known.epochs[job]
                if any(_number(one.removeprefix(prefix)) > epoch for one in listed(f"{there}/{job}")):
                    return True
    return False


def _number(name: str) -> int:
    """Of a job's or attempt's folder; 0 for what is none. Called for each, so without a pattern: 0.2 us."""
    text = name.partition("_")[0]
    return int(text) if text.isdecimal() else 0


def _mark(folder: str, restore: Restore) -> str:
    """With the logs, so that who copies these to another directory takes it along."""
    return os.path.join(folder, "logs", f".restored-{restore.id}")


def _is_there(path: str) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True  # any other failure is raised: a mark that is missed would cost jobs that are known their files


def _put_mark(folder: str, restore: Restore) -> None:
    path = _mark(folder, restore)
    with around("restore.mark_folder"):
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    with around("restore.mark"):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    for one in (os.path.dirname(path), folder):
        sync_directory("restore.mark_sync", one)


# ---- what a restore leaves word of ------------------------------------------------------------------------------------


def restores_of(text: str) -> list[Restore]:
    """Read what `with_restore` wrote; nothing where there is nothing.

    Raises:
        StoreUnusable: it was written by somebody else.
    """
    try:
        found = [
            Restore(
                id=_id(said),
                reach=Reach(last_job_seq=int(last), epochs={job: int(epochs[job]) for job in epochs}),
                term=int(term),
            )
            for said, last, epochs, term in json.loads(text or "[]")
        ]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StoreUnusable(
            f"row {RESTORES!r} of table shared cannot be read: {error}",
            hint="where every head has led since the last restore, the row may be removed",
        ) from error
    return found


def _id(said: str) -> str:
    if not _ID.fullmatch(said):
        raise ValueError(f"{said!r} is no id of a restore")
    return said


def with_restore(text: str, restore: Restore) -> str:
    """The same with one more, of which no more than the newest are kept."""
    kept = [*restores_of(text), restore][-RESTORES_KEPT:]
    return json.dumps([[one.id, one.reach.last_job_seq, dict(one.reach.epochs), one.term] for one in kept])


def with_term(text: str, term: int) -> str:
    """The terms in a row with one more, of a lead or a restore; it begins a row of its own where one before it is missing."""
    first, last = _terms(text)
    return f"{first if last == term - 1 else term} {term}"


def judged(restores: Iterable[Restore], text: str, term: int) -> list[Restore]:
    """The restores as a head sees them that begins to lead in this term."""
    first, last = _terms(text)
    return [replace(one, certain=last == term - 1 and first <= one.term) for one in restores]


def _terms(text: str) -> tuple[int, int]:
    """Of what cannot be read nothing is certain."""
    words = text.split()
    if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal():
        return int(words[0]), int(words[1])
    return -1, -1

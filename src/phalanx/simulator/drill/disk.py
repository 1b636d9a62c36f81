"""What a head's records lie on in a drill: the memory store, or the real SQLite store on a virtual disk. Both can be full and can end a head.

A head dies in `commit` by `HeadDied`: before anything was written, after all was, or, on SQLite, between any two writes to the disk.
"""

from __future__ import annotations

import enum
import gc
import os
import shutil
import tempfile
from random import Random
from typing import Final

from phalanx.core.state.world import World
from phalanx.ports.store import Batch, JobFilter, StoreRefused
from phalanx.simulator.drill.violation import OURS, Broken
from phalanx.store.memory import MemoryStore
from phalanx.store.sql.sqlite.store import SqliteStore
from phalanx.store.sql.sqlite.virtual_disk import VirtualDisk

_RAM_DISK: Final = "/dev/shm"  # noqa: S108  # a folder of our own is made in it
_COMPARED: Final = (
    "jobs",
    "attempts",
    "nodes",
    "queues",
    "spent",
    "users",
    "projects",
    "reservations",
    "idempotency",
    "next_job_seq",
    "next_story_seq",
)

_ALL: Final = 1_000_000  # records; no seed makes so many


class Crash(enum.StrEnum):
    """When a head dies in its next commit."""

    BEFORE = "before"
    AFTER = "after"
    TORN = "torn"  # the power goes between two writes to the disk, and what was not synced is there in part


class HeadDied(Exception):
    """The head is gone in the middle of a commit. Nobody is answered."""

    def __init__(self, crash: Crash) -> None:
        super().__init__(crash.value)
        self.crash = crash


class MemoryDisk(MemoryStore):
    """A memory store whose disk can be full.

    Attributes:
        refuse_next: so many commits find the disk full.
        crash_next: how the head dies in the next commit.
        in_doubt: the batch in whose commit the head died; whether it is durable `reopen` says.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refuse_next = 0
        self.crash_next: Crash | None = None
        self.in_doubt: Batch | None = None

    def commit(self, batch: Batch) -> None:
        """Write the batch whole, if fate lets it.

        Raises:
            StoreRefused: the disk is full.
            HeadDied: as asked for.
            Broken: the store refuses it though nothing is wrong with the disk.
        """
        crash, self.crash_next = self.crash_next, None
        if crash in (Crash.BEFORE, Crash.TORN):
            raise HeadDied(crash)
        if self.refuse_next > 0:
            self.refuse_next -= 1
            self._full(batch)
            return
        self._write_through(batch)
        if crash is Crash.AFTER:
            self.in_doubt = batch
            raise HeadDied(crash)

    def _full(self, batch: Batch) -> None:
        del batch
        raise StoreRefused("no space left on the device")

    def _write_through(self, batch: Batch) -> None:
        try:
            super().commit(batch)
        except StoreRefused as error:
            raise _no_fault_of_the_disk(error) from error

    def reopen(self) -> bool:
        """What a new head finds. True where the batch in doubt is durable."""
        batch, self.in_doubt = self.in_doubt, None
        return batch is not None

    def compare(self) -> None:
        """At the end: whether all is there, what no head loads again among it. In memory it is."""

    def shut(self) -> None:
        """Nothing is left of it."""


class SqliteDisk(MemoryDisk):
    """The real store on a virtual disk, and beside it in memory what it must hold: each new head finds just that, or it is a violation."""

    def __init__(self, dice: Random) -> None:
        super().__init__()
        self._dice = dice
        parent = _RAM_DISK if os.path.isdir(_RAM_DISK) else None
        self._root = tempfile.mkdtemp(prefix="phalanx-drill-", dir=parent)
        self._lives = 0
        self._torn = False
        self._before: list[VirtualDisk] = []
        self._open(os.path.join(self._root, "0"))

    def _open(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        self.disk = VirtualDisk()
        self._sqlite = SqliteStore(os.path.join(folder, "state.db"), vfs=self.disk.name)

    def commit(self, batch: Batch) -> None:
        """See `MemoryDisk.commit`; torn, the power goes before some operation of this commit."""
        if self.crash_next is not Crash.TORN:
            super().commit(batch)
            return
        self.crash_next, self._torn, self.in_doubt = None, True, batch
        self.disk.cut_at = self.disk.operations + self._dice.randrange(24)  # a commit here is 10 to 40 operations
        try:
            self._sqlite.commit(batch)
        except StoreRefused as error:
            if not self.disk.dead:
                raise _no_fault_of_the_disk(error) from error
        raise HeadDied(Crash.TORN)

    def _full(self, batch: Batch) -> None:
        """Really full: SQLite meets it half-way. A commit that fits into pages that are there already is none the worse."""
        self.disk.room = 0
        try:
            self._write_through(batch)
        finally:
            self.disk.room = None
        if batch.story and not self._holds_last(batch):
            raise Broken(24, "the disk is full, and a commit returned that is not there")

    def _write_through(self, batch: Batch) -> None:
        syncs = self.disk.syncs
        try:
            self._sqlite.commit(batch)
        except StoreRefused as error:
            if self.disk.room is None:
                raise _no_fault_of_the_disk(error) from error
            raise
        if self.disk.syncs == syncs and (batch.records or batch.story):
            full = self.disk.room is not None
            raise Broken(
                24 if full else 3, f"a commit returned, and nothing was synced{' of it: the disk is full' * full}"
            )
        MemoryStore.commit(self, batch)

    def load(self) -> World:
        """Everything alive, as the database has it."""
        return self._sqlite.load()

    def reopen(self) -> bool:
        """The machine comes back, or the process alone: the database must hold every commit that returned, and the last one whole or not at all."""
        self.disk.cut()
        self._sqlite.close()
        self._lives += 1
        folder = os.path.join(self._root, str(self._lives))
        os.makedirs(folder)
        self.disk.image(folder, self._dice if self._torn else None)
        self.disk.cut_at = None  # whatever still holds the old connection may close it in peace
        self._before.append(self.disk)
        self._torn = False
        self._open(folder)
        batch, self.in_doubt = self.in_doubt, None
        found = self._sqlite.load()
        if batch is None:
            return _demand_same(found, MemoryStore.load(self), durable=False)
        if self._holds(batch):  # committed after it returned: it was written through
            return _demand_same(found, MemoryStore.load(self), durable=True)
        if _differs(found, MemoryStore.load(self)) is None:
            return False
        MemoryStore.commit(self, batch)
        return _demand_same(found, MemoryStore.load(self), durable=True)

    def _holds(self, batch: Batch) -> bool:
        return bool(batch.story) and len(self.story(after=batch.story[0].seq - 1, limit=1)) > 0

    def _holds_last(self, batch: Batch) -> bool:
        return len(self._sqlite.story(after=batch.story[-1].seq - 1, limit=1)) > 0

    def compare(self) -> None:
        """At the end: whether the database holds all that was acknowledged, with ended attempts and the whole story, which no head loads."""
        _demand_same(self._sqlite.load(), MemoryStore.load(self), durable=True)
        lines = zip(self._sqlite.story(limit=_ALL), self.story(limit=_ALL), strict=False)
        odd = next((pair for pair in lines if pair[0] != pair[1]), None)
        if odd is not None:
            raise Broken(3, f"the database tells {odd[0]} instead of {odd[1]}")
        for job in self.jobs(JobFilter(limit=_ALL)):
            found, wanted = self._sqlite.attempts(job.id), self.attempts(job.id)
            if found != wanted:
                raise Broken(3, f"of job {job.id} the database holds {found} instead of {wanted}")

    def shut(self) -> None:
        """Close it and remove its folder."""
        self._sqlite.close()
        gc.collect()  # a refusal's traceback may hold a connection, whose files must outlive it
        for disk in (*self._before, self.disk):
            disk.unregister()
        shutil.rmtree(self._root, ignore_errors=True)


def _no_fault_of_the_disk(error: StoreRefused) -> Broken:
    """The store refuses what breaks an invariant, as it must; but no head that is right ever hands it that."""
    return Broken(OURS, f"the store refuses what the head made: {error.message}")


def _demand_same(found: World, wanted: World, *, durable: bool) -> bool:
    what = _differs(found, wanted)
    if what is not None:
        raise Broken(3, f"after the crash the database does not hold what was acknowledged: {what}")
    return durable


def _differs(found: World, wanted: World) -> str | None:
    for name in _COMPARED:
        one, other = getattr(found, name), getattr(wanted, name)
        if one != other:
            return f"{name}: {_first_difference(one, other)}"
    return None


def _first_difference(one: object, other: object) -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
        return f"{keys[0]}: {one.get(keys[0])} instead of {other.get(keys[0])}"
    return f"{one} instead of {other}"

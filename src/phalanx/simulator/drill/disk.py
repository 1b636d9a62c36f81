"""The head's store in a drill: the memory store, or the real SQLite store on a virtual disk. Both can be full and can kill the head.

A head dies in `commit` with `HeadDied`: before the write, after it, or, on SQLite, between any two disk writes.
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
from phalanx.ports.store import Batch, JobFilter, Store, StoreRefused
from phalanx.simulator.drill.violations import CODE_ERROR, InvariantBroken, require
from phalanx.store.memory import MemoryStore
from phalanx.store.sql.sqlite.store import SqliteStore
from phalanx.store.sql.sqlite.virtual_disk import VirtualDisk

_RAM_DISK: Final = "/dev/shm"  # noqa: S108  # used through a private temporary folder
_COMPARED: Final = (
    "jobs",
    "attempts",
    "nodes",
    "queues",
    "reservations",
    "tables",
    "next_job_seq",
    "next_history_seq",
)

_ALL: Final = 1_000_000  # records; more than any seed creates


class CommitCrash(enum.StrEnum):
    """The point at which a head dies in its next commit."""

    BEFORE = "before"
    AFTER = "after"
    TORN = "torn"  # power loss between two disk writes; unsynced data is partially present


class HeadDied(Exception):
    """The head died in a commit; no request is answered."""

    def __init__(self, crash: CommitCrash) -> None:
        super().__init__(crash.value)
        self.crash = crash


class DrillMemoryStore(MemoryStore):
    """A memory store with a simulated full disk.

    Attributes:
        full_commits: number of following commits that find the disk full.
        next_crash: crash point in the next commit.
        in_doubt: the batch in whose commit the head died; `reopen` returns whether it is durable.
    """

    def __init__(self) -> None:
        super().__init__()
        self.full_commits = 0
        self.next_crash: CommitCrash | None = None
        self.in_doubt: Batch | None = None

    def commit(self, batch: Batch) -> None:
        """Commit the batch, subject to the injected faults.

        Raises:
            StoreRefused: the disk is full.
            HeadDied: as injected.
            InvariantBroken: the store refuses the batch although the disk is fine.
        """
        crash, self.next_crash = self.next_crash, None
        if crash in (CommitCrash.BEFORE, CommitCrash.TORN):
            raise HeadDied(crash)
        if self.full_commits > 0:
            self.full_commits -= 1
            self._full(batch)
            return
        self._write_through(batch)
        if crash is CommitCrash.AFTER:
            self.in_doubt = batch
            raise HeadDied(crash)

    def _full(self, batch: Batch) -> None:
        del batch
        raise StoreRefused("no space left on the device")

    def _write_through(self, batch: Batch) -> None:
        try:
            super().commit(batch)
        except StoreRefused as error:
            raise _unexpected_refusal(error) from error

    def reopen(self) -> bool:
        """Reopen for a new head. Return whether the batch in doubt is durable."""
        batch, self.in_doubt = self.in_doubt, None
        return batch is not None

    def check_contents(self) -> None:
        """Check the final contents; nothing to check in memory."""

    def release(self) -> None:
        """Release all resources; none in memory."""


class DrillSqliteStore(DrillMemoryStore):
    """The SQLite store on a virtual disk, with the expected contents in memory; every difference is a violation."""

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
        """See `DrillMemoryStore.commit`; a torn commit loses power before some operation."""
        if self.next_crash is not CommitCrash.TORN:
            super().commit(batch)
            return
        self.next_crash, self._torn, self.in_doubt = None, True, batch
        self.disk.cut_at = self.disk.operations + self._dice.randrange(40)  # a commit takes 10 to 50 operations
        try:
            self._sqlite.commit(batch)
        except StoreRefused as error:
            if not self.disk.powered_off:
                raise _unexpected_refusal(error) from error
        raise HeadDied(CommitCrash.TORN)

    def _full(self, batch: Batch) -> None:
        """Fill the disk for this commit. A commit that fits into existing pages still succeeds."""
        self.disk.room = 0
        try:
            self._write_through(batch)
        finally:
            self.disk.room = None
        if batch.history and not self._holds_last(batch):
            raise InvariantBroken(24, "a commit succeeded on a full disk, but its data is missing")

    def _write_through(self, batch: Batch) -> None:
        syncs = self.disk.syncs
        try:
            self._sqlite.commit(batch)
        except StoreRefused as error:
            if self.disk.room is None:
                raise _unexpected_refusal(error) from error
            raise
        if self.disk.syncs == syncs and (batch.records or batch.history):
            full = self.disk.room is not None
            raise InvariantBroken(24 if full else 3, f"a commit succeeded without a sync{' on a full disk' * full}")
        MemoryStore.commit(self, batch)

    def load(self) -> World:
        """Load the live records from the database."""
        return self._sqlite.load()

    def reopen(self) -> bool:
        """Restart after a crash: the database must hold every successful commit, and the last one completely or not at all."""
        self.disk.cut()
        self._sqlite.close()
        self._lives += 1
        folder = os.path.join(self._root, str(self._lives))
        os.makedirs(folder)
        self.disk.image(folder, self._dice if self._torn else None)
        self.disk.cut_at = None  # leftover references to the old connection can close it
        self._before.append(self.disk)
        self._torn = False
        self._open(folder)
        batch, self.in_doubt = self.in_doubt, None
        found = self._sqlite.load()
        if batch is None:
            return _require_same(found, MemoryStore.load(self), durable=False)
        if self._holds(batch):  # the crash came after the commit
            return _require_same(found, MemoryStore.load(self), durable=True)
        if _differs(found, MemoryStore.load(self)) is None and not _has_audit(self._sqlite, batch):
            return False
        MemoryStore.commit(self, batch)
        return _require_same(found, MemoryStore.load(self), durable=True)

    def _holds(self, batch: Batch) -> bool:
        events = bool(batch.history) and len(self.history(after=batch.history[0].seq - 1, limit=1)) > 0
        return events or _has_audit(self, batch)

    def _holds_last(self, batch: Batch) -> bool:
        return len(self._sqlite.history(after=batch.history[-1].seq - 1, limit=1)) > 0

    def check_contents(self) -> None:
        """Check at the end that the database holds all acknowledged data, including ended attempts and all events, which no head loads."""
        _require_same(self._sqlite.load(), MemoryStore.load(self), durable=True)
        lines = zip(self._sqlite.history(limit=_ALL), self.history(limit=_ALL), strict=False)
        odd = next((pair for pair in lines if pair[0] != pair[1]), None)
        if odd is not None:
            raise InvariantBroken(3, f"the database has event {odd[0]} instead of {odd[1]}")
        require(self._sqlite.audit(limit=_ALL) == self.audit(limit=_ALL), 3, "the database has another audit trail")
        for job in self.jobs(JobFilter(limit=_ALL)):
            found, wanted = self._sqlite.attempts(job.id), self.attempts(job.id)
            if found != wanted:
                raise InvariantBroken(3, f"of job {job.id} the database holds {found} instead of {wanted}")

    def release(self) -> None:
        """Close it and remove its folder."""
        self._sqlite.close()
        gc.collect()  # an error's traceback may reference a connection, whose files must outlive it
        for disk in (*self._before, self.disk):
            disk.unregister()
        shutil.rmtree(self._root, ignore_errors=True)


def _has_audit(store: Store, batch: Batch) -> bool:
    return bool(batch.audit) and len(store.audit(after=batch.audit[0].seq - 1, limit=1)) > 0


def _unexpected_refusal(error: StoreRefused) -> InvariantBroken:
    """Build the violation for a refusal that the disk did not cause: a correct head never commits invalid data."""
    return InvariantBroken(CODE_ERROR, f"the store refused a commit of the head: {error.message}")


def _require_same(found: World, wanted: World, *, durable: bool) -> bool:
    difference = _differs(found, wanted)
    if difference is not None:
        raise InvariantBroken(3, f"after the crash the database lacks acknowledged data: {difference}")
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

"""Failpoints: every write of the head has a name at which tests and drills can make it fail.

An unarmed failpoint costs one lookup in an empty dict. A test arms failpoints in its own process. A drill arms those of a real head
through the environment, for example PHALANX_FAILPOINT="store.commit.commit=kill:3,logs.append.write=torn". The part of a name before
its first dot is the component that writes: `store` `history` (SQLite) `postgres` `election` `upgrade` `backup` `restore` `logs` `blobs` `kept`
`outputs` `archives` (store/), `home` `files` `tls` (app/), `private` (node/files/), `local` (engines/local/), `ray`. The part after its last dot is what is done;
the functions of `durable_files` add it.
"""

from __future__ import annotations

import enum
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NoReturn

ENVIRONMENT_VARIABLE: Final = "PHALANX_FAILPOINT"


class FailureMode(enum.StrEnum):
    """Effect of an armed failpoint."""

    KILL = "kill"  # the process dies by SIGKILL before the write, as at a kernel kill or a power cut
    AFTER = "after"  # the write is done, then the process dies before it can report that
    ERROR = "error"  # the write fails with EIO
    FULL = "full"  # the write fails with ENOSPC
    TORN = "torn"  # half of the bytes are written, then SIGKILL


_AROUND: Final = frozenset({FailureMode.KILL, FailureMode.AFTER, FailureMode.ERROR, FailureMode.FULL})
_WRITE: Final = _AROUND | {FailureMode.TORN}
_BEFORE: Final = frozenset({FailureMode.KILL, FailureMode.ERROR, FailureMode.FULL})  # a point between two writes
_DONE: Final = frozenset({FailureMode.KILL})  # too late for an error: the write is durable
_IGNORED: Final = frozenset({FailureMode.KILL, FailureMode.AFTER})  # the caller ignores errors of this write


def _replaced(point: str) -> dict[str, frozenset[FailureMode]]:
    """Return the failpoints of `durable_files.replace_file`."""
    points = dict.fromkeys((f"{point}.{part}" for part in ("create", "sync", "rename", "sync_directory")), _AROUND)
    return {**points, f"{point}.write": _WRITE}


FAILPOINTS: Final[dict[str, frozenset[FailureMode]]] = {
    "store.open.directory": _AROUND,
    "store.open.lock.create": _AROUND,
    "store.open.create": _AROUND,
    "store.open.begin": _AROUND,  # the file exists and is empty; the connection may create its WAL
    "store.open.sync_directory": _AROUND,
    "store.open.mark.write": _WRITE,  # from now on the lock file records that a database exists
    "store.open.mark.sync": _AROUND,
    "store.migrate.begin": _BEFORE,
    "store.migrate.statements": _BEFORE,
    "store.migrate.record": _BEFORE,
    "store.migrate.ledger": _BEFORE,
    "store.migrate.commit": _BEFORE,
    "store.migrate.done": _DONE,
    "store.migrate.rollback": _IGNORED,
    "store.commit.begin": _BEFORE,
    "store.commit.rows": _BEFORE,  # hit once for each kind of record in the batch
    "store.commit.commit": _BEFORE,  # everything is written, nothing is committed
    "store.commit.done": _DONE,  # durable, not yet reported
    "store.commit.rollback": _IGNORED,
    "store.settle.checkpoint": _IGNORED,
    "store.close.checkpoint": _IGNORED,
    "history.open.begin": _AROUND,
    "history.open.schema": _AROUND,
    "history.put.rows": _AROUND,
    "history.put.commit": _AROUND,
    "history.drop.rows": _AROUND,
    "history.keep.rows": _AROUND,
    "history.aside.rename": _AROUND,  # of a damaged file
    "postgres.open.term": _BEFORE,
    "postgres.migrate.nothing": _DONE,
    "postgres.migrate.schema": _BEFORE,
    "postgres.migrate.ledger": _BEFORE,
    "postgres.migrate.statements": _BEFORE,
    "postgres.migrate.record": _BEFORE,
    "postgres.migrate.commit": _BEFORE,
    "postgres.migrate.done": _DONE,
    "postgres.migrate.rollback": _DONE,
    "postgres.history.rows": _AROUND,
    "postgres.history.commit": _AROUND,
    "postgres.history.drop": _AROUND,
    "postgres.history.keep": _AROUND,
    "postgres.commit.begin": _BEFORE,
    "postgres.commit.rows": _BEFORE,  # hit once for each kind of record in the batch
    "postgres.commit.remember": _BEFORE,
    "postgres.commit.patience": _BEFORE,
    "postgres.commit.commit": _BEFORE,  # everything is sent except COMMIT
    "postgres.commit.done": _DONE,  # durable, not yet reported
    "postgres.commit.rollback": _DONE,
    "upgrade.copy.remove": _AROUND,
    "upgrade.copy.create": _AROUND,
    "upgrade.copy.write": _AROUND,
    "upgrade.copy.sync": _AROUND,
    "upgrade.copy.rename": _AROUND,
    "upgrade.copy.sync_directory": _AROUND,
    "upgrade.schema": _AROUND,
    "upgrade.table": _AROUND,
    "backup.create": _AROUND,
    "backup.cut": _AROUND,
    "backup.sync": _AROUND,
    "backup.rename": _AROUND,
    "backup.sync_directory": _AROUND,
    "restore.rows": _AROUND,
    "restore.commit": _AROUND,
    "restore.checkpoint": _AROUND,
    "restore.wal.rename": _AROUND,
    "restore.aside": _AROUND,
    "restore.shm.remove": _AROUND,
    "restore.rename": _AROUND,
    "restore.sync_directory": _AROUND,
    "restore.remove": _AROUND,
    "restore.put": _AROUND,
    "restore.term": _AROUND,
    "restore.end": _AROUND,
    "restore.schema": _AROUND,
    "restore.copy": _AROUND,
    "restore.truncate": _AROUND,
    "backup.write": _WRITE,
    "backup.take_back.remove": _IGNORED,
    "archives.month.directory": _AROUND,
    "election.prepare.leads": _AROUND,
    "election.open.patience": _AROUND,
    "election.say.statement": _AROUND,  # every SQL statement of the leader election, reads included
    "logs.open.directory": _AROUND,
    "logs.append.directory": _AROUND,
    "logs.append.create": _AROUND,
    "logs.append.write": _WRITE,
    "logs.append.sync": _AROUND,  # written, not synced
    "logs.append.sync_directory": _AROUND,
    "logs.append.done": _DONE,
    "logs.take_back.remove": _IGNORED,
    "logs.take_back.cut": _IGNORED,
    "logs.delete.remove": _AROUND,
    "blobs.open.directory": _AROUND,
    "blobs.put.create": _AROUND,
    "blobs.put.cut": _AROUND,
    "blobs.put.write": _WRITE,
    "blobs.put.sync": _AROUND,
    "blobs.put.directory": _AROUND,
    "blobs.put.rename": _AROUND,
    "blobs.put.sync_directory": _AROUND,
    "blobs.take_back.remove": _IGNORED,
    "blobs.sweep.remove": _AROUND,
    "blobs.used.touch": _IGNORED,
    "blobs.unused.remove": _AROUND,
    "files.open.directory": _AROUND,  # the directory that several heads share
    "home.open.directory": _AROUND,
    "home.lock.create": _AROUND,
    "home.holder.cut": _AROUND,
    "home.holder.write": _WRITE,
    "home.file.remove": _AROUND,
    "audit.anchor.create": _AROUND,
    "audit.anchor.write": _WRITE,
    "tls.open.directory": _AROUND,
    "private.file.directory": _AROUND,
    **_replaced("private.file"),
    "local.spawn.directory": _AROUND,
    "local.spawn.output": _AROUND,
    "local.spawn.process": _AROUND,  # writes no file, but must be recorded
    "local.forget.remove": _AROUND,
    "kept.open.directory": _AROUND,
    "kept.begin.directory": _AROUND,
    "kept.begin.mark": _AROUND,
    "kept.parents.directory": _AROUND,
    "kept.begin.sync": _AROUND,  # of what an earlier head process received
    **_replaced("kept.open.nonce"),
    **_replaced("kept.manifest"),
    **_replaced("kept.empty"),
    "kept.piece.create": _AROUND,
    "kept.piece.write": _WRITE,
    "kept.piece.cut": _AROUND,
    "kept.piece.sync": _AROUND,
    "kept.take_back.remove": _IGNORED,  # a file whose sync failed
    "kept.inside.sync_directory": _AROUND,
    "kept.finish.rename": _AROUND,
    "kept.finish.sync_directory": _AROUND,
    "kept.retire.rename": _IGNORED,
    "kept.retire.remove": _IGNORED,
    "kept.settled_mark.remove": _IGNORED,
    "kept.settled_epoch.remove": _IGNORED,
    "kept.settled_job.remove": _IGNORED,
    "outputs.sweep.remove": _IGNORED,
    "outputs.delete.remove": _AROUND,
    "outputs.delete_owners.remove": _AROUND,
    "outputs.extend.write": _WRITE,
    "outputs.extend.sync": _AROUND,
    "outputs.extend.sync_directory": _AROUND,
    "outputs.take.directory": _AROUND,
    "outputs.take.create": _AROUND,
    "outputs.take.cut": _AROUND,
    "outputs.take.write": _WRITE,
    "outputs.refuse.remove": _IGNORED,
    "outputs.name.mode": _AROUND,
    "outputs.name.sync": _AROUND,
    "outputs.name.rename": _AROUND,
    "outputs.name.sync_directory": _AROUND,
    "outputs.file.remove": _AROUND,
    "outputs.folder.remove": _AROUND,
    "outputs.settle.remove": _IGNORED,
    "outputs.beside.rename": _AROUND,
    "outputs.own.directory": _AROUND,
    **_replaced("outputs.own"),
    "outputs.own_root.sync_directory": _AROUND,
    "outputs.root.directory": _AROUND,
    "outputs.within.directory": _AROUND,
    "outputs.within.sync_directory": _AROUND,
    "outputs.root.sync_directory": _AROUND,
    "renewals.process": _AROUND,
    "ray.open.directory": _AROUND,
    "ray.mark.remove": _AROUND,
    "ray.start.directory": _AROUND,
    "ray.supervisor.directory": _AROUND,
    "ray.start.output": _AROUND,
    "ray.start.process": _AROUND,
    "ray.temp.remove": _IGNORED,
    "ray.driver.log": _AROUND,
    "ray.driver.process": _AROUND,
}


@dataclass(slots=True)
class _Armed:
    failure: FailureMode
    left: int  # passes until it fails; 1 fails at the next


_armed: dict[str, _Armed] = {}
_lock = threading.Lock()


def hit(name: str) -> None:
    """Pass a failpoint between two writes; fail if it is armed.

    Raises:
        OSError: the failpoint is armed with ERROR or FULL.
    """
    if _armed:
        _pass(name)


def around(name: str, torn: Callable[[], object] | None = None) -> _Around:
    """Wrap a block with one write: if armed, fail before the write or kill the process after it. `torn` does half of the write.

    Raises:
        OSError: the failpoint is armed with ERROR or FULL.
    """
    return _Around(name, torn)


class _Around:
    __slots__ = ("_dies", "_name", "_torn")

    def __init__(self, name: str, torn: Callable[[], object] | None) -> None:
        self._name = name
        self._torn = torn
        self._dies = False

    def __enter__(self) -> None:
        if _armed:
            self._dies = _pass(self._name, self._torn)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._dies and kind is None:
            _die()
        if self._dies:
            arm(self._name, FailureMode.AFTER)  # nothing was written, so it applies to the next pass


def arm(name: str, failure: FailureMode, nth: int = 1) -> None:
    """Make the failpoint fail once, at its nth pass from now.

    Raises:
        ValueError: there is no such failpoint, or it cannot fail in this way.
    """
    if name not in FAILPOINTS:
        raise ValueError(f"no failpoint {name!r}; known: {' '.join(sorted(FAILPOINTS))}")
    if failure not in FAILPOINTS[name]:
        raise ValueError(
            f"failpoint {name} does not support {failure.value}, only {' or '.join(sorted(FAILPOINTS[name]))}"
        )
    if nth < 1:
        raise ValueError(f"failpoint {name}: NTH is {nth}; passes count from 1")
    _armed[name] = _Armed(failure, nth)


def disarm() -> None:
    """Disarm every failpoint."""
    _armed.clear()


@contextmanager
def armed(name: str, failure: FailureMode, nth: int = 1) -> Iterator[None]:
    """Arm one failpoint for a block of a test."""
    arm(name, failure, nth)
    try:
        yield
    finally:
        disarm()


def arm_from_text(text: str) -> None:
    """Arm the failpoints of a text like "store.commit.commit=kill:3,logs.append.write=torn".

    Raises:
        ValueError: the text is malformed. The head then does not start, rather than run the wrong drill.
    """
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, rest = item.partition("=")
        failure, _, nth = rest.partition(":")
        if failure not in set(FailureMode) or not (nth or "1").isdecimal():
            raise ValueError(f"{ENVIRONMENT_VARIABLE}: {item!r} is not NAME={'|'.join(FailureMode)}[:NTH]")
        arm(name, FailureMode(failure), int(nth or "1"))


def _pass(name: str, torn: Callable[[], object] | None = None) -> bool:
    """Fail if the failpoint is armed for this pass. True: the process must die after the write."""
    with _lock:
        point = _armed.get(name)
        if point is None:
            return False
        point.left -= 1
        if point.left > 0:
            return False
        del _armed[name]
    match point.failure:
        case FailureMode.KILL:
            _die()
        case FailureMode.AFTER:
            pass
        case FailureMode.TORN:
            if torn is not None:
                torn()
            _die()
        case FailureMode.ERROR:
            raise OSError(errno.EIO, f"failpoint {name}")
        case FailureMode.FULL:
            raise OSError(errno.ENOSPC, f"failpoint {name}")
    return True


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # until the signal arrives, nothing else may run
    raise AssertionError("unreachable")


arm_from_text(os.environ.get(ENVIRONMENT_VARIABLE, ""))

"""Places where a write can be made to fail: one name before every write of the store, so that tests and drills can stop just there.

Unarmed, `hit` is one look into an empty dict. A test arms points in its own process; a drill arms those of a real head through the
environment, for example PHALANX_FAILPOINT="store.commit.commit=kill:3,logs.append.write=torn".
"""

from __future__ import annotations

import enum
import errno
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NoReturn

VARIABLE: Final = "PHALANX_FAILPOINT"


class Failure(enum.StrEnum):
    """What happens at an armed point."""

    KILL = "kill"  # the process dies by SIGKILL, as by the kernel or a loose cable
    ERROR = "error"  # the write fails with EIO
    FULL = "full"  # the write fails with ENOSPC
    TORN = "torn"  # half of the bytes reach the file, then the process dies


_BEFORE: Final = frozenset({Failure.KILL, Failure.ERROR, Failure.FULL})
_WRITE: Final = _BEFORE | {Failure.TORN}
_DONE: Final = frozenset({Failure.KILL})  # too late to fail: what was written is durable

FAILPOINTS: Final[dict[str, frozenset[Failure]]] = {
    "store.open.folder": _BEFORE,
    "store.open.lock": _BEFORE,  # before the lock file is made
    "store.open.create": _BEFORE,  # before the database file is made
    "store.open.begin": _BEFORE,  # it is there, and empty
    "store.open.directory": _BEFORE,  # it is made, its name is not synced
    "store.migrate.begin": _BEFORE,
    "store.migrate.statements": _BEFORE,
    "store.migrate.record": _BEFORE,
    "store.migrate.ledger": _BEFORE,
    "store.migrate.commit": _BEFORE,
    "store.migrate.done": _DONE,
    "store.migrate.rollback": frozenset({Failure.KILL}),
    "store.commit.begin": _BEFORE,
    "store.commit.rows": _BEFORE,  # hit once for each kind of record in the batch
    "store.commit.commit": _BEFORE,  # all is written, nothing is committed
    "store.commit.done": _DONE,  # durable, and nobody knows yet
    "store.commit.rollback": frozenset({Failure.KILL}),
    "store.settle.checkpoint": frozenset({Failure.KILL}),
    "store.close.checkpoint": frozenset({Failure.KILL}),
    "logs.open.directory": _BEFORE,
    "logs.append.directory": _BEFORE,
    "logs.append.create": _BEFORE,
    "logs.append.write": _WRITE,
    "logs.append.sync": _BEFORE,  # written, not synced
    "logs.append.sync_directory": _BEFORE,
    "logs.append.done": _DONE,
    "logs.take_back.remove": frozenset({Failure.KILL}),
    "logs.take_back.cut": frozenset({Failure.KILL}),
    "logs.delete.remove": _BEFORE,
    "blobs.open.directory": _BEFORE,
    "blobs.put.create": _BEFORE,
    "blobs.put.write": _WRITE,
    "blobs.put.sync": _BEFORE,
    "blobs.put.directory": _BEFORE,
    "blobs.put.rename": _BEFORE,
    "blobs.put.sync_directory": _BEFORE,
    "blobs.take_back.remove": frozenset({Failure.KILL}),
    "blobs.sweep.remove": _BEFORE,
}


@dataclass(slots=True)
class _Armed:
    failure: Failure
    left: int  # passes until it fails; 1 fails at the next


_armed: dict[str, _Armed] = {}
_lock = threading.Lock()


def hit(name: str) -> None:
    """Pass a point, or fail there if it is armed.

    Raises:
        OSError: it is armed with ERROR or FULL.
    """
    if _armed:
        _pass(name)


def write(name: str, fd: int, content: bytes | memoryview, offset: int) -> None:
    """Write all of `content` at `offset`, unless the point is armed. The only way in which the store writes bytes to its own files.

    Raises:
        OSError: the disk took not all of it; some may be there.
    """
    view = memoryview(content)
    if _armed:
        _pass(name, fd, view, offset)
    written = 0
    while written < len(view):
        written += os.pwrite(fd, view[written:], offset + written)


def sync_directory(name: str, path: str) -> None:
    """Sync a folder, so that names in it survive a power cut.

    Raises:
        OSError: the disk, or the point is armed.
    """
    hit(name)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def arm(name: str, failure: Failure, nth: int = 1) -> None:
    """Let the point fail at its nth pass from now, once.

    Raises:
        ValueError: there is no such point, or it cannot fail in this way.
    """
    if name not in FAILPOINTS:
        raise ValueError(f"there is no failpoint {name!r}; known: {' '.join(sorted(FAILPOINTS))}")
    if failure not in FAILPOINTS[name]:
        raise ValueError(f"failpoint {name} cannot be {failure.value}, only {' or '.join(sorted(FAILPOINTS[name]))}")
    if nth < 1:
        raise ValueError(f"failpoint {name}: passes count from 1, not {nth}")
    _armed[name] = _Armed(failure, nth)


def disarm() -> None:
    """Let every point pass again."""
    _armed.clear()


@contextmanager
def armed(name: str, failure: Failure, nth: int = 1) -> Iterator[None]:
    """Arm one point for a block of a test."""
    arm(name, failure, nth)
    try:
        yield
    finally:
        disarm()


def arm_by_text(text: str) -> None:
    """Arm what a line like "store.commit.commit=kill:3,logs.append.write=torn" names.

    Raises:
        ValueError: the line cannot be read: better no head than one that runs a drill wrongly.
    """
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, rest = item.partition("=")
        failure, _, nth = rest.partition(":")
        if failure not in set(Failure) or not (nth or "1").isdecimal():
            raise ValueError(f"{VARIABLE}: {item!r} is not NAME=kill|error|full|torn[:NTH]")
        arm(name, Failure(failure), int(nth or "1"))


def _pass(name: str, fd: int = -1, view: memoryview | None = None, offset: int = 0) -> None:
    with _lock:
        point = _armed.get(name)
        if point is None:
            return
        point.left -= 1
        if point.left > 0:
            return
        del _armed[name]
    match point.failure:
        case Failure.KILL:
            _die()
        case Failure.TORN:
            if view is not None and len(view) > 1:
                os.pwrite(fd, view[: len(view) // 2], offset)
            _die()
        case Failure.ERROR:
            raise OSError(errno.EIO, f"failpoint {name}")
        case Failure.FULL:
            raise OSError(errno.ENOSPC, f"failpoint {name}")


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # the signal is on its way; nothing more may happen here
    raise AssertionError("unreachable")


arm_by_text(os.environ.get(VARIABLE, ""))

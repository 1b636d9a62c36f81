"""The supervisor's end of the report pipe (`wire.rank`): a FIFO of JSON lines from the ranks, read by the spool's thread.

It is opened for reading and writing, so that it never ends when ranks do. Every process that knows its path can write to it: invalid lines
are skipped.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from phalanx.core.jsonline import parse_object
from phalanx.node.files.job_accounts import acting_as
from phalanx.node.logic.accounts import NodeAccount
from phalanx.wire.rank import REPORT_BYTES_MAX, ReportKind

_READ_BYTES: Final = 65536
_ROUND_BYTES: Final = 1024 * 1024  # read in one turn; a FIFO holds 64 KiB, so a turn empties it unless ranks flood it
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One report of a rank; `fields` are those of its kind (see ReportKind), `line` is the raw line."""

    kind: ReportKind
    rank: int
    epoch: int
    generation: int
    fields: dict[str, Any]
    line: bytes


def parse_report(line: bytes) -> RankReport | None:
    """Parse one line; None if it is not a report."""
    record = parse_object(line)
    if record is None:
        return None
    try:
        kind = ReportKind(record.pop("k"))
        numbers = [record.pop(name) for name in ("rank", "epoch", "generation")]
    except (KeyError, ValueError, TypeError):
        return None
    if not all(type(number) is int for number in numbers):
        return None
    rank, epoch, generation = numbers
    return RankReport(kind=kind, rank=rank, epoch=epoch, generation=generation, fields=record, line=line)


def make_fifo(path: str, *, reuse: bool = False) -> int:
    """Create a FIFO, open for both ends, so that writers may come and go. With `reuse`, take the unused one beside it, if there is one.

    Raises:
        OSError: it cannot be created, or the path was replaced by another file.
    """
    if reuse:
        with contextlib.suppress(OSError):
            os.rename(unused_fifo(path), path)
            if not _has_writer(path):
                return _open_fifo(path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    os.mkfifo(path, 0o600)
    return _open_fifo(path)


def _has_writer(path: str) -> bool:
    """Whether a process still has the FIFO open to write: one that outlived its attempt, whose reports another attempt must not get.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return bool(os.read(descriptor, 1))
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def _open_fifo(path: str) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    return descriptor


def unused_fifo(path: str) -> str:
    """Where a FIFO of our own account lies while no generation uses it. Its content ends with the last process that has it open."""
    return f"{path}.unused"


class ReportPipeReader:
    """One FIFO, created by `Spool.open_reports`."""

    def __init__(
        self,
        path: str,
        on_report: Callable[[RankReport], None],
        unregister: Callable[[int], None],
        drain: Callable[[int, float], bool],
        account: NodeAccount | None = None,
    ) -> None:
        self.path = path
        self._account = account
        self._on_report = on_report
        self._forget = unregister
        self._drain = drain
        self._rest = b""
        self._lock = threading.Lock()
        self._skipping = False  # inside a line that is too long to be a report
        with acting_as(account):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            self.descriptor = make_fifo(path, reuse=account is None)

    def drain(self, timeout_s: float = 5.0) -> bool:
        """Wait until all reports written before now were passed on; False on timeout."""
        return self._drain(self.descriptor, timeout_s)

    def close(self) -> None:
        """Stop reading and remove the FIFO, or put one of our own account aside. May be called again."""
        with self._lock:
            descriptor, self.descriptor = self.descriptor, -1
        if descriptor < 0:
            return
        self._forget(descriptor)
        os.close(descriptor)
        with contextlib.suppress(OSError), acting_as(self._account):
            if self._account is None:
                os.rename(self.path, unused_fifo(self.path))
            else:
                os.unlink(self.path)

    def read(self) -> None:
        """Read available reports; called by the spool."""
        taken = 0
        while taken < _ROUND_BYTES:
            with self._lock:  # against `close`: the descriptor number must not be reused in between
                if self.descriptor < 0:
                    return
                try:
                    data = os.read(self.descriptor, _READ_BYTES)
                except BlockingIOError:
                    return
            taken += len(data)
            self._take(data)

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if self._skipping:  # the end of a line that was too long
                self._skipping = False
                continue
            report = parse_report(line) if len(line) < REPORT_BYTES_MAX else None
            if report is not None:
                self._pass_on(report)
        if len(self._rest) >= REPORT_BYTES_MAX:
            self._skipping = True
        if self._skipping:
            self._rest = b""

    def _pass_on(self, report: RankReport) -> None:
        try:
            self._on_report(report)
        except Exception:  # noqa: BLE001  any process may have written the line: it must not affect later lines
            _log.exception("report of rank %d (%s) skipped", report.rank, report.kind)

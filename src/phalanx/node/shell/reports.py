"""The supervisor's end of the report pipe (`wire.rank`): a FIFO of JSON lines from the ranks, read by the spool's thread.

It is opened for reading and writing, so that it never ends when ranks do. Whoever has its path can write to it: a line that is no report is
counted and passed over, never a reason to stop.
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

from phalanx.core.jsonline import object_of
from phalanx.node.logic.accounts import Account
from phalanx.node.shell.accounts import acting_as
from phalanx.wire.rank import REPORT_BYTES_MAX, ReportKind

_READ_BYTES: Final = 65536
_ROUND_BYTES: Final = 1024 * 1024  # a turn; a FIFO holds 64 KiB, so a turn empties it unless ranks flood it
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One report of a rank; `fields` holds what its kind brings along (see ReportKind), `line` is all of it as it came."""

    kind: ReportKind
    rank: int
    epoch: int
    generation: int
    fields: dict[str, Any]
    line: bytes


def parse_report(line: bytes) -> RankReport | None:
    """Read one line; None where it is no report."""
    record = object_of(line)
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


def make_fifo(path: str) -> int:
    """A FIFO, open for both ends: a writer may come and go. What lies at the path must be this one.

    Raises:
        OSError: it cannot be made, or something else was put in its place.
    """
    os.mkfifo(path, 0o600)
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    return descriptor


class ReportPipe:
    """One FIFO. Made by `Spool.open_reports`; `garbage` counts the lines that were no reports."""

    def __init__(
        self,
        path: str,
        on_report: Callable[[RankReport], None],
        forget: Callable[[int], None],
        drain: Callable[[int, float], bool],
        account: Account | None = None,
    ) -> None:
        self.path = path
        self._account = account
        self.garbage = 0
        self._on_report = on_report
        self._forget = forget
        self._drain = drain
        self._rest = b""
        self._lock = threading.Lock()
        self._skipping = False  # inside a line that is too long to be a report
        with acting_as(account):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            self.descriptor = make_fifo(path)

    def drain(self, timeout_s: float = 5.0) -> bool:
        """Wait until all reports written before now were passed on; False when that takes longer."""
        return self._drain(self.descriptor, timeout_s)

    def close(self) -> None:
        """Stop reading and remove the FIFO. May be called again."""
        with self._lock:
            descriptor, self.descriptor = self.descriptor, -1
        if descriptor < 0:
            return
        self._forget(descriptor)
        os.close(descriptor)
        with contextlib.suppress(OSError), acting_as(self._account):
            os.unlink(self.path)

    def read(self) -> None:
        """Take what is there; called by the spool."""
        taken = 0
        while taken < _ROUND_BYTES:
            with self._lock:  # against `close`: the number must not pass to another file in between
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
            if self._skipping:  # the end of a line that was counted when it grew too long
                self._skipping = False
                continue
            report = parse_report(line) if len(line) < REPORT_BYTES_MAX else None
            if report is None or not self._pass_on(report):
                self.garbage += 1
        if len(self._rest) >= REPORT_BYTES_MAX:
            self.garbage += not self._skipping
            self._skipping = True
        if self._skipping:
            self._rest = b""

    def _pass_on(self, report: RankReport) -> bool:
        """False where nobody could make anything of it."""
        try:
            self._on_report(report)
        except Exception:  # noqa: BLE001  anybody may have written it: it costs itself, and no line behind it
            _log.exception("a report of rank %d (%s) is passed over", report.rank, report.kind)
            return False
        return True

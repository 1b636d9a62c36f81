"""Reports of use on the disk until the head has counted them. A file for each gateway, locked while it runs; a later one takes over the files of
those that have ended, under their names, so that nothing is counted twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from typing import Final

import msgspec

from phalanx.wire.api.gateways import UsageReport

_NAME: Final = re.compile(r"([0-9a-f]{32})\.jsonl", re.ASCII)


class UsageSpool:
    """The file of one gateway, with one report a line.

    Args:
        path: of the file; its name is the id of the gateway.

    Raises:
        BlockingIOError: another process has it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.gateway_id = os.path.basename(path).removesuffix(".jsonl")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise
        self.waiting: list[UsageReport] = list(_read(self._file))
        self._next = self.waiting[-1].sequence + 1 if self.waiting else 1

    def add(self, report: UsageReport) -> None:
        """Store a report; it gets the next number. It is on the disk when this returns."""
        report = msgspec.structs.replace(report, sequence=self._next)
        self._next += 1
        self.waiting.append(report)
        line = memoryview(b"\n" + msgspec.json.encode(report) + b"\n")  # the last one may be cut off, as by a full disk
        while line:
            line = line[os.write(self._file, line) :]
        os.fdatasync(self._file)

    def counted(self, sequence: int) -> None:
        """Drop the reports up to this number. The file is emptied with the last one."""
        self.waiting = [one for one in self.waiting if one.sequence > sequence]
        if not self.waiting:
            os.ftruncate(self._file, 0)

    def close(self) -> None:
        """Let another process have it; without reports, remove it."""
        if not self.waiting:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        os.close(self._file)


def orphaned_spools(folder: str) -> list[UsageSpool]:
    """Return the files of gateways that have ended, which are now this process's."""
    found = []
    for name in sorted(os.listdir(folder)):
        if _NAME.fullmatch(name):
            with contextlib.suppress(OSError):
                found.append(UsageSpool(os.path.join(folder, name)))
    return found


def _read(file: int) -> list[UsageReport]:
    """Read the reports; a last line that was cut off by a crash is not one yet."""
    with open(os.dup(file), "rb") as reader:
        reader.seek(0)
        lines = reader.read().split(b"\n")
    found: list[UsageReport] = []
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError):
            found.append(msgspec.json.decode(line, type=UsageReport))
    return found

"""Stores anchors of the audit trail in a file outside the database, so that a truncated database is detected."""

from __future__ import annotations

import logging
import os
from typing import Final

from phalanx.core.access.audit import ChainTip, parse_anchor
from phalanx.core.errors import BadRequest
from phalanx.durable_files import create_file, write_at

READ_BYTES: Final = 1 << 20  # the newest 14,000 anchors; the hash chain covers older ones
_log: Final = logging.getLogger("phalanx.audit")


class FileAuditCheckpoints:
    """One line per anchor, oldest first. Anchors are also logged, as copies of the log on other machines are safer."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._last = ChainTip()

    def check_not_truncated(self, tip: ChainTip) -> None:
        """Check at the start of the head that the trail is not shorter than before; `phalanx audit verify` checks all of it."""
        last = max((anchor.seq for anchor in self.read_all()), default=0)
        if last > tip.seq:
            _log.error(
                "the audit trail is truncated, or the database is an older copy: it had %d lines and now has %d; run phalanx audit verify",
                last,
                tip.seq,
            )
        self.record(tip)

    def record(self, tip: ChainTip) -> None:
        """Store a tip, unless it is the last one stored. Disk errors are only logged, as the trail itself is not affected."""
        if tip in (self._last, ChainTip()):
            return
        self._last = tip
        _log.info("audit trail at %s", tip)
        try:
            fd = create_file("audit.anchor", self._path, os.O_WRONLY)
            try:
                write_at("audit.anchor", fd, f"{tip}\n".encode(), os.fstat(fd).st_size)
            finally:
                os.close(fd)
        except OSError as error:
            _log.warning("the anchor was not written to %s: %s", self._path, error)

    def read_all(self) -> list[ChainTip]:
        """Return the newest anchors. Invalid lines, as a crash may leave one, are skipped."""
        try:
            with open(self._path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - READ_BYTES))
                lines = file.read().decode("ascii", "replace").splitlines()
        except FileNotFoundError:
            return []
        found: list[ChainTip] = []
        for line in lines:
            try:
                found.append(parse_anchor(line))
            except BadRequest:
                continue
        return found

"""Anchors of the audit trail in a file beside the database: what a database with its end cut off is found out by."""

from __future__ import annotations

import logging
import os
from typing import Final

from phalanx.core.access.audit import Tip, anchor_of
from phalanx.core.errors import BadRequest
from phalanx.failpoints import around, write

READ_BYTES: Final = 1 << 20  # the newest 14,000: an older one is proven by the chain
_log: Final = logging.getLogger("phalanx.audit")


class FileAnchors:
    """One line for each, oldest first; also told to the log, whose copies elsewhere are the better ones."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._said = Tip()

    def check(self, tip: Tip) -> None:
        """Look at a starting head whether the trail reaches to where it once was; the whole of it is for `phalanx audit verify`."""
        last = max((anchor.seq for anchor in self.all()), default=0)
        if last > tip.seq:
            _log.error(
                "the audit trail was cut off, or the database is an older one: it had %d lines, and has %d",
                last,
                tip.seq,
            )
        self.say(tip)

    def say(self, tip: Tip) -> None:
        """Note one, unless it is the one before. A disk that refuses is told to the log: the trail itself is not at stake."""
        if tip in (self._said, Tip()):
            return
        self._said = tip
        _log.info("audit trail at %s", tip)
        try:
            with around("audit.anchor.create"):
                fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                write("audit.anchor.write", fd, f"{tip}\n".encode(), os.fstat(fd).st_size)
            finally:
                os.close(fd)
        except OSError as error:
            _log.warning("the anchor was not written to %s: %s", self._path, error)

    def all(self) -> list[Tip]:
        """The newest anchors; what is no anchor (a line torn by a crash) is passed over."""
        try:
            with open(self._path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - READ_BYTES))
                lines = file.read().decode("ascii", "replace").splitlines()
        except FileNotFoundError:
            return []
        found: list[Tip] = []
        for line in lines:
            try:
                found.append(anchor_of(line))
            except BadRequest:
                continue
        return found

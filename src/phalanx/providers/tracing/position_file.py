"""The position in the history up to which traces were sent, in a small file."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from phalanx.node.files.private_files import write_private


@dataclass(frozen=True, slots=True)
class PositionFile:
    """See the module. Without the file, or with other content, there is no position."""

    path: str

    def read(self) -> int | None:
        """Return the stored position."""
        with contextlib.suppress(OSError, ValueError), open(self.path, encoding="ascii") as file:
            return max(0, int(file.read(32)))
        return None

    def write(self, seq: int) -> None:
        """Replace the position. After an error an older one remains, and some traces are sent again."""
        with contextlib.suppress(OSError):
            write_private(*os.path.split(self.path), f"{seq}\n")

"""The progress of a download or an upload on a terminal."""

from __future__ import annotations

import sys
import time
from typing import IO, Final

from phalanx.cli.cells import bar, percent
from phalanx.cli.terminal import Terminal, terminal, truncate
from phalanx.core.units import format_bytes, format_duration

_BAR: Final = 20  # columns
_PROGRESS_AFTER_S: Final = 0.7  # short downloads print no progress


class ProgressReader:
    """A reader that shows a progress bar on a terminal if a download or an upload takes long. `had_bytes`: what an earlier one brought."""

    def __init__(
        self, source: IO[bytes], *, label: str = "", screen: Terminal | None = None, had_bytes: int = 0
    ) -> None:
        self._source = source
        self._had_bytes = had_bytes
        self._label = label
        self._screen = screen or terminal(sys.stderr)
        self._begun = self._drawn = time.monotonic()
        self._bytes = 0
        self._expected = 0
        self._shown = False

    def expect(self, size: int) -> None:
        """Set the expected number of bytes, so that the bar can show a share and the time left."""
        self._expected = size

    def read(self, size: int = -1) -> bytes:
        """Read from the source; may draw the progress."""
        data = self._source.read(size)
        self.add(len(data))
        return data

    @property
    def received(self) -> int:
        """The bytes so far."""
        return self._bytes

    def add(self, count: int) -> None:
        """Count bytes that arrived; may draw the progress."""
        self._bytes += count
        now = time.monotonic()
        if self._screen.interactive and now - self._begun > _PROGRESS_AFTER_S and now - self._drawn > 0.1:
            line = self.line(now - self._begun)
            sys.stderr.write(f"\r\x1b[K{truncate(line, self._screen.width - 1)}")
            sys.stderr.flush()
            self._drawn, self._shown = now, True

    def seek(self, position: int) -> int:
        """Go back in a source that is sent again."""
        self._bytes = 0
        return self._source.seek(position)

    def line(self, elapsed_s: float) -> str:
        """Return the progress: `[bar] 45%  540 MiB of 1.2 GiB, 110 MiB/s, 6.0s left`; without a known size the bytes and the rate."""
        rate = self._bytes / max(elapsed_s, 1e-3)
        done, whole = self._had_bytes + self._bytes, self._had_bytes + self._expected
        if not self._expected:
            return f"{self._label}{format_bytes(done)} downloaded, {format_bytes(rate)}/s"
        share = min(1.0, done / whole)
        left = f", {format_duration((self._expected - self._bytes) / rate)} left" if rate and share < 1.0 else ""
        amount = f"{format_bytes(done)} of {format_bytes(whole)}, {format_bytes(rate)}/s{left}"
        return f"{self._label}{bar(share, _BAR, self._screen)} {percent(share)}  {amount}"

    def clear(self) -> None:
        """Remove the progress line."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

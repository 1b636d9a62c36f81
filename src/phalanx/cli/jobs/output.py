"""Printing what tasks wrote: whole lines under a rank prefix, or one rank's bytes as they are."""

from __future__ import annotations

import re
import sys
from typing import Final, TextIO

from phalanx.cli.terminal import Terminal, rank_style, terminal

_HELD_MAX: Final = 64 * 1024  # characters of an unfinished line held back for its end
_TEXTS: Final = r"\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?"  # titles, the clipboard, and what the terminal reads as commands
_OTHERS: Final = r"[ -/]+[0-~]|[0-?@-OQ-WYZ\\`-~]"
_STEERING: Final = rf"\x1b(?:\[[0-?]*[ -/]*[@-~]|{_TEXTS}|{_OTHERS})"
# What a task may write into a line: text, tabs and colours (`m`). In one pass what passes is kept and all other control goes, escapes
# that begin nothing too: else what stands around a removed piece would join to a sequence. `>` or `?` in a colour makes it a setting or a question.
_LINES: Final = re.compile(rf"(\x1b\[[0-9:;]*m)|{_STEERING}|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# What a task may write that has the screen for itself: the same, and what progress bars draw with: moves by a line or a column (A to G),
# the wiping of a line (K), backspaces and returns. A question to the terminal (`n`, `c`, ENQ) would be answered as if it were typed.
_BARS: Final = re.compile(rf"(\x1b\[[0-9:;]*[A-GKm])|{_STEERING}|[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_CUT: Final = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*\x1b?|[PX^_][^\x1b]*\x1b?|[ -/]*)?\Z"
)  # a sequence whose end is still to come
_CUT_MAX: Final = 4096


class Output:
    """Writes chunks of a job's streams.

    With `prefix` every line says its rank and lines of ranks never mix. Without, text goes out as it comes, so that a progress bar of
    a single task works; on a terminal without what would steer more than that. A file or a pipe gets what was written.
    """

    def __init__(self, *, prefix: bool, out: TextIO | None = None, screen: Terminal | None = None) -> None:
        self.prefix = prefix
        self._out = sys.stdout if out is None else out
        self._screen = screen or terminal(self._out)
        self._open: dict[tuple[int, str], str] = {}
        self._epoch = 0
        self._mid_line = False
        self._cut = ""

    def write(self, epoch: int, stream: str, text: str) -> None:
        """Print what is complete of a piece of a stream; the rest waits for its end."""
        if epoch != self._epoch:
            self._new_attempt(epoch)
        if not self.prefix:
            self._out.write(self._harmless(text) if self._screen.interactive else text)
            self._mid_line = not text.endswith("\n")
            return
        key = (epoch, stream)
        *lines, rest = (self._open.pop(key, "") + text).split("\n")
        if len(rest) > _HELD_MAX:
            lines, rest = [*lines, rest], ""
        if rest:
            self._open[key] = rest
        for line in lines:
            self._line(stream, line)

    def flush(self) -> None:
        """Hand what was printed to the reader now."""
        self._out.flush()

    def finish(self) -> None:
        """Print unfinished lines: their ends will not come."""
        for (_, stream), text in sorted(self._open.items()):
            self._line(stream, text)
        self._open.clear()
        self._cut = ""
        if self._mid_line and self._screen.interactive:
            self._out.write("\n")
            self._mid_line = False
        self._out.flush()

    def _harmless(self, text: str) -> str:
        text, self._cut = self._cut + text, ""
        found = _CUT.search(text)
        if found is not None and len(found[0]) <= _CUT_MAX:
            text, self._cut = text[: found.start()], found[0]
        return _BARS.sub(r"\1", text)

    def _new_attempt(self, epoch: int) -> None:
        if self._epoch:
            self.finish()
            print(f"--- attempt {epoch} ---", file=sys.stderr)
        self._epoch = epoch

    def _line(self, stream: str, line: str) -> None:
        label = "[" + stream.replace("-", " ", 1) + "]"
        rank = stream.removeprefix("rank-")
        style = rank_style(int(rank)) if rank.isdigit() else "dim"
        # Of a line that was drawn over (\r), the last state counts.
        shown = line.rstrip("\r").rsplit("\r", 1)[-1]
        if self._screen.interactive:
            shown = _LINES.sub(r"\1", shown)
        self._out.write(f"{self._screen.paint(label, style)} {shown}{self._reset(shown)}\n")

    def _reset(self, shown: str) -> str:
        return "\x1b[0m" if self._screen.colour and "\x1b[" in shown else ""

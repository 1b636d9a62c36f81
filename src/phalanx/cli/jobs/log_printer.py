"""Prints the output of tasks: whole lines with a rank prefix, or the text of one rank as it is."""

from __future__ import annotations

import re
import sys
from typing import Final, TextIO

from phalanx.cli.terminal import Terminal, rank_style, terminal

_HELD_MAX: Final = 64 * 1024  # characters of an incomplete line that are buffered
# OSC, DCS, SOS, PM and APC strings: window titles, the clipboard, terminal commands.
_STRINGS: Final = r"\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?"
_OTHERS: Final = r"[ -/]+[0-~]|[0-?@-OQ-WYZ\\`-~]"
_ESCAPES: Final = rf"\x1b(?:\[[0-?]*[ -/]*[@-~]|{_STRINGS}|{_OTHERS})"
# Allowed in a line: text, tabs and colours (`m`, without the private parameters `>` and `?`). One pass keeps these and removes all other
# control characters, single escapes included; with several passes the text around a removed part could form a new sequence.
_ALLOWED_IN_LINE: Final = re.compile(rf"(\x1b\[[0-9:;]*m)|{_ESCAPES}|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Allowed for a single task, which has the screen for itself: the same, and the sequences of progress bars: cursor moves (A to G), erase
# line (K), backspace and return. Queries (`n`, `c`, ENQ) are removed: the terminal would send the answer as keyboard input.
_ALLOWED_ALONE: Final = re.compile(rf"(\x1b\[[0-9:;]*[A-GKm])|{_ESCAPES}|[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]")
# A sequence at the end of a chunk, to be continued by the next one.
_CUT: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*\x1b?|[PX^_][^\x1b]*\x1b?|[ -/]*)?\Z")
_CUT_MAX: Final = 4096


class LogPrinter:
    """Prints chunks of a job's streams.

    With `prefix` every line starts with its rank, and lines of ranks never mix. With an `owner`, the id of an array's element, the prefix names
    it: `[17_3 rank 1]`, or `[17_3]` if the element is one task (`alone`). Without, text is printed as it arrives, so that the
    progress bar of a single task works. On a terminal other control sequences are removed; a file or pipe gets the text unchanged.
    """

    def __init__(
        self,
        *,
        prefix: bool,
        owner: str = "",
        alone: bool = False,
        out: TextIO | None = None,
        screen: Terminal | None = None,
    ) -> None:
        self.prefix = prefix
        self._owner = owner
        self._alone = alone
        self._out = sys.stdout if out is None else out
        self._screen = screen or terminal(self._out)
        self._open: dict[tuple[int, str], str] = {}
        self._epoch = 0
        self._mid_line = False
        self._cut = ""

    def write(self, epoch: int, stream: str, text: str) -> None:
        """Print the complete lines of a chunk; buffer the rest."""
        if epoch != self._epoch:
            self._new_attempt(epoch)
        if not self.prefix:
            self._out.write(self._without_escapes(text) if self._screen.interactive else text)
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
        """Flush the output."""
        self._out.flush()

    def finish(self) -> None:
        """Print incomplete lines: there is no more output."""
        for (_, stream), text in sorted(self._open.items()):
            self._line(stream, text)
        self._open.clear()
        self._cut = ""
        if self._mid_line and self._screen.interactive:
            self._out.write("\n")
            self._mid_line = False
        self._out.flush()

    def _without_escapes(self, text: str) -> str:
        text, self._cut = self._cut + text, ""
        found = _CUT.search(text)
        if found is not None and len(found[0]) <= _CUT_MAX:
            text, self._cut = text[: found.start()], found[0]
        return _ALLOWED_ALONE.sub(r"\1", text)

    def _new_attempt(self, epoch: int) -> None:
        if self._epoch:
            self.finish()
            owner = f"{self._owner}: " if self._owner else ""
            print(f"--- {owner}attempt {epoch} ---", file=sys.stderr)
        self._epoch = epoch

    def _line(self, stream: str, line: str) -> None:
        rank = stream.removeprefix("rank-")
        words = [self._owner] if self._owner else []
        words += [] if self._alone and rank == "0" else [stream.replace("-", " ", 1)]
        label = f"[{' '.join(words)}]"
        colour = self._owner.rpartition("_")[2] or rank
        style = rank_style(int(colour)) if rank.isdigit() and colour.isdigit() else "dim"
        # Of a line that was overwritten (\r), print the last state.
        shown = line.rstrip("\r").rsplit("\r", 1)[-1]
        if self._screen.interactive:
            shown = _ALLOWED_IN_LINE.sub(r"\1", shown)
        self._out.write(f"{self._screen.paint(label, style)} {shown}{self._reset(shown)}\n")

    def _reset(self, shown: str) -> str:
        return "\x1b[0m" if self._screen.colour and "\x1b[" in shown else ""


class JsonPrinter:
    """Prints chunks of streams as JSON, one per line; those of an array with the element's id as `job`."""

    def __init__(self, job_id: str = "") -> None:
        self._owner = {"job": job_id} if job_id else {}

    def write(self, epoch: int, stream: str, text: str) -> None:
        """Print one chunk."""
        import msgspec  # a printer of text needs none

        print(msgspec.json.encode({**self._owner, "epoch": epoch, "stream": stream, "text": text}).decode())

    def flush(self) -> None:
        """Flush standard output."""
        sys.stdout.flush()

    def finish(self) -> None:
        """Flush standard output."""
        sys.stdout.flush()

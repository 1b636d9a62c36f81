"""Properties of the output stream (width, colour), and removal of control characters from untrusted text."""

from __future__ import annotations

import os
import re
import sys
from typing import Final, NamedTuple, TextIO

_COLOURS: Final = ("red", "green", "yellow", "blue", "magenta", "cyan")
# SGR parameters of ECMA-48; 9x is the bright variant of xterm.
_STYLES: Final = {
    "": "",
    "bold": "1",
    "dim": "2",
    **{colour: str(31 + index) for index, colour in enumerate(_COLOURS)},
    **{f"bright_{colour}": str(91 + index) for index, colour in enumerate(_COLOURS)},
}
_RANK_STYLES: Final = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
_UNSAFE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_WIDTH_DEFAULT: Final = 80  # of a terminal that does not report its width
_WIDTH_PIPE: Final = 10_000  # of a file or pipe: nothing is truncated


class Terminal(NamedTuple):
    """Properties of one output stream."""

    width: int
    height: int
    interactive: bool
    colour: bool
    blocks: bool  # whether the encoding has block characters

    def paint(self, text: str, style: str) -> str:
        """Return the text in a style, or plain if colours are off."""
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if self.colour and style else text


def terminal(stream: TextIO | None = None) -> Terminal:
    """Return the properties of `stream` (standard output if None), read at each call. Honours `NO_COLOR`, `TERM=dumb` and `COLUMNS`."""
    stream = sys.stdout if stream is None else stream
    interactive = stream.isatty()
    width, height = _size(stream) if interactive else (_WIDTH_PIPE, 24)
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) > 0:
        width = int(columns)
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM", "dumb") == "dumb"
    encoding = (getattr(stream, "encoding", None) or "ascii").lower().replace("-", "")
    return Terminal(
        width=width,
        height=height,
        interactive=interactive,
        colour=interactive and not plain,
        blocks=encoding.startswith("utf"),
    )


def strip_control(text: str) -> str:
    """Return the text as one line without control characters, so that untrusted text cannot control the terminal."""
    return _UNSAFE.sub(lambda found: " " if found[0] in "\t\n\r" else "\ufffd", text)


def display_width(text: str) -> int:
    """Return the number of columns of a clean text."""
    if text.isascii():
        return len(text)
    import unicodedata  # most texts are ASCII

    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def truncate(text: str, width: int) -> str:
    """Truncate a text to `width` columns, with an ellipsis."""
    if display_width(text) <= width:
        return text
    kept, used = [], 0
    for char in text:
        wide = display_width(char)
        if used + wide > width - 1:
            break
        kept.append(char)
        used += wide
    return "".join(kept) + "…" if width > 0 else ""


def rank_style(rank: int) -> str:
    """Return the colour of a rank's prefix; ranks eight apart share one."""
    return _RANK_STYLES[rank % len(_RANK_STYLES)]


def _size(stream: TextIO) -> tuple[int, int]:
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return _WIDTH_DEFAULT, 24
    return (size.columns or _WIDTH_DEFAULT, size.lines or 24)

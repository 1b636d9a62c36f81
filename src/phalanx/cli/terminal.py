"""What we print to: how wide it is, whether it shows colour, and how to keep a stranger's text from steering it."""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from dataclasses import dataclass
from typing import Final, TextIO

_STYLES: Final = {
    "": "", "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "magenta": "35", "cyan": "36",
    "bright_red": "91", "bright_green": "92", "bright_yellow": "93", "bright_blue": "94", "bright_magenta": "95", "bright_cyan": "96",
}  # fmt: skip
_RANK_STYLES: Final = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
_UNSAFE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_WIDTH_DEFAULT: Final = 80  # a terminal that does not tell
_WIDTH_PIPE: Final = 10_000  # not a terminal: nothing is cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """One output stream as it shows text."""

    width: int
    height: int
    interactive: bool
    colour: bool
    blocks: bool  # whether bars may be drawn with block characters

    def paint(self, text: str, style: str) -> str:
        """The text in a style, or plain where colours are not wanted."""
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if self.colour and style else text


def terminal(stream: TextIO | None = None) -> Terminal:
    """What `stream` (standard output if None) is. `NO_COLOR`, `TERM=dumb` and `COLUMNS` are honoured; asked anew at each call."""
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


def clean(text: str) -> str:
    """One line without control characters: what others named must not move the cursor, ring or recolour our screen."""
    return _UNSAFE.sub(lambda found: " " if found[0] in "\t\n\r" else "\ufffd", text)


def width_of(text: str) -> int:
    """Columns that a clean text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def cut(text: str, width: int) -> str:
    """The text in at most `width` columns, with an ellipsis where it was cut."""
    if width_of(text) <= width:
        return text
    kept, used = [], 0
    for char in text:
        wide = width_of(char)
        if used + wide > width - 1:
            break
        kept.append(char)
        used += wide
    return "".join(kept) + "…" if width > 0 else ""


def rank_style(rank: int) -> str:
    """The colour of a rank's prefix; ranks eight apart share one."""
    return _RANK_STYLES[rank % len(_RANK_STYLES)]


def _size(stream: TextIO) -> tuple[int, int]:
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return _WIDTH_DEFAULT, 24
    return (size.columns or _WIDTH_DEFAULT, size.lines or 24)

"""The cursor of a follower: how far it has read each stream of a job, as the text of an event's id.

1:rank-0=120,rank-1=88;2:rank-0=17
"""

from __future__ import annotations

import re
from typing import Final

from phalanx.core.errors import BadRequest

Cursor = dict[tuple[int, str], int]  # (epoch, stream) -> offset after the last byte read

_PART: Final = re.compile(r"([a-z]+(?:-\d{1,9})?)=(\d{1,18})")
CURSOR_CHARACTERS_MAX: Final = 60_000  # about 4,000 streams; longer request lines are refused anyway


def write_cursor(cursor: Cursor) -> str:
    """Return the cursor as text, ordered by epoch and stream; "0" if nothing was read, as an event's id may not be empty."""
    epochs: dict[int, list[str]] = {}
    for (epoch, stream), offset in sorted(cursor.items()):
        if offset:
            epochs.setdefault(epoch, []).append(f"{stream}={offset}")
    return ";".join(f"{epoch}:{','.join(parts)}" for epoch, parts in epochs.items()) or "0"


def read_cursor(text: str) -> Cursor:
    """Parse a cursor.

    Raises:
        BadRequest: the text is not a cursor.
    """
    cursor: Cursor = {}
    if text in ("", "0"):
        return cursor
    if len(text) > CURSOR_CHARACTERS_MAX:
        raise BadRequest("the cursor is too long", hint="leave it out to read from the start")
    for word in text.split(";"):
        epoch, colon, parts = word.partition(":")
        if not colon or not epoch.isdecimal() or len(epoch) > 9:
            raise _invalid_cursor(text)
        for part in parts.split(","):
            match = _PART.fullmatch(part)
            if match is None:
                raise _invalid_cursor(text)
            cursor[int(epoch), match[1]] = int(match[2])
    return cursor


def _invalid_cursor(text: str) -> BadRequest:
    return BadRequest(
        f"{text[:60]!r} is not a cursor", hint="send a cursor from an earlier reply, or none to read from the start"
    )

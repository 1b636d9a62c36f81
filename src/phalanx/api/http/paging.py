"""Bounded lists: no answer is larger than `ApiLimits.answer_bytes`, whatever the records hold. A list that is cut continues behind its last record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Final, TypeVar

import msgspec
from fastapi import Query

from phalanx.core.errors import BadRequest

T = TypeVar("T")
_KEY_CHARACTERS_MAX: Final = 1000
AfterKey = Annotated[str, Query(max_length=_KEY_CHARACTERS_MAX)]
_encoder: Final = msgspec.json.Encoder()


def fitting(records: Iterable[T], bytes_max: int) -> list[T]:
    """Return the first records that fit together, at least one if there is one. Encodes each, up to the limit."""
    found: list[T] = []
    left = bytes_max
    for record in records:
        left -= len(_encoder.encode(record)) + 1
        if left < 0 and found:
            break
        found.append(record)
    return found


def key_page(records: Sequence[T], after: str, key: Callable[[T], str], bytes_max: int) -> tuple[list[T], str]:
    """Return the page of a list behind the record with the key `after`, and the key of its last record, empty at the end.

    Raises:
        BadRequest: there is no such record.
    """
    begin = 0
    if after:
        begin = 1 + next((at for at, one in enumerate(records) if key(one) == after), len(records))
        if begin > len(records):
            raise BadRequest(
                f"after: {after[:60]!r} is not in the list",
                hint="send `next` of the reply before, or nothing to read from the start",
            )
    page = fitting(records[begin:] if begin else records, bytes_max)
    return page, key(page[-1]) if begin + len(page) < len(records) else ""

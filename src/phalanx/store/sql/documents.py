"""Encodes records as rows and decodes them: a JSON document, its checksum, and the columns that are searched. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, Final, TypeVar

import msgspec

from phalanx.core.state.records import ColumnValue, RecordKind
from phalanx.ports.store import StoreRefused
from phalanx.store.errors import StoreUnusable

K = TypeVar("K")
R = TypeVar("R")
Row = tuple[ColumnValue, ...]

_encoder: Final = msgspec.json.Encoder()


@cache
def decoder(kind: RecordKind[Any, R]) -> msgspec.json.Decoder[R]:
    """Decoder for documents of a kind. Built once, since building one costs a thousand uses."""
    return msgspec.json.Decoder(kind.record)


def decode(kind: RecordKind[Any, R], doc: object, crc: object) -> R:
    """Decode a document.

    Raises:
        StoreUnusable: the document was changed, or is not of this kind.
    """
    content = doc.encode() if isinstance(doc, str) else b""  # a damaged row may contain anything
    if not content or zlib.crc32(content) != crc:
        raise StoreUnusable(
            f"a record of kind {kind.name} is damaged in the database (checksum): {str(doc)[:80]!r}",
            hint="restore the database from a backup; the disk may be failing",
        )
    try:
        record: R = decoder(kind).decode(content)
    except msgspec.DecodeError as error:
        raise StoreUnusable(
            f"a record of kind {kind.name} cannot be read ({error}): {str(doc)[:80]}",
            hint="was the database written by another release?",
        ) from error
    return record


def row_of(kind: RecordKind[Any, R], record: R) -> Row:
    """The row of a record: its columns, its document, and the document's checksum."""
    return (
        *[None if (value := read(record)) is None else type_(value) for type_, read in _columns(kind)],
        *_document(record),
    )


@cache
def _columns(kind: RecordKind[Any, Any]) -> tuple[tuple[type, Callable[[Any], Any]], ...]:
    return tuple((column.type, attrgetter(column.name)) for column in kind.columns)


def key_values(key: object) -> Row:
    """A record's key as column values."""
    return key if isinstance(key, tuple) else (key,)


def _document(record: object) -> tuple[str, int]:
    """The JSON of a record and its CRC-32.

    Raises:
        StoreRefused: the record cannot be encoded: an unpaired surrogate, or a number of more than 64 bits.
    """
    try:
        content = _encoder.encode(record)
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError) as error:
        raise StoreRefused(
            f"a record of kind {type(record).__name__} cannot be written ({error}): {str(record)[:80]!r}"
        ) from error
    return content.decode(), zlib.crc32(content)

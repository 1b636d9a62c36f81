"""Reads the value of one key of a job: numbers, times, texts and tables as people write them.

Each reader takes the keys that are given, and raises `InvalidKey` for a value that it cannot take.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from phalanx.core.errors import BadRequest
from phalanx.core.units import parse_duration_s
from phalanx.core.work.job_file.keys import InvalidKey

SpecValue = TypeVar("SpecValue")

PRINTABLE: Final = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")
_DURATION_MAX_S: Final = 366 * 86400.0
_SECRET_KEYS: Final = frozenset(
    {"env"}
)  # their values may be passwords: error messages, which may be logged, must not repeat them


def read_key(
    given: Mapping[str, object], key: str, parse: Callable[[object], SpecValue], default: SpecValue
) -> SpecValue:
    """The value by its parser, whose `BadRequest` gets the key; `default` if it is not given."""
    if key not in given:
        return default
    try:
        return parse(given[key])
    except BadRequest as error:
        raise InvalidKey(error.message, key=key, hint=error.hint) from None


def read_duration_s(given: Mapping[str, object], key: str, default: float | None) -> float | None:
    """Seconds, at most 366 days; `default` if it is not given."""
    if key not in given:
        return default
    seconds = read_key(given, key, lambda value: parse_duration_s(value, what=key), 0.0)
    if not 0 < seconds <= _DURATION_MAX_S:
        raise InvalidKey(
            f"{key}: {given[key]!r} is not between 0 and 366 days", key=key, hint="write 90m, 2h, 1-12:00:00"
        )
    return seconds


def read_number(given: Mapping[str, object], key: str, *, low: int, high: int) -> int | None:
    """A whole number between `low` and `high`; None if it is not given."""
    if key not in given:
        return None
    value = given[key]
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,18}", value.strip()):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidKey(f"{key}: {value!r} is not a whole number", key=key)
    if not low <= value <= high:
        raise InvalidKey(f"{key}: {value} is not between {low} and {high}", key=key)
    return value


def read_flag(given: Mapping[str, object], key: str, *, default: bool = False) -> bool:
    """True or false."""
    value = given.get(key, default)
    if isinstance(value, str) and value.lower() in {"true", "false"}:
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise InvalidKey(f"{key}: {value!r} is neither true nor false", key=key)
    return value


def read_text(given: Mapping[str, object], key: str) -> str:
    """Text; empty if it is not given."""
    return read_word(given[key], key) if key in given else ""


def read_table(given: Mapping[str, object], key: str) -> tuple[tuple[str, str], ...]:
    """Names with their texts, of a mapping or of a list of NAME=value."""
    if key not in given:
        return ()
    value = given[key]
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = dict(_pair(item, key) for item in value)
    if not isinstance(value, Mapping):
        raise InvalidKey(f"{key}: must contain names and values", key=key, hint=f"write {key}: {{NAME: value}}")
    return tuple((read_word(name, key), "" if text is None else read_word(text, key)) for name, text in value.items())


def _pair(item: object, key: str) -> tuple[str, str]:
    name, equals, text = read_word(item, key).partition("=")
    if not equals:
        shown = "an entry" if key in _SECRET_KEYS else repr(name[:40])
        raise InvalidKey(f"{key}: {shown} has no '='", key=key, hint="write NAME=value")
    return name, text


def read_word(value: object, key: str) -> str:
    """One value as text. Lone surrogates and NUL bytes are rejected."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    if not isinstance(value, str):
        shown = f"a value of kind {type(value).__name__}" if key in _SECRET_KEYS else repr(value)
        raise InvalidKey(f"{key}: {shown} is not text", key=key)
    if "\0" in value:
        raise InvalidKey(f"{key}: contains a NUL byte", key=key)
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidKey(f"{key}: {value[:40]!r} is not UTF-8", key=key)
    return value

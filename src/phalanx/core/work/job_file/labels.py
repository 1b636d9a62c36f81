"""Labels of jobs: names and values that users choose, to find their jobs and to add up what they used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from phalanx.core.errors import BadRequest

LABEL_FILTERS_MAX: Final = 8  # in one request
LabelFilter = tuple[str, str | None]
"""A name and its value; None for any value."""


def parse_label_filters(texts: Iterable[str]) -> tuple[LabelFilter, ...]:
    """The filters of `exp=7` (this value) and `exp` (any value).

    Raises:
        BadRequest: a name is missing, or there are too many filters.
    """
    found: list[LabelFilter] = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not name.strip():
            raise BadRequest(f"label: {text[:40]!r} has no name", hint="write exp=7, or exp for any value")
        found.append((name.strip(), value if equals else None))
    if len(found) > LABEL_FILTERS_MAX:
        raise BadRequest(f"label: {len(found)} filters; at most {LABEL_FILTERS_MAX} are possible")
    return tuple(found)


def has_labels(labels: Iterable[tuple[str, str]], filters: Iterable[LabelFilter]) -> bool:
    """Whether the labels meet all filters."""
    known: Mapping[str, str] = dict(labels)
    return all(name in known and value in (None, known[name]) for name, value in filters)

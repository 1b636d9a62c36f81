"""Every number of a good body, and every number that the description names beside them, at every edge."""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.hostile.asked import Asked

HUGE = "1" + "0" * 400
EDGES = [
    "0",
    "-1",
    "1e-320",
    str(2**53 + 1),
    str(2**63 - 1),
    str(2**63),
    str(-(2**63) - 1),
    str(2**64),
    HUGE,
    f"-{HUGE}",
    "1e308",
    "-1e308",
    "1e999",
    "NaN",
    "Infinity",
]
_MARK = "@number@"


def at_every_edge(asked: Asked, schema: Any) -> Iterator[Asked]:
    """The request with one of its numbers at an edge, one after the other. `schema`: of its body, or None."""
    try:
        body = json.loads(asked.body)
    except ValueError:
        return
    ways = list(numbers(body))
    if isinstance(body, dict):
        ways += [(name,) for name in named(schema) if name not in body]
    for way in ways:
        for edge in EDGES:
            text = json.dumps(put(body, way, _MARK)).replace(f'"{_MARK}"', edge)
            yield replace(asked, body=text.encode(), odd=f"{'.'.join(map(str, way))} is {edge[:30]}")


def numbers(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all numbers in a value."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from numbers(inner, (*way, name))
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from numbers(inner, (*way, at))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield way


def named(schema: Any) -> list[str]:
    """Properties that may be numbers."""
    found = []
    for name, inner in (schema or {}).get("properties", {}).items():
        kinds = [inner, *inner.get("anyOf", [])]
        if any(kind.get("type") in ("integer", "number") for kind in kinds):
            found.append(name)
    return found


def put(value: Any, way: tuple[Any, ...], new: Any) -> Any:
    """The value with another at the end of a way."""
    value = copy.deepcopy(value)
    at = value
    for step in way[:-1]:
        at = at[step]
    at[way[-1]] = new
    return value

"""`replace` for the records that every transition makes anew: as `dataclasses.replace`, at half its cost.

A transition changes two or three fields of a record of thirty. `dataclasses.replace` looks at each field in Python and runs `__init__`; here
the fields are read and set by loops in C. For frozen, slotted dataclasses without `__post_init__`, which is what the records are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import replace as replace  # noqa: PLC0414  # mypy checks names and types of the changes by it
else:
    from collections.abc import Callable
    from dataclasses import fields
    from itertools import repeat
    from operator import attrgetter

    _new, _put = object.__new__, object.__setattr__
    _known: dict[type[Any], tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]] = {}

    def replace(record: Any, /, **changes: Any) -> Any:
        """The record with some fields changed.

        Raises:
            AttributeError: it has no such field.
        """
        kind = type(record)
        known = _known.get(kind)
        if known is None:
            names = tuple(field.name for field in fields(kind))
            known = _known[kind] = (names, attrgetter(*names))
        names, values_of = known
        fresh = _new(kind)
        any(map(_put, repeat(fresh), names, values_of(record)))  # `_put` gives None: `any` goes through all of them
        for name, value in changes.items():
            _put(fresh, name, value)
        return fresh

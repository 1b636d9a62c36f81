"""`replace` for the records that every transition makes anew: as `dataclasses.replace`, at an eighth of its cost.

A transition changes two or three fields of a record of thirty, a dozen times in a job's life. `dataclasses.replace` looks at each field in
Python and runs `__init__`, which must go round the record's own `__setattr__`. Here one function is written for each class, as `dataclasses`
itself writes `__init__`: it fills a twin, a class of the same slots that is not frozen, and then makes it one of the record's class. So
nobody ever holds a record that can change. For frozen, slotted dataclasses without `__post_init__`, which is what the records are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import replace as replace  # noqa: PLC0414  # mypy checks names and types of the changes by it
else:
    from collections.abc import Callable
    from dataclasses import fields

    _known: dict[type[Any], Callable[[Any, dict[str, Any]], Any]] = {}

    def replace(record: Any, /, **changes: Any) -> Any:
        """The record with some fields changed.

        Raises:
            AttributeError: it has no such field.
        """
        write = _known.get(type(record))
        if write is None:
            write = _known[type(record)] = _writer(type(record))
        return write(record, changes)

    def _writer(kind: type[Any]) -> Callable[[Any, dict[str, Any]], Any]:
        names = [field.name for field in fields(kind)]
        twin = type(f"_{kind.__name__}", (), {"__slots__": tuple(names)})
        lines = [
            "def write(old, changes):",
            "    new = make(twin)",
            *(f"    new.{name} = old.{name}" for name in names),
            "    for name, value in changes.items():",
            "        put(new, name, value)",
            "    new.__class__ = kind",
            "    return new",
        ]
        room: dict[str, Any] = {"make": object.__new__, "put": setattr, "twin": twin, "kind": kind}
        exec("\n".join(lines), room)  # noqa: S102  # only names of our own fields are in it
        written: Callable[[Any, dict[str, Any]], Any] = room["write"]
        return written

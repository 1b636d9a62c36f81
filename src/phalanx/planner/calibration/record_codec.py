"""Convert records to plain values and back, for profiles and samples. Fields are stored by name; the caller encodes JSON."""

from __future__ import annotations

import enum
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from phalanx.core.errors import BadRequest
from phalanx.core.jsonline import finite_float
from phalanx.core.work.layouts.layout import Layout, layout_from_json, layout_to_json
from phalanx.core.work.nearest_match import suggestion

R = TypeVar("R")


def encode_record(value: Any) -> Any:
    """Return the record as dicts, lists, strings and numbers."""
    if isinstance(value, Layout):
        return layout_to_json(value)
    if is_dataclass(value):
        return {field.name: encode_record(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): encode_record(inner) for key, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode_record(inner) for inner in value]
    return value


def decode_record(record: type[R], values: Any, where: str = "") -> R:
    """Build a record from plain values. Missing fields get their defaults; numbers must be finite.

    Args:
        record: a dataclass whose fields are numbers, strings, enums, mappings, tuples and such dataclasses.
        values: as returned by `encode_record`.
        where: name of the record in error messages.

    Raises:
        BadRequest: a field is unknown, missing or of the wrong type.
    """
    where = where or record.__name__.lower()
    if not isinstance(values, Mapping):
        raise BadRequest(f"{where} is {_shown(values)}; it must be an object")
    if record is Layout:
        return layout_from_json(values)  # type: ignore[return-value]  # R is Layout here
    hints = _hints(cast("Any", record))  # mypy does not know that a type is hashable
    for name in values:
        if name not in hints:
            hint = suggestion(str(name), hints, form="{!r}")
            raise BadRequest(f"{where}: unknown field {str(name)[:40]!r}", hint=hint)
    given = {name: _value(hints[name], inner, f"{where}.{name}") for name, inner in values.items()}
    lacking = [field.name for field in fields(record) if _is_required(field) and field.name not in given]  # type: ignore[arg-type]
    if lacking:
        raise BadRequest(f"{where} lacks {', '.join(lacking)}")
    return record(**given)


@cache
def _hints(record: type[Any]) -> Mapping[str, Any]:
    """Return the field types of a record class. Cached: samples hold a hundred thousand records of a few classes."""
    return get_type_hints(record)


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        return _value(next(one for one in inner if one is not type(None)), value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise BadRequest(f"{where} is {_shown(value)}; it must be a list")
        return tuple(_value(inner[0], one, f"{where}[{index}]") for index, one in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise BadRequest(f"{where} is {_shown(value)}; it must be an object")
        return {str(key): _value(inner[1], one, f"{where}.{key}") for key, one in value.items()}
    if is_dataclass(hint):
        return decode_record(hint, value, where)  # type: ignore[arg-type]  # is a class, not a record
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        if value not in {one.value for one in hint}:
            raise BadRequest(
                f"{where} is {_shown(value)}; it must be one of {', '.join(str(one.value) for one in hint)}"
            )
        return hint(value)
    return _scalar(hint, value, where)


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is float and (number := finite_float(value)) is not None:
        return number
    if hint in (int, str, bool) and type(value) is hint:
        return value
    words = {float: "a finite number", int: "a whole number", str: "a string", bool: "true or false"}
    raise BadRequest(f"{where} is {_shown(value)}; it must be {words.get(hint, 'another type')}")


def _shown(value: Any) -> str:
    return repr(value)[:40]

"""Pickles between the user's program and its workers. What only one of them knows, as a function of a script, travels by value (cloudpickle)."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, Final

from phalanx.executor.frames import DIGEST_BYTES

_PLAIN: Final = frozenset({int, float, str, bytes, bool, type(None)})


def dumps(value: Any) -> bytes:
    """Pickle a value."""
    if type(value) in _PLAIN:
        return pickle.dumps(value, 5)
    import cloudpickle

    data: bytes = cloudpickle.dumps(value, 5)
    return data


def pickled_function(function: Callable[..., Any]) -> tuple[bytes, bytes]:
    """Return the digest and the pickle of a function, as it is now: what it refers to may be another thing at the next call."""
    import hashlib  # 2 ms, which brokers and workers need not spend

    data = dumps(function)
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest(), data


def pickled_arguments(given: tuple[Any, ...], named: Mapping[str, Any]) -> bytes:
    """Return the pickle of a call's arguments."""
    if not named and _PLAIN.issuperset(map(type, given)):
        return pickle.dumps((given, {}), 5)
    return dumps((given, dict(named)))

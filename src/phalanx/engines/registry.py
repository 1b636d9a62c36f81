"""Finds engine types by name: the built-in ones, and those that installed packages declare as entry points `phalanx.engines`."""

from __future__ import annotations

import importlib.metadata
import logging
from functools import cache
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.ports.engine import EngineType

ENTRY_POINTS: Final = "phalanx.engines"
DEFAULT_ENGINE: Final = "local"
# Not entry points of our own: a checkout has none, and the metadata of an editable install is as old as the install.
_BUILT_IN: Final = {
    "local": "phalanx.engines.local.engine_type:LocalEngineType",
    "ray": "phalanx.engines.ray.engine_type:RayEngineType",
    "slurm": "phalanx.engines.slurm.engine_type:SlurmEngineType",
    "kubernetes": "phalanx.engines.kubernetes.engine_type:KubernetesEngineType",
    "joined": "phalanx.engines.joined.engine_type:JoinedEngineType",
}
_log = logging.getLogger("phalanx.engines")


def engine_type(name: str) -> EngineType:
    """Return the type with this name.

    Raises:
        BadRequest: it is not installed, or cannot be imported.
    """
    built_in = _built_in(name)
    found = [built_in] if built_in is not None else [point for point in _installed() if point.name == name]
    if not found:
        known = ", ".join([*_BUILT_IN, *(point.name for point in _installed())])
        raise BadRequest(f"the engine {name} is not installed here", hint=f"installed: {known}")
    try:
        return _load(found[0])
    except Exception as error:
        raise BadRequest(f"the engine {name} cannot be imported: {error}", hint=f"see {found[0].value}") from error


def selectable_engines() -> list[EngineType]:
    """Return the types for `phalanx up --engine`, the default first. One that cannot be imported is left out, with a warning."""
    found = []
    for point in [*filter(None, map(_built_in, _BUILT_IN)), *_installed()]:
        try:
            found.append(_load(point))
        except Exception as error:  # noqa: BLE001  # a broken package must not stop the others
            _log.warning("the engine %s cannot be imported: %s", point.name, error)
    return [one for one in found if one.selectable]


def _built_in(name: str) -> importlib.metadata.EntryPoint | None:
    value = _BUILT_IN.get(name)
    return None if value is None else importlib.metadata.EntryPoint(name, value, ENTRY_POINTS)


@cache
def _installed() -> tuple[importlib.metadata.EntryPoint, ...]:
    """Return the entry points of other packages, by name."""
    found = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    return tuple(found[name] for name in sorted(found.keys() - _BUILT_IN.keys()))


@cache
def _load(point: importlib.metadata.EntryPoint) -> EngineType:
    made: EngineType = point.load()()
    return made

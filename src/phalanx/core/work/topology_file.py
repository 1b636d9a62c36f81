"""Turns a hand-written tree of host lists into topology labels of nodes. Pure: the caller reads the file.

    spine s0:
      leaf l0:
        rack r0: gpu[001-004]
        rack r1: [gpu005, "gpu[007-008]"]
      leaf l1: gpu[009-016]

A key is a level and a name; levels are nested from outer to inner, and may be left out. A value is a host list, a list of them, or
further domains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from phalanx.core.errors import BadFile, BadRequest
from phalanx.core.fleet.hostlist import expand_hostlist
from phalanx.core.fleet.topology import LEVELS
from phalanx.core.ids import NodeId
from phalanx.core.work.nearest_match import nearest_match

_EXAMPLE = "write rack r1: gpu[001-004]"
DomainPath = tuple[tuple[str, str], ...]  # (level, name), outermost first


def parse_topology_tree(tree: object) -> dict[NodeId, dict[str, str]]:
    """The labels of every node named: its domain at each level of its path, and "" (none) at the levels that its path leaves out.

    Raises:
        BadFile: not of this form, a level unknown or in the wrong order, or a node named twice.
    """
    if not isinstance(tree, Mapping) or not tree:
        raise BadFile("the tree is empty", hint=_EXAMPLE)
    found: dict[NodeId, DomainPath] = {}
    for name, place in _hosts(tree, ()):
        if name in found:
            raise BadFile(
                f"{name} is both under {_path_text(found[name])} and under {_path_text(place)}",
                hint="list each node once",
            )
        found[name] = place
    return {name: {level: dict(place).get(level, "") for level in LEVELS} for name, place in found.items()}


def _hosts(value: object, place: DomainPath) -> Iterator[tuple[NodeId, DomainPath]]:
    if isinstance(value, Mapping):
        for key, inside in value.items():
            yield from _hosts(inside, (*place, _domain(key, place)))
    elif isinstance(value, str):
        try:
            names = expand_hostlist(value)
        except BadRequest as error:
            raise BadFile(f"{_path_text(place)}: {error.message}", hint=error.hint) from None
        yield from ((NodeId(name), place) for name in names)
    elif isinstance(value, Sequence) and value:
        for item in value:
            if not isinstance(item, str):
                raise BadFile(
                    f"{_path_text(place)}: {item!r} is not a host list", hint="numbers need quotes; " + _EXAMPLE
                )
            yield from _hosts(item, place)
    else:
        raise BadFile(f"{_path_text(place)}: {value!r} is not a host list", hint=_EXAMPLE)


def _domain(key: object, place: DomainPath) -> tuple[str, str]:
    level, _, name = str(key).strip().partition(" ")
    level, name = level.lower(), name.strip()
    if level not in LEVELS:
        near = nearest_match(level, LEVELS)
        raise BadFile(
            f"{str(key)[:60]!r}: unknown level {level[:30]!r}",
            hint=f"did you mean {near}?" if near else f"the levels are {', '.join(LEVELS)}",
        )
    if not name:
        raise BadFile(f"{_path_text(place)}: a {level} needs a name", hint=_EXAMPLE)
    if place and LEVELS.index(level) <= LEVELS.index(place[-1][0]):
        raise BadFile(
            f"{_path_text(place)}: a {level} cannot be inside a {place[-1][0]}",
            hint=f"from outer to inner: {', '.join(LEVELS)}",
        )
    return level, name


def _path_text(place: DomainPath) -> str:
    return " / ".join(f"{level} {name}" for level, name in place) or "the tree"

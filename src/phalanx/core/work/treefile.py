"""A hand-written tree of host lists, turned into the labels by which nodes say where they are. Pure: whoever reads the file calls it.

    spine s0:
      leaf l0:
        rack r0: gpu[001-004]
        rack r1: [gpu005, "gpu[007-008]"]
      leaf l1: gpu[009-016]

A key is a level and a name; levels go inward, and may be left out. A value is a host list, a list of them, or domains further in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from phalanx.core.errors import BadFile, BadRequest
from phalanx.core.fleet.hostlist import expand
from phalanx.core.fleet.topology import LEVELS
from phalanx.core.ids import NodeId
from phalanx.core.work.nearest import nearest

_EXAMPLE = "write rack r1: gpu[001-004]"
Place = tuple[tuple[str, str], ...]  # (level, name), outermost first


def labels_in(tree: object) -> dict[NodeId, dict[str, str]]:
    """The labels of every node named: its domain at each level of its path, and "" (none) at the levels that its path leaves out.

    Raises:
        BadFile: not of this form, a level unknown or outside another further in, or a node named twice.
    """
    if not isinstance(tree, Mapping) or not tree:
        raise BadFile("the tree holds nothing", hint=_EXAMPLE)
    found: dict[NodeId, Place] = {}
    for name, place in _hosts(tree, ()):
        if name in found:
            raise BadFile(
                f"{name} stands under {_shown(found[name])} and under {_shown(place)}", hint="a node is in one place"
            )
        found[name] = place
    return {name: {level: dict(place).get(level, "") for level in LEVELS} for name, place in found.items()}


def _hosts(value: object, place: Place) -> Iterator[tuple[NodeId, Place]]:
    if isinstance(value, Mapping):
        for key, inside in value.items():
            yield from _hosts(inside, (*place, _domain(key, place)))
    elif isinstance(value, str):
        try:
            names = expand(value)
        except BadRequest as error:
            raise BadFile(f"{_shown(place)}: {error.message}", hint=error.hint) from None
        yield from ((NodeId(name), place) for name in names)
    elif isinstance(value, Sequence) and value:
        for item in value:
            if not isinstance(item, str):
                raise BadFile(f"{_shown(place)}: {item!r} is no host list", hint="numbers need quotes; " + _EXAMPLE)
            yield from _hosts(item, place)
    else:
        raise BadFile(f"{_shown(place)}: {value!r} is no host list", hint=_EXAMPLE)


def _domain(key: object, place: Place) -> tuple[str, str]:
    level, _, name = str(key).strip().partition(" ")
    level, name = level.lower(), name.strip()
    if level not in LEVELS:
        near = nearest(level, LEVELS)
        raise BadFile(f"{str(key)[:60]!r}: there is no level {level[:30]!r}",
                      hint=f"did you mean {near}?" if near else f"the levels are {', '.join(LEVELS)}")  # fmt: skip
    if not name:
        raise BadFile(f"{_shown(place)}: a {level} without a name", hint=_EXAMPLE)
    if place and LEVELS.index(level) <= LEVELS.index(place[-1][0]):
        raise BadFile(f"{_shown(place)}: a {level} is not inside a {place[-1][0]}",
                      hint=f"from outside in: {', '.join(LEVELS)}")  # fmt: skip
    return level, name


def _shown(place: Place) -> str:
    return " / ".join(f"{level} {name}" for level, name in place) or "the tree"

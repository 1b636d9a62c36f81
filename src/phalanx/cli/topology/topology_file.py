"""Reads topology files (YAML 1.2, a hand-written tree of host lists) into topology labels of nodes. Errors name the line.


    spine s0:
      leaf l0:
        rack r0: gpu[001-004]
        rack r1: [gpu005, "gpu[007-008]"]
      leaf l1: gpu[009-016]

A key is a level and a name; levels are nested from outer to inner, and may be left out. A value is a host list, a list of them, or
further domains.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from phalanx.cli.yaml_file import read_yaml_file
from phalanx.core.errors import BadRequest
from phalanx.core.fleet.hostlist import expand_hostlist
from phalanx.core.fleet.topology import LEVELS
from phalanx.core.ids import NodeId
from phalanx.core.work.nearest_match import suggestion
from phalanx.user_files.yaml_document import FileKind, YamlValue

_EXAMPLE: Final = "write rack r1: gpu[001-004]"
TOPOLOGY_FILE: Final = FileKind(
    name="topology file",
    example=_EXAMPLE,
    bytes_max=1 << 20,  # room for a list of 100,000 hosts; takes the scanner a second
    depth_max=18,  # levels are five at most
    events_max=10_000,  # the largest supported fleet, 12,500 nodes in racks of 8, has some 4,000
)
DomainPath = tuple[tuple[str, str], ...]  # (level, name), outermost first


def read_topology_file(path: str) -> dict[NodeId, dict[str, str]]:
    """Return the labels of every node in the file at `path`; `-` reads standard input.

    The labels are the node's domain at each level of its path, and "" (none) at the levels that its path leaves out.

    Raises:
        BadFile: the file cannot be read, is not YAML or not a tree of host lists, a level is unknown or in the wrong order, or a node is
            named twice; the message names the line.
        TooLarge: the file is larger than 1 MiB.
    """
    found: dict[NodeId, DomainPath] = {}
    for name, domains, value in _hosts(read_yaml_file(path, TOPOLOGY_FILE), ()):
        if name in found:
            raise value.error(
                f"{name} is both under {_path_text(found[name])} and under {_path_text(domains)}", "list each node once"
            )
        found[name] = domains
    return {name: {level: dict(domains).get(level, "") for level in LEVELS} for name, domains in found.items()}


def _hosts(value: YamlValue, domains: DomainPath) -> Iterator[tuple[NodeId, DomainPath, YamlValue]]:
    if isinstance(value.content, dict):
        for key, inside in value.content.items():
            yield from _hosts(inside, (*domains, _domain(key, inside, domains)))
        return
    for item in value.content if isinstance(value.content, list) and value.content else [value]:
        plain = item.plain()
        if not isinstance(plain, str):
            hint = f"numbers need quotes; {_EXAMPLE}" if item.content else _EXAMPLE
            raise item.error(f"{_path_text(domains)}: {plain!r} is not a host list", hint)
        try:
            names = expand_hostlist(plain)
        except BadRequest as error:
            raise item.error(f"{_path_text(domains)}: {error.message}", error.hint) from None
        yield from ((NodeId(name), domains, item) for name in names)


def _domain(key: str, value: YamlValue, outer: DomainPath) -> tuple[str, str]:
    level, _, name = key.strip().partition(" ")
    level, name = level.lower(), name.strip()
    if level not in LEVELS:
        hint = suggestion(level, LEVELS, f"the levels are {', '.join(LEVELS)}")
        raise value.error(f"{key[:60]!r}: unknown level {level[:30]!r}", hint)
    if not name:
        raise value.error(f"{_path_text(outer)}: a {level} needs a name", _EXAMPLE)
    if outer and LEVELS.index(level) <= LEVELS.index(outer[-1][0]):
        raise value.error(
            f"{_path_text(outer)}: a {level} cannot be inside a {outer[-1][0]}",
            f"from outer to inner: {', '.join(LEVELS)}",
        )
    return level, name


def _path_text(domains: DomainPath) -> str:
    return " / ".join(f"{level} {name}" for level, name in domains) or "the tree"

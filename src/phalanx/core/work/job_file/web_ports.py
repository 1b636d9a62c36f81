"""Ports of a job on which its programs serve web pages, as a job file names them, and their paths at the head.

ports: [8888]                          one port
ports: {jupyter: 8888, board: 6006}    names to ports
ports: {lab: "8888:keep-path"}         a program that gets its base path, /j/JOB/8888/, and expects it in requests
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.ids import JobId

PORTS_MAX: Final = 16
PORT_MAX: Final = 65535
_NAME: Final = re.compile(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?")
_PORT: Final = re.compile(r"([0-9]{1,5})(:keep-path)?")
_HINT: Final = "write ports: [8888] or ports: {jupyter: 8888}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebPort:
    """A port of the job's first node. `name` is empty if none was given; `keep_path`: requests keep their path below the head."""

    port: int
    name: str = ""
    keep_path: bool = False


def parse_web_ports(value: object) -> tuple[WebPort, ...]:
    """Parse a port, a list of [NAME=]PORT, or a mapping of names to ports.

    Raises:
        BadRequest: an invalid name or port, or one of them twice.
    """
    pairs: list[tuple[str, object]]
    if isinstance(value, Mapping):
        pairs = [(str(name), port) for name, port in value.items()]
    else:
        items = list(value) if isinstance(value, list | tuple) else str(value).split(",")
        pairs = []
        for item in items:
            name, equals, port = str(item).partition("=")
            pairs.append((name.strip(), port) if equals else ("", item))
        if any("=" in str(item) and not name for item, (name, _) in zip(items, pairs, strict=True)):
            raise BadRequest("ports: a name is missing before =", hint=_HINT)
    if len(pairs) > PORTS_MAX:
        raise BadRequest(f"ports: {len(pairs)} ports; at most {PORTS_MAX} are allowed")
    found = tuple(_web_port(name, port) for name, port in pairs)
    for one in found:
        if sum(other.port == one.port for other in found) > 1:
            raise BadRequest(f"ports: {one.port} is there twice", hint="name each port once")
        if one.name and sum(other.name == one.name for other in found) > 1:
            raise BadRequest(f"ports: {one.name} is there twice", hint="use another name")
    return found


def _web_port(name: str, value: object) -> WebPort:
    if name and not _NAME.fullmatch(name):
        raise BadRequest(
            f"ports: {name[:60]!r} is not a valid name", hint="use lower-case letters, digits and -, such as jupyter"
        )
    text = "" if value is None or isinstance(value, bool) else str(value).strip()
    found = _PORT.fullmatch(text)
    if found is None or not 1 <= int(found[1]) <= PORT_MAX:
        raise BadRequest(f"ports: {text[:60]!r} is not a port between 1 and {PORT_MAX}", hint=_HINT)
    return WebPort(name=name, port=int(found[1]), keep_path=found[2] is not None)


def web_path(job_id: JobId, port: int, node_rank: int = 0) -> str:
    """Return the path of a port at the head: /j/17/8888/, or /j/17.1/8888/ on the job's second node."""
    return f"/j/{job_id}{f'.{node_rank}' if node_rank else ''}/{port}/"

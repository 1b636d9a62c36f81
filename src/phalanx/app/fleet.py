"""Which nodes this machine contributes: its real GPUs, or as many virtual nodes as asked for."""

from __future__ import annotations

import re
import socket
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.ids import NodeId
from phalanx.engines.local.records import LocalNode

_VIRTUAL: Final = re.compile(r"(\d+)x(\d+)")
VIRTUAL_NODES_MAX: Final = 256  # each is a process of some 30 MB
DEFAULT_VIRTUAL_DEVICES: Final = 4


def virtual_nodes(text: str, prefix: str = "") -> list[LocalNode]:
    """Nodes n0, n1, ... of `3x4`: 3 nodes with 4 virtual devices each. `prefix` tells those of several heads apart.

    Raises:
        BadRequest: not of that form, or too many for one machine.
    """
    match = _VIRTUAL.fullmatch(text.strip().lower())
    if match is None:
        raise BadRequest(
            f"--virtual {text!r} is not NODESxDEVICES", hint="write --virtual 3x4 for 3 nodes of 4 virtual devices"
        )
    nodes, devices = int(match[1]), int(match[2])
    if not 1 <= nodes <= VIRTUAL_NODES_MAX or not 1 <= devices <= VIRTUAL_NODES_MAX:
        raise BadRequest(f"--virtual {text}: 1 to {VIRTUAL_NODES_MAX} nodes of 1 to {VIRTUAL_NODES_MAX} devices")
    return [LocalNode(id=NodeId(f"{prefix}n{index}"), virtual_devices=devices) for index in range(nodes)]


def this_machine() -> list[LocalNode]:
    """One node: this machine with its GPUs where NVML finds any, else with four virtual devices."""
    name = NodeId(socket.gethostname().split(".")[0] or "localhost")
    return [LocalNode(id=name, virtual_devices=0 if has_gpus() else DEFAULT_VIRTUAL_DEVICES)]


def has_gpus() -> bool:
    """Whether NVML is here and finds a device."""
    from phalanx.node.shell.nvml import open_nvml

    probe = open_nvml()
    if probe is None:
        return False
    try:
        return bool(probe.devices())
    finally:
        probe.close()

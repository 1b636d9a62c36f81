"""The nodes that this machine contributes: one with its GPUs, or the requested number of virtual nodes."""

from __future__ import annotations

import re
import socket
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.ids import NodeId
from phalanx.ports.engine import LocalNode

_VIRTUAL: Final = re.compile(r"(\d+)x(\d+)")
VIRTUAL_NODES_MAX: Final = 256  # each is a process of about 30 MB
DEFAULT_VIRTUAL_DEVICES: Final = 4


def virtual_nodes(text: str, prefix: str = "") -> list[LocalNode]:
    """Return nodes n0, n1, ... for text such as `3x4`: 3 nodes with 4 virtual devices each. `prefix` keeps the names of several heads apart.

    Raises:
        BadRequest: the text does not have that form, or asks for too many.
    """
    match = _VIRTUAL.fullmatch(text.strip().lower())
    if match is None:
        raise BadRequest(
            f"--virtual {text!r} is not NODESxDEVICES", hint="use --virtual 3x4 for 3 nodes with 4 virtual devices each"
        )
    nodes, devices = int(match[1]), int(match[2])
    if not 1 <= nodes <= VIRTUAL_NODES_MAX or not 1 <= devices <= VIRTUAL_NODES_MAX:
        raise BadRequest(
            f"--virtual {text} is out of range: use 1 to {VIRTUAL_NODES_MAX} nodes with 1 to {VIRTUAL_NODES_MAX} devices"
        )
    return [LocalNode(id=NodeId(f"{prefix}n{index}"), virtual_devices=devices) for index in range(nodes)]


def this_machine_nodes() -> list[LocalNode]:
    """Return one node: this machine with its GPUs if NVML finds any, else with four virtual devices."""
    name = NodeId(socket.gethostname().split(".")[0] or "localhost")
    return [LocalNode(id=name, virtual_devices=0 if has_gpus() else DEFAULT_VIRTUAL_DEVICES)]


def has_gpus() -> bool:
    """Whether NVML is installed and finds a device."""
    from phalanx.node.probes.nvml import open_nvml

    probe = open_nvml()
    if probe is None:
        return False
    try:
        return bool(probe.devices())
    finally:
        probe.close()

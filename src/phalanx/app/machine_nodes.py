"""The nodes that this machine contributes: one with its GPUs, or the requested number of virtual nodes."""

from __future__ import annotations

import re
import socket
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.virtual_devices import VirtualDevices, parse_virtual_devices
from phalanx.core.ids import NodeId
from phalanx.ports.engine import LocalNode

_VIRTUAL: Final = re.compile(r"([0-9]{1,6})x(.*)")
VIRTUAL_NODES_MAX: Final = 256  # each is a process of about 30 MB
DEFAULT_VIRTUAL_DEVICES: Final = 4
NO_NODES: Final = "none"  # the head brings no node: all its servers join
PLAIN_MODELS: Final = ("fast", "slow")  # of virtual devices that stand in for no GPU, to try fleets of several models


def virtual_nodes(text: str, prefix: str = "") -> list[LocalNode]:
    """Return nodes n0, n1, ... for text such as `3x4`: 3 nodes with 4 virtual devices each; `none`: no node.

    `prefix` keeps the names of several heads apart.

    `3xh100:4` makes the devices stand in for H100s, `3xh100:4+mig` for H100s that MIG can divide. `2xfast:2,2xslow:2` is a fleet of two models.

    Raises:
        BadRequest: the text does not have that form, asks for too many, or names a GPU that the fact tables do not have.
    """
    nodes: list[LocalNode] = []
    if text.strip().lower() == NO_NODES:
        return nodes
    for part in text.strip().lower().split(","):
        count, kind = _virtual_part(part.strip(), text)
        model = _known_model(kind) if kind.model else ""
        first = len(nodes)
        nodes += (
            LocalNode(
                id=NodeId(f"{prefix}n{first + index}"),
                virtual_devices=kind.count,
                virtual_model=model,
                virtual_mig=kind.mig,
            )
            for index in range(count)
        )
    if len(nodes) > VIRTUAL_NODES_MAX:
        raise _too_many(text)
    return nodes


def _virtual_part(part: str, text: str) -> tuple[int, VirtualDevices]:
    """The number of nodes and the devices of each, for one part of the text."""
    match = _VIRTUAL.fullmatch(part)
    try:
        kind = None if match is None else parse_virtual_devices(match[2])
    except BadRequest:
        kind = None
    if match is None or kind is None:
        raise BadRequest(
            f"--virtual {text!r} is not NODESx[MODEL:]DEVICES[+mig]",
            hint="use --virtual 3x4 for 3 nodes with 4 virtual devices each, 3xh100:4+mig, or 2xfast:2,2xslow:2",
        )
    if not 1 <= int(match[1]) <= VIRTUAL_NODES_MAX or not 1 <= kind.count <= VIRTUAL_NODES_MAX:
        raise _too_many(text)
    return int(match[1]), kind


def _too_many(text: str) -> BadRequest:
    return BadRequest(
        f"--virtual {text} is out of range: use 1 to {VIRTUAL_NODES_MAX} nodes with 1 to {VIRTUAL_NODES_MAX} devices"
    )


def _known_model(kind: VirtualDevices) -> str:
    """Return the model's name in the fact tables.

    Raises:
        BadRequest: they do not have it; or not its MIG profiles, which are asked for.
    """
    from phalanx.planner.facts.gpus import find_gpu
    from phalanx.planner.facts.mig import find_mig_gpu, read_mig_gpus

    if kind.model in PLAIN_MODELS and not kind.mig:
        return kind.model
    divisible = find_mig_gpu(kind.model)
    if divisible is not None:
        return divisible.name
    name = find_gpu(kind.model).gpu.name
    if kind.mig:
        known = ", ".join(one.name for one in read_mig_gpus())
        raise BadRequest(f"--virtual: the MIG profiles of {name} are not known", hint=f"known: {known}")
    return name


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

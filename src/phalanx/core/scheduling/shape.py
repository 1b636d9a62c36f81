"""How many nodes and devices a request becomes on a fleet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.core.errors import NeverFits
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Node
from phalanx.core.units import GIB
from phalanx.core.work.gpus import GpuRequest
from phalanx.core.work.spec import Launch, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Equal parts on `nodes` nodes: devices, CPUs and memory of each, and tasks started on each."""

    nodes: int
    devices: int
    cpus: int
    memory_bytes: int
    tasks: int
    model: str | None = None
    device_memory_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.nodes} node{'s' if self.nodes > 1 else ''} x {self.devices} = {self.nodes * self.devices} GPUs"


def device_fits(device: Device, model: str | None, device_memory_bytes: int) -> bool:
    """Whether a device is of the model wanted ("h100" also names "NVIDIA H100 80GB HBM3") and large enough.

    Vendors' "80 GB" cards report a little less than 80 GiB, so 5 % is granted.
    """
    if not device.healthy or device.memory_bytes < 0.95 * device_memory_bytes:
        return False
    if model is None:
        return True
    words, wanted = _words(device.model), _words(model)
    return any(words[at : at + len(wanted)] == wanted for at in range(len(words) - len(wanted) + 1))


def _words(model: str) -> list[str]:
    return model.lower().replace("-", " ").replace("_", " ").split()


def matching(node: Node, model: str | None, device_memory_bytes: int) -> tuple[int, ...]:
    """Indices of the node's devices that fit, ascending."""
    return tuple(d.index for d in node.devices if device_fits(d, model, device_memory_bytes))


def shape_of(role: Role, nodes: Iterable[Node]) -> Shape:
    """The request's shape on this fleet: as stated, or as few nodes as hold the total in equal parts.

    Raises:
        NeverFits: even the empty fleet could not hold it. A fleet without nodes refuses nothing.
    """
    fleet = tuple(nodes)
    request = role.gpus
    memory = (request.memory_gib or 0) * GIB
    sizes = [len(matching(node, request.model, memory)) for node in fleet]
    if request.nodes is not None:
        count, each = request.nodes, request.per_node or 0
    elif request.total == 0:
        count, each = 1, 0
    else:
        roomy = [
            size
            for node, size in zip(fleet, sizes, strict=True)
            if node.cpus >= role.cpus and node.memory_bytes >= role.memory_bytes
        ]
        count, each = _fewest_nodes(request.total, roomy) if fleet else (1, request.total)
    shape = Shape(
        nodes=count, devices=each, cpus=role.cpus or (0 if each else 1), memory_bytes=role.memory_bytes,
        tasks=tasks_per_node(role, each), model=request.model, device_memory_bytes=memory,
    )  # fmt: skip
    if fleet:
        _refuse_if_never(request, shape, fleet, sizes)
    return shape


def tasks_per_node(role: Role, devices: int) -> int:
    """How often the command starts on a node: as stated, once for a launcher, else once per device and at least once."""
    if role.tasks_per_node is not None:
        return role.tasks_per_node
    return 1 if role.launch is Launch.PER_NODE else max(1, devices)


def _fewest_nodes(total: int, sizes: list[int]) -> tuple[int, int]:
    """Fewest equal parts for which there are nodes enough (12 on nodes of 8, 4 and 4: 3 x 4; 7 on nodes of 4: 7 x 1).

    Where there is none, the fewest parts that fit the largest node, for the refusal to name.
    """
    largest_first = sorted(sizes, reverse=True)
    for count in range(1, min(total, len(sizes)) + 1):
        if total % count == 0 and largest_first[count - 1] >= total // count:
            return count, total // count
    for count in range(max(1, -(-total // max(1, max(sizes, default=0)))), total + 1):
        if total % count == 0:
            return count, total // count
    return total, 1


def _refuse_if_never(request: GpuRequest, shape: Shape, fleet: tuple[Node, ...], sizes: list[int]) -> None:
    able = [
        node
        for node, size in zip(fleet, sizes, strict=True)
        if size >= shape.devices and node.cpus >= shape.cpus and node.memory_bytes >= shape.memory_bytes
    ]
    if len(able) >= shape.nodes:
        return
    kinds = sorted({device.model for node in fleet for device in node.devices})
    if request.model is not None and not any(sizes):
        raise NeverFits(f"no node has a {request.model} GPU{f' of {request.memory_gib} GiB' if request.memory_gib else ''}",
                        hint=f"this fleet has: {', '.join(kinds) or 'no GPUs'}")  # fmt: skip
    total = sum(sizes)
    wants = f"{shape}" if shape.devices else f"{shape.nodes} node{'s' if shape.nodes > 1 else ''}"
    if shape.cpus > max(node.cpus for node in fleet):
        wants += f" with {shape.cpus} CPUs each"
    if shape.memory_bytes and max(node.memory_bytes for node in fleet) < shape.memory_bytes:
        wants += f" and {shape.memory_bytes / GIB:.0f} GiB a node"
    raise NeverFits(
        f"{wants} can never fit: the fleet has {len(fleet)} node{'s' if len(fleet) != 1 else ''}, at most {max(sizes)} "
        f"matching GPUs on one, {total} in all",
        hint="phalanx nodes shows them; ask for less, or join more servers",
    )

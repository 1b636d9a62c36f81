"""How many nodes and devices a request becomes on a fleet: one shape for every model that would do, in order of preference.

Called at submit (to refuse what never fits), by the scheduler once for each class of requests, and by whoever tells a user what he will get.
It decides shapes; which nodes is the pool's affair. A shape costs the number of different nodes of the fleet, however many there are of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isqrt

from phalanx.core.errors import NeverFits
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Node
from phalanx.core.fleet.summary import FleetSummary, device_fits, summary_of
from phalanx.core.units import GIB
from phalanx.core.work.gpus import GpuRequest
from phalanx.core.work.spec import Launch, Role

Sizes = dict[int, int]  # fitting devices on a node -> how many nodes have so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Equal parts on `nodes` nodes: devices, CPUs and memory of each, and tasks started on each.

    Attributes:
        model: as asked; the fleet's own name, and `exact`, where several models of the fleet answer to what was asked.
        tail, tail_tasks: devices and tasks on one node more, of an uneven request; 0 for none.
        nodes_max: elastic: parts up to so many; 0 for a fixed number.
    """

    nodes: int
    devices: int
    cpus: int
    memory_bytes: int
    tasks: int
    model: str | None = None
    device_memory_bytes: int = 0
    exact: bool = False
    tail: int = 0
    tail_tasks: int = 0
    nodes_max: int = 0

    @property
    def gpus(self) -> int:
        """Devices in all, of the smallest gang that will do."""
        return self.nodes * self.devices + self.tail

    def takes(self, device: Device) -> bool:
        """Whether the device may be part of it."""
        return device_fits(device, self.model, self.device_memory_bytes, exact=self.exact)

    def __str__(self) -> str:
        most = f"..{self.nodes_max}" if self.nodes_max else ""
        nodes = f"{self.nodes}{most} node{'s' if self.nodes > 1 or most else ''} x {self.devices}"
        tail = f" + {self.tail}" if self.tail else ""
        total = f"{self.gpus}" + (f"..{self.nodes_max * self.devices}" if most else "")
        return f"{nodes}{tail} = {total} GPUs"


def matching(node: Node, model: str | None, device_memory_bytes: int) -> tuple[int, ...]:
    """Indices of the node's devices that fit, ascending."""
    return tuple(d.index for d in node.devices if device_fits(d, model, device_memory_bytes))


def shape_of(role: Role, fleet: FleetSummary | Iterable[Node]) -> Shape:
    """The shape liked best: that of `shapes_of` which comes first.

    Raises:
        NeverFits: even the empty fleet could not hold it. A fleet without nodes refuses nothing.
    """
    return shapes_of(role, fleet)[0]


def shapes_of(role: Role, fleet: FleetSummary | Iterable[Node]) -> tuple[Shape, ...]:
    """The request's shapes on this fleet, best first, at least one: as stated, or as few nodes as hold the total in equal parts.

    A gang is of one model. Models come in the order asked; where one word (or none) means several models of the fleet, those that need
    the fewest nodes come first, then the smaller name.

    Raises:
        NeverFits: even the empty fleet could not hold it. A fleet without nodes refuses nothing.
    """
    summary = fleet if isinstance(fleet, FleetSummary) else summary_of(fleet)
    if not summary.kinds:
        return tuple(_alone(role, model, memory_gib) for model, memory_gib in role.gpus.kinds)
    found: list[Shape] = []
    for model, memory_gib in role.gpus.kinds:
        asked = _alone(role, model, memory_gib)
        shapes = [_on(asked, name, exact, role, summary) for name, exact in _named(asked, summary)]
        found += sorted(filter(None, shapes), key=lambda shape: (shape.nodes + bool(shape.tail), shape.model or ""))
    if not found:
        raise _refusal(role, summary)
    return tuple(found)


def tasks_per_node(role: Role, devices: int) -> int:
    """How often the command starts on a node: as stated, once for a launcher, else once per device and at least once."""
    if role.tasks_per_node is not None:
        return role.tasks_per_node
    return 1 if role.launch is Launch.PER_NODE else max(1, devices)


def _alone(role: Role, model: str | None, memory_gib: int | None) -> Shape:
    """The shape where nothing is known of the fleet: as stated, or all on one node."""
    request = role.gpus
    nodes, devices = (1, request.total) if request.nodes is None else (request.nodes, request.per_node or 0)
    return Shape(
        nodes=nodes, devices=devices, cpus=role.cpus or (0 if devices else 1), memory_bytes=role.memory_bytes,
        tasks=tasks_per_node(role, devices), model=model, device_memory_bytes=(memory_gib or 0) * GIB,
        nodes_max=request.nodes_max or 0,
    )  # fmt: skip


def _named(asked: Shape, summary: FleetSummary) -> Sequence[tuple[str | None, bool]]:
    """Model and `exact` for each model of the fleet that is meant; as asked where that is no more than one."""
    models = summary.models_like(asked.model, asked.device_memory_bytes) if asked.devices else ()
    return ((asked.model, False),) if len(models) < 2 else [(model, True) for model in models]


def _on(asked: Shape, model: str | None, exact: bool, role: Role, summary: FleetSummary) -> Shape | None:
    """The shape on nodes that have CPUs and memory enough; None where too few have."""
    request = role.gpus
    sizes = _roomy(asked, model, exact, summary)
    if request.nodes is not None or not request.total:
        parts = (asked.nodes, asked.devices, 0) if _at_least(sizes, asked.devices) >= asked.nodes else None
    else:
        parts = _whole_and_rest(request.total, sizes) if request.uneven else _fewest_nodes(request.total, sizes)
    return None if parts is None else _parted(asked, model, exact, role, parts)


def _parted(asked: Shape, model: str | None, exact: bool, role: Role, parts: tuple[int, int, int]) -> Shape:
    nodes, devices, tail = parts
    return Shape(
        nodes=nodes, devices=devices, cpus=asked.cpus, memory_bytes=asked.memory_bytes, tasks=tasks_per_node(role, devices), model=model,
        device_memory_bytes=asked.device_memory_bytes, exact=exact, tail=tail, tail_tasks=tasks_per_node(role, tail) if tail else 0,
        nodes_max=asked.nodes_max,
    )  # fmt: skip


def _roomy(asked: Shape, model: str | None, exact: bool, summary: FleetSummary) -> Sizes:
    return summary.sizes(
        model, asked.device_memory_bytes, exact=exact, cpus=asked.cpus, memory_bytes=asked.memory_bytes
    )


def _at_least(sizes: Sizes, devices: int) -> int:
    """Nodes that have so many."""
    return sum(nodes for size, nodes in sizes.items() if size >= devices)


def _fewest_nodes(total: int, sizes: Sizes) -> tuple[int, int, int] | None:
    """Fewest equal parts for which there are nodes enough (12 on nodes of 8, 4 and 4: 3 x 4; 7 on nodes of 4: 7 x 1)."""
    largest, there = max(sizes, default=0), sum(sizes.values())
    for nodes in _divisors(total):
        if nodes > there:
            return None
        if total // nodes <= largest and _at_least(sizes, total // nodes) >= nodes:
            return nodes, total // nodes, 0
    return None


def _whole_and_rest(total: int, sizes: Sizes) -> tuple[int, int, int] | None:
    """Whole nodes of the largest size of which there are enough, and the rest on one more (19 on nodes of 8: 2 x 8 + 3)."""
    if total <= max(sizes, default=0):
        return 1, total, 0
    for size in sorted((size for size in sizes if 0 < size < total), reverse=True):
        whole, rest = divmod(total, size)
        # A node that has `size` also has `rest`, so whole nodes are among those that could hold the rest.
        if _at_least(sizes, size) >= whole and (not rest or _at_least(sizes, rest) > whole):
            return whole, size, rest
    return None


def _divisors(total: int) -> Iterator[int]:
    """Ascending."""
    small = [part for part in range(1, isqrt(total) + 1) if total % part == 0]
    yield from small
    yield from (total // part for part in reversed(small) if part * part != total)


# ---- what can never fit ---------------------------------------------------------------------------------------------


def _refusal(role: Role, summary: FleetSummary) -> NeverFits:
    """What was wanted, what the fleet has, and the nearest thing that would fit."""
    request = role.gpus
    alone = [_alone(role, model, memory_gib) for model, memory_gib in request.kinds]
    asked = [replace(one, model=model, exact=exact) for one in alone for model, exact in _named(one, summary)]
    has = [(one, summary.sizes(one.model, one.device_memory_bytes, exact=one.exact)) for one in asked]
    if request.model is not None and not any(max(sizes) for _, sizes in has):
        return NeverFits(f"no node has {_gpu_named(request)}",
                         hint=f"this fleet has: {', '.join(summary.models) or 'no GPUs'}")  # fmt: skip
    # The model of which there is most stands for the fleet; ties go to the one liked better.
    best, sizes = max(has, key=lambda one: sum(size * nodes for size, nodes in one[1].items()))
    shape = _wanted(best, role, sizes)
    wants = f"{shape}" if shape.devices else f"{shape.nodes} node{'s' if shape.nodes > 1 else ''}"
    roomy = _roomy(best, best.model, best.exact, summary)
    enough = _at_least(sizes, shape.devices) >= shape.nodes  # then CPUs or memory are what lacks
    if shape.cpus > max(kind.cpus for kind, _ in summary.kinds) or (enough and shape.cpus):
        wants += f" with {shape.cpus} CPUs each"
    if shape.memory_bytes > max(kind.memory_bytes for kind, _ in summary.kinds) or (enough and shape.memory_bytes):
        wants += f" and {shape.memory_bytes / GIB:.0f} GiB a node"
    return NeverFits(
        f"{wants} can never fit: the fleet has {summary.nodes} node{'s' if summary.nodes != 1 else ''}, {_counts(has)}",
        hint=_nearest(shape, request, roomy, summary) + "; phalanx nodes shows what there is",
    )


def _gpu_named(request: GpuRequest) -> str:
    kinds = [f"{model}" + (f" of {memory} GiB" if memory else "") for model, memory in request.kinds]
    if len(kinds) > 1:
        return f"a GPU that is {' or '.join(kinds)}"
    return f"a {request.model} GPU{f' of {request.memory_gib} GiB' if request.memory_gib else ''}"


def _wanted(best: Shape, role: Role, sizes: Sizes) -> Shape:
    """As stated, or the fewest parts that fit the largest node, for the refusal to name."""
    total = role.gpus.total
    if role.gpus.nodes is not None or not total:
        return best
    largest = max(1, *sizes)
    if role.gpus.uneven and total > largest:
        return _parted(best, best.model, best.exact, role, (total // largest, largest, total % largest))
    nodes = next(part for part in _divisors(total) if part * largest >= total)
    return _parted(best, best.model, best.exact, role, (nodes, total // nodes, 0))


def _counts(has: list[tuple[Shape, Sizes]]) -> str:
    if len(has) == 1:
        sizes = has[0][1]
        return f"at most {max(sizes)} matching GPUs on one, {sum(size * nodes for size, nodes in sizes.items())} in all"
    return "; ".join(
        f"{one.model}: at most {max(sizes)} on one, {sum(size * nodes for size, nodes in sizes.items())} in all"
        for one, sizes in has
    )


def _nearest(shape: Shape, request: GpuRequest, roomy: Sizes, summary: FleetSummary) -> str:
    """The largest thing not larger than what was asked that would fit, in the words to ask for it."""
    kind = _as_asked(shape)
    if not roomy:
        cpus = max(kind.cpus for kind, _ in summary.kinds)
        memory_gib = max(kind.memory_bytes for kind, _ in summary.kinds) / GIB
        return f"a node has at most {cpus} CPUs and {memory_gib:.0f} GiB"
    if not shape.devices:
        return f"ask for at most {sum(roomy.values())} nodes"
    parts = _fewest_nodes(shape.gpus, roomy)
    if parts is not None:
        return f"{kind}{shape.gpus} would fit as {parts[0]}x{parts[1]}"
    there = _at_least(roomy, shape.devices)
    if request.nodes is not None and there:
        return f"{there}x{kind}{shape.devices} would fit"
    fits = [(min(_at_least(roomy, size), shape.gpus // size) * size, size) for size in roomy if 0 < size <= shape.gpus]
    if not fits:
        return "ask for less, or join more servers"
    total, size = max(fits)
    return f"{total // size}x{kind}{size} would fit" if total else "ask for less, or join more servers"


def _as_asked(shape: Shape) -> str:
    """The model in the grammar of GPUs: a vendor's name may hold blanks."""
    if shape.model is None:
        return ""
    memory = f"-{shape.device_memory_bytes // GIB}gb" if shape.device_memory_bytes and not shape.exact else ""
    return "-".join(shape.model.lower().split()) + memory + ":"

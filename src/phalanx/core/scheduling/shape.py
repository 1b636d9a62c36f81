"""The shape of a request on a fleet: its number of nodes and devices, one shape for every acceptable model, in order of preference.

Called at submit (to reject requests that can never fit), by the scheduler once for each class of requests, and to show users their shape.
The pool chooses the nodes. Cost: proportional to the number of kinds of nodes, not of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from math import isqrt
from typing import Final

from phalanx.core.errors import NeverFits
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.mig import MigProfile
from phalanx.core.fleet.node import HOME_SITE, Node
from phalanx.core.fleet.summary import FleetSummary, SlicesOf, device_fits, summary_of
from phalanx.core.hints import Hint, HintCode
from phalanx.core.resources import Extras, Resources, amount_text, extras_fit
from phalanx.core.scheduling.sharing.mig_placement import EMPTY, mig_geometry
from phalanx.core.scheduling.sharing.mig_refusals import mig_refusal
from phalanx.core.units import GIB
from phalanx.core.work.extras import extras_text
from phalanx.core.work.gpus import ANY_MODEL, GpuRequest, ShareRequest
from phalanx.core.work.share import ShareKind
from phalanx.core.work.spec import LaunchMode, Role

Sizes = dict[int, int]  # matching devices on a node -> number of such nodes
WHOLE_FLEET: Final = "the fleet"  # the nodes that a request is judged against, in words
ROLE_SHAPES_MAX: Final = 32  # of a gang with several roles: more combinations of models than anyone prefers


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Equal parts on `nodes` nodes: devices, CPUs and memory of each, and tasks started on each.

    Attributes:
        model: as requested; the fleet's own name, with `exact`, if several models of the fleet match the request.
        last_node_devices, last_node_tasks: devices and tasks on one more node, of an uneven request; 0 for none.
        nodes_max: elastic: up to this many parts; 0 for a fixed number.
        share: the part of one device on each node, instead of `devices` whole ones; None for whole devices.
        extras: named amounts of each part.
        licences: seats of licences for the whole gang.
        others: the shapes of the further roles of a gang with several.
    """

    nodes: int
    devices: int
    cpus: int
    memory_bytes: int
    tasks: int
    model: str | None = None
    device_memory_bytes: int = 0
    exact: bool = False
    last_node_devices: int = 0
    last_node_tasks: int = 0
    nodes_max: int = 0
    share: ShareRequest | None = None
    extras: Extras = ()
    licences: Extras = ()
    others: tuple[Shape, ...] = ()

    @property
    def each(self) -> tuple[Shape, ...]:
        """The shape of each role alone, that of the first role first."""
        return (replace(self, others=()), *self.others) if self.others else (self,)

    @property
    def gpus(self) -> int:
        """Whole devices of the smallest acceptable gang, without those of its other roles."""
        return self.nodes * self.devices + self.last_node_devices

    @property
    def host(self) -> Resources:
        """What each part takes besides devices."""
        return Resources(0, self.cpus, self.memory_bytes, self.extras)

    @property
    def parts(self) -> int:
        """Nodes of the smallest acceptable gang."""
        return self.nodes + (self.last_node_devices > 0)

    @property
    def node_devices(self) -> int:
        """Devices that a node must have for a part of it, or MIG slices: one for a share."""
        return self.devices if self.share is None else self.share.count

    @property
    def slices_of(self) -> SlicesOf | None:
        """How many of its MIG slices fit on a device; None if it is not for slices."""
        return None if self.share is None or self.share.kind is not ShareKind.MIG else self._slices_on

    def accepts(self, device: Device) -> bool:
        """Whether the device may be part of it."""
        return self.capacity_on(device) > 0

    def capacity_on(self, device: Device) -> int:
        """The devices (1 or 0) or MIG slices that the device, empty, has for it."""
        if not device_fits(device, self.model, self.device_memory_bytes, exact=self.exact):
            return 0
        if self.slices_of is None:
            return int(not device.divided)
        return self.slices_of(device.mig.profiles) if device.mig is not None and device.mig.grantable else 0

    def _slices_on(self, profiles: tuple[MigProfile, ...]) -> int:
        profile = None if self.share is None else self.share.mig_profile(profiles)
        return 0 if profile is None else mig_geometry(profiles).room(profile.name, EMPTY)

    def __str__(self) -> str:
        if self.others:
            return ", and ".join(map(str, self.each))
        if self.share is not None and self.share.profile:
            return f"{self.nodes} node{'s' if self.nodes > 1 else ''} x {self.share.count} MIG slice{'s' if self.share.count > 1 else ''} {self.share.profile}"
        if self.share is not None:
            return f"{self.nodes} node{'s' if self.nodes > 1 else ''} x {self.share} of a GPU"
        most = f"..{self.nodes_max}" if self.nodes_max else ""
        nodes = f"{self.nodes}{most} node{'s' if self.nodes > 1 or most else ''} x {self.devices}"
        tail = f" + {self.last_node_devices}" if self.last_node_devices else ""
        total = f"{self.gpus}" + (f"..{self.nodes_max * self.devices}" if most else "")
        return f"{nodes}{tail} = {total} GPUs"


def preferred_shape(role: Role, fleet: FleetSummary | Iterable[Node]) -> Shape:
    """The preferred shape: the first of `acceptable_shapes`.

    Raises:
        NeverFits: even the empty fleet could not hold it. A fleet without nodes rejects nothing.
    """
    return acceptable_shapes(role, fleet)[0]


def acceptable_shapes(
    role: Role, fleet: FleetSummary | Iterable[Node], *, fleet_text: str = WHOLE_FLEET
) -> tuple[Shape, ...]:
    """The request's shapes on this fleet, best first, at least one: as requested, or the total in equal parts on as few nodes as possible.

    A gang is of one model and at one site. Models come in the order requested; if one word (or none) matches several models of the fleet, those that need
    the fewest nodes come first, then those on which a share by memory is the smallest part, then the smaller name.

    Args:
        role: the request.
        fleet: the nodes.
        fleet_text: what these nodes are, for the error.

    Raises:
        NeverFits: even the empty fleet could not hold it. A fleet without nodes rejects nothing.
    """
    summary = fleet if isinstance(fleet, FleetSummary) else summary_of(fleet)
    if role.others:
        return _shapes_of_roles(role, summary, fleet_text)
    if role.gpus.alternatives:
        return _shapes_of_alternatives(role, summary, fleet_text)
    if not summary.kinds:
        return tuple(_requested_shape(role, model, memory_gib) for model, memory_gib in role.gpus.kinds)
    found: list[Shape] = []
    sites = summary.by_site
    for model, memory_gib in role.gpus.kinds:
        asked = _requested_shape(role, model, memory_gib)
        for site in sites:  # a gang is at one site
            shapes = [_shape_on(asked, name, exact, role, site) for name, exact in _matching_models(asked, site)]
            found += sorted(filter(None, shapes), key=lambda shape, site=site: _preference(shape, site))  # type: ignore[misc]
    if not found:
        raise _never_fits_at(role, sites, fleet_text)
    return tuple(found) if len(sites) == 1 else tuple(dict.fromkeys(found))


def _never_fits_at(role: Role, sites: Sequence[FleetSummary], fleet_text: str) -> NeverFits:
    """The error for the site that has the most nodes."""
    most = max(sites, key=lambda site: site.nodes)
    name = "" if len(sites) == 1 else f" at site {most.kinds[0][0].site or HOME_SITE}"
    return _never_fits(role, most, f"{fleet_text}{name}")


def _shapes_of_alternatives(role: Role, summary: FleetSummary, fleet_text: str) -> tuple[Shape, ...]:
    """The shapes of all alternatives that fit the fleet, in order of preference.

    Raises:
        NeverFits: none fits; it has the reason of each.
    """
    found: list[Shape] = []
    refusals: list[tuple[str, NeverFits]] = []
    for one in role.gpus.choices:
        try:
            found += acceptable_shapes(replace(role, gpus=one), summary, fleet_text=fleet_text)
        except NeverFits as refusal:
            refusals.append((str(one), refusal))
    if not found:
        raise NeverFits(
            alternatives_text([(one, refusal.message) for one, refusal in refusals]), hint=refusals[0][1].hint
        )
    return tuple(dict.fromkeys(found))


def _shapes_of_roles(role: Role, summary: FleetSummary, fleet_text: str) -> tuple[Shape, ...]:
    """The shapes of a gang with several roles: each role has nodes of its own, so that there must be enough nodes for all.

    Raises:
        NeverFits: a role does not fit alone, or there are too few nodes for all.
    """
    alone: list[tuple[Shape, ...]] = []
    for number, one in enumerate(role.each):
        try:
            alone.append(acceptable_shapes(one, summary, fleet_text=fleet_text))
        except NeverFits as refusal:
            raise NeverFits(f"role {number} of the job: {refusal.message}", hint=refusal.hint) from None
    together = islice(product(*alone), ROLE_SHAPES_MAX)
    found = [replace(first, others=tuple(others)) for first, *others in together]
    fitting = tuple(
        one for one in found if not summary.kinds or any(_fit_together(one.each, site) for site in summary.by_site)
    )
    if fitting:
        return fitting
    nodes = sum(shape.parts for shape in found[0].each)
    raise NeverFits(
        f"the {len(alone)} roles of the job need {nodes} nodes of their own ({found[0]}); {fleet_text} has"
        f" {summary.nodes} node{'s' if summary.nodes != 1 else ''}, which cannot hold all roles at once",
        hint="request fewer nodes, or put the work of two roles into one",
    )


def _fit_together(shapes: Sequence[Shape], summary: FleetSummary) -> bool:
    """Whether the roles fit on the empty nodes in the order in which the board places them: each part on the smallest node that can hold it."""
    free = dict(summary.kinds)
    for number in hardest_first([(one.node_devices, one.cpus, one.memory_bytes) for one in shapes]):
        shape = shapes[number]
        for devices in [shape.devices] * shape.nodes + [shape.last_node_devices] * (shape.last_node_devices > 0):
            fitting = [
                kind
                for kind, count in free.items()
                if count
                and shape.host.fits(kind.host)
                and kind.count(shape.model, shape.device_memory_bytes, exact=shape.exact) >= devices
            ]
            if not fitting:
                return False
            free[min(fitting, key=lambda kind: (sum(one[2] for one in kind.devices), kind.host))] -= 1
    return True


def hardest_first(sizes: Sequence[tuple[int, int, int]]) -> list[int]:
    """The roles of a gang, by number: those with the most devices, CPUs and memory on a node first."""
    return sorted(range(len(sizes)), key=lambda number: (*(-size for size in sizes[number]), number))


def alternatives_text(refusals: Sequence[tuple[str, str]]) -> str:
    """Why each alternative is impossible, in one sentence each; a reason that all share stands alone."""
    reasons = dict.fromkeys(reason for _, reason in refusals)
    return next(iter(reasons)) if len(reasons) == 1 else "; ".join(f"{one}: {reason}" for one, reason in refusals)


def _preference(shape: Shape, summary: FleetSummary) -> tuple[int, int, str]:
    """Of several models that one word matches: the fewest nodes, the most device memory for a share by memory, the smaller name."""
    memory = 0
    if shape.share is not None and shape.share.memory_gib:
        memory = max(
            size
            for kind, _ in summary.kinds
            for model, size, _ in kind.devices
            if model == shape.model or not shape.exact
        )
    return shape.nodes + bool(shape.last_node_devices), -memory, shape.model or ""


def placement_part(role: Role, *, with_tasks: bool = True) -> Role:
    """The part of the role that matters for placement, so that equal requests are equal values.

    `with_tasks`: also how often its command starts on a node, which belongs to a shape, but does not decide whether nodes can hold it.
    """
    return Role(
        gpus=role.gpus,
        cpus=role.cpus,
        memory_bytes=role.memory_bytes,
        launch=role.launch if with_tasks else LaunchMode.PER_DEVICE,
        tasks_per_node=role.tasks_per_node if with_tasks else None,
        extras=role.extras,
        licences=role.licences,
        others=tuple(placement_part(one) for one in role.others),
    )


def tasks_per_node(role: Role, devices: int) -> int:
    """How often the command starts on a node: as given, once for a launcher, else once per device and at least once."""
    if role.launch is LaunchMode.ONCE:
        return 1
    if role.tasks_per_node is not None:
        return role.tasks_per_node
    return 1 if role.launch is LaunchMode.PER_NODE else max(1, devices)


def _requested_shape(role: Role, model: str | None, memory_gib: int | None) -> Shape:
    """The shape without knowledge of the fleet: as requested, or all on one node."""
    request = role.gpus
    nodes, devices = (1, request.total) if request.nodes is None else (request.nodes, request.per_node or 0)
    return Shape(
        nodes=nodes,
        devices=devices,
        cpus=role.cpus or (0 if devices or request.share else 1),
        memory_bytes=role.memory_bytes,
        tasks=tasks_per_node(role, request.share.count if request.share else devices),
        model=model,
        device_memory_bytes=max(memory_gib or 0, request.share.memory_gib if request.share else 0) * GIB,
        nodes_max=request.nodes_max or 0,
        share=request.share,
        extras=role.extras,
        licences=role.licences,
    )


def _matching_models(asked: Shape, summary: FleetSummary) -> Sequence[tuple[str | None, bool]]:
    """Model and `exact` for each model of the fleet that matches; as requested if at most one does."""
    models = summary.models_like(asked.model, asked.device_memory_bytes, asked.slices_of) if asked.node_devices else ()
    return ((asked.model, False),) if len(models) < 2 else [(model, True) for model in models]


def _shape_on(asked: Shape, model: str | None, exact: bool, role: Role, summary: FleetSummary) -> Shape | None:
    """The shape on nodes with enough CPUs and memory; None if there are too few."""
    request = role.gpus
    sizes = _usable_sizes(asked, model, exact, summary)
    if request.nodes is not None or not request.total:
        parts = (asked.nodes, asked.devices, 0) if _nodes_with(sizes, asked.node_devices) >= asked.nodes else None
    else:
        parts = _whole_nodes_and_rest(request.total, sizes) if request.uneven else _fewest_nodes(request.total, sizes)
    return None if parts is None else _with_parts(asked, model, exact, role, parts)


def _with_parts(asked: Shape, model: str | None, exact: bool, role: Role, parts: tuple[int, int, int]) -> Shape:
    nodes, devices, tail = parts
    return Shape(
        nodes=nodes,
        devices=devices,
        cpus=asked.cpus,
        memory_bytes=asked.memory_bytes,
        tasks=tasks_per_node(role, asked.share.count if asked.share else devices),
        model=model,
        device_memory_bytes=asked.device_memory_bytes,
        exact=exact,
        last_node_devices=tail,
        last_node_tasks=tasks_per_node(role, tail) if tail else 0,
        nodes_max=asked.nodes_max,
        share=asked.share,
        extras=asked.extras,
        licences=asked.licences,
    )


def _usable_sizes(asked: Shape, model: str | None, exact: bool, summary: FleetSummary) -> Sizes:
    return summary.sizes(model, asked.device_memory_bytes, exact=exact, host=asked.host, slices_of=asked.slices_of)


def _nodes_with(sizes: Sizes, devices: int) -> int:
    """Number of nodes with at least this many devices."""
    return sum(nodes for size, nodes in sizes.items() if size >= devices)


def _fewest_nodes(total: int, sizes: Sizes) -> tuple[int, int, int] | None:
    """Fewest equal parts for which there are enough nodes (12 on nodes of 8, 4 and 4: 3 x 4; 7 on nodes of 4: 7 x 1)."""
    largest, node_count = max(sizes, default=0), sum(sizes.values())
    for nodes in _divisors(total):
        if nodes > node_count:
            return None
        if total // nodes <= largest and _nodes_with(sizes, total // nodes) >= nodes:
            return nodes, total // nodes, 0
    return None


def _whole_nodes_and_rest(total: int, sizes: Sizes) -> tuple[int, int, int] | None:
    """Whole nodes of the largest size with enough nodes, and the rest on one more (19 on nodes of 8: 2 x 8 + 3)."""
    if total <= max(sizes, default=0):
        return 1, total, 0
    for size in sorted((size for size in sizes if 0 < size < total), reverse=True):
        whole, rest = divmod(total, size)
        # A node with `size` devices also has `rest`, so it counts among the nodes that could hold the rest.
        if _nodes_with(sizes, size) >= whole and (not rest or _nodes_with(sizes, rest) > whole):
            return whole, size, rest
    return None


def _divisors(total: int) -> Iterator[int]:
    """Ascending."""
    small = [part for part in range(1, isqrt(total) + 1) if total % part == 0]
    yield from small
    yield from (total // part for part in reversed(small) if part * part != total)


# ---- errors ----------------------------------------------------------------------------------------------------------


def _never_fits(role: Role, summary: FleetSummary, fleet_text: str) -> NeverFits:
    """The error: the request, the fleet's capacity, and the nearest request that would fit."""
    of_fleet = "" if fleet_text == WHOLE_FLEET else f" of {fleet_text}"
    request = role.gpus
    alone = [_requested_shape(role, model, memory_gib) for model, memory_gib in request.kinds]
    asked = [replace(one, model=model, exact=exact) for one in alone for model, exact in _matching_models(one, summary)]
    has = [
        (one, summary.sizes(one.model, one.device_memory_bytes, exact=one.exact, slices_of=one.slices_of))
        for one in asked
    ]
    if not any(max(sizes) for _, sizes in has):
        refusal = mig_refusal(request, summary, of_fleet)
        if refusal is not None:
            return refusal
    if request.kinds_text and not any(max(sizes) for _, sizes in has):
        return NeverFits(
            f"no node{of_fleet} has {_gpu_text(request)}",
            hint=f"this fleet has: {', '.join(summary.models) or 'no GPUs'}",
        )
    # The most frequent model represents the fleet; ties go to the preferred one.
    best, sizes = max(has, key=lambda one: sum(size * nodes for size, nodes in one[1].items()))
    shape = _message_shape(best, role, sizes)
    usable = _usable_sizes(best, best.model, best.exact, summary)
    enough = _nodes_with(sizes, shape.node_devices) >= shape.nodes  # then CPUs or memory are the problem
    requested = f"{shape}" if shape.node_devices else f"{shape.nodes} node{'s' if shape.nodes > 1 else ''}"
    if request.nodes is None and request.share is None and shape.node_devices and not enough:
        requested = f"{request.total} GPU{'s' if request.total > 1 else ''}"  # the user chose no shape
    if shape.cpus > max(kind.cpus for kind, _ in summary.kinds) or (enough and shape.cpus):
        requested += f" with {shape.cpus} CPUs each"
    if shape.memory_bytes > max(kind.memory_bytes for kind, _ in summary.kinds) or (enough and shape.memory_bytes):
        requested += f" and {shape.memory_bytes / GIB:.0f} GiB per node"
    if missing := _missing_extras(shape, summary, fleet_text):
        return missing
    return NeverFits(
        f"{requested} can never fit: {fleet_text} has {summary.nodes} node{'s' if summary.nodes != 1 else ''}, {_capacity_text(has)}",
        hint=Hint(HintCode.NEAREST_FIT, fit=_nearest_fit(shape, request, usable, summary)),
    )


def _missing_extras(shape: Shape, summary: FleetSummary, fleet_text: str) -> NeverFits | None:
    """The error if no node offers enough of one of the extras."""
    for name, amount in shape.extras:
        most = max(dict(kind.extras).get(name, 0) for kind, _ in summary.kinds)
        if most < amount:
            has = f"no node offers more than {amount_text(most)}" if most else "no node offers any"
            where = "" if fleet_text == WHOLE_FLEET else f" within {fleet_text}"
            return NeverFits(
                f"the job needs {amount_text(amount)} of {name} on each node; {has}{where}, and no licence has that name",
                hint=Hint(HintCode.OFFER_EXTRAS, name=name),
            )
    usable = [kind for kind, _ in summary.kinds if extras_fit(shape.extras, kind.extras)]
    if shape.extras and not usable:
        return NeverFits(f"no node offers {extras_text(shape.extras)} together", hint=Hint(HintCode.LIST_NODES))
    return None


def _gpu_text(request: GpuRequest) -> str:
    kinds = [f"{model or ANY_MODEL}" + (f" of {memory} GiB" if memory else "") for model, memory in request.kinds]
    if len(kinds) > 1:
        return f"a GPU that is {' or '.join(kinds)}"
    model = "" if request.model is None else f" of model {request.model}"
    return f"a GPU{model}{f' of {request.memory_gib} GiB' if request.memory_gib else ''}"


def _message_shape(best: Shape, role: Role, sizes: Sizes) -> Shape:
    """As requested, or the fewest parts that fit the largest node, for the message."""
    total = role.gpus.total
    if role.gpus.nodes is not None or not total:
        return best
    largest = max(1, *sizes)
    if role.gpus.uneven and total > largest:
        return _with_parts(best, best.model, best.exact, role, (total // largest, largest, total % largest))
    nodes = next(part for part in _divisors(total) if part * largest >= total)
    return _with_parts(best, best.model, best.exact, role, (nodes, total // nodes, 0))


def _capacity_text(has: list[tuple[Shape, Sizes]]) -> str:
    if len(has) == 1:
        sizes = has[0][1]
        what = "such MIG slices" if has[0][0].slices_of is not None else "matching GPUs"
        return f"at most {max(sizes)} {what} on one node, {sum(size * nodes for size, nodes in sizes.items())} in total"
    return "; ".join(
        f"{one.model}: at most {max(sizes)} on one node, {sum(size * nodes for size, nodes in sizes.items())} in total"
        for one, sizes in has
    )


def _nearest_fit(shape: Shape, request: GpuRequest, usable: Sizes, summary: FleetSummary) -> str:
    """The largest request, not larger than this one, that would fit, in the grammar of GPUs."""
    kind = _model_prefix(shape)
    if not usable:
        cpus = max(kind.cpus for kind, _ in summary.kinds)
        memory_gib = max(kind.memory_bytes for kind, _ in summary.kinds) / GIB
        return f"a node has at most {cpus} CPUs and {memory_gib:.0f} GiB"
    if not shape.node_devices:
        return f"request at most {sum(usable.values())} nodes"
    if shape.share is not None:
        node_count = _nodes_with(usable, shape.node_devices)
        if shape.share.profile:
            most = max(usable)
            named = f"{kind[:-1]}." if kind else ""
            if not most:
                return "request another profile"
            nodes, count = (node_count, shape.share.count) if node_count else (1, most)
            return f"{nodes}x{named}{replace(shape.share, count=count)} would fit"
        return f"{node_count}x{kind}{shape.share} would fit" if node_count else "add servers with GPUs"
    parts = _fewest_nodes(shape.gpus, usable)
    if parts is not None:
        return f"{kind}{shape.gpus} would fit as {parts[0]}x{parts[1]}"
    node_count = _nodes_with(usable, shape.devices)
    if request.nodes is not None and node_count:
        return f"{node_count}x{kind}{shape.devices} would fit"
    fits = [
        (min(_nodes_with(usable, size), shape.gpus // size) * size, size) for size in usable if 0 < size <= shape.gpus
    ]
    if not fits:
        return "request fewer GPUs, or add servers"
    total, size = max(fits)
    return f"{total // size}x{kind}{size} would fit" if total else "request fewer GPUs, or add servers"


def _model_prefix(shape: Shape) -> str:
    """The model in the grammar of GPUs: a vendor's name may contain blanks."""
    if shape.model is None:
        return ""
    memory = f"-{shape.device_memory_bytes // GIB}gb" if shape.device_memory_bytes and not shape.exact else ""
    return "-".join(shape.model.lower().split()) + memory + ":"

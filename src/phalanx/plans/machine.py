"""The machine to plan on: from the command's options, or from the fleet of the user's head (`--fleet here`).

Facts come from `phalanx.planner.facts`; measurements of `phalanx calibrate` override them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.core.errors import BadRequest, NeverFits, PhalanxError
from phalanx.core.units import parse_memory_bytes
from phalanx.core.work.gang_topology import common_network, parse_gbit_per_s
from phalanx.core.work.gpus import GpuRequest, parse_gpus
from phalanx.planner.cost.machine import Machine

if TYPE_CHECKING:
    from phalanx.planner.facts.machines import FactTables


class PlannedDevice(Protocol):
    """A device, as far as a plan needs it."""

    @property
    def model(self) -> str: ...  # noqa: D102
    @property
    def memory_bytes(self) -> int: ...  # noqa: D102


class PlannedNode(Protocol):
    """A node, as far as a plan needs it."""

    @property
    def devices(self) -> Sequence[PlannedDevice]: ...  # noqa: D102
    @property
    def labels(self) -> Mapping[str, str]: ...  # noqa: D102
    @property
    def cordon(self) -> object | None: ...  # noqa: D102
    @property
    def down_cause(self) -> str: ...  # noqa: D102
    @property
    def memory_bytes(self) -> int: ...  # noqa: D102


class FleetProfile(Protocol):
    """The result of the last calibration, and why it may no longer hold."""

    @property
    def profile(self) -> Mapping[str, Any] | None: ...  # noqa: D102
    @property
    def stale(self) -> Sequence[str]: ...  # noqa: D102


class PlannedFleet(Protocol):
    """A fleet to plan on: a client of a head, or the head itself."""

    def nodes(self) -> Sequence[PlannedNode]:
        """Return all nodes."""
        ...

    def profile(self) -> FleetProfile:
        """Return the last calibration."""
        ...


DeviceKind = tuple[str, int]  # device model and number of devices of a node


def machine_from_options(options: Mapping[str, Any], tables: FactTables, notes: list[str]) -> Machine:
    """Build the machine from the options.

    Args:
        options: the command's options.
        tables: fact tables.
        notes: assumptions are appended to it.

    Raises:
        BadRequest: missing, unknown or contradictory GPUs.
    """
    from phalanx.planner.facts.machines import build_machine

    if not options["gpus"]:
        raise BadRequest("no GPUs given", hint="add --gpus 4xh100:8, or --fleet here for the fleet of your head")
    return build_machine(
        parse_gpus(options["gpus"]),
        instance=options["instance"],
        **_network(options["network"]),
        **_price(options),
        host_memory_bytes=_stated_host_memory(options),
        tables=tables,
        notes=notes,
    )


def node_of_kind(name: str, count: int, options: Mapping[str, Any], tables: FactTables, notes: list[str]) -> Machine:
    """Build one node with `count` GPUs of the row `name` of the table; the other arguments are those of `machine_from_options`.

    Raises:
        BadRequest: as `machine_from_options`.
    """
    from phalanx.planner.facts.machines import build_machine

    request = GpuRequest(total=count, nodes=1, per_node=count, model=name)
    priced = _price(options)
    return build_machine(request, **_network(options["network"]), **priced, tables=tables, notes=notes)


def machine_from_head(head: PlannedFleet, options: Mapping[str, Any], tables: FactTables, notes: list[str]) -> Machine:
    """Build the machine from the head's fleet, or the part that `--gpus` names: the largest group of equal nodes of one model.

    Raises:
        NeverFits: the fleet has no such devices.
        PhalanxError: the head does not answer.
    """
    from phalanx.planner.facts.machines import build_machine, unplanned_notes

    nodes = [node for node in head.nodes() if node.cordon is None and node.devices and node.down_cause == ""]
    request = parse_gpus(options["gpus"]) if options["gpus"] else None
    chosen, asked = _chosen(nodes, request)
    notes += [] if request is None else unplanned_notes(request)
    model, _ = _kind(chosen[0])
    stated = options["network"] or common_network(node.labels for node in chosen)
    assumed: list[str] = []
    reported = min(node.memory_bytes for node in chosen)
    machine = build_machine(
        asked,
        **_network(stated),
        **_price(options),
        host_memory_bytes=_stated_host_memory(options) or reported or None,
        tables=tables,
        notes=assumed,
    )
    machine = with_measurements(machine, head, model, notes)
    measured = machine.measured is not None and machine.measured.between_bytes_per_s is not None
    notes += [note for note in assumed if not (measured and note.startswith("network between nodes not stated"))]
    return machine


def with_measurements(machine: Machine, head: PlannedFleet, model: str, notes: list[str]) -> Machine:
    """Add the measurements for this device model, if any; append doubts about them to `notes`."""
    from phalanx.planner.calibration.profile import measured_rates, parse_profile
    from phalanx.planner.calibration.slowdown import CALIBRATION_STACK, measure_slowdown
    from phalanx.planner.facts.coefficient_table import find_stack, physics

    try:
        found = head.profile()
    except PhalanxError as error:
        notes.append(f"no profile of this fleet: {error.message}")
        return machine
    profile = None if found.profile is None else parse_profile(found.profile)
    if profile is None or all(node.gpu != model for node in profile.nodes):
        notes.append("these devices have no calibration; run `phalanx calibrate` for more accurate plans")
        return machine
    notes.extend(f"profile of {profile.at[:10]}: {doubt}" for doubt in found.stale)
    slowdown = measure_slowdown(profile, model, machine, physics(), find_stack(CALIBRATION_STACK))
    steps = f"took {slowdown:.2f} times" if slowdown > 1.0 else "were not slower than"
    notes.append(f"calibrated on {profile.at[:10]}; measured steps {steps} the sum of their parts")
    return replace(machine, measured=measured_rates(profile, gpu=model, slowdown=slowdown))


def _chosen(nodes: Sequence[PlannedNode], request: GpuRequest | None) -> tuple[list[PlannedNode], GpuRequest]:
    """Select equal nodes, and express the request in numbers of them."""
    from phalanx.core.fleet.summary import model_fits

    alike: dict[DeviceKind, list[PlannedNode]] = {}
    for node in nodes:
        if request is None or any(
            model_fits(_kind(node)[0], node.devices[0].memory_bytes, model, (memory or 0) << 30)
            for model, memory in request.kinds
        ):
            alike.setdefault(_kind(node), []).append(node)
    if not alike:
        has = ", ".join(sorted({_kind(node)[0] for node in nodes})) or "no GPUs"
        wanted = "" if request is None else f" {request.kinds_text}"
        raise NeverFits(f"no node of this fleet has{wanted} GPUs", hint=f"available: {has}")
    (model, per_node), chosen = max(alike.items(), key=lambda one: (len(one[1]) * one[0][1], one[0]))
    word = "-".join(model.lower().split())
    if request is None or request.nodes is not None:
        nodes_wanted, each = (len(chosen), per_node) if request is None else (request.nodes or 1, request.per_node or 1)
        return chosen, GpuRequest(total=nodes_wanted * each, nodes=nodes_wanted, per_node=each, model=word)
    each = max(count for count in range(1, per_node + 1) if request.total % count == 0)
    return chosen, GpuRequest(total=request.total, nodes=request.total // each, per_node=each, model=word)


def _kind(node: PlannedNode) -> DeviceKind:
    return node.devices[0].model, len(node.devices)


def _stated_host_memory(options: Mapping[str, Any]) -> float | None:
    text = options.get("host_memory")
    return None if text is None else float(parse_memory_bytes(text, what="host-memory"))


def _network(text: str | None) -> dict[str, Any]:
    """Convert `--network 400gbit` or a name from the table of networks to arguments of `build_machine`."""
    if not text:
        return {}
    gbit = parse_gbit_per_s(text)
    if gbit == 0:
        raise BadRequest(f"network: {text!r} has no bandwidth", hint="example: 400gbit per GPU and direction")
    return {"network": text} if gbit is None else {"network_gbit_per_gpu": gbit}


def _price(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `--price 2.69` to arguments of `build_machine`; the date defaults to today."""
    if options["price"] is None and options.get("price_date"):
        raise BadRequest("--price-date needs --price", hint="--price 2.69")
    if options["price"] is None:
        return {"price_kind": options["price_kind"]} if options.get("price_kind") else {}
    from phalanx.plans.amounts import parse_usd

    return {"price": parse_usd(options["price"]), "price_date": options["price_date"] or time.strftime("%Y-%m-%d")}

"""The machine to plan on: as the words of the command state it, or as the fleet of this user's head is (`--fleet here`).

Facts come from `phalanx.facts`; what `phalanx calibrate` measured goes before them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phalanx.core.errors import BadRequest, NeverFits, PhalanxError
from phalanx.core.performance.machine import Machine
from phalanx.core.work.gpus import GpuRequest, parse_gpus
from phalanx.core.work.surroundings import gbit_of, network_of

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.facts.machines import Tables
    from phalanx.wire.api.nodes import NodeView

Kind = tuple[str, int]  # model of a node's devices, and how many it has


def machine_asked(given: Mapping[str, Any], tables: Tables, notes: list[str]) -> Machine:
    """The machine that the options state.

    Args:
        given: the command's options.
        tables: of facts.
        notes: is told what was assumed.

    Raises:
        BadRequest: no GPUs, unknown ones, or what contradicts.
    """
    from phalanx.facts.machines import machine_for

    if not given["gpus"]:
        raise BadRequest("on which GPUs?", hint="--gpus 4xh100:8, or --fleet here for the fleet of your head")
    return machine_for(
        parse_gpus(given["gpus"]),
        instance=given["instance"],
        **_network(given["network"]),
        **_price(given),
        tables=tables,
        notes=notes,
    )


def machine_here(head: Client, given: Mapping[str, Any], tables: Tables, notes: list[str]) -> Machine:
    """The machine that the head's fleet is, or the part of it that `--gpus` names: equal nodes of one model, the most there are.

    Raises:
        NeverFits: the fleet has no such devices.
        PhalanxError: nobody answers.
    """
    from phalanx.facts.machines import machine_for

    nodes = [node for node in head.nodes() if node.cordon is None and node.devices and node.down_cause == ""]
    request = parse_gpus(given["gpus"]) if given["gpus"] else None
    chosen, asked = _chosen(nodes, request)
    model, _ = _kind(chosen[0])
    stated = given["network"] or network_of(node.labels for node in chosen)
    assumed: list[str] = []
    machine = machine_for(asked, **_network(stated), **_price(given), tables=tables, notes=assumed)
    machine = with_measured(machine, head, model, notes)
    measured = machine.measured is not None and machine.measured.between_bytes_per_s is not None
    notes += [note for note in assumed if not (measured and note.startswith("network between nodes not stated"))]
    return machine


def with_measured(machine: Machine, head: Client, model: str, notes: list[str]) -> Machine:
    """The machine with what was calibrated of devices of that model; as it was where nothing was. `notes` is told what to doubt."""
    from phalanx.core.performance.profile import measured_of, profile_from
    from phalanx.core.performance.slowdown import CALIBRATION_STACK, slowdown_of
    from phalanx.facts.coefficients import physics, stack_named

    try:
        found = head.profile()
    except PhalanxError as error:
        notes.append(f"no profile of this fleet: {error.message}")
        return machine
    profile = None if found.profile is None else profile_from(found.profile)
    if profile is None or all(node.gpu != model for node in profile.nodes):
        notes.append("these devices were never measured: `phalanx calibrate` makes plans on them sharper")
        return machine
    notes.extend(f"profile of {profile.at[:10]}: {doubt}" for doubt in found.stale)
    slowdown = slowdown_of(profile, model, machine, physics(), stack_named(CALIBRATION_STACK))
    notes.append(f"as calibrated on {profile.at[:10]}; whole steps took {slowdown:.2f} times what their parts promise")
    return replace(machine, measured=measured_of(profile, gpu=model, slowdown=slowdown))


def _chosen(nodes: Sequence[NodeView], request: GpuRequest | None) -> tuple[list[NodeView], GpuRequest]:
    """Nodes that are alike, and the request in numbers of them."""
    from phalanx.core.fleet.summary import kind_fits

    alike: dict[Kind, list[NodeView]] = {}
    for node in nodes:
        if request is None or any(
            kind_fits(_kind(node)[0], node.devices[0].memory_bytes, model, (memory or 0) << 30)
            for model, memory in request.kinds
        ):
            alike.setdefault(_kind(node), []).append(node)
    if not alike:
        has = ", ".join(sorted({_kind(node)[0] for node in nodes})) or "no GPUs"
        wanted = "" if request is None else f" {request.kind}"
        raise NeverFits(f"no node of this fleet has{wanted} GPUs", hint=f"it has: {has}")
    (model, per_node), chosen = max(alike.items(), key=lambda one: (len(one[1]) * one[0][1], one[0]))
    word = "-".join(model.lower().split())
    if request is None or request.nodes is not None:
        nodes_wanted, each = (len(chosen), per_node) if request is None else (request.nodes or 1, request.per_node or 1)
        return chosen, GpuRequest(total=nodes_wanted * each, nodes=nodes_wanted, per_node=each, model=word)
    each = max(count for count in range(1, per_node + 1) if request.total % count == 0)
    return chosen, GpuRequest(total=request.total, nodes=request.total // each, per_node=each, model=word)


def _kind(node: NodeView) -> Kind:
    return node.devices[0].model, len(node.devices)


def _network(text: str | None) -> dict[str, Any]:
    """`--network 400gbit` or a name of the table of networks, as `machine_for` takes them."""
    if not text:
        return {}
    gbit = gbit_of(text)
    if gbit == 0:
        raise BadRequest(f"network: {text!r} joins nothing", hint="write 400gbit, for each GPU and direction")
    return {"network": text} if gbit is None else {"network_gbit_per_gpu": gbit}


def _price(given: Mapping[str, Any]) -> dict[str, Any]:
    """`--price 2.69`: as of today, unless the user says another day."""
    if given["price"] is None and given.get("price_date"):
        raise BadRequest("--price-date is of --price, which is not given", hint="--price 2.69")
    if given["price"] is None:
        return {"price_kind": given["price_kind"]} if given.get("price_kind") else {}
    from phalanx.cli.plan.amounts import parse_usd

    return {"price": parse_usd(given["price"]), "price_date": given["price_date"] or time.strftime("%Y-%m-%d")}

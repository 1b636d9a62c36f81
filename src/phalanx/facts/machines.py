"""The machine that a request for GPUs means: which GPU, how many nodes, what joins them, what they cost. Every figure that nobody stated
comes from a table with its source, and is said so in `notes`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.performance.machine import Fact, Machine, Measured, Price
from phalanx.core.work.gpus import GpuRequest
from phalanx.core.work.nearest import nearest
from phalanx.facts.files import own_tables, shipped_text
from phalanx.facts.gpus import GB, GBIT, GpuEntry, gpu_named, gpu_on, read_gpus
from phalanx.facts.instances import Instance, Network, instance_named, network_named, read_instances
from phalanx.facts.prices import PriceEntry, price_of, read_prices, stated_price
from phalanx.facts.table import Columns, rows_of

_ASSUMED: Final = Columns(needed=("name", "value", "unit"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The tables that a plan reads: the shipped ones, with a user's own rows laid over them."""

    gpus: tuple[GpuEntry, ...] = field(default_factory=read_gpus)
    instances: tuple[Instance, ...] = field(default_factory=read_instances)
    prices: tuple[PriceEntry, ...] = field(default_factory=read_prices)


def read_tables(home: str = "", prices: tuple[str, ...] = ()) -> Tables:
    """The shipped tables, those in HOME/facts, and the price lists given.

    Args:
        home: the state folder (`PHALANX_HOME`); empty to look into none.
        prices: paths of further price lists, the last wins.

    Raises:
        BadFile: one of them is not what it should be.
    """
    own = {name: own_tables(home, f"{name}.csv") if home else () for name in ("gpus", "instances", "prices")}
    gpus = read_gpus(*own["gpus"])
    return Tables(
        gpus=gpus,
        instances=read_instances(*own["instances"], gpus=gpus),
        prices=read_prices(*own["prices"], *prices, gpus=gpus),
    )


def machine_for(
    request: GpuRequest,
    *,
    instance: str | None = None,
    network: str | None = None,
    network_gbit_per_gpu: float | None = None,
    storage_gb_per_s: float | None = None,
    price: float | None = None,
    price_date: str | None = None,
    price_kind: str = "on-demand",
    measured: Measured | None = None,
    tables: Tables | None = None,
    notes: list[str] | None = None,
) -> Machine:
    """The machine that `request` means.

    Args:
        request: what `--gpus` says; of several kinds the first, of an elastic range the fewest.
        instance: a rented server ("p5.48xlarge"); GPU, GPUs per node, network, storage and price are then its own.
        network: a name of the table of networks ("ib-ndr"), instead of what usually joins such GPUs.
        network_gbit_per_gpu: Gbit/s per GPU and direction between nodes; goes before `network`.
        storage_gb_per_s: GB/s that one node writes durably.
        price: US dollars per GPU and hour.
        price_date: since when; a price without a date is refused.
        price_kind: which kind of listed price counts where none is stated: "on-demand", "spot", "capacity block".
        measured: what `phalanx calibrate` found on it.
        tables: the shipped ones by default.
        notes: is told what was assumed.

    Raises:
        BadRequest: no GPU or an unknown one, a shape that instance does not have, a rate that cannot be, or a price without a date.
    """
    known = Tables() if tables is None else tables
    said = [] if notes is None else notes
    server = None if instance is None else instance_named(instance, known.instances)
    entry = _gpu(request, server, known, said)
    nodes, per_node = _shape(request, entry, server, said)
    joined = _network(entry, server, network, network_gbit_per_gpu, said if nodes > 1 else [])
    storage, storage_fact = _storage(server, storage_gb_per_s)
    if price is not None:
        cost: Price | None = stated_price(price, price_date)
    else:
        cost = _listed_price(entry, server, known, price_kind, joined if nodes > 1 else None, said)
    return Machine(
        gpu=gpu_on(entry, per_node),
        nodes=nodes,
        gpus_per_node=per_node,
        network_bytes_per_s=joined.bytes_per_s,
        network_kind=joined.kind,
        network_fact=joined.fact,
        storage_bytes_per_s=storage,
        storage_fact=storage_fact,
        price=cost,
        measured=measured,
    )


def _gpu(request: GpuRequest, server: Instance | None, known: Tables, notes: list[str]) -> GpuEntry:
    if request.model is None and server is None:
        raise BadRequest(
            f"gpus: {request} names no GPU, and a plan depends on which it is", hint="write h100:8 or 4xa100-80gb:8"
        )
    if request.or_models:
        notes.append(f"planned for {request.model}; {', '.join(request.or_models)} would need a plan of its own")
    if server is None:
        assert request.model is not None  # refused above
        entry = gpu_named(request.model, memory_gib=request.memory_gib, gpus=known.gpus, notes=notes)
        if entry.note:
            notes.append(f"{entry.gpu.name}: {entry.note}")
        return entry
    entry = gpu_named(server.gpu, gpus=known.gpus)
    if request.model is not None:
        asked = gpu_named(request.model, memory_gib=request.memory_gib, gpus=known.gpus)
        if asked.gpu.name != entry.gpu.name and request.model not in entry.gpu.aliases:
            raise BadRequest(f"instance: {server.name} has {entry.gpu.name}, and {request.kind} is asked for",
                             hint="give one of the two")  # fmt: skip
    return entry


def _shape(request: GpuRequest, entry: GpuEntry, server: Instance | None, notes: list[str]) -> tuple[int, int]:
    """Nodes and GPUs on each; all nodes equal."""
    if request.total == 0:
        raise BadRequest("gpus: a plan needs at least one GPU", hint="write h100:8")
    usual = entry.gpus_per_node if server is None else server.gpus
    name = entry.gpu.name if server is None else server.name
    if request.nodes is not None and request.per_node is not None:
        if request.per_node > usual and server is not None:
            raise BadRequest(f"instance: {name} has {usual} GPUs, and {request.per_node} per node are asked for")
        if request.per_node > usual and not entry.gpu.virtual:
            notes.append(f"{request.per_node} GPUs per node are more than the usual {usual} of {name}")
        if request.nodes_max is not None:
            notes.append(f"planned for {request.nodes} nodes, the fewest of {request.nodes}..{request.nodes_max}")
        return request.nodes, request.per_node
    per_node = max(count for count in range(1, min(usual, request.total) + 1) if request.total % count == 0)
    if per_node == 1 and request.total > usual > 1:
        raise BadRequest(f"gpus: {request.total} GPUs do not divide into equal nodes of up to {usual}",
                         hint=f"ask for {request.total // usual * usual} or {(request.total // usual + 1) * usual}")  # fmt: skip
    return request.total // per_node, per_node


def _network(
    entry: GpuEntry, server: Instance | None, name: str | None, gbit: float | None, notes: list[str]
) -> Network:
    stated = None if name is None else network_named(name)
    if gbit is not None:
        if not math.isfinite(gbit) or gbit < 0:
            raise BadRequest(f"network: {gbit:g} Gbit/s per GPU cannot be")
        kind = stated.kind if stated else server.network.kind if server else entry.network_kind
        fact = Fact(source="given by the user", date="")
        return Network(name="given", kind=kind, bytes_per_s=gbit * GBIT, fact=fact)
    if stated is not None:
        return stated
    if server is not None:
        return server.network
    usual = Network(
        name=entry.gpu.name, kind=entry.network_kind, bytes_per_s=entry.network_bytes_per_s, fact=entry.network_fact
    )
    notes.append(f"network between nodes not stated: {usual.bytes_per_s / GBIT:g} Gbit/s per GPU, {usual.fact.source}")
    return usual


def _storage(server: Instance | None, gb_per_s: float | None) -> tuple[float, Fact]:
    if gb_per_s is not None:
        if not math.isfinite(gb_per_s) or gb_per_s <= 0:
            raise BadRequest(f"storage: {gb_per_s:g} GB/s per node cannot be")
        return gb_per_s * GB, Fact(source="given by the user", date="")
    if server is not None and server.storage_bytes_per_s is not None:
        return server.storage_bytes_per_s, server.fact
    value, fact = assumed("storage_gb_per_s")
    return value * GB, fact


@cache
def assumed(name: str) -> tuple[float, Fact]:
    """A figure to count with where nobody stated or measured one (`assumed.csv`).

    Raises:
        KeyError: no such figure.
    """
    rows = rows_of(shipped_text("assumed.csv"), "assumed.csv", _ASSUMED)
    return {row.text("name"): (row.number("value"), row.fact()) for row in rows}[name]


def _listed_price(
    entry: GpuEntry, server: Instance | None, known: Tables, kind: str, joined: Network | None, notes: list[str]
) -> Price | None:
    kinds = {one.price.kind for one in known.prices}
    if kind not in kinds:
        close = nearest(kind, kinds)
        raise BadRequest(f"price: no offer is of kind {kind!r}",
                         hint=f"did you mean {close!r}?" if close else f"known: {', '.join(sorted(kinds))}")  # fmt: skip
    renting = [server] if server else [one for one in known.instances if one.gpu == entry.gpu.name]
    offers = [one.offer for one in renting]
    name = entry.gpu.name
    cost = price_of(name, [one for one in known.prices if one.own], offers=offers if server else (), kind=kind)
    # The clouds next: their price is for whole nodes with a network between them, which a single rented GPU does not have.
    if cost is None and offers:
        cost = price_of(name, known.prices, offers=offers, kind=kind)
    if cost is None and server is None:
        cost = price_of(name, known.prices, kind=kind)
    if cost is None and not entry.gpu.virtual:
        notes.append(f"no dated {kind} price of {server.offer if server else name} is known")
    for one in renting:
        if cost and joined and one.offer == cost.offer and one.network.bytes_per_s < joined.bytes_per_s:
            there = f"{one.network.bytes_per_s / GBIT:g} Gbit/s per GPU"
            notes.append(
                f"the price is that of {one.offer}, which has {there} between nodes: --instance {one.name} plans for it"
            )
    return cost

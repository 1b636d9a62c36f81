"""Build the machine of a GPU request: GPU, nodes, network, storage and price. Figures that the user did not state come from a table with
their source; `notes` lists them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.gpus import GpuRequest
from phalanx.core.work.nearest_match import suggestion
from phalanx.planner.cost.machine import (
    FactSource,
    Machine,
    MeasuredRates,
    Price,
)
from phalanx.planner.facts.gpus import (
    GB,
    GBIT,
    GpuEntry,
    find_gpu,
    gpu_in_node,
    read_gpus,
)
from phalanx.planner.facts.instances import (
    InstanceEntry,
    NetworkEntry,
    find_instance,
    find_network,
    read_instances,
)
from phalanx.planner.facts.mig_slice import plan_slice
from phalanx.planner.facts.prices import (
    PriceEntry,
    find_price,
    read_prices,
    user_price,
)
from phalanx.planner.facts.table import TableColumns, TableRow, read_rows
from phalanx.planner.facts.table_files import shipped_text, user_tables

_ASSUMED: Final = TableColumns(required=("name", "value", "unit"))
_HOSTS: Final = TableColumns(required=("gpu", "memory_gb_per_s"), optional=("memory_gib",))
_ANY_GPU: Final = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class FactTables:
    """The tables for a plan: the shipped ones merged with rows of the user."""

    gpus: tuple[GpuEntry, ...] = field(default_factory=read_gpus)
    instances: tuple[InstanceEntry, ...] = field(default_factory=read_instances)
    prices: tuple[PriceEntry, ...] = field(default_factory=read_prices)


def read_fact_tables(home: str = "", prices: tuple[str, ...] = ()) -> FactTables:
    """Return the shipped tables merged with those in HOME/facts and with price lists.

    Args:
        home: the state folder (`PHALANX_HOME`); empty for none.
        prices: paths of further price lists; later ones take precedence.

    Raises:
        BadFile: a table is invalid.
    """
    own = {name: user_tables(home, f"{name}.csv") if home else () for name in ("gpus", "instances", "prices")}
    gpus = read_gpus(*own["gpus"])
    return FactTables(
        gpus=gpus,
        instances=read_instances(*own["instances"], gpus=gpus),
        prices=read_prices(*own["prices"], *prices, gpus=gpus),
    )


def build_machine(
    request: GpuRequest,
    *,
    instance: str | None = None,
    network: str | None = None,
    network_gbit_per_gpu: float | None = None,
    storage_gb_per_s: float | None = None,
    price: float | None = None,
    price_date: str | None = None,
    price_kind: str = "on-demand",
    measured: MeasuredRates | None = None,
    host_memory_bytes: float | None = None,
    tables: FactTables | None = None,
    notes: list[str] | None = None,
) -> Machine:
    """Return the machine for a request.

    Args:
        request: the value of `--gpus`; the first of several kinds, the fewest nodes of an elastic range.
        instance: a cloud instance ("p5.48xlarge"), which determines GPU, GPUs per node, network, storage and price.
        network: a name in the table of networks ("ib-ndr"), instead of the usual network of such GPUs.
        network_gbit_per_gpu: Gbit/s per GPU and direction between nodes; takes precedence over `network`.
        storage_gb_per_s: GB/s that one node writes durably.
        price: US dollars per GPU and hour.
        price_date: date of `price`, required with it.
        price_kind: kind of listed price to use without `price`: "on-demand", "spot", "capacity block".
        measured: rates from `phalanx calibrate`.
        host_memory_bytes: memory of the host of a node, as stated or reported, instead of the usual one.
        tables: by default the shipped ones.
        notes: receives the assumptions.

    Raises:
        BadRequest: missing or unknown GPU, a shape that the instance does not have, an invalid rate, or a price without a date.
    """
    known = FactTables() if tables is None else tables
    notes = [] if notes is None else notes
    server = None if instance is None else find_instance(instance, known.instances)
    request, entry = plan_slice(request, _gpu(request, server, known, notes), notes)
    nodes, per_node = _shape(request, entry, server, notes)
    link = _network(entry, server, network, network_gbit_per_gpu, notes if nodes > 1 else [])
    storage, storage_fact = _storage(server, storage_gb_per_s)
    if price is not None:
        cost: Price | None = user_price(price, price_date)
    else:
        cost = _listed_price(entry, server, known, price_kind, link if nodes > 1 else None, notes)
    host_bytes_per_s, host_fact = host_bandwidth(entry.gpu.name)
    host_memory, memory_fact = _host_memory(entry, server, host_memory_bytes)
    return Machine(
        gpu=gpu_in_node(entry, per_node),
        nodes=nodes,
        gpus_per_node=per_node,
        network_bytes_per_s=link.bytes_per_s,
        network_kind=link.kind,
        network_fact=link.fact,
        storage_bytes_per_s=storage,
        storage_fact=storage_fact,
        price=cost,
        measured=measured,
        host_bytes_per_s=host_bytes_per_s,
        host_fact=host_fact,
        host_memory_bytes=host_memory,
        host_memory_fact=memory_fact,
    )


def unplanned_notes(request: GpuRequest) -> list[str]:
    """Notes for the models and alternatives of the request that a plan for its first one does not cover."""
    notes = []
    if request.alternative_models:
        notes.append(f"planned for {request.model} only; {', '.join(request.alternative_models)} need a separate plan")
    if request.alternatives:
        first, *others = (str(one) for one in request.choices)
        notes.append(f"planned for {first} only; {', '.join(others)} need{'s' * (len(others) == 1)} a separate plan")
    return notes


def _gpu(request: GpuRequest, server: InstanceEntry | None, known: FactTables, notes: list[str]) -> GpuEntry:
    if request.model is None and server is None:
        raise BadRequest(f"gpus: {request} has no GPU model, which a plan needs", hint="write h100:8 or 4xa100-80gb:8")
    notes += unplanned_notes(request)
    if server is None:
        assert request.model is not None  # checked above
        entry = find_gpu(request.model, memory_gib=request.memory_gib, gpus=known.gpus, notes=notes)
        if entry.note:
            notes.append(f"{entry.gpu.name}: {entry.note}")
        return entry
    entry = find_gpu(server.gpu, gpus=known.gpus)
    if request.model is not None:
        asked = find_gpu(request.model, memory_gib=request.memory_gib, gpus=known.gpus)
        if asked.gpu.name != entry.gpu.name and request.model not in entry.gpu.aliases:
            raise BadRequest(
                f"instance: {server.name} has {entry.gpu.name}, but the request is for {request.kinds_text}",
                hint="give the instance or the GPU, not both",
            )
    return entry


def _shape(request: GpuRequest, entry: GpuEntry, server: InstanceEntry | None, notes: list[str]) -> tuple[int, int]:
    """Return the number of nodes and the GPUs of each."""
    if request.total == 0:
        raise BadRequest("gpus: a plan needs at least one GPU", hint="write h100:8")
    usual = entry.gpus_per_node if server is None else server.gpus
    name = entry.gpu.name if server is None else server.name
    if request.nodes is not None and request.per_node is not None:
        if request.per_node > usual and server is not None:
            raise BadRequest(f"instance: {name} has {usual} GPUs, but the request is for {request.per_node} per node")
        if request.per_node > usual and not entry.gpu.virtual:
            notes.append(f"{request.per_node} GPUs per node are more than the usual {usual} for {name}")
        if request.nodes_max is not None:
            notes.append(f"planned for {request.nodes} nodes, the minimum of {request.nodes}..{request.nodes_max}")
        return request.nodes, request.per_node
    per_node = max(count for count in range(1, min(usual, request.total) + 1) if request.total % count == 0)
    if per_node == 1 and request.total > usual > 1:
        raise BadRequest(
            f"gpus: {request.total} GPUs do not divide into equal nodes of up to {usual}",
            hint=f"request {request.total // usual * usual} or {(request.total // usual + 1) * usual}",
        )
    return request.total // per_node, per_node


def _network(
    entry: GpuEntry, server: InstanceEntry | None, name: str | None, gbit: float | None, notes: list[str]
) -> NetworkEntry:
    stated = None if name is None else find_network(name)
    if gbit is not None:
        if not math.isfinite(gbit) or gbit < 0:
            raise BadRequest(f"network: {gbit:g} Gbit/s per GPU is not a valid bandwidth")
        kind = stated.kind if stated else server.network.kind if server else entry.network_kind
        fact = FactSource(source="given by the user", date="")
        return NetworkEntry(name="given", kind=kind, bytes_per_s=gbit * GBIT, fact=fact)
    if stated is not None:
        return stated
    if server is not None:
        return server.network
    usual = NetworkEntry(
        name=entry.gpu.name, kind=entry.network_kind, bytes_per_s=entry.network_bytes_per_s, fact=entry.network_fact
    )
    notes.append(
        f"network between nodes not stated: assumed {usual.bytes_per_s / GBIT:g} Gbit/s per GPU, {usual.fact.source}"
    )
    return usual


def _storage(server: InstanceEntry | None, gb_per_s: float | None) -> tuple[float, FactSource]:
    if gb_per_s is not None:
        if not math.isfinite(gb_per_s) or gb_per_s <= 0:
            raise BadRequest(f"storage: {gb_per_s:g} GB/s per node is not a valid bandwidth")
        return gb_per_s * GB, FactSource(source="given by the user", date="")
    if server is not None and server.storage_bytes_per_s is not None:
        return server.storage_bytes_per_s, server.fact
    value, fact = default_figure("storage_gb_per_s")
    return value * GB, fact


@cache
def default_figure(name: str) -> tuple[float, FactSource]:
    """Return the default for a figure that is neither stated nor measured (`assumed.csv`).

    Raises:
        KeyError: unknown figure.
    """
    rows = read_rows(shipped_text("assumed.csv"), "assumed.csv", _ASSUMED)
    return {row.text("name"): (row.number("value"), row.fact()) for row in rows}[name]


@cache
def host_bandwidth(gpu: str) -> tuple[float, FactSource]:
    """Return the bytes per second of the host's memory in the usual server of this GPU (`hosts.csv`)."""
    row = _host_row(gpu)
    return row.number("memory_gb_per_s", least=1.0) * GB, row.fact()


def _host_memory(
    entry: GpuEntry, server: InstanceEntry | None, stated_bytes: float | None
) -> tuple[float | None, FactSource]:
    """Return the memory of a host: as stated, of the instance, or of the usual server of the GPU; None if none is known."""
    if stated_bytes is not None:
        return stated_bytes, FactSource(source="", date="")
    if server is not None and server.memory_bytes is not None:
        return server.memory_bytes, server.fact
    row = _host_row(entry.gpu.name)
    return (row.number("memory_gib", least=1.0) * 2**30 if row.text("memory_gib") else None), row.fact()


def _host_row(gpu: str) -> TableRow:
    rows = {
        row.text("gpu").removesuffix(_ANY_GPU): row for row in read_rows(shipped_text("hosts.csv"), "hosts.csv", _HOSTS)
    }
    return rows[max((name for name in rows if gpu.startswith(name)), key=len)]


def _listed_price(
    entry: GpuEntry,
    server: InstanceEntry | None,
    known: FactTables,
    kind: str,
    link: NetworkEntry | None,
    notes: list[str],
) -> Price | None:
    kinds = {one.price.kind for one in known.prices}
    if kind not in kinds:
        hint = suggestion(kind, kinds, f"known: {', '.join(sorted(kinds))}", form="{!r}")
        raise BadRequest(f"price: unknown kind of price {kind!r}", hint=hint)
    rented = [server] if server else [one for one in known.instances if one.gpu == entry.gpu.name]
    offers = [one.offer for one in rented]
    name = entry.gpu.name
    cost = find_price(
        name, [one for one in known.prices if one.user_supplied], offers=offers if server else (), kind=kind
    )
    # Then the clouds: they rent whole nodes with a network between them, unlike offers of single GPUs.
    if cost is None and offers:
        cost = find_price(name, known.prices, offers=offers, kind=kind)
    if cost is None and server is None:
        cost = find_price(name, known.prices, kind=kind)
    if cost is None and not entry.gpu.virtual:
        notes.append(f"no dated {kind} price is known for {server.offer if server else name}")
    for one in rented:
        if cost and link and one.offer == cost.offer and one.network.bytes_per_s < link.bytes_per_s:
            slower = f"{one.network.bytes_per_s / GBIT:g} Gbit/s per GPU"
            notes.append(
                f"the price is for {one.offer}, which has only {slower} between nodes; plan for the instance {one.name} to see its effect"
            )
    return cost

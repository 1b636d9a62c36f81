"""Offers in order of price, and what a node of some machine types has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node_pool import NodeOffer
from phalanx.planner.facts.gpus import find_gpu
from phalanx.planner.facts.instances import InstanceEntry, read_instances
from phalanx.planner.facts.prices import PriceEntry

ON_DEMAND: Final = "on-demand"
SPOT: Final = "spot"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineShape:
    """What a cloud says of a machine type. `gpu`: its name there, empty without one; `gpu_bytes`: of the memory of one, 0 if unknown."""

    cpus: int
    memory_bytes: int
    gpu: str = ""
    gpus: int = 0
    gpu_bytes: int = 0


def sort_offers(offers: Sequence[NodeOffer]) -> tuple[NodeOffer, ...]:
    """Return the offers in order of price, else as given.

    Raises:
        BadRequest: the price of one is not known, and another one's is: they cannot be compared.
    """
    unknown = [offer.text for offer in offers if offer.price_per_h <= 0.0]
    if unknown and len(unknown) < len(offers):
        raise BadRequest(f"the price of {unknown[0]} is not known, so the offers have no order", hint="--price 30/h")
    return tuple(sorted(offers, key=lambda offer: offer.price_per_h))


def zone_offers(
    markets: Sequence[str], types: Sequence[str], zones: Sequence[str], price: Callable[[str, str], float]
) -> tuple[NodeOffer, ...]:
    """Return an offer for each zone, type and market, whose text is these three, in order of price.

    Args:
        markets: kinds of capacity, in the order in which equal prices are tried; then types and zones likewise.
        types: machine types.
        zones: where.
        price: of a type and a market, in US dollars an hour; 0 if unknown.

    Raises:
        BadRequest: as for `sort_offers`.
    """
    return sort_offers(
        [
            NodeOffer(text=f"{zone} {kind} {market}", zone=zone, price_per_h=price(kind, market))
            for market in markets
            for kind in types
            for zone in zones
        ]
    )


def parse_zone_offer(text: str) -> tuple[str, str, str]:
    """Return zone, type and market of an offer."""
    zone, kind, market = text.split(" ")
    return zone, kind, market


def fact_price(
    cloud: str, kind: str, market: str, region: str, facts: tuple[Sequence[InstanceEntry], Sequence[PriceEntry]]
) -> float:
    """Return the price of a machine in US dollars an hour: of the region, else the newest of another one; 0 if no fact has it.

    Args:
        cloud: as in the table of instances.
        kind: the machine type; upper and lower case are the same.
        market: the kind of price in the table of prices.
        region: where.
        facts: the tables of instances and of prices.
    """
    instance = next((one for one in facts[0] if one.cloud == cloud and one.name.lower() == kind.lower()), None)
    if instance is None:
        return 0.0
    found = [one.price for one in facts[1] if one.price.offer == instance.offer and one.price.kind == market]
    found.sort(key=lambda price: (price.region == region, price.fact.date))
    return round(found[-1].usd_per_gpu_hour * instance.gpus, 4) if found else 0.0


def node_shape(cloud: str, shapes: Mapping[str, MachineShape], virtual: int) -> tuple[tuple[Device, ...], int, int]:
    """Return the devices, CPUs and bytes of memory that a machine of each of these types has.

    Args:
        cloud: as in the table of instances, which knows better than a cloud what its GPUs are.
        shapes: by type.
        virtual: devices that stand in for the GPUs; 0 for none.

    Raises:
        BadRequest: types have different GPUs.
    """
    known = {one.name.lower(): one for one in read_instances() if one.cloud == cloud}
    devices: dict[str, tuple[str, int, int]] = {}
    for name, shape in shapes.items():
        entry = known.get(name.lower())
        if virtual:
            devices[name] = ("virtual", 0, virtual)
        elif entry is not None:
            gpu = find_gpu(entry.gpu).gpu
            devices[name] = (gpu.name, gpu.memory_bytes, entry.gpus)
        else:
            devices[name] = (shape.gpu.lower(), shape.gpu_bytes, shape.gpus)
    if len(set(devices.values())) != 1:
        parts = ", ".join(f"{name} has {one[2]} x {one[0] or 'no GPU'}" for name, one in sorted(devices.items()))
        raise BadRequest(f"the types of a pool have the same GPUs, but {parts}", hint="add a pool for each")
    model, device_bytes, count = next(iter(devices.values()))
    made = tuple(
        Device(index=index, uuid="", model=model, memory_bytes=device_bytes, virtual=bool(virtual))
        for index in range(count)
    )
    return made, _least(shape.cpus for shape in shapes.values()), _least(one.memory_bytes for one in shapes.values())


def _least(values: Iterable[int]) -> int:
    return min(values)

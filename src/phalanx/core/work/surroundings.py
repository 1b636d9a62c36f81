"""What the head knows of the devices that a job with a plan was given: from it a rank chooses or checks its layout.

Made where the head prepares an attempt, carried to the nodes, read by `phalanx.torch` from `PHALANX_MACHINE`. It names the devices and
does not describe them: what a model of device is able to is looked up by its name (`phalanx.facts`) or measured (`phalanx calibrate`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.node import Node
from phalanx.core.fleet.topology import tree_of
from phalanx.core.work.allocation import Allocation

LINK_LEVEL: Final = "nvlink"  # the level of the topology whose nodes are joined by links as fast as those inside a node
_GBIT: Final = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*(?:g(?:bit|bps|b/s|bit/s)?)?", re.IGNORECASE)
NETWORK_LABEL: Final = "network"
"""Of a node: what joins it to others, for each GPU and direction, as in `--network` ("400gbit")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Equal parts of equal nodes.

    Attributes:
        gpu: the model as the nodes' drivers name it ("NVIDIA H100 80GB HBM3"); "virtual" for slots on CPU, "" for no device.
        memory_bytes: of one device; the least of all.
        gpus_per_node: the fewest on one node, where a gang is uneven.
        linked_nodes: nodes, in rank order, that share one domain of NVLink; 1 where links end at the node.
        network: the nodes' label where it is a name of the table of networks ("ib-ndr"); "" where they have none or differ.
        network_gbit: the label where it is a rate ("400gbit"), per device and direction; 0 where it is none.
    """

    gpu: str
    memory_bytes: int
    virtual: bool
    nodes: int
    gpus_per_node: int
    linked_nodes: int = 1
    network: str = ""
    network_gbit: float = 0.0


def surroundings_of(allocation: Allocation, fleet: Mapping[Any, Node]) -> Surroundings | None:
    """What the gang was given, by the nodes' own records; None where a node is no longer known."""
    nodes = [fleet[grant.node_id] for grant in allocation.grants if grant.node_id in fleet]
    if len(nodes) != len(allocation.grants) or not nodes:
        return None
    devices = [
        device
        for node, grant in zip(nodes, allocation.grants, strict=True)
        for device in node.devices
        if device.index in grant.devices
    ]
    network = network_of(node.labels for node in nodes)
    gbit = gbit_of(network)
    return Surroundings(
        gpu=devices[0].model if devices else "",
        memory_bytes=min((device.memory_bytes for device in devices), default=0),
        virtual=any(device.virtual for device in devices),
        nodes=len(nodes),
        gpus_per_node=min(len(grant.devices) for grant in allocation.grants),
        linked_nodes=linked_nodes(nodes),
        network="" if gbit else network,
        network_gbit=gbit or 0.0,
    )


def network_of(labels: Iterable[Mapping[str, str]]) -> str:
    """What the nodes with these labels say that joins them; "" where they say nothing, or differ."""
    networks = {one.get(NETWORK_LABEL, "") for one in labels}
    return networks.pop() if len(networks) == 1 else ""


def gbit_of(text: str) -> float | None:
    """Gbit/s of `400gbit`, `400`, `400G`; None where it is no rate, but perhaps the name of a network."""
    match = _GBIT.fullmatch(text.strip())
    return float(match[1]) if match is not None else None


def linked_nodes(nodes: Sequence[Node]) -> int:
    """Into what runs of nodes, side by side and each inside one NVLink domain, they can be cut: the size of a run; 1 for none larger."""
    tree = tree_of(nodes)
    if LINK_LEVEL not in tree.levels:
        return 1
    domains = tree.domains[tree.level(LINK_LEVEL)]
    return math.gcd(*(len(list(run)) for _, run in groupby(domains)))


def surroundings_to_json(found: Surroundings) -> dict[str, Any]:
    """As plain values."""
    return asdict(found)


def surroundings_from_json(values: Mapping[str, Any]) -> Surroundings:
    """The reverse. Unknown fields are passed over: they are a later release's.

    Raises:
        BadRequest: a field lacks or has a value that it cannot have.
    """
    known = {field.name for field in fields(Surroundings)}
    try:
        found = Surroundings(**{name: value for name, value in values.items() if name in known})
    except TypeError as error:
        raise BadRequest(f"PHALANX_MACHINE: {error}") from None
    counts: tuple[object, ...] = (found.memory_bytes, found.nodes, found.gpus_per_node, found.linked_nodes)
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise BadRequest(f"PHALANX_MACHINE: one of the counts {counts} is no whole number")
    return found

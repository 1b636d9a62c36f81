"""The devices that a job with a plan was placed on; a rank chooses or checks its layout with them.

Created when the head prepares an attempt, sent to the nodes, and read by `phalanx.torch` from `PHALANX_MACHINE`. It names the devices
but does not describe them: the capabilities of a model are looked up by name (`phalanx.planner.facts`) or measured (`phalanx calibrate`).
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
from phalanx.core.fleet.topology import build_topology_tree
from phalanx.core.work.allocation import Allocation

LINK_LEVEL: Final = "nvlink"  # the topology level whose nodes are joined by links as fast as those inside a node
_GBIT: Final = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*(?:g(?:bit|bps|b/s|bit/s)?)?", re.IGNORECASE)
NETWORK_LABEL: Final = "network"
"""Node label: the network of a node, per GPU and direction, as in `--network` ("400gbit")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangTopology:
    """Equal parts of equal nodes.

    Attributes:
        gpu: the model as the nodes' drivers name it ("NVIDIA H100 80GB HBM3"); "virtual" for slots on the CPU, "" for no device.
        memory_bytes: of one device; the least of all.
        gpus_per_node: the fewest on one node, if a gang is uneven.
        linked_nodes: consecutive nodes, in rank order, that share one NVLink domain; 1 if links end at the node.
        network: the nodes' label if it names an entry of the network table ("ib-ndr"); "" if they have none or differ.
        network_gbit: the label if it is a rate ("400gbit"), per device and direction; else 0.
    """

    gpu: str
    memory_bytes: int
    virtual: bool
    nodes: int
    gpus_per_node: int
    linked_nodes: int = 1
    network: str = ""
    network_gbit: float = 0.0


def gang_topology(allocation: Allocation, fleet: Mapping[Any, Node]) -> GangTopology | None:
    """The topology of a gang's nodes, from the nodes' records; None if a node is no longer known."""
    nodes = [fleet[grant.node_id] for grant in allocation.grants if grant.node_id in fleet]
    if len(nodes) != len(allocation.grants) or not nodes:
        return None
    devices = [
        device
        for node, grant in zip(nodes, allocation.grants, strict=True)
        for device in node.devices
        if device.index in grant.devices
    ]
    network = common_network(node.labels for node in nodes)
    gbit = parse_gbit_per_s(network)
    return GangTopology(
        gpu=devices[0].model if devices else "",
        memory_bytes=min((device.memory_bytes for device in devices), default=0),
        virtual=any(device.virtual for device in devices),
        nodes=len(nodes),
        gpus_per_node=min(grant.visible_devices for grant in allocation.grants),
        linked_nodes=linked_run_length(nodes),
        network="" if gbit else network,
        network_gbit=gbit or 0.0,
    )


def common_network(labels: Iterable[Mapping[str, str]]) -> str:
    """The common network of nodes with these labels; "" if they have none, or differ."""
    networks = {one.get(NETWORK_LABEL, "") for one in labels}
    return networks.pop() if len(networks) == 1 else ""


def parse_gbit_per_s(text: str) -> float | None:
    """Gbit/s of `400gbit`, `400`, `400G`; None if it is not a rate, but perhaps the name of a network."""
    match = _GBIT.fullmatch(text.strip())
    return float(match[1]) if match is not None else None


def linked_run_length(nodes: Sequence[Node]) -> int:
    """Size of the consecutive runs, each inside one NVLink domain, that the nodes can be divided into; 1 if there are none larger."""
    tree = build_topology_tree(nodes)
    if LINK_LEVEL not in tree.levels:
        return 1
    domains = tree.domains[tree.level(LINK_LEVEL)]
    return math.gcd(*(len(list(run)) for _, run in groupby(domains)))


def gang_topology_to_json(found: GangTopology) -> dict[str, Any]:
    """As plain values."""
    return asdict(found)


def gang_topology_from_json(values: Mapping[str, Any]) -> GangTopology:
    """The reverse. Unknown fields are ignored: they come from a later release.

    Raises:
        BadRequest: a field is missing or invalid.
    """
    known = {field.name for field in fields(GangTopology)}
    try:
        found = GangTopology(**{name: value for name, value in values.items() if name in known})
    except TypeError as error:
        raise BadRequest(f"PHALANX_MACHINE: {error}") from None
    counts: tuple[object, ...] = (found.memory_bytes, found.nodes, found.gpus_per_node, found.linked_nodes)
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise BadRequest(f"PHALANX_MACHINE: one of the counts {counts} is not a whole number")
    return found

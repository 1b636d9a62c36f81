"""A fleet summary that counts equal nodes together: 12,500 nodes are a handful of kinds. Shapes are computed on it, not on nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Node

_MEMORY_GRANTED: Final = 0.95  # vendors' "80 GB" cards report a little less than 80 GiB


@dataclass(frozen=True, slots=True, order=True)
class NodeKind:
    """The properties by which two nodes are equal for a shape. `devices` holds (model, memory in bytes, number of healthy ones), sorted."""

    cpus: int
    memory_bytes: int
    devices: tuple[tuple[str, int, int], ...]

    def count(self, model: str | None, device_memory_bytes: int, *, exact: bool = False) -> int:
        """Number of healthy devices that match."""
        return sum(
            healthy
            for have, memory_bytes, healthy in self.devices
            if healthy and model_fits(have, memory_bytes, model, device_memory_bytes, exact=exact)
        )


@dataclass(frozen=True, slots=True)
class FleetSummary:
    """Kinds of nodes with their counts, sorted by kind so that equal fleets are equal values."""

    kinds: tuple[tuple[NodeKind, int], ...]

    @property
    def nodes(self) -> int:
        """Total number of nodes."""
        return sum(count for _, count in self.kinds)

    @property
    def models(self) -> tuple[str, ...]:
        """Models of all devices, unhealthy ones included, by name."""
        return tuple(sorted({model for kind, _ in self.kinds for model, _, _ in kind.devices}))

    def models_like(self, model: str | None, device_memory_bytes: int) -> tuple[str, ...]:
        """Models with a matching healthy device, by name."""
        return tuple(
            sorted(
                {
                    have
                    for kind, _ in self.kinds
                    for have, memory_bytes, healthy in kind.devices
                    if healthy and model_fits(have, memory_bytes, model, device_memory_bytes)
                }
            )
        )

    def sizes(
        self, model: str | None, device_memory_bytes: int, *, exact: bool = False, cpus: int = 0, memory_bytes: int = 0
    ) -> dict[int, int]:
        """Number of nodes with enough CPUs and memory, by their number of matching devices: `{8: 10_000, 4: 12, 0: 1}`."""
        found: Counter[int] = Counter()
        for kind, nodes in self.kinds:
            if kind.cpus >= cpus and kind.memory_bytes >= memory_bytes:
                found[kind.count(model, device_memory_bytes, exact=exact)] += nodes
        return dict(found)


def summary_of(nodes: Iterable[Node]) -> FleetSummary:
    """Summarise the fleet. Linear in its devices: call it once for each change of the fleet, never for each request."""
    return summary_from_counts(Counter(node_kind(node) for node in nodes))


def summary_from_counts(kinds: Counter[NodeKind]) -> FleetSummary:
    """The summary of nodes that the caller has already counted by kind."""
    return FleetSummary(tuple(sorted((kind, count) for kind, count in kinds.items() if count > 0)))


def node_kind(node: Node) -> NodeKind:
    """The kind of a node."""
    found: dict[tuple[str, int], int] = {}
    for device in node.devices:
        key = (device.model, device.memory_bytes)
        found[key] = found.get(key, 0) + device.healthy
    devices = tuple(sorted((model, memory_bytes, count) for (model, memory_bytes), count in found.items()))
    return NodeKind(node.cpus, node.memory_bytes, devices)


def device_fits(device: Device, model: str | None, device_memory_bytes: int, *, exact: bool = False) -> bool:
    """Whether a device is healthy, large enough and of the model wanted ("h100" also matches "NVIDIA H100 80GB HBM3").

    With `exact`, the model must equal the fleet's own name.
    """
    return device.healthy and model_fits(device.model, device.memory_bytes, model, device_memory_bytes, exact=exact)


def model_fits(
    have: str, have_memory_bytes: int, model: str | None, device_memory_bytes: int, *, exact: bool = False
) -> bool:
    """The same for a model and a memory size."""
    if have_memory_bytes < _MEMORY_GRANTED * device_memory_bytes:
        return False
    if model is None or exact:
        return model in (None, have)
    words, wanted = _words(have), _words(model)
    return any(words[at : at + len(wanted)] == wanted for at in range(len(words) - len(wanted) + 1))


def _words(model: str) -> list[str]:
    return model.lower().replace("-", " ").replace("_", " ").split()

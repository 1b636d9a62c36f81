"""Records of hardware facts: accelerators, prices, machines, each with its source. The numbers are data (`phalanx.planner.facts`) or measured
(`phalanx calibrate`), never constants in this module.

Rates are per device and second, one direction for links; bytes are bytes, not bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class FactSource:
    """Source of a number: a page, paper or measurement, and its ISO date (year, month or day)."""

    source: str
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator model.

    Attributes:
        name: the name in the tables ("h100-sxm5-80gb").
        aliases: other names people and drivers use, lower case ("h100", "nvidia h100 80gb hbm3").
        memory_bytes: memory of the device; a program gets a little less, see the memory model.
        memory_bytes_per_s: bandwidth of the device memory.
        flops: dense peak of matrix products by precision ("bf16", "fp16", "fp8", "fp32").
        best_flops: best published measurement by precision; missing if none was published.
        link_bytes_per_s: to another device in the same link domain, one direction, all links together; 0 for PCIe only.
        link_domain: number of devices joined by such links; 1 for none.
        link_kind: "nvlink", "xgmi" or "pcie".
        pcie_bytes_per_s: to the host, one direction.
        watts: maximum power.
        virtual: no accelerator; a slot on a CPU.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops: Mapping[str, float]
    link_bytes_per_s: float
    link_domain: int
    pcie_bytes_per_s: float
    watts: float
    aliases: tuple[str, ...] = ()
    best_flops: Mapping[str, float] = field(default_factory=dict)
    link_kind: str = "nvlink"
    virtual: bool = False
    fact: FactSource = FactSource(source="", date="")


def rate_of(rates: Mapping[str, float], precision: str) -> float | None:
    """Return the rate for this precision, or where it is missing, that of bf16 for fp16 and the reverse: the same circuits compute both."""
    twin = {"fp16": "bf16", "bf16": "fp16"}.get(precision, precision)
    return rates.get(precision) or rates.get(twin) or None


def peak_of(gpu: Gpu, precision: str) -> float:
    """Return the dense peak of this precision, as `rate_of`.

    Raises:
        KeyError: the GPU does not have the precision.
    """
    peak = rate_of(gpu.flops, precision)
    if peak is None:
        raise KeyError(precision)
    return peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Price of one device and hour, in US dollars. A price has a date.

    Attributes:
        kind: "on-demand", "spot", "reserved", ...
        offer: the instance or rental ("AWS p5.48xlarge").
    """

    usd_per_gpu_hour: float
    kind: str
    offer: str
    region: str
    fact: FactSource


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRates:
    """Rates that `phalanx calibrate` measured on this fleet; None where it did not measure. Units as in the records above.

    Attributes:
        flops: best measured by precision.
        within_bytes_per_s: bus bandwidth of a large all-reduce over the devices of one node.
        between_bytes_per_s: the same between nodes, per device.
        all_to_all_within_bytes_per_s, all_to_all_between_bytes_per_s: sent per device.
        within_latency_s, between_latency_s: latency of one small collective step.
        storage_bytes_per_s: written by one node, durable.
        slowdown: measured over predicted step time, geometric mean of the short runs; 1 without runs.
    """

    at: str = ""
    flops: Mapping[str, float] = field(default_factory=dict)
    memory_bytes_per_s: float | None = None
    within_bytes_per_s: float | None = None
    between_bytes_per_s: float | None = None
    all_to_all_within_bytes_per_s: float | None = None
    all_to_all_between_bytes_per_s: float | None = None
    within_latency_s: float | None = None
    between_latency_s: float | None = None
    storage_bytes_per_s: float | None = None
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Equal nodes of one accelerator, with their network and storage.

    Attributes:
        nodes, gpus_per_node: nodes that the plan may use, and devices of each.
        network_bytes_per_s: per device, one direction, between nodes.
        network_kind: "infiniband", "roce", "efa", "tcp", "ethernet", "none".
        network_fact: source of the network figures.
        storage_bytes_per_s: written per node, durable.
        price: None if no dated price is known.
        host_bytes_per_s: bandwidth of the host's memory of a node, all sockets together.
        host_memory_bytes: memory of the host of a node; None if it is not known.
    """

    gpu: Gpu
    nodes: int
    gpus_per_node: int
    network_bytes_per_s: float
    network_kind: str = "infiniband"
    network_fact: FactSource = FactSource(source="", date="")
    storage_bytes_per_s: float = 2e9
    storage_fact: FactSource = FactSource(source="", date="")
    price: Price | None = None
    measured: MeasuredRates | None = None
    host_bytes_per_s: float = 307.2e9
    host_fact: FactSource = FactSource(source="", date="")
    host_memory_bytes: float | None = None
    host_memory_fact: FactSource = FactSource(source="", date="")

    @property
    def gpus(self) -> int:
        """Number of devices."""
        return self.nodes * self.gpus_per_node

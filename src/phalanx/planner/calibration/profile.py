"""The profile of a fleet: what a calibration measured per node, per pair of nodes, and in a few short trainings.

The rank program (`phalanx.torch.calibrate`) measures, `samples.build_profile` builds the profile, and the head stores it. `phalanx plan` and
the scheduler use it: `measured_rates` returns rates, `slow_parts` the parts to repair, `stale_reasons` the reasons to calibrate again.
This module reads no clock: `at_s` is the Unix time of the calibration.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from phalanx.core.errors import BadRequest
from phalanx.core.hints import Hint, HintCode
from phalanx.core.work.layouts.layout import Layout
from phalanx.planner.calibration.record_codec import decode_record, encode_record
from phalanx.planner.cost.machine import MeasuredRates
from phalanx.planner.cost.model_shape import ModelShape

T = TypeVar("T")

SLOW_SHARE: Final = 0.15
"""A part is slow if its rate is this share below the median of its peers, more than healthy devices of one kind differ.
Source: P. Sinha et al., "Not All GPUs Are Created Equal", 2022 (arXiv 2208.11035): equal GPUs of one cluster vary by 8 % on average,
bad ones take up to 1.5 times the median time."""
VALID_S: Final = 30 * 86400.0
"""A profile older than this is stale: a month brings driver, firmware and cable changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMeasurement:
    """The rates of one node: medians over its devices, measured on all at once; None where not measured.

    Attributes:
        gpu: model of its devices as reported by the node.
        worst_flops: rate of its slowest device, by precision: a gang waits for it.
        within_bytes_per_s: bus bandwidth of an all-reduce over its devices.
        link_bytes_per_s: to another node, one direction, one rank; median over its pairs.
    """

    node: str
    gpu: str
    devices: int
    virtual: bool = False
    at_s: float = 0.0
    flops: Mapping[str, float] = field(default_factory=dict)
    worst_flops: Mapping[str, float] = field(default_factory=dict)
    memory_bytes_per_s: float | None = None
    within_bytes_per_s: float | None = None
    within_latency_s: float | None = None
    all_to_all_within_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    storage_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMeasurement:
    """The rate of one direction between two nodes that sent both ways at once. `first` sorts before `second`."""

    first: str
    second: str
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InterNodeMeasurement:
    """The rates of collectives between nodes of one accelerator. Each group has one rank per node; all groups run at once.

    Rates are per device.
    """

    gpu: str
    nodes: int
    groups: int
    all_reduce_bytes_per_s: float
    latency_s: float
    all_to_all_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeasurement:
    """One short training: its configuration and the median time of its steps.

    Attributes:
        gpu: the accelerator; set by `samples.build_profile`, because the ranks do not know it.
        spread: (slowest - fastest) / median of the timed steps.
    """

    model: ModelShape
    layout: Layout
    seq: int
    step_s: float
    nodes: int
    gpus_per_node: int
    gpu: str = ""
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All measurements. `at` is the ISO date and time of `at_s`; `job` is the calibration job; `quick` means few sizes and repeats."""

    at: str
    at_s: float
    job: str = ""
    quick: bool = False
    nodes: tuple[NodeMeasurement, ...] = ()
    pairs: tuple[PairMeasurement, ...] = ()
    between: tuple[InterNodeMeasurement, ...] = ()
    runs: tuple[RunMeasurement, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowPart:
    """A node or a pair of nodes below the rate of its peers: `part` is "n3" or "n1 - n3", `what` the measured quantity."""

    part: str
    what: str
    value: float
    median: float

    @property
    def share(self) -> float:
        """How far the value is below the median: 0.2 for 20 %."""
        return 1.0 - self.value / self.median


def parse_profile(values: Any) -> Profile:
    """Build a profile from plain values, as returned by `record_codec.encode_record`.

    Raises:
        BadRequest: not a profile, a rate or time is not positive, a node is duplicated, or a pair has an unknown node.
    """
    profile = decode_record(Profile, values)
    names = [node.node for node in profile.nodes]
    if not names:
        raise BadRequest("the profile has no nodes", hint=Hint(HintCode.CALIBRATE))
    if len(set(names)) != len(names):
        raise BadRequest("the profile lists a node twice")
    for node in profile.nodes:
        rates = {name: value for name, value in encode_record(node).items() if name not in _NOT_RATES}
        _check_positive(f"node {node.node}", rates)
    for pair in profile.pairs:
        _check_positive(f"pair {pair.first} - {pair.second}", {"bytes_per_s": pair.bytes_per_s})
        if not {pair.first, pair.second} <= set(names):
            raise BadRequest(f"the profile has the pair {pair.first} - {pair.second}, but not both of its nodes")
    for one in profile.between:
        rates = {name: value for name, value in encode_record(one).items() if name not in _NOT_RATES}
        _check_positive(f"between {one.nodes} nodes", rates)
    for run in profile.runs:
        _check_positive(f"run {run.layout}", {"step_s": run.step_s})
    return profile


# A fitted latency may be 0.
_NOT_RATES: Final = frozenset({"node", "gpu", "virtual", "at_s", "within_latency_s", "latency_s"})


def _check_positive(where: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping):
            _check_positive(f"{where}, {name}", value)
        elif value is not None and not value > 0:
            raise BadRequest(f"{where}: {name} is {value}; it must be above 0")


def measured_rates(profile: Profile, *, gpu: str | None = None, slowdown: float = 1.0) -> MeasuredRates:
    """Return the rates of the fleet, or of its nodes with this accelerator: medians over nodes.

    Pass `gpu` for a fleet with several accelerators. `slowdown`: measured over predicted step time of `profile.runs`.
    """
    nodes = [node for node in profile.nodes if gpu is None or node.gpu == gpu]
    precisions = sorted({precision for node in nodes for precision in node.flops})
    between = inter_node_measurement(profile, gpu)
    return MeasuredRates(
        at=profile.at,
        flops={one: statistics.median(node.flops[one] for node in nodes if one in node.flops) for one in precisions},
        memory_bytes_per_s=_median(node.memory_bytes_per_s for node in nodes),
        within_bytes_per_s=_median(node.within_bytes_per_s for node in nodes),
        within_latency_s=_median(node.within_latency_s for node in nodes),
        all_to_all_within_bytes_per_s=_median(node.all_to_all_within_bytes_per_s for node in nodes),
        between_bytes_per_s=None if between is None else between.all_reduce_bytes_per_s,
        between_latency_s=None if between is None else between.latency_s,
        all_to_all_between_bytes_per_s=None if between is None else between.all_to_all_bytes_per_s,
        storage_bytes_per_s=_median(node.storage_bytes_per_s for node in nodes),
        slowdown=slowdown,
    )


def inter_node_measurement(profile: Profile, gpu: str | None = None) -> InterNodeMeasurement | None:
    """Return the collectives over the most nodes, with this accelerator or any; None if none were measured."""
    found = [one for one in profile.between if gpu in (None, one.gpu)]
    return max(found, key=lambda one: (one.nodes, one.gpu), default=None)


def slow_parts(profile: Profile) -> tuple[SlowPart, ...]:
    """Return nodes and pairs that are SLOW_SHARE below the median of their peers, worst first. Peers have the same accelerator.

    Pairs of a node with a slow link are left out. A part without peers is its own median, so it is never slow.
    """
    found: list[SlowPart] = []
    for gpu in sorted({node.gpu for node in profile.nodes}):
        peers = [node for node in profile.nodes if node.gpu == gpu]
        for what, rates in _rates(peers).items():
            found += _below(rates, what)
    links = {slow.part for slow in found if slow.what == "link"}
    pairs = {f"{pair.first} - {pair.second}": pair for pair in profile.pairs}
    for slow in _below({name: pair.bytes_per_s for name, pair in pairs.items()}, "link"):
        if not {pairs[slow.part].first, pairs[slow.part].second} & links:
            found.append(slow)
    return tuple(sorted(found, key=lambda slow: (-slow.share, slow.part, slow.what)))


def slow_nodes(profile: Profile) -> tuple[str, ...]:
    """Return the names of the slow nodes, sorted."""
    nodes = {node.node for node in profile.nodes}
    return tuple(sorted({slow.part for slow in slow_parts(profile)} & nodes))


def merge_profiles(old: Profile | None, new: Profile, fleet: Collection[str]) -> Profile:
    """Merge `old` into `new` for nodes that are still in the fleet, so that a calibration of a few nodes completes the profile.

    New measurements of the same shape (accelerator, nodes, layout) replace old ones.
    """
    if old is None:
        return new
    fresh = {node.node for node in new.nodes}
    kept = [node for node in old.nodes if node.node in fleet and node.node not in fresh]
    known = {(pair.first, pair.second) for pair in new.pairs}
    pairs = [
        pair
        for pair in old.pairs
        if (pair.first, pair.second) not in known and pair.first in fleet and pair.second in fleet
    ]
    return replace(
        new,
        nodes=tuple(sorted((*kept, *new.nodes), key=lambda node: node.node)),
        pairs=tuple(sorted((*pairs, *new.pairs), key=lambda pair: (pair.first, pair.second))),
        between=_updated(old.between, new.between, lambda one: (one.gpu, one.nodes, one.groups)),
        runs=_updated(old.runs, new.runs, lambda one: (one.gpu, one.nodes, one.gpus_per_node, str(one.layout))),
    )


def stale_reasons(profile: Profile, now_s: float, fleet: Mapping[str, tuple[str, int]]) -> tuple[str, ...]:
    """Return why the profile is stale; empty if it is valid. `fleet`: accelerator and number of devices by node."""
    reasons = []
    age_s = now_s - profile.at_s
    if age_s > VALID_S:
        reasons.append(f"it is {age_s / 86400:.0f} days old; a profile is valid for {VALID_S / 86400:.0f} days")
    known = {node.node: (node.gpu, node.devices) for node in profile.nodes}
    absent = [name for name in sorted(fleet) if name not in known]
    if absent:
        reasons.append(f"{_few(absent)} {'was' if len(absent) == 1 else 'were'} never measured")
    changed = [name for name in sorted(fleet) if name in known and known[name] != fleet[name]]
    if changed:
        reasons.append(f"the devices of {_few(changed)} have changed since")
    return tuple(reasons)


def _updated(old: Iterable[T], new: Iterable[T], key: Callable[[T], tuple[Any, ...]]) -> tuple[T, ...]:
    by_key = {key(one): one for one in (*old, *new)}
    return tuple(by_key[name] for name in sorted(by_key))


def rates_of_node(node: NodeMeasurement) -> dict[str, float]:
    """Return the measured rates of one node by name. For matrix products, the rate of the slowest device counts."""
    rates: dict[str, float | None] = {f"matmul {precision}": flops for precision, flops in node.worst_flops.items()}
    rates |= {
        "memory": node.memory_bytes_per_s,
        "all-reduce within": node.within_bytes_per_s,
        "link": node.link_bytes_per_s,
        "storage": node.storage_bytes_per_s,
    }
    return {what: rate for what, rate in rates.items() if rate is not None}


def _rates(nodes: Iterable[NodeMeasurement]) -> dict[str, dict[str, float]]:
    """Return rates by measured quantity and node."""
    rates: dict[str, dict[str, float]] = {}
    for node in nodes:
        for what, rate in rates_of_node(node).items():
            rates.setdefault(what, {})[node.node] = rate
    return rates


def _below(rates: Mapping[str, float], what: str) -> list[SlowPart]:
    if not rates:
        return []
    median = statistics.median(rates.values())
    return [
        SlowPart(part=part, what=what, value=rate, median=median)
        for part, rate in sorted(rates.items())
        if rate < (1.0 - SLOW_SHARE) * median
    ]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

"""What a calibration found of this fleet: node by node, pair by pair, and a few short trainings.

The rank program (`phalanx.torch.calibrate`) measures, `samples.profile_of` makes this of it, the head keeps it, `phalanx plan` and
placements ask it: `measured_of` what the machine gives, `slow_parts` whom to mend, `stale_because` whether to believe it still.
Nothing here knows a clock: `at_s` is Unix time as the calibration had it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from phalanx.core.errors import BadRequest
from phalanx.core.performance.machine import Measured
from phalanx.core.performance.model import Model
from phalanx.core.performance.plain import from_plain, to_plain
from phalanx.core.work.layout import Layout

T = TypeVar("T")

SLOW_SHARE: Final = 0.15
"""A part is slow when it gives this much less than the median of its peers: past what healthy devices of one kind differ by.
Source: P. Sinha et al., "Not All GPUs Are Created Equal", 2022 (arXiv 2208.11035): equal GPUs of one cluster vary by 8 % on average,
the bad ones take up to 1.5 times the median's time."""
KEEPS_S: Final = 30 * 86400.0
"""A profile older than this is doubted: a month of driver, firmware and cable changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFound:
    """One node. Rates are medians over its devices, which all worked at once; None where it was not measured.

    Attributes:
        gpu: model of its devices as the node reported it.
        worst_flops: of its slowest device, by precision: what a gang waits for.
        within_bytes_per_s: bus bandwidth of an all-reduce among its devices.
        link_bytes_per_s: to another node, one direction, one rank: median over the nodes it was paired with.
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
class PairFound:
    """Two nodes, first by name first, that exchanged messages both ways at once; one direction's rate."""

    first: str
    second: str
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenFound:
    """Collectives among nodes of one accelerator: one rank of each, as many such groups at once as a node has devices.

    Rates are per device.
    """

    gpu: str
    nodes: int
    groups: int
    all_reduce_bytes_per_s: float
    latency_s: float
    all_to_all_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFound:
    """A short training: what was run and the median time of its steps.

    Attributes:
        gpu: what it ran on; the ranks do not know it, `samples.profile_of` says it.
        spread: (slowest - fastest) / median of the steps that count; a noisy run says little.
    """

    model: Model
    layout: Layout
    seq: int
    step_s: float
    nodes: int
    gpus_per_node: int
    gpu: str = ""
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All of it. `at` is the ISO date and time of `at_s`; `job` is the job that measured; `quick` says with few sizes and repeats."""

    at: str
    at_s: float
    job: str = ""
    quick: bool = False
    nodes: tuple[NodeFound, ...] = ()
    pairs: tuple[PairFound, ...] = ()
    between: tuple[BetweenFound, ...] = ()
    runs: tuple[RunFound, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """A node or a pair of nodes that gives less than its peers: `part` is "n3" or "n1 - n3"; `share` is what is missing, 0.2 for 20 %."""

    part: str
    what: str
    value: float
    median: float

    @property
    def share(self) -> float:
        """What is missing of the median."""
        return 1.0 - self.value / self.median


def profile_from(values: Any) -> Profile:
    """The profile in plain values, as `plain.to_plain` writes them.

    Raises:
        BadRequest: it is none, a rate or time is not positive, a node comes twice, or a pair's node not at all.
    """
    profile = from_plain(Profile, values)
    names = [node.node for node in profile.nodes]
    if not names:
        raise BadRequest("the profile has no node", hint="phalanx calibrate makes one")
    if len(set(names)) != len(names):
        raise BadRequest("the profile has a node twice")
    for node in profile.nodes:
        rates = {name: value for name, value in to_plain(node).items() if name not in _NOT_RATES}
        _check_positive(f"node {node.node}", rates)
    for pair in profile.pairs:
        _check_positive(f"pair {pair.first} - {pair.second}", {"bytes_per_s": pair.bytes_per_s})
        if not {pair.first, pair.second} <= set(names):
            raise BadRequest(f"the profile has a pair {pair.first} - {pair.second}, and not both of its nodes")
    for one in profile.between:
        rates = {name: value for name, value in to_plain(one).items() if name not in _NOT_RATES}
        _check_positive(f"between {one.nodes} nodes", rates)
    for run in profile.runs:
        _check_positive(f"run {run.layout}", {"step_s": run.step_s})
    return profile


_NOT_RATES: Final = frozenset(
    {"node", "gpu", "virtual", "at_s", "within_latency_s", "latency_s"}
)  # a latency may come out as 0


def _check_positive(where: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping):
            _check_positive(f"{where}, {name}", value)
        elif value is not None and not value > 0:
            raise BadRequest(f"{where}: {name} is {value}; it must be above 0")


def measured_of(profile: Profile, *, gpu: str | None = None, slowdown: float = 1.0) -> Measured:
    """What the fleet, or its nodes with this accelerator, gives: medians over nodes. A fleet of two kinds is asked for one at a time.

    `slowdown` is the planner's: measured over predicted step time of `profile.runs`.
    """
    nodes = [node for node in profile.nodes if gpu is None or node.gpu == gpu]
    precisions = sorted({precision for node in nodes for precision in node.flops})
    between = between_of(profile, gpu)
    return Measured(
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


def between_of(profile: Profile, gpu: str | None = None) -> BetweenFound | None:
    """Collectives among the most nodes, of this accelerator or any; None where none were measured."""
    found = [one for one in profile.between if gpu in (None, one.gpu)]
    return max(found, key=lambda one: (one.nodes, one.gpu), default=None)


def slow_parts(profile: Profile) -> tuple[Slow, ...]:
    """Nodes and pairs that give SLOW_SHARE less than the median of their peers, worst first; peers are nodes with the same accelerator.

    A slow node's pairs are not named beside it: its link already is. A part alone of its kind is its own median, and never slow.
    """
    found: list[Slow] = []
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
    """Names of the slow nodes, sorted."""
    nodes = {node.node for node in profile.nodes}
    return tuple(sorted({slow.part for slow in slow_parts(profile)} & nodes))


def merged(old: Profile | None, new: Profile, fleet: Collection[str]) -> Profile:
    """`new` with what `old` knows beside it, of nodes that are still in the fleet: so that a calibration of a few nodes adds to the rest.

    What was measured again in the same shape (accelerator, nodes, layout) is replaced.
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
        between=_renewed(old.between, new.between, lambda one: (one.gpu, one.nodes, one.groups)),
        runs=_renewed(old.runs, new.runs, lambda one: (one.gpu, one.nodes, one.gpus_per_node, str(one.layout))),
    )


def stale_because(profile: Profile, now_s: float, fleet: Mapping[str, tuple[str, int]]) -> tuple[str, ...]:
    """Why the profile should be made again; empty if it holds. `fleet`: accelerator and number of devices by node."""
    reasons = []
    age_s = now_s - profile.at_s
    if age_s > KEEPS_S:
        reasons.append(f"it is {age_s / 86400:.0f} days old, and one is believed for {KEEPS_S / 86400:.0f}")
    known = {node.node: (node.gpu, node.devices) for node in profile.nodes}
    absent = [name for name in sorted(fleet) if name not in known]
    if absent:
        reasons.append(
            f"{_few(absent)} was never measured" if len(absent) == 1 else f"{_few(absent)} were never measured"
        )
    changed = [name for name in sorted(fleet) if name in known and known[name] != fleet[name]]
    if changed:
        reasons.append(
            f"{_few(changed)} has other devices since"
            if len(changed) == 1
            else f"{_few(changed)} have other devices since"
        )
    return tuple(reasons)


def _renewed(old: Iterable[T], new: Iterable[T], key: Callable[[T], tuple[Any, ...]]) -> tuple[T, ...]:
    by_key = {key(one): one for one in (*old, *new)}
    return tuple(by_key[name] for name in sorted(by_key))


def _rates(nodes: Iterable[NodeFound]) -> dict[str, dict[str, float]]:
    """Rates by what was measured and node; of the matrix products the slowest device's."""
    rates: dict[str, dict[str, float]] = {}
    for node in nodes:
        for precision, flops in node.worst_flops.items():
            rates.setdefault(f"matmul {precision}", {})[node.node] = flops
        for what, rate in (
            ("memory", node.memory_bytes_per_s),
            ("all-reduce within", node.within_bytes_per_s),
            ("link", node.link_bytes_per_s),
            ("storage", node.storage_bytes_per_s),
        ):
            if rate is not None:
                rates.setdefault(what, {})[node.node] = rate
    return rates


def _below(rates: Mapping[str, float], what: str) -> list[Slow]:
    if not rates:
        return []
    median = statistics.median(rates.values())
    return [
        Slow(part=part, what=what, value=rate, median=median)
        for part, rate in sorted(rates.items())
        if rate < (1.0 - SLOW_SHARE) * median
    ]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

"""The raw samples of a calibration, and the profile that they yield.

A rank reports the median of its repeats for each measurement. Times of collectives follow the alpha-beta model: a message
of m bytes takes alpha + beta m. With n ranks, a ring all-reduce makes 2 (n - 1) steps and sends 2 (n - 1) / n of its message per rank,
an all-to-all sends (n - 1) / n of its buffer.
Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, sections 3 and 4.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.core.errors import BadRequest
from phalanx.core.hints import Hint, HintCode
from phalanx.planner.calibration.profile import (
    InterNodeMeasurement,
    NodeMeasurement,
    PairMeasurement,
    Profile,
    RunMeasurement,
)


class Collective(enum.StrEnum):
    """The collective that was timed."""

    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"


class CollectiveScope(enum.StrEnum):
    """The ranks of a collective: the devices of one node, or one device of each node."""

    WITHIN = "within"
    BETWEEN = "between"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductSample:
    """Square matrix products of `size` on one device."""

    node_rank: int
    rank: int
    precision: str
    size: int
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySample:
    """A copy within the memory of one device; the rate counts read and written bytes."""

    node_rank: int
    rank: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSample:
    """A collective of `bytes` per rank. `node_rank` is 0 for the scope `between`."""

    collective: Collective
    scope: CollectiveScope
    node_rank: int
    ranks: int
    groups: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSample:
    """Two nodes, `first < second`, each of which sent `bytes` to the other."""

    first: int
    second: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSample:
    """A file written and fsynced by one node, while all nodes write."""

    node_rank: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """All samples of one calibration. `devices`: number of ranks of each node, by node rank."""

    at: str
    at_s: float
    quick: bool
    devices: tuple[int, ...]
    products: tuple[ProductSample, ...] = ()
    copies: tuple[CopySample, ...] = ()
    collectives: tuple[CollectiveSample, ...] = ()
    pairs: tuple[PairSample, ...] = ()
    writes: tuple[WriteSample, ...] = ()
    runs: tuple[RunMeasurement, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedNode:
    """A node of the calibration job, known to the head. Samples have node ranks, which are valid in one job only."""

    node: str
    gpu: str
    virtual: bool


def build_profile(samples: Samples, members: Sequence[CalibratedNode], *, job: str = "") -> Profile:
    """Build the profile from the samples. `members` are the nodes by node rank, with equal accelerators.

    The best of several passes counts: noise only slows a part down, and a slow part is slow in every pass.

    Raises:
        BadRequest: the numbers of nodes differ, or the members have several accelerators.
    """
    if len({member.gpu for member in members}) > 1:
        raise BadRequest(
            "one calibration measures nodes of one accelerator model",
            hint=Hint(HintCode.CALIBRATE_EACH),
        )
    if len(members) != len(samples.devices):
        raise BadRequest(
            f"the calibration measured {len(samples.devices)} nodes, but the job had {len(members)}",
            hint="calibrate again",
        )
    names = [member.node for member in members]
    pairs = _pairs(samples.pairs, names)
    nodes = [_node(samples, rank, member, pairs) for rank, member in enumerate(members)]
    return Profile(
        at=samples.at,
        at_s=samples.at_s,
        job=job,
        quick=samples.quick,
        nodes=tuple(sorted(nodes, key=lambda node: node.node)),
        pairs=pairs,
        between=_between(samples, members),
        runs=tuple(replace(run, gpu=members[0].gpu) for run in samples.runs),
    )


def fit_alpha_beta(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fit alpha (seconds) and beta (seconds per byte) of t = alpha + beta m by least squares of the relative errors; both >= 0.

    With absolute errors, the largest message would determine both. A single size is attributed to beta.
    """
    weights = [(m / t, 1.0 / t) for m, t in points]  # minimise sum of (alpha / t + beta m / t - 1) squared
    smm = sum(m * m for m, _ in weights)
    sm1 = sum(m * one for m, one in weights)
    s11 = sum(one * one for _, one in weights)
    sm, s1 = sum(m for m, _ in weights), sum(one for _, one in weights)
    determinant = smm * s11 - sm1 * sm1
    if determinant > 1e-9 * smm * s11:  # sizes differ
        alpha = (smm * s1 - sm1 * sm) / determinant
        beta = (s11 * sm - sm1 * s1) / determinant
        if alpha >= 0.0 and beta > 0.0:
            return alpha, beta
        if beta <= 0.0:  # noise: larger messages took no longer; the largest one bounds beta
            m, t = max(points)
            return min(t for _, t in points), t / m
    return 0.0, sm / smm


def _node(samples: Samples, rank: int, member: CalibratedNode, pairs: Sequence[PairMeasurement]) -> NodeMeasurement:
    best = _best_products(samples, rank)
    copies = _best_copies(samples, rank)
    reduce = _fitted(samples, Collective.ALL_REDUCE, CollectiveScope.WITHIN, rank)
    exchange = _fitted(samples, Collective.ALL_TO_ALL, CollectiveScope.WITHIN, rank)
    links = [pair.bytes_per_s for pair in pairs if member.node in (pair.first, pair.second)]
    writes = [write.bytes / write.seconds for write in samples.writes if write.node_rank == rank]
    return NodeMeasurement(
        node=member.node,
        gpu=member.gpu,
        virtual=member.virtual,
        devices=samples.devices[rank],
        at_s=samples.at_s,
        flops={precision: statistics.median(devices) for precision, devices in best.items()},
        worst_flops={precision: min(devices) for precision, devices in best.items()},
        memory_bytes_per_s=statistics.median(copies) if copies else None,
        within_bytes_per_s=None if reduce is None else reduce.bytes_per_s,
        within_latency_s=None if reduce is None else reduce.latency_s,
        all_to_all_within_bytes_per_s=None if exchange is None else exchange.bytes_per_s,
        link_bytes_per_s=statistics.median(links) if links else None,
        storage_bytes_per_s=max(writes) if writes else None,
    )


def _best_products(samples: Samples, node_rank: int) -> dict[str, list[float]]:
    """Return the best rate of each device of the node over all sizes, by precision."""
    best: dict[tuple[str, int], float] = {}
    for product in samples.products:
        if product.node_rank == node_rank:
            key = (product.precision, product.rank)
            best[key] = max(best.get(key, 0.0), product.flops_per_s)
    by_precision: dict[str, list[float]] = {}
    for (precision, _), flops in sorted(best.items()):
        by_precision.setdefault(precision, []).append(flops)
    return by_precision


def _best_copies(samples: Samples, node_rank: int) -> list[float]:
    """Return the best rate of each device of the node."""
    best: dict[int, float] = {}
    for copy in samples.copies:
        if copy.node_rank == node_rank:
            best[copy.rank] = max(best.get(copy.rank, 0.0), copy.bytes_per_s)
    return [rate for _, rate in sorted(best.items())]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitted:
    latency_s: float
    bytes_per_s: float
    ranks: int
    groups: int


def _fitted(samples: Samples, collective: Collective, scope: CollectiveScope, node_rank: int) -> _Fitted | None:
    """Fit the latency of one step and the bytes that one rank sends per second; None without samples."""
    mine = [
        one
        for one in samples.collectives
        if one.collective is collective and one.scope is scope and one.node_rank == node_rank and one.ranks > 1
    ]
    if not mine:
        return None
    best: dict[int, float] = {}
    for one in mine:
        best[one.bytes] = min(best.get(one.bytes, one.seconds), one.seconds)
    alpha, beta = fit_alpha_beta(sorted(best.items()))
    ranks = mine[0].ranks
    rounds_of_ring = 2 if collective is Collective.ALL_REDUCE else 1
    steps, sent = rounds_of_ring * (ranks - 1), rounds_of_ring * (ranks - 1) / ranks
    return _Fitted(latency_s=alpha / steps, bytes_per_s=sent / beta, ranks=ranks, groups=mine[0].groups)


def _between(samples: Samples, members: Sequence[CalibratedNode]) -> tuple[InterNodeMeasurement, ...]:
    reduce = _fitted(samples, Collective.ALL_REDUCE, CollectiveScope.BETWEEN, 0)
    exchange = _fitted(samples, Collective.ALL_TO_ALL, CollectiveScope.BETWEEN, 0)
    if reduce is None:
        return ()
    found = InterNodeMeasurement(
        gpu=members[0].gpu,
        nodes=reduce.ranks,
        groups=reduce.groups,
        all_reduce_bytes_per_s=reduce.bytes_per_s,
        latency_s=reduce.latency_s,
        all_to_all_bytes_per_s=None if exchange is None else exchange.bytes_per_s,
    )
    return (found,)


def _pairs(samples: Sequence[PairSample], names: Sequence[str]) -> tuple[PairMeasurement, ...]:
    """Return the best rate of each measured pair, sorted by node names."""
    best: dict[tuple[str, str], float] = {}
    for pair in samples:
        first, second = sorted((names[pair.first], names[pair.second]))
        best[first, second] = max(best.get((first, second), 0.0), pair.bytes / pair.seconds)
    return tuple(
        PairMeasurement(first=first, second=second, bytes_per_s=rate) for (first, second), rate in sorted(best.items())
    )


def tournament_rounds(nodes: int, most: int) -> list[list[tuple[int, int]]]:
    """Return the rounds of a round-robin tournament: in each round every node has one partner, and no pair occurs twice.

    All pairs need nodes - 1 rounds (nodes if odd). If that exceeds `most`, return `most` of them at even distances. Circle method: node 0
    stays, the others rotate by one.
    """
    if nodes < 2:
        return []
    order = list(range(nodes)) + ([-1] if nodes % 2 else [])  # the partner of -1 pauses
    count = len(order)
    found = []
    for _ in range(count - 1):
        pairs = [(order[place], order[count - 1 - place]) for place in range(count // 2)]
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        order[1:] = [order[-1], *order[1:-1]]
    if len(found) <= most:
        return found
    return [found[index * len(found) // most] for index in range(most)]

"""Derive the tree of network levels from measured rates between pairs of nodes, and find slow links and slow nodes.

Rates fall from level to level by a factor, while noise and wear change them by some per cent. A gap in the sorted rates is therefore the
border of a level. At each gap, nodes that are joined by rates above it form domains. If that separates only a minority from a domain, those
nodes are slow, not far. One slow link within a domain does not split it, because its ends are joined through other nodes.
Pure functions of `profile.PairMeasurement`; called by `phalanx topology --measure`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from phalanx.planner.calibration.profile import PairMeasurement

LEVEL_GAP: Final = 1.5
"""Rates that differ by more than this factor belong to two levels: one link varies by some 20 %, and the oversubscription of a level is
rarely under 2 to 1. A link this factor below its level is slow."""
DENSE_SHARE: Final = 2 / 3
"""Share of the measured pairs within a domain that must be above the gap: a chain of fast links is not a domain."""
LEVEL_NAMES: Final = (("leaf",), ("leaf", "rack"), ("spine", "leaf", "rack"))
"""Level names by the number of levels, outermost first, from `core.fleet.topology.LEVELS`."""
_DIGITS: Final = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLevel:
    """One level of the tree.

    Attributes:
        domains: sorted groups of two nodes or more, ordered by first node. A node in no group has no neighbour at this level.
        bytes_per_s: rate of a healthy link inside a domain but not inside a domain of a deeper level; None if there is no such link.
    """

    name: str
    domains: tuple[tuple[str, ...], ...]
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """A link far below the rate of its level. An empty `second` means all links of node `first` at that level."""

    first: str
    second: str
    bytes_per_s: float
    level_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTopology:
    """The derived topology. `levels`: outermost first, empty for a flat fleet; `bytes_per_s`: rate of healthy links outside all domains."""

    nodes: tuple[str, ...]
    levels: tuple[NetworkLevel, ...]
    bytes_per_s: float | None
    slow: tuple[SlowLink, ...]

    def labels(self) -> dict[str, dict[str, str]]:
        """Return the domain name of each node at each level, "" where it has none. Domains of a level are named m0, m1, ..."""
        return {
            node: {
                level.name: next((f"m{number}" for number, domain in enumerate(level.domains) if node in domain), "")
                for level in self.levels
            }
            for node in self.nodes
        }


def infer_topology(pairs: Sequence[PairMeasurement]) -> MeasuredTopology:
    """Return the levels and the slow links. Deterministic; pairs that were not measured are ignored. Cost: gaps x pairs."""
    rates = {(pair.first, pair.second): pair.bytes_per_s for pair in pairs}
    nodes = tuple(sorted({node for pair in rates for node in pair}, key=natural_sort_key))
    partitions = _partitions(nodes, rates)
    depths = {pair: _depth(pair, partitions) for pair in rates}
    sound = [_healthy_rate(depth, rates, depths) for depth in range(len(partitions) + 1)]
    names = LEVEL_NAMES[len(partitions) - 1] if partitions else ()
    levels = tuple(
        NetworkLevel(name=name, domains=domains, bytes_per_s=sound[depth])
        for depth, (name, domains) in enumerate(zip(names, partitions, strict=True), start=1)
    )
    return MeasuredTopology(
        nodes=nodes, levels=levels, bytes_per_s=sound[0], slow=_slow(nodes, rates, depths, sound, partitions)
    )


def natural_sort_key(name: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key that puts n2 before n10."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(name))


_Domains = tuple[tuple[str, ...], ...]
_Pair = tuple[str, str]


def _partitions(nodes: Sequence[str], rates: Mapping[_Pair, float]) -> list[_Domains]:
    """Return the domains of each level, outermost first. If there are more levels than names, the widest gaps count."""
    ordered = sorted(rates.values())
    gaps = [(high / low, math.sqrt(low * high)) for low, high in pairwise(ordered) if high > LEVEL_GAP * low]
    while True:
        levels: list[tuple[_Domains, tuple[float, float]]] = []
        for gap in gaps:
            outer = levels[-1][0] if levels else (tuple(nodes),)
            domains = _within(outer, rates, gap[1])
            if domains not in ((), outer):
                levels.append((domains, gap))
        if len(levels) <= len(LEVEL_NAMES):
            return [domains for domains, _ in levels]
        gaps.remove(min(gap for _, gap in levels))


def _within(outer: _Domains, rates: Mapping[_Pair, float], threshold: float) -> _Domains:
    """Split the domains for the next level. A domain whose majority stays together is not split: the other nodes are slow.

    Exception: if the other nodes are as far away as the parts of split domains are from each other, they form their own location.
    """
    inner = {domain: _domains(domain, rates, threshold) for domain in outer}
    whole = {domain for domain in outer if len(inner[domain]) == 1 and 2 * len(inner[domain][0]) > len(domain)}
    far = [
        rate
        for domain in outer
        if inner[domain] and domain not in whole
        for rate in _rates_inside(domain, rates).values()
        if rate < threshold
    ]
    found: list[tuple[str, ...]] = []
    for domain in outer:
        stays = domain in whole and not (far and _is_remote(domain, inner[domain][0], rates, statistics.median(far)))
        found += [domain] if stays else inner[domain]
    return tuple(found)


def _is_remote(domain: Sequence[str], group: Sequence[str], rates: Mapping[_Pair, float], far: float) -> bool:
    """Return whether every node outside the group has links to it that are about as fast as links between parts."""
    links = [
        _upper_quartile(own)
        for node in domain
        if node not in group
        and (own := [rate for pair, rate in rates.items() if node in pair and set(pair) & set(group)])
    ]
    return bool(links) and all(far / LEVEL_GAP < rate < far * LEVEL_GAP for rate in links)


def _rates_inside(nodes: Sequence[str], rates: Mapping[_Pair, float]) -> dict[_Pair, float]:
    own = set(nodes)
    return {pair: rate for pair, rate in rates.items() if pair[0] in own and pair[1] in own}


def _domains(nodes: Sequence[str], rates: Mapping[_Pair, float], threshold: float) -> _Domains:
    """Return dense groups of two nodes or more that are joined by rates above the threshold."""
    root = {node: node for node in nodes}

    def find(node: str) -> str:
        while root[node] != node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    mine = _rates_inside(nodes, rates)
    for (first, second), rate in mine.items():
        if rate > threshold:
            root[find(second)] = find(first)
    groups: dict[str, list[str]] = {}
    for node in nodes:
        groups.setdefault(find(node), []).append(node)
    inside: dict[str, list[bool]] = {}
    for (first, second), rate in mine.items():
        if find(first) == find(second):
            inside.setdefault(find(first), []).append(rate > threshold)
    dense = (
        group for key, group in groups.items() if len(group) > 1 and sum(inside[key]) >= DENSE_SHARE * len(inside[key])
    )
    return tuple(sorted((tuple(group) for group in dense), key=lambda group: natural_sort_key(group[0])))


def _depth(pair: _Pair, partitions: Sequence[_Domains]) -> int:
    """Return the number of levels at which both nodes are in the same domain."""
    return sum(any(pair[0] in domain and pair[1] in domain for domain in domains) for domains in partitions)


def _healthy_rate(depth: int, rates: Mapping[_Pair, float], depths: Mapping[_Pair, int]) -> float | None:
    """Return the rate of a healthy link of this depth: the median over nodes of the upper quartile of their links."""
    links: dict[str, list[float]] = {}
    for pair, rate in rates.items():
        if depths[pair] == depth:
            for node in pair:
                links.setdefault(node, []).append(rate)
    return statistics.median(_upper_quartile(own) for own in links.values()) if links else None


def _upper_quartile(values: Iterable[float]) -> float:
    """Return the upper quartile. With one slow node of three, two of three links are slow, so the median would be a slow link."""
    ordered = sorted(values)
    return ordered[(3 * (len(ordered) - 1) + 3) // 4]


def _sharers(pair: _Pair, depth: int, partitions: Sequence[_Domains]) -> int:
    """Return how many pairs may have shared the links between the domains of the two nodes: the node count of the smaller domain.

    All pairs of a round are measured at once, and a trunk between switches seldom carries the rate of all ports of one switch.
    """
    if depth == len(partitions):
        return 1
    sizes = [len(next((domain for domain in partitions[depth] if node in domain), (node,))) for node in pair]
    return min(sizes)


def _slow(
    nodes: Iterable[str],
    rates: Mapping[_Pair, float],
    depths: Mapping[_Pair, int],
    sound: Sequence[float | None],
    partitions: Sequence[_Domains],
) -> tuple[SlowLink, ...]:
    """Return slow nodes, then slow links, slowest first. A node is slow if its upper quartile is; its links are then left out."""
    share = {
        pair: rate * _sharers(pair, depths[pair], partitions) / (sound[depths[pair]] or rate)
        for pair, rate in rates.items()
    }
    slow: dict[tuple[str, int], SlowLink] = {}
    for node in nodes:
        for depth, usual in enumerate(sound):
            own = [pair for pair in rates if node in pair and depths[pair] == depth]
            if usual is not None and len(own) > 1 and LEVEL_GAP * _upper_quartile(share[pair] for pair in own) < 1.0:
                rate = statistics.median(rates[pair] for pair in own)
                slow[node, depth] = SlowLink(first=node, second="", bytes_per_s=rate, level_bytes_per_s=usual)
    links = [
        SlowLink(first=first, second=second, bytes_per_s=rate, level_bytes_per_s=sound[depths[first, second]] or rate)
        for (first, second), rate in rates.items()
        if LEVEL_GAP * share[first, second] < 1.0
        and not {(first, depths[first, second]), (second, depths[first, second])} & set(slow)
    ]
    found = [*slow.values(), *links]
    found.sort(key=lambda one: (bool(one.second), one.bytes_per_s / one.level_bytes_per_s, one.first, one.second))
    return tuple(found)

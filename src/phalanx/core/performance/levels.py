"""The tree of levels that measured rates between pairs of nodes tell of, and the links and nodes that fall short of theirs.

Rates fall from level to level by a factor, while noise and wear change them by some per cent: a level is where sorted rates have a gap.
At each gap, nodes that are joined by rates above it form domains, unless that only cuts off a few from most: those are slow and not far;
what no more than half have is a place. One slow link within a domain does not split it: its ends meet through the others.
Pure, from `profile.PairFound`; `phalanx topology --measure` asks.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from phalanx.core.performance.profile import PairFound

GAP: Final = 1.5
"""Rates further apart than this factor are of two levels: a link's own ups and downs are within some 20 %, and a level's oversubscription is
rarely under 2 to 1. A link this factor below its level is slow."""
DENSE: Final = 2 / 3
"""Of the pairs within a domain that were measured, so many must be above the gap: a mere chain of fast links is no domain."""
NAMES: Final = (("leaf",), ("leaf", "rack"), ("spine", "leaf", "rack"))
"""What levels are called by how many there are, outermost first: words of `core.fleet.topology.LEVELS`."""
_DIGITS: Final = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A rung of the tree.

    Attributes:
        domains: groups of two nodes and more, each sorted, by their first node; a node in none is near to nobody here.
        bytes_per_s: what a sound link within one of them gives that is not within a domain further in; None where there is none.
    """

    name: str
    domains: tuple[tuple[str, ...], ...]
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """A link that gives much less than its level does; with an empty `second` all that a node has of that level."""

    first: str
    second: str
    bytes_per_s: float
    level_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """What the rates tell. `levels`: outermost first, empty for a flat fleet; `bytes_per_s`: of sound links that are within no domain."""

    nodes: tuple[str, ...]
    levels: tuple[Level, ...]
    bytes_per_s: float | None
    slow: tuple[SlowLink, ...]

    def labels(self) -> dict[str, dict[str, str]]:
        """By node the name of its domain at each level; "" at a level where it is in none. Domains are m0, m1, ... over the fleet."""
        return {
            node: {
                level.name: next((f"m{number}" for number, domain in enumerate(level.domains) if node in domain), "")
                for level in self.levels
            }
            for node in self.nodes
        }


def levels_of(pairs: Sequence[PairFound]) -> Measure:
    """The levels, and what is slow. Equal rates give equal trees; pairs that were not measured say nothing. Cost: gaps x pairs."""
    rates = {(pair.first, pair.second): pair.bytes_per_s for pair in pairs}
    nodes = tuple(sorted({node for pair in rates for node in pair}, key=natural))
    partitions = _partitions(nodes, rates)
    depths = {pair: _depth(pair, partitions) for pair in rates}
    sound = [_sound(depth, rates, depths) for depth in range(len(partitions) + 1)]
    names = NAMES[len(partitions) - 1] if partitions else ()
    levels = tuple(
        Level(name=name, domains=domains, bytes_per_s=sound[depth])
        for depth, (name, domains) in enumerate(zip(names, partitions, strict=True), start=1)
    )
    return Measure(
        nodes=nodes, levels=levels, bytes_per_s=sound[0], slow=_slow(nodes, rates, depths, sound, partitions)
    )


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """A key by which n2 comes before n10."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(name))


_Domains = tuple[tuple[str, ...], ...]
_Pair = tuple[str, str]


def _partitions(nodes: Sequence[str], rates: Mapping[_Pair, float]) -> list[_Domains]:
    """The domains of each level, outermost first; of more than there are names for, those with the widest gaps."""
    gaps = [
        (high / low, math.sqrt(low * high)) for low, high in pairwise(sorted(rates.values())) if high > GAP * low
    ]  # fmt: skip
    while True:
        levels: list[tuple[_Domains, tuple[float, float]]] = []
        for gap in gaps:
            outer = levels[-1][0] if levels else (tuple(nodes),)
            domains = _within(outer, rates, gap[1])
            if domains not in ((), outer):
                levels.append((domains, gap))
        if len(levels) <= len(NAMES):
            return [domains for domains, _ in levels]
        gaps.remove(min(gap for _, gap in levels))


def _within(outer: _Domains, rates: Mapping[_Pair, float], threshold: float) -> _Domains:
    """What the domains become at the next level. One in which most stay together stays whole, unless those left over are as far from it as
    the parts of others are from each other: then they are a place of their own, and else slow.
    """
    inner = {domain: _domains(domain, rates, threshold) for domain in outer}
    whole = {domain for domain in outer if len(inner[domain]) == 1 and 2 * len(inner[domain][0]) > len(domain)}
    far = [
        rate
        for domain in outer
        if inner[domain] and domain not in whole
        for rate in _among(domain, rates).values()
        if rate < threshold
    ]
    found: list[tuple[str, ...]] = []
    for domain in outer:
        stays = domain in whole and not (far and _far(domain, inner[domain][0], rates, statistics.median(far)))
        found += [domain] if stays else inner[domain]
    return tuple(found)


def _far(domain: Sequence[str], group: Sequence[str], rates: Mapping[_Pair, float], far: float) -> bool:
    """Whether the links of all that are left over to the group are about as fast as links between parts."""
    links = [
        _better(own)
        for node in domain
        if node not in group
        and (own := [rate for pair, rate in rates.items() if node in pair and set(pair) & set(group)])
    ]
    return bool(links) and all(far / GAP < rate < far * GAP for rate in links)


def _among(nodes: Sequence[str], rates: Mapping[_Pair, float]) -> dict[_Pair, float]:
    own = set(nodes)
    return {pair: rate for pair, rate in rates.items() if pair[0] in own and pair[1] in own}


def _domains(nodes: Sequence[str], rates: Mapping[_Pair, float], threshold: float) -> _Domains:
    """Dense groups of two nodes and more that rates above the threshold join."""
    root = {node: node for node in nodes}

    def find(node: str) -> str:
        while root[node] != node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    mine = _among(nodes, rates)
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
    dense = (group for key, group in groups.items() if len(group) > 1 and sum(inside[key]) >= DENSE * len(inside[key]))
    return tuple(sorted((tuple(group) for group in dense), key=lambda group: natural(group[0])))


def _depth(pair: _Pair, partitions: Sequence[_Domains]) -> int:
    """How many levels the two nodes have a domain in common at."""
    return sum(any(pair[0] in domain and pair[1] in domain for domain in domains) for domains in partitions)


def _sound(depth: int, rates: Mapping[_Pair, float], depths: Mapping[_Pair, int]) -> float | None:
    """What a sound link of this depth gives: the median over nodes of what each one's better links give."""
    links: dict[str, list[float]] = {}
    for pair, rate in rates.items():
        if depths[pair] == depth:
            for node in pair:
                links.setdefault(node, []).append(rate)
    return statistics.median(_better(own) for own in links.values()) if links else None


def _better(values: Iterable[float]) -> float:
    """The upper quartile: where one node of three is bad, two of the three links are, and the median would take that for the rule."""
    ordered = sorted(values)
    return ordered[(3 * (len(ordered) - 1) + 3) // 4]


def _sharers(pair: _Pair, depth: int, partitions: Sequence[_Domains]) -> int:
    """How many pairs may have shared the links between the two nodes' domains while these two were measured: as many as the smaller has nodes.

    All pairs of a round are measured at once, and a trunk between switches seldom carries what all ports of one do.
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
    """Nodes first, most missing first. A node is slow at a depth where its better links are; those links are not named beside it."""
    share = {
        pair: rate * _sharers(pair, depths[pair], partitions) / (sound[depths[pair]] or rate)
        for pair, rate in rates.items()
    }
    slow: dict[tuple[str, int], SlowLink] = {}
    for node in nodes:
        for depth, usual in enumerate(sound):
            own = [pair for pair in rates if node in pair and depths[pair] == depth]
            if usual is not None and len(own) > 1 and GAP * _better(share[pair] for pair in own) < 1.0:
                rate = statistics.median(rates[pair] for pair in own)
                slow[node, depth] = SlowLink(first=node, second="", bytes_per_s=rate, level_bytes_per_s=usual)
    links = [
        SlowLink(first=first, second=second, bytes_per_s=rate, level_bytes_per_s=sound[depths[first, second]] or rate)
        for (first, second), rate in rates.items()
        if GAP * share[first, second] < 1.0
        and not {(first, depths[first, second]), (second, depths[first, second])} & set(slow)
    ]
    found = [*slow.values(), *links]
    found.sort(key=lambda one: (bool(one.second), one.bytes_per_s / one.level_bytes_per_s, one.first, one.second))
    return tuple(found)

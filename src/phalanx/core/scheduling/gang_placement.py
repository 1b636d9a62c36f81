"""Places a gang on the nodes that could each hold a part of it: in the smallest domain, the fullest of its level, all or nothing.

Called by the pool with the candidates; reads the topology and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.core.scheduling.needs import Need
from phalanx.core.scheduling.node_bitsets import bitset_of, lowest_member, lowest_members
from phalanx.core.scheduling.topology_domains import Counts, DomainIndex


@dataclass(slots=True)
class GangCandidates:
    """Nodes that could hold a part of a need.

    Attributes:
        candidate_nodes: those nodes in sets, best fit first.
        bits: all of them.
        spare: sets of further nodes that could hold the tail only, best fit first.
        domains: None without a topology.
        whole: they are exactly the pool's whole free nodes, whose counts the domains maintain.
        cpus: free CPUs by node number, if the fewest free CPUs are the best fit; else None.
    """

    candidate_nodes: Sequence[int]
    bits: int
    spare: Sequence[int]
    domains: DomainIndex | None = None
    whole: bool = False
    cpus: Sequence[int] | None = None
    _counts: Counts | None = None

    @property
    def depths(self) -> int:
        """Number of topology levels; 0 without a topology."""
        return 0 if self.domains is None else len(self.domains.levels)

    def counts(self) -> Counts:
        """Candidates in each domain, by level. Requires a topology."""
        if self._counts is None:
            assert self.domains is not None
            self._counts = self.domains.whole_free_counts() if self.whole else self.domains.count(self.bits)
        return self._counts

    def find_domain(self, depth: int, nodes: int, one_more: int | None = None) -> int:
        """The fullest domain of the level that has `nodes` candidates; -1 for none. `one_more` as in `DomainIndex.find_for_gang`."""
        assert self.domains is not None
        return self.domains.find_for_gang(depth, nodes, counts=None if self.whole else self.counts(), one_more=one_more)

    def nodes_in(self, bits: int, scope: DomainScope) -> tuple[int, int]:
        """The scope's part of a set of nodes, and the node number of its lowest bit."""
        if self.domains is None or scope.depth < 0:
            return bits, 0
        level = self.domains.levels[scope.depth]
        return level.nodes_in(bits, scope.domain), level.first[scope.domain]

    def inner_domains(self, scope: DomainScope, depth: int) -> list[int]:
        """The domains of an inner level that lie in the scope, ascending."""
        assert self.domains is not None
        if scope.depth < 0:
            return list(range(len(self.domains.levels[depth].first)))
        under = self.domains.levels[scope.depth].under[depth - scope.depth][scope.domain]
        return lowest_members(under, under.bit_count())


class DomainScope(NamedTuple):
    """One domain of one level; depth -1 is the whole pool."""

    depth: int
    domain: int


WHOLE_POOL = DomainScope(-1, 0)


def place_gang(need: Need, candidates: GangCandidates) -> tuple[tuple[int, int], ...] | None:
    """The gang's places, node numbers ascending; None if it does not fit.

    Chooses the innermost level with a domain that can hold the gang, tail included, and of its domains the fullest (fewest candidates). Without
    such a domain, and unless one is required, it uses the whole pool. Inside, it crosses as few domains as is cheap to compute: those with the
    most candidates are used up first, the rest goes into the smallest domain that can hold it. Inside an innermost domain: best fit, then the
    lowest. Slices are indivisible in all this, down to their level. The tail goes on a node that cannot hold a full part, best fit, else on a
    candidate.

    If `nodes` is not a multiple of `slice_nodes`, the short last slice has the highest node numbers. Slices and a tail exclude each other.
    """
    if candidates.bits.bit_count() < need.nodes:
        return None
    if need.slice_nodes > 1 and need.slice_within >= 0:
        nodes = _sliced(need, candidates)
        return None if nodes is None else tuple([(node, need.devices) for node in sorted(nodes)])
    scope = WHOLE_POOL if need.nodes == 1 and not need.last_node_devices else _scope(need, candidates)
    if scope is None:
        return None
    if need.nodes == 1 and not need.last_node_devices:
        nodes = _best_fits(1, candidates, WHOLE_POOL)
    else:
        nodes = _spread(need.nodes, candidates, scope)
    places = [(node, need.devices) for node in nodes]
    if need.last_node_devices:
        places.append((_tail_node(nodes, candidates, scope), need.last_node_devices))
    places.sort()
    return tuple(places)


def _scope(need: Need, candidates: GangCandidates) -> DomainScope | None:
    """The smallest domain that can hold the gang and its tail."""
    required = need.required and need.within >= 0
    one_more: int | None = None
    if need.last_node_devices:
        one_more = 0
        for bits in candidates.spare:
            one_more |= bits
    for depth in range(candidates.depths - 1, (need.within if required else 0) - 1, -1):
        domain = candidates.find_domain(depth, need.nodes, one_more)
        if domain >= 0:
            return DomainScope(depth, domain)
    if required or (one_more == 0 and candidates.bits.bit_count() == need.nodes):
        return None
    return WHOLE_POOL


def _spread(count: int, candidates: GangCandidates, scope: DomainScope) -> list[int]:
    """This many nodes of a scope that has enough, crossing few domains."""
    depth = scope.depth + 1
    if depth >= candidates.depths:
        return _best_fits(count, candidates, scope)
    counts = candidates.counts()
    rest = sorted(candidates.inner_domains(scope, depth), key=lambda domain: (-counts[depth][domain], domain))
    nodes: list[int] = []
    used = 0
    while counts[depth][rest[used]] < count:
        have = counts[depth][rest[used]]
        nodes += lowest_members(*_candidates_in(candidates, DomainScope(depth, rest[used]), have))
        count -= have
        used += 1
    return nodes + _spread(count, candidates, _narrowest(count, candidates, depth, rest[used:]))


def _candidates_in(candidates: GangCandidates, scope: DomainScope, count: int) -> tuple[int, int, int]:
    bits, base = candidates.nodes_in(candidates.bits, scope)
    return bits, count, base


def _narrowest(count: int, candidates: GangCandidates, depth: int, domains: Sequence[int]) -> DomainScope:
    """The innermost, then fullest domain inside these of level `depth` that has enough candidates; one of them has."""
    counts = candidates.counts()
    for inner in range(candidates.depths - 1, depth, -1):
        further = (one for domain in domains for one in candidates.inner_domains(DomainScope(depth, domain), inner))
        least = min(((counts[inner][one], one) for one in further if counts[inner][one] >= count), default=None)
        if least is not None:
            return DomainScope(inner, least[1])
    return DomainScope(depth, min((counts[depth][one], one) for one in domains if counts[depth][one] >= count)[1])


def _best_fits(count: int, candidates: GangCandidates, scope: DomainScope) -> list[int]:
    """The best fits in the scope; ties to the lowest."""
    nodes: list[int] = []
    for fitting in candidates.candidate_nodes:
        bits, base = candidates.nodes_in(fitting, scope)
        if candidates.cpus is not None:
            cpus = candidates.cpus
            members = lowest_members(bits, bits.bit_count(), base)
            return sorted(members, key=lambda node: (cpus[node], node))[:count]
        if bits:
            nodes += lowest_members(bits, count - len(nodes), base)
            if len(nodes) == count:
                break
    return nodes


def _tail_node(nodes: Iterable[int], candidates: GangCandidates, scope: DomainScope) -> int:
    """The node for the tail, not one of the given nodes. The scope must have one."""
    used = bitset_of(nodes)
    for bits in (*candidates.spare, *candidates.candidate_nodes):
        left, base = candidates.nodes_in(bits ^ (bits & used), scope)
        if left:
            return base + lowest_member(left)
    raise AssertionError("a scope was chosen that has no node for the tail")


def _sliced(need: Need, candidates: GangCandidates) -> list[int] | None:
    """The nodes of a gang in slices: in one domain of the slices' level or further in, else with slices in several."""
    level, stop = need.slice_within, need.within if need.required and need.within >= 0 else 0
    if need.last_node_devices or level >= candidates.depths:
        return None
    for depth in range(candidates.depths - 1, max(stop, level) - 1, -1):
        domain = candidates.find_domain(depth, need.nodes)
        if domain >= 0:
            return _spread(need.nodes, candidates, DomainScope(depth, domain))
    for depth in range(level - 1, stop - 1, -1):
        counts = candidates.counts()[depth]
        for free, domain in sorted(zip(counts, range(len(counts)), strict=True)):
            nodes = _slices(need, candidates, DomainScope(depth, domain)) if free >= need.nodes else None
            if nodes is not None:
                return nodes
    return None if need.required and need.within >= 0 else _slices(need, candidates, WHOLE_POOL)


def _slices(need: Need, candidates: GangCandidates, scope: DomainScope) -> list[int] | None:
    """Whole slices from the domains with the most of them, the last ones from the smallest domain that can hold them."""
    size, level = need.slice_nodes, need.slice_within
    left, short = divmod(need.nodes, size)
    room = {domain: candidates.counts()[level][domain] for domain in candidates.inner_domains(scope, level)}
    chosen: dict[int, int] = {}
    if short:
        # The short slice has the last ranks, so it takes the last domain that can hold it: later domains hold no whole slice either.
        last = max((domain for domain, free in room.items() if free >= short), default=-1)
        if last < 0:
            return None
        room[last] -= short
        chosen[last] = short
    if not room or sum(free // size for free in room.values()) < left:
        return None
    while left:
        most = max(free // size for free in room.values())
        if most >= left:
            domain = min((free, domain) for domain, free in room.items() if free // size >= left)[1]
            most = left
        else:
            domain = min(domain for domain, free in room.items() if free // size == most)
        chosen[domain] = chosen.get(domain, 0) + most * size
        left -= most
        del room[domain]
    return [node for domain, count in chosen.items() for node in _spread(count, candidates, DomainScope(level, domain))]

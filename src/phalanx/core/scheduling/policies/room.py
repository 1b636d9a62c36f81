"""Selects the jobs to displace so that a job fits; tried on the board before anything is decided.

Three ways, from the least disruptive: move small jobs into free gaps; shrink elastic jobs; stop jobs. Stops are by value (the gain is a
multiple of the loss) or by right (a higher priority; the owner of borrowed quota; a gang that lost its place). All or nothing: if the job
would not fit afterwards, no job is displaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.entry import Because, Entry
from phalanx.core.scheduling.needs import Need, Places
from phalanx.core.scheduling.node_sets import bits_of
from phalanx.core.scheduling.policies.prices import INFINITE, Prices

VICTIMS_SEARCHED = 1_000  # jobs searched for a set on as few nodes as needed; beyond them any cheapest set is used
# Nodes priced exactly for a job with a right to devices in use; they are pre-sorted by the cost of all their victims.
NODES_PRICED = 64
NODES_TRIED = 4  # nodes tried for a job smaller than a node before the round continues with the next job


@dataclass(slots=True)
class Going:
    """One displaced job: moved to `places`, or stopped if there are none. `because` is set if its reason differs from that of the others."""

    entry: Entry
    need: Need | None = None
    places: Places = ()
    because: Because | None = None


class Room:
    """Selects jobs to displace on a board.

    Attributes:
        examined: victims examined by right since the policy last reset it: bounds a pass.
        shield_s: the earliest end of a guaranteed run that blocked a displacement since the policy last reset it.
    """

    def __init__(self, board: Board, *, moves: bool, move_min_s: float, right_min_s: float, stops_max: int) -> None:
        self.board = board
        self.moves = moves
        self.move_min_s = move_min_s
        self.right_min_s = right_min_s
        self.stops_max = stops_max
        self.examined = 0
        self.shield_s = INFINITE

    # ---------------------------------------------------------------- by moves and by value

    def by_moves(self, entry: Entry, prices: Prices, now_s: float) -> list[Going] | None:
        """Move small jobs into free gaps so that the job fits."""
        for need in entry.klass.needs:
            if need.devices == 0:
                continue
            shut = entry.klass.shut
            if need.nodes == 1 and not need.tail and not need.required:
                column = prices.shift[:, need.devices]
                if len(self.board.pools) > 1 or shut or need.shut:
                    column = np.where(prices.open_to(need, shut), column, INFINITE)
                for node in np.argsort(column, kind="stable")[:NODES_TRIED].tolist():
                    if column[node] == INFINITE:
                        break
                    going = self._free_devices(
                        entry, need, [(node, need.devices)], prices, now_s, INFINITE, stops=False
                    )
                    if going is not None:
                        return going
                continue
            wanted = prices.cheapest(prices.shift, need, shut)
            if wanted is not None:
                going = self._free_devices(entry, need, wanted, prices, now_s, INFINITE, stops=False)
                if going is not None:
                    return going
        return None

    def by_value(self, entry: Entry, prices: Prices, now_s: float, limit: float) -> list[Going] | None:
        """Stop the cheapest set on one node (on whole nodes for a gang), if its total cost is at most `limit`."""
        for need in entry.klass.needs:
            if need.devices == 0:
                continue
            wanted = prices.cheapest(prices.stop, need, entry.klass.shut)
            if wanted is None or (len(wanted) == 1 and prices.stop[wanted[0]] > limit):
                continue
            going = self._free_devices(entry, need, wanted, prices, now_s, limit, stops=True)
            if going is not None:
                return going
        return None

    def _free_devices(
        self,
        entry: Entry,
        need: Need,
        wanted: Sequence[tuple[int, int]],
        prices: Prices,
        now_s: float,
        limit: float,
        *,
        stops: bool,
    ) -> list[Going] | None:
        """Free the wanted devices: each victim moves if a gap fits it, else is stopped, if stops are allowed and cost at most `limit`."""
        shut = 0
        for node, _ in wanted:
            shut |= 1 << node
        victims: dict[int, Entry] = {}
        for node, want in wanted:
            for victim in prices.cheapest_set(node, want, now_s, moves=not stops):
                victims[victim.seq] = victim
        going: list[Going] = []
        cost = 0.0
        for victim in sorted(victims.values(), key=lambda victim: (-victim.gpus, victim.seq)):
            gap = self._gap(victim, shut) if self.moves and prices.movable(victim, now_s) else None
            if gap is None:
                cost += prices.price(victim, now_s)
                if not stops or cost > limit:
                    self._vacate(going)
                    return None
                going.append(Going(victim))
            else:
                self.board.occupy(victim.need, gap)
                going.append(Going(victim, victim.need, gap))
        # For a plain need only device counts matter, and they have been counted.
        fits = need.plain or self._would_fit(entry, going)
        self._vacate(going)
        return going if fits else None

    def _gap(self, victim: Entry, shut: int) -> Places | None:
        need = victim.need
        if need is None or not need.plain:
            return None
        pool = self.board.pools[self.board.kind[victim.places[0][0]]]
        # Its request: it holds fewer devices if one became unhealthy.
        node = pool.find_outside(need.devices, shut | victim.klass.shut | victim.avoid)
        return None if node < 0 else ((node, need.devices),)

    def _vacate(self, going: Sequence[Going]) -> None:
        for one in going:
            self.board.vacate(one.need, one.places)

    # ---------------------------------------------------------------- by right

    def by_right(self, entry: Entry, now_s: float) -> list[Going] | None:
        """Stop the cheapest jobs that the entry has a right to stop, only on the nodes it needs."""
        board, klass = self.board, entry.klass
        admitted = board.admits(klass)
        victims = self._victims(entry, now_s, admitted=admitted)
        if not victims:
            return None
        self.examined += len(victims)
        cost = {other.seq: self._cost(other, now_s) for other in victims}
        victims.sort(key=lambda other: (other.klass.rank, cost[other.seq], -other.since_s, other.seq))
        cheapest = victims[: max(VICTIMS_SEARCHED, 4 * klass.gpus)]
        chosen = self._cheapest_by_node(entry, cheapest, cost) or self._cheapest_first(entry, victims)
        if chosen is None:
            return None
        chosen.sort(key=lambda other: other.seq)
        # If only its quota blocks the job, others must release theirs, which a moved job would not.
        going = (
            self._moved_if_possible(entry, chosen, now_s)
            if self.moves and admitted
            else [Going(other) for other in chosen]
        )
        for one in going:
            one.because = self._reason_for(entry, one.entry)
        return going

    def _reason_for(self, entry: Entry, other: Entry) -> Because:
        """The reason given to the displaced job: borrowed quota is reclaimed even from jobs that nothing else may stop."""
        if not (other.fixed or other.stops >= self.stops_max):
            if entry.repair:
                return Because.REPAIR
            if other.klass.rank < entry.klass.rank:
                return Because.PRIORITY
        return Because.RECLAIM

    def _moved_if_possible(self, entry: Entry, chosen: Sequence[Entry], now_s: float) -> list[Going]:
        """Move small chosen jobs into free gaps, other than the freed place, if there are some; stop the others."""
        board = self.board
        for other in chosen:
            board.give(other)
        found = board.find(entry)
        going = [Going(other) for other in chosen]
        if found is not None:
            board.occupy(*found)
            shut = bits_of(node for node, _ in found[1])
            for one in sorted(going, key=lambda one: -one.entry.gpus):
                other = one.entry
                immovable = (
                    len(other.places) > 1
                    or not other.places[0][1]
                    or other.fixed
                    or now_s - other.moved_s < self.move_min_s
                )
                gap = None if immovable else self._gap(other, shut)
                if gap is not None:
                    board.occupy(other.need, gap)
                    one.need, one.places = other.need, gap
            self._vacate(going)
            board.vacate(*found)
        for other in chosen:
            board.take(other)
        return going

    def _victims(self, entry: Entry, now_s: float, *, admitted: bool) -> list[Entry]:
        """The jobs that the entry may stop: all or none of each group of one queue and rank, except for guaranteed runs."""
        quotas, klass = self.board.quotas, entry.klass
        found: list[Entry] = []
        for (queue, rank), group in self.board.groups.items():
            # Borrowed quota is reclaimed whatever the priority, and also from jobs that are otherwise never stopped.
            borrowed = quotas is not None and self.board.lends and quotas.reclaimable(queue, klass.queue, klass.gpus)
            lower = rank < klass.rank and (admitted or queue == klass.queue)
            repair = entry.repair and rank <= klass.rank
            if not (borrowed or lower or repair):
                continue
            for other in group.values():
                if other.since_s < 0.0 or other.overdue:
                    continue
                exempt = other.fixed or other.stops >= self.stops_max
                newcomer = (
                    repair and not other.repair and (other.moved_s > entry.waits_from_s or other.gpus < entry.gpus)
                )
                if not (borrowed or (not exempt and (lower or newcomer))):
                    continue
                if now_s < other.moved_s + self.right_min_s:
                    self.shield_s = min(self.shield_s, other.moved_s + self.right_min_s)
                else:
                    found.append(other)
        return found

    def _cost(self, other: Entry, now_s: float) -> float:
        """GPU-seconds lost if it is stopped now."""
        return (self.board.restart_cost_s + other.unsaved_s(now_s)) * max(1, other.gpus)

    def _cheapest_by_node(
        self, entry: Entry, victims: Sequence[Entry], cost: Mapping[int, float]
    ) -> list[Entry] | None:
        """The cheapest set per node, on as many nodes as the need has parts."""
        board = self.board
        on_node: dict[int, list[tuple[Entry, int]]] = {}
        for other in victims:
            for node, count in other.places:
                on_node.setdefault(node, []).append((other, count))
        for need in entry.klass.needs:
            prices: list[tuple[int, float, int, list[Entry]]] = []
            parts = need.nodes + (need.tail > 0)
            for node in self._nodes_by_cost(entry, need, on_node, cost)[: NODES_PRICED + parts]:
                free = board.pools[board.kind[node]].free[node]
                found = self._cheapest_on_node(on_node.get(node, ()), need.devices - free, cost)
                if found is not None:
                    prices.append(
                        (max((other.klass.rank for other in found[1]), default=-(1 << 30)), found[0], node, found[1])
                    )
            prices.sort(key=lambda price: price[:3])
            for first in range(max(1, min(NODES_TRIED, len(prices) - parts + 1))):
                chosen = {other.seq: other for price in prices[first : first + parts] for other in price[3]}
                if len(prices) - first >= parts and self._would_suffice(entry, list(chosen.values())):
                    return self._necessary(entry, list(chosen.values()))
        return None

    def _nodes_by_cost(
        self, entry: Entry, need: Need, on_node: Mapping[int, Sequence[tuple[Entry, int]]], cost: Mapping[int, float]
    ) -> list[int]:
        """Nodes that could be freed, those with the least total cost first: a pre-sort, so that only a few are priced exactly."""
        board = self.board
        shut = entry.klass.shut | need.shut
        nodes = set(on_node)
        if need.nodes > 1:  # free devices cost nothing
            for kind in need.kinds:
                pool = board.pools[kind]
                nodes.update(
                    node for node, free in enumerate(pool.free) if free >= need.devices and board.kind[node] == kind
                )
        likely: list[tuple[int, float, int]] = []
        for node in nodes:
            pool = board.pools[board.kind[node]]
            if board.kind[node] not in need.kinds or node in pool.away or shut >> node & 1:
                continue
            room, total_cost, rank = pool.free[node], 0.0, -(1 << 30)
            if room < need.devices:
                here = on_node.get(node, ())
                for other, count in here:
                    room += count
                    total_cost += cost[other.seq]
                rank = here[-1][0].klass.rank if here else rank  # victims are sorted by rank, lowest first
            if room >= need.devices:
                likely.append((rank, total_cost, node))
        likely.sort()
        return [node for _, _, node in likely]

    def _cheapest_on_node(
        self, here: Sequence[tuple[Entry, int]], need: int, costs: Mapping[int, float]
    ) -> tuple[float, list[Entry]] | None:
        """The set on one node that frees `need` devices at the least cost, lower ranks first."""
        if need <= 0:
            return 0.0, []
        best: list[tuple[tuple[int, float], tuple[Entry, ...]] | None] = [((-(1 << 30), 0.0), ())] + [None] * need
        for other, count in here:
            rank, cost = other.klass.rank, costs[other.seq]
            for short in range(need, 0, -1):
                before = best[max(0, short - count)]
                if before is None or not count:
                    continue
                price = (max(before[0][0], rank), before[0][1] + cost)
                present = best[short]
                if present is None or price < present[0]:
                    best[short] = (price, (*before[1], other))
        found = best[need]
        return None if found is None else (found[0][1], list(found[1]))

    def _cheapest_first(self, entry: Entry, victims: Sequence[Entry]) -> list[Entry] | None:
        """Cheapest first until the job fits: for needs that no set per node satisfies (topology, CPUs, quota)."""
        removed: list[Entry] = []
        fits = False
        for other in victims:
            self.out(other)
            removed.append(other)
            fits = self._fits(entry)
            if fits:
                break
        for other in removed:
            self.back(other)
        return self._necessary(entry, removed) if fits else None

    def _necessary(self, entry: Entry, chosen: Sequence[Entry]) -> list[Entry]:
        """Remove unnecessary victims, the most expensive first."""
        for other in chosen:
            self.out(other)
        needed: list[Entry] = []
        for other in reversed(chosen):
            self.back(other)
            if not self._fits(entry):
                self.out(other)
                needed.append(other)
        for other in needed:
            self.back(other)
        return needed[::-1]

    def _would_suffice(self, entry: Entry, going: Sequence[Entry]) -> bool:
        return self._would_fit(entry, [Going(other) for other in going])

    def _would_fit(self, entry: Entry, going: Sequence[Going]) -> bool:
        """Whether the job would be admitted and placed without these; the board is unchanged afterwards."""
        for one in going:
            self.out(one.entry, moves=bool(one.places))
        fits = self._fits(entry)
        for one in going:
            self.back(one.entry, moves=bool(one.places))
        return fits

    def _fits(self, entry: Entry) -> bool:
        return self.board.admits(entry.klass) and self.board.find(entry) is not None

    def out(self, other: Entry, *, moves: bool = False) -> None:
        """Remove the job for a trial; a moved job keeps its quota."""
        self.board.give(other)
        if self.board.quotas is not None and not moves:
            self.board.quotas.give(other.klass.queue, other.klass.user, other.held)

    def back(self, other: Entry, *, moves: bool = False) -> None:
        """Revert `out`."""
        self.board.take(other)
        if self.board.quotas is not None and not moves:
            self.board.quotas.take(other.klass.queue, other.klass.user, other.held)

    # ---------------------------------------------------------------- elastic

    def by_shrinking(self, entry: Entry, now_s: float) -> list[Going] | None:
        """Take back nodes that elastic jobs of no higher rank grew onto."""
        board = self.board
        going: list[Going] = []
        grown = [
            other
            for other in board.running.values()
            if other.need is not None and other.need.nodes_max > 0 and len(other.places) > 1
        ]
        for other in sorted(grown, key=lambda other: (other.klass.rank, -len(other.places), other.seq)):
            least = next(
                (need for need in other.klass.needs if other.need is not None and need.devices == other.need.devices),
                None,
            )
            if least is None or len(other.places) <= least.nodes or other.klass.rank > entry.klass.rank:
                continue
            if now_s < other.moved_s + self.move_min_s:
                self.shield_s = min(self.shield_s, other.moved_s + self.move_min_s)
                continue
            # A move to a drained node would be rejected, and a node with an unhealthy device cannot hold a part any more.
            stays = tuple([place for place in other.places if place[0] not in board.down and place[1] == least.devices])
            if len(stays) < least.nodes:
                continue
            for nodes in range(min(len(stays), len(other.places) - 1), least.nodes - 1, -1):
                trial = [*going, Going(other, replace(least, nodes=nodes), stays[:nodes])]
                if self._fits_after_shrinking(entry, trial):
                    return trial
            going.append(Going(other, least, stays[: least.nodes]))
        return None

    def _fits_after_shrinking(self, entry: Entry, going: Sequence[Going]) -> bool:
        board = self.board
        for one in going:
            board.give(one.entry)
            board.occupy(one.need, one.places)
        fits = self._fits(entry)
        for one in going:
            board.vacate(one.need, one.places)
            board.take(one.entry)
        return fits

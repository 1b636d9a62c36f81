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
from phalanx.core.scheduling.board_records import JobEntry, StopReason
from phalanx.core.scheduling.estimates.move_times import MoveTimes
from phalanx.core.scheduling.needs import Need, Places
from phalanx.core.scheduling.node_bitsets import bitset_of
from phalanx.core.scheduling.policies.displacement_costs import INFINITE, DisplacementCosts

VICTIMS_SEARCHED = 1_000  # jobs searched for a set on as few nodes as needed; beyond them any cheapest set is used
# Nodes priced exactly for a job with a right to devices in use; they are pre-sorted by the cost of all their victims.
NODES_COSTED = 64
NODES_TRIED = 4  # nodes tried for a job smaller than a node before the round continues with the next job


@dataclass(slots=True)
class Eviction:
    """One displaced job: moved to `places`, or stopped if there are none. `reason` is set if its reason differs from that of the others."""

    entry: JobEntry
    need: Need | None = None
    places: Places = ()
    reason: StopReason | None = None


class VictimSelector:
    """Selects jobs to displace on a board.

    Attributes:
        examined: victims examined by right since the policy last reset it: bounds a pass.
        protection_ends_s: the earliest end of a guaranteed run that blocked a displacement since the policy last reset it.
    """

    def __init__(
        self, board: Board, *, allow_moves: bool, move_times: MoveTimes, run_min_by_right_s: float, stops_max: int
    ) -> None:
        self.board = board
        self.allow_moves = allow_moves
        self.move_times = move_times
        self.run_min_by_right_s = run_min_by_right_s
        self.stops_max = stops_max
        self.examined = 0
        self.protection_ends_s = INFINITE

    # ---------------------------------------------------------------- by moves and by value

    def select_moves(self, entry: JobEntry, prices: DisplacementCosts, now_s: float) -> list[Eviction] | None:
        """Move small jobs into free gaps so that the job fits."""
        for need in entry.job_class.needs:
            if not need.gpus or not self.board.admits_need(entry.job_class, need):
                continue
            excluded = entry.job_class.excluded
            if need.nodes == 1 and not need.last_node_devices and not need.required and not need.others:
                column = prices.move_costs[:, need.devices]
                if len(self.board.pools) > 1 or excluded or need.excluded:
                    column = np.where(prices.allowed_nodes(need, excluded), column, INFINITE)
                for node in np.argsort(column, kind="stable")[:NODES_TRIED].tolist():
                    if column[node] == INFINITE:
                        break
                    going = self._free_devices(
                        entry, need, [(node, need.devices)], prices, now_s, INFINITE, stops=False
                    )
                    if going is not None:
                        return going
                continue
            wanted = prices.cheapest(prices.move_costs, need, excluded)
            if wanted is not None:
                going = self._free_devices(entry, need, wanted, prices, now_s, INFINITE, stops=False)
                if going is not None:
                    return going
        return None

    def select_by_value(
        self, entry: JobEntry, prices: DisplacementCosts, now_s: float, limit: float
    ) -> list[Eviction] | None:
        """Stop the cheapest set on one node (on whole nodes for a gang), if its total cost is at most `limit`."""
        for need in entry.job_class.needs:
            if not need.gpus or not self.board.admits_need(entry.job_class, need):
                continue
            wanted = prices.cheapest(prices.stop_costs, need, entry.job_class.excluded)
            if wanted is None or (len(wanted) == 1 and prices.stop_costs[wanted[0]] > limit):
                continue
            going = self._free_devices(entry, need, wanted, prices, now_s, limit, stops=True)
            if going is not None:
                return going
        return None

    def _free_devices(
        self,
        entry: JobEntry,
        need: Need,
        wanted: Sequence[tuple[int, int]],
        prices: DisplacementCosts,
        now_s: float,
        limit: float,
        *,
        stops: bool,
    ) -> list[Eviction] | None:
        """Free the wanted devices: each victim moves if a gap fits it, else is stopped. Both cost as much as a stop where it may not be moved yet.

        If stops are not allowed, only moves of those that may; if they are, the sum is at most `limit`.
        """
        excluded = 0
        for node, _ in wanted:
            excluded |= 1 << node
        victims: dict[int, JobEntry] = {}
        for node, want in wanted:
            for victim in prices.cheapest_set(node, want, now_s, moves=not stops):
                victims[victim.seq] = victim
        going: list[Eviction] = []
        cost = 0.0
        for victim in sorted(victims.values(), key=lambda victim: (-victim.gpus, victim.seq)):
            one_place = len(victim.places) == 1 and victim.places[0][1] > 0
            gap = self._gap(victim, excluded) if self.allow_moves and one_place else None
            if gap is None or not prices.movable(victim, now_s):
                cost += prices.stop_cost(victim, now_s)
                if not stops or cost > limit:
                    self._vacate(going)
                    return None
            if gap is None:
                going.append(Eviction(victim))
            else:  # also if it may not be moved yet, or would lose much: a stop would cost it more
                self.board.occupy(victim.need, gap)
                going.append(Eviction(victim, victim.need, gap))
        # For a plain need only device counts matter, and they have been counted.
        fits = need.devices_only or self._would_fit(entry, going)
        self._vacate(going)
        return going if fits else None

    def _gap(self, victim: JobEntry, excluded: int) -> Places | None:
        need = victim.need
        if need is None or not need.devices_only:
            return None
        pool = self.board.pools[self.board.pool_of_node[victim.places[0][0]]]
        # Its request: it holds fewer devices if one became unhealthy.
        node = pool.find_single_node(need.devices, excluded | victim.job_class.excluded | victim.avoided_nodes)
        return None if node < 0 else ((node, need.devices),)

    def _vacate(self, going: Sequence[Eviction]) -> None:
        for one in going:
            self.board.vacate(one.need, one.places)

    # ---------------------------------------------------------------- by right

    def select_by_right(self, entry: JobEntry, now_s: float) -> list[Eviction] | None:
        """Stop the cheapest jobs that the entry has a right to stop, only on the nodes it needs."""
        board, klass = self.board, entry.job_class
        admitted = board.limits_admit(klass)
        victims = self._victims(entry, now_s, admitted=admitted)
        if not victims:
            return None
        self.examined += len(victims)
        cost: dict[int, float] = {}

        def ordered(found: list[JobEntry]) -> list[JobEntry]:
            cost.update((other.seq, self._cost(other, now_s)) for other in found)
            return sorted(found, key=lambda other: (other.job_class.rank, cost[other.seq], -other.started_s, other.seq))

        # A job with a share frees no whole device by itself. There may be a hundred thousand, so they are ordered only if the others do not suffice.
        whole = (
            [other for other in victims if any(count for _, count in other.places)]
            if klass.needs[0].devices
            else victims
        )
        cheapest = ordered(whole)[: max(VICTIMS_SEARCHED, 4 * klass.gpus)]
        chosen = self._cheapest_by_node(entry, cheapest, cost) or self._cheapest_first(entry, ordered(victims))
        if chosen is None:
            return None
        chosen.sort(key=lambda other: other.seq)
        # If only its quota blocks the job, others must release theirs, which a moved job would not.
        going = (
            self._moved_if_possible(entry, chosen)
            if self.allow_moves and admitted
            else [Eviction(other) for other in chosen]
        )
        for one in going:
            one.reason = self._reason_for(entry, one.entry)
        return going

    def _reason_for(self, entry: JobEntry, other: JobEntry) -> StopReason:
        """The reason given to the displaced job: borrowed quota is reclaimed even from jobs that nothing else may stop."""
        if not (other.never_stopped or other.stops >= self.stops_max):
            if entry.lost_nodes:
                return StopReason.REPAIR
            if other.job_class.rank < entry.job_class.rank:
                return StopReason.PRIORITY
        return StopReason.RECLAIM

    def _moved_if_possible(self, entry: JobEntry, chosen: Sequence[JobEntry]) -> list[Eviction]:
        """Move small chosen jobs into free gaps, other than the freed place, if there are some; stop the others.

        They lose their place in any case: a move costs them less than a stop, however recently they were placed.
        """
        board = self.board
        for other in chosen:
            board.free_devices(other)
        found = board.find(entry)
        going = [Eviction(other) for other in chosen]
        if found is not None:
            held = board.occupy(*found)
            excluded = bitset_of(node for node, _ in found[1])
            for one in sorted(going, key=lambda one: -one.entry.gpus):
                other = one.entry
                immovable = len(other.places) > 1 or not other.places[0][1] or other.never_stopped
                gap = None if immovable else self._gap(other, excluded)
                if gap is not None:
                    board.occupy(other.need, gap)
                    one.need, one.places = other.need, gap
            self._vacate(going)
            board.vacate(*found, held)
        for other in chosen:
            board.retake_devices(other)
        return going

    def _victims(self, entry: JobEntry, now_s: float, *, admitted: bool) -> list[JobEntry]:
        """The jobs that the entry may stop: all or none of each group of one queue and rank, except for guaranteed runs."""
        quotas, klass = self.board.quotas, entry.job_class
        found: list[JobEntry] = []
        for (queue, rank), group in self.board.running_by_queue.items():
            # Borrowed quota is reclaimed whatever the priority, and also from jobs that are otherwise never stopped.
            borrowed = (
                quotas is not None
                and self.board.has_lendable_quota
                and quotas.is_reclaimable(queue, klass.queue, klass.asked)
            )
            lower = rank < klass.rank and (admitted or queue == klass.queue)
            if lower and quotas is not None and self.board.has_lendable_quota:
                lower = not quotas.would_owe(
                    klass.queue, queue, klass.asked
                )  # else each would stop the other, without end
            repair = entry.lost_nodes and rank <= klass.rank
            if not (borrowed or lower or repair):
                continue
            for other in group.values():
                if other.started_s < 0.0 or other.overdue:
                    continue
                exempt = other.never_stopped or other.stops >= self.stops_max
                newcomer = (
                    repair
                    and not other.lost_nodes
                    and (other.placed_s > entry.waiting_since_s or other.gpus < entry.gpus)
                )
                if not (borrowed or (not exempt and (lower or newcomer))):
                    continue
                if now_s < other.placed_s + self.run_min_by_right_s:
                    self.protection_ends_s = min(self.protection_ends_s, other.placed_s + self.run_min_by_right_s)
                else:
                    found.append(other)
        return found

    def _cost(self, other: JobEntry, now_s: float) -> float:
        """GPU-seconds lost if it is stopped now."""
        return (self.board.restart_cost_s + other.unsaved_s(now_s)) * max(1, other.gpus)

    def _cheapest_by_node(
        self, entry: JobEntry, victims: Sequence[JobEntry], cost: Mapping[int, float]
    ) -> list[JobEntry] | None:
        """The cheapest set per node, on as many nodes as the need has parts."""
        board = self.board
        on_node: dict[int, list[tuple[JobEntry, int]]] = {}
        for other in victims:
            for node, count in other.places:
                on_node.setdefault(node, []).append((other, count))
        for need in [need for need in entry.job_class.needs if not need.others]:
            prices: list[tuple[int, float, int, list[JobEntry]]] = []
            parts = need.parts
            for node in self._nodes_by_cost(entry, need, on_node, cost)[: NODES_COSTED + parts]:
                free = board.pools[board.pool_of_node[node]].free[node]
                found = self._cheapest_on_node(on_node.get(node, ()), need.devices - free, cost)
                if found is not None:
                    prices.append(
                        (
                            max((other.job_class.rank for other in found[1]), default=-(1 << 30)),
                            found[0],
                            node,
                            found[1],
                        )
                    )
            prices.sort(key=lambda price: price[:3])
            for first in range(max(1, min(NODES_TRIED, len(prices) - parts + 1))):
                chosen = {other.seq: other for price in prices[first : first + parts] for other in price[3]}
                if len(prices) - first >= parts and self._would_suffice(entry, list(chosen.values())):
                    return self._necessary(entry, list(chosen.values()))
        return None

    def _nodes_by_cost(
        self,
        entry: JobEntry,
        need: Need,
        on_node: Mapping[int, Sequence[tuple[JobEntry, int]]],
        cost: Mapping[int, float],
    ) -> list[int]:
        """Nodes that could be freed, those with the least total cost first: a pre-sort, so that only a few are priced exactly."""
        board = self.board
        excluded = entry.job_class.excluded | need.excluded
        nodes = set(on_node)
        if need.nodes > 1:  # free devices cost nothing
            for kind in need.kinds:
                pool = board.pools[kind]
                nodes.update(
                    node
                    for node, free in enumerate(pool.free)
                    if free >= need.devices and board.pool_of_node[node] == kind
                )
        likely: list[tuple[int, float, int]] = []
        for node in nodes:
            pool = board.pools[board.pool_of_node[node]]
            if board.pool_of_node[node] not in need.kinds or node in pool.removed_nodes or excluded >> node & 1:
                continue
            room, total_cost, rank = pool.free[node], 0.0, -(1 << 30)
            if room < need.devices:
                here = on_node.get(node, ())
                for other, count in here:
                    room += count
                    total_cost += cost[other.seq]
                rank = here[-1][0].job_class.rank if here else rank  # victims are sorted by rank, lowest first
            if room >= need.devices:
                likely.append((rank, total_cost, node))
        likely.sort()
        return [node for _, _, node in likely]

    def _cheapest_on_node(
        self, here: Sequence[tuple[JobEntry, int]], need: int, costs: Mapping[int, float]
    ) -> tuple[float, list[JobEntry]] | None:
        """The set on one node that frees `need` devices at the least cost, lower ranks first."""
        if need <= 0:
            return 0.0, []
        best: list[tuple[tuple[int, float], tuple[JobEntry, ...]] | None] = [((-(1 << 30), 0.0), ())] + [None] * need
        for other, count in here:
            rank, cost = other.job_class.rank, costs[other.seq]
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

    def _cheapest_first(self, entry: JobEntry, victims: Sequence[JobEntry]) -> list[JobEntry] | None:
        """Cheapest first until the job fits: for needs that no set per node satisfies (topology, CPUs, quota)."""
        removed: list[JobEntry] = []
        fits = False
        for other in victims:
            self.remove_for_trial(other)
            removed.append(other)
            fits = self._fits(entry)
            if fits:
                break
        for other in removed:
            self.revert_trial(other)
        return self._necessary(entry, removed) if fits else None

    def _necessary(self, entry: JobEntry, chosen: Sequence[JobEntry]) -> list[JobEntry]:
        """Remove unnecessary victims, the most expensive first."""
        for other in chosen:
            self.remove_for_trial(other)
        needed: list[JobEntry] = []
        for other in reversed(chosen):
            self.revert_trial(other)
            if not self._fits(entry):
                self.remove_for_trial(other)
                needed.append(other)
        for other in needed:
            self.revert_trial(other)
        return needed[::-1]

    def _would_suffice(self, entry: JobEntry, going: Sequence[JobEntry]) -> bool:
        return self._would_fit(entry, [Eviction(other) for other in going])

    def _would_fit(self, entry: JobEntry, going: Sequence[Eviction]) -> bool:
        """Whether the job would be admitted and placed without these; the board is unchanged afterwards."""
        for one in going:
            self.remove_for_trial(one.entry, moves=bool(one.places))
        fits = self._fits(entry)
        for one in going:
            self.revert_trial(one.entry, moves=bool(one.places))
        return fits

    def _fits(self, entry: JobEntry) -> bool:
        return self.board.admits(entry.job_class) and self.board.find(entry) is not None

    def remove_for_trial(self, other: JobEntry, *, moves: bool = False) -> None:
        """Remove the job for a trial; a moved job keeps its quota."""
        self.board.free_devices(other)
        if self.board.quotas is not None and not moves:
            self.board.quotas.remove_running(other.job_class.queue, other.job_class.user, other.held)

    def revert_trial(self, other: JobEntry, *, moves: bool = False) -> None:
        """Revert `remove_for_trial`."""
        self.board.retake_devices(other)
        if self.board.quotas is not None and not moves:
            self.board.quotas.add_running(other.job_class.queue, other.job_class.user, other.held)

    # ---------------------------------------------------------------- elastic

    def select_shrinks(self, entry: JobEntry, now_s: float) -> list[Eviction] | None:
        """Take back nodes that elastic jobs of no higher rank grew onto."""
        board = self.board
        going: list[Eviction] = []
        grown = [other for other in board.running.values() if other.may_shrink]
        for other in sorted(grown, key=lambda other: (other.job_class.rank, -len(other.places), other.seq)):
            least = next(
                (
                    need
                    for need in other.job_class.needs
                    if other.need is not None
                    and need.devices == other.need.devices
                    and board.kind_of(other) in need.kinds
                    and need.nodes_max
                ),
                None,
            )
            if least is None or len(other.places) <= least.nodes or other.job_class.rank > entry.job_class.rank:
                continue
            if now_s < self.move_times.from_s(other):
                self.protection_ends_s = min(self.protection_ends_s, self.move_times.from_s(other))
                continue
            # A move to a drained node would be rejected, and a node with an unhealthy device cannot hold a part any more.
            stays = tuple(
                [place for place in other.places if place[0] not in board.closed_nodes and place[1] == least.devices]
            )
            if len(stays) < least.nodes:
                continue
            for nodes in range(min(len(stays), len(other.places) - 1), least.nodes - 1, -1):
                trial = [*going, Eviction(other, replace(least, nodes=nodes), stays[:nodes])]
                if self._fits_after_shrinking(entry, trial):
                    return trial
            going.append(Eviction(other, least, stays[: least.nodes]))
        return None

    def _fits_after_shrinking(self, entry: JobEntry, going: Sequence[Eviction]) -> bool:
        board = self.board
        for one in going:
            board.free_devices(one.entry)
            board.occupy(one.need, one.places)
        fits = self._fits(entry)
        for one in going:
            board.vacate(one.need, one.places)
            board.retake_devices(one.entry)
        return fits

"""The cost of freeing devices on each node: the least value to stop, and the fewest GPUs to move, for each number of devices wanted.

Rows are cached and recomputed only if the node changed, a guaranteed run ended, or a job's hazard bin changed: a round on 12,500 nodes
recomputes only those.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import JobEntry
from phalanx.core.scheduling.estimates.hazard_table import EDGES_S, bin_of
from phalanx.core.scheduling.estimates.move_times import MoveTimes
from phalanx.core.scheduling.needs import Need

INFINITE = float("inf")
SAVES_CHECK_S = 300.0  # after this a job that had too much to lose may have saved
Rows = NDArray[np.float64]


class DisplacementCosts:
    """The rows of every node for jobs of one rank, which stop jobs of their own rank, and move those and lower ones.

    Attributes:
        stop_costs: [node, devices wanted] least value to stop.
        move_costs: the same in GPUs to move.
        expiry: when each row must be recomputed.
        outdated_nodes: nodes whose rows are outdated.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        stop_cost: Callable[[JobEntry, float], float],
        *,
        move_times: MoveTimes,
        stops_max: int,
    ) -> None:
        nodes = len(board.devices_of_node)
        self.board = board
        self.rank = rank
        self.stop_cost = stop_cost
        self.move_times = move_times
        self.stops_max = stops_max
        self.stop_costs: Rows = np.full((nodes, board.node_devices_max + 1), INFINITE)
        self.move_costs: Rows = np.full((nodes, board.node_devices_max + 1), INFINITE)
        self.expiry: Rows = np.zeros(nodes)
        self.outdated_nodes: set[int] = set()
        self.refreshed_s = -INFINITE
        self._kinds = np.array(board.pool_of_node)

    def stoppable(self, entry: JobEntry, now_s: float) -> bool:
        """Whether the entry may be stopped by value."""
        return (
            entry.job_class.rank == self.rank
            and not entry.never_stopped
            and entry.protected_until_s <= now_s
            and not entry.overdue
            and entry.stops + entry.moves < self.stops_max
        )

    def movable(self, entry: JobEntry, now_s: float) -> bool:
        """Whether the entry may be moved: on one node, at a time that suits it, and displaced less often than the most by its equals."""
        return (
            len(entry.places) == 1
            and entry.places[0][1] > 0
            and self.move_times.may_move(entry, now_s)
            and entry.job_class.rank <= self.rank
            and not entry.never_stopped
            and (entry.job_class.rank < self.rank or entry.stops + entry.moves < self.stops_max)
        )

    def refresh(self, now_s: float) -> None:
        """Recompute outdated rows."""
        for node in self.outdated_nodes:
            self.expiry[node] = 0.0
        self.outdated_nodes.clear()
        self.refreshed_s = now_s
        for node in np.nonzero(self.expiry <= now_s)[0].tolist():
            self._compute_row(node, now_s)

    def invalidate(self) -> None:
        """Mark all rows as outdated."""
        self.expiry[:] = 0.0

    def cheapest(self, rows: Rows, need: Need, excluded: int) -> list[tuple[int, int]] | None:
        """The (node, devices wanted) that are cheapest for the need; None if there are too few. Ties by number."""
        if need.others:
            found: list[tuple[int, int]] = []
            for role in need.roles:
                chosen_of_role = self.cheapest(rows, role, excluded | self.board.nodes_of(found))
                if chosen_of_role is None:
                    return None
                found += chosen_of_role
            return found
        is_open = self.allowed_nodes(need, excluded)
        column = np.where(is_open, rows[:, need.devices], INFINITE)
        chosen = self._in_one_domain(column, need) if need.required else np.argsort(column, kind="stable")[: need.nodes]
        if len(chosen) < need.nodes or column[chosen[-1]] == INFINITE:
            return None
        needs = [(node, need.devices) for node in chosen.tolist()]
        if need.last_node_devices:
            tail = np.where(is_open, rows[:, need.last_node_devices], INFINITE)
            tail[chosen] = INFINITE
            node = int(np.argmin(tail))
            if tail[node] == INFINITE:
                return None
            needs.append((node, need.last_node_devices))
        return needs

    def cheapest_set(self, node: int, want: int, now_s: float, *, moves: bool) -> list[JobEntry]:
        """The set of jobs on the node that its row priced: least value, or fewest GPUs."""
        need = want - self.board.pools[self.board.pool_of_node[node]].free[node]
        if need <= 0:
            return []
        best: list[tuple[float, tuple[JobEntry, ...]]] = [(0.0, ()), *((INFINITE, ()) for _ in range(need))]
        for entries, count in self.board.whole_holders(node):
            if not count or not all(
                self.movable(entry, now_s) if moves else self.stoppable(entry, now_s) for entry in entries
            ):
                continue
            cost = float(count) if moves else sum(self.stop_cost(entry, now_s) for entry in entries)
            for short in range(need, 0, -1):
                before = best[max(0, short - count)]
                if before[0] + cost < best[short][0]:
                    best[short] = (before[0] + cost, (*before[1], *entries))
        return list(best[need][1])

    def allowed_nodes(self, need: Need, excluded: int) -> NDArray[np.bool_]:
        """Nodes of the need's first kind that are not closed to it."""
        is_open = np.isin(self._kinds, need.kinds[:1])
        excluded |= need.excluded
        while excluded:
            low = excluded & -excluded
            is_open[low.bit_length() - 1] = False
            excluded ^= low
        return is_open

    def _in_one_domain(self, column: Rows, need: Need) -> NDArray[np.int64]:
        """The cheapest nodes in one domain of the required level: of the domain with the least sum."""
        domains = self.board.domains(need.within)
        best: tuple[float, NDArray[np.int64]] = (INFINITE, np.empty(0, dtype=np.int64))
        for domain in np.unique(domains).tolist():
            inside = np.nonzero(domains == domain)[0]
            if len(inside) < need.nodes:
                continue
            order = inside[np.argsort(column[inside], kind="stable")[: need.nodes]]
            cost = float(column[order].sum())
            if cost < best[0]:
                best = (cost, order)
        return best[1]

    def _move_changes_s(self, entry: JobEntry, now_s: float) -> float:
        """When time changes whether the entry may be moved."""
        from_s = self.move_times.from_s(entry)
        if from_s > now_s:
            return from_s
        until_s = self.move_times.until_s(entry)
        return now_s + SAVES_CHECK_S if until_s < now_s else until_s + 1e-6

    def _compute_row(self, node: int, now_s: float) -> None:
        board = self.board
        pool = board.pools[board.pool_of_node[node]]
        unit, free = board.node_devices_max, pool.free[node]
        expiry = INFINITE
        size = board.devices_of_node[node]
        short = free < 0  # devices failed under running gangs: nothing more fits, whichever job leaves
        room = [INFINITE] * (unit + 1) if short else [0.0] * (free + 1) + [INFINITE] * (unit - free)
        stop, shift = room, room.copy()
        for entries, count in () if short else board.whole_holders(node):
            stoppable = movable = True
            value = 0.0
            for entry in entries:
                protected = entry.protected_until_s > now_s
                same_rank = entry.job_class.rank == self.rank and not entry.never_stopped
                if protected and same_rank:
                    expiry = min(expiry, entry.protected_until_s)
                if len(entry.places) == 1:
                    expiry = min(expiry, self._move_changes_s(entry, now_s))
                stoppable = stoppable and same_rank and not protected and self.stoppable(entry, now_s)
                movable = movable and self.movable(entry, now_s)
            if not stoppable and not movable:
                continue
            for entry in entries:
                service_s = entry.service_s(now_s)
                age = bin_of(service_s)
                value += self.stop_cost(
                    entry, now_s
                )  # also of jobs that only move: the statistics of its group are fitted by the first use
                if age + 1 < len(EDGES_S):
                    expiry = min(expiry, now_s + EDGES_S[age + 1] - service_s + 1e-6)
            for want in range(size, free, -1):
                base = want - count if want > count else 0
                if stoppable and stop[base] + value < stop[want]:
                    stop[want] = stop[base] + value
                if movable and shift[base] + count < shift[want]:
                    shift[want] = shift[base] + count
        if node in pool.removed_nodes:
            stop = shift = [INFINITE] * (unit + 1)
        self.stop_costs[node] = stop
        self.move_costs[node] = shift
        self.expiry[node] = expiry

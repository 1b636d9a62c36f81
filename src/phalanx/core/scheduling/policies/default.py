"""The default policy: knows no duration, learns how jobs of a size end, and pays for every stop and move.

Waiting jobs of equal size and equal attained service form one class; classes are served by value per GPU. What does not fit may, at a
round, have room made for it: first by moving small jobs into holes, else by stopping the cheapest set on one node.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from phalanx.core.scheduling.board import Board, Entry, Listener
from phalanx.core.scheduling.hazard import EDGES_S, HazardTable, bin_of
from phalanx.core.scheduling.pool import Places

INFINITE = float("inf")
OVERDUE = 1e6  # value per GPU of an overdue job: above any index, which is at most 1 per second times the boost
OVERDUE_LOOK_S = 3600.0  # with nothing else happening, overdue jobs are looked for this often


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """The policy's constants; docs/decisions/0018 says where each comes from.

    Attributes:
        round_s: room is made for waiting jobs this often; what fits starts at once.
        boost: how much more a gang of a whole node or more counts.
        hysteresis: a stop must bring this many times what it takes.
        run_min_s: guaranteed run after a start.
        move_min_s: least time between two moves of a job.
        refit_s: hazards are computed anew this often.
        overdue_s: least wait after which a job is overdue; never reached when infinite.
        patience: mean service times after which a job is overdue, where that is longer than `overdue_s`.
        crowd: how far the limit stretches for each fleet's worth of GPUs that wait.
        lane: share of the fleet that overdue jobs may hold ahead of everyone.
    """

    round_s: float = 60.0
    boost: float = 4.0
    hysteresis: float = 8.0
    run_min_s: float = 1800.0
    move_min_s: float = 300.0
    refit_s: float = 3600.0
    overdue_s: float = 432_000.0
    patience: float = 25.0
    crowd: float = 3.0
    lane: float = 0.125
    stops: bool = True
    moves: bool = True


class Default(Listener):
    """See the module."""

    def __init__(self, board: Board, knobs: Knobs | None = None) -> None:
        self.board = board
        self.knobs = knobs or Knobs()
        self.table = HazardTable()
        self.fitted_s = -INFINITE
        self.fitted_events = 0
        self.classes: dict[tuple[int, int], list[tuple[float, int, Entry]]] = {}
        self.stopped: dict[int, Entry] = {}
        unit = board.pool.unit
        nodes = len(board.pool.size)
        self.evict = np.full((nodes, unit + 1), INFINITE)
        self.shift = np.full((nodes, unit + 1), INFINITE)
        self.expiry = np.zeros(nodes)
        self.round_next_s = 0.0
        self.lane_used = 0
        self.reserved: list[int] = []  # nodes kept free of new work for the first overdue gang

    # ---------------------------------------------------------------- what it hears

    def arrived(self, entry: Entry) -> None:
        """Wait, among its likes."""
        entry.group = self.table.group(entry.label, entry.gpus)
        self._join(entry)

    def left(self, entry: Entry) -> None:
        """Wait no longer."""
        if self.stopped.pop(entry.seq, None) is not None:
            return
        line = self.classes[entry.label, entry.gpus]
        line.remove((entry.submit_s, entry.seq, entry))
        heapq.heapify(line)

    def ended(self, entry: Entry, now_s: float) -> None:
        """Learn from how long it took."""
        if entry.overdue:
            self.lane_used -= entry.gpus
        group = self.table.group(entry.label, entry.gpus)
        group.active.pop(entry.seq, None)
        self.table.ended(group, max(entry.service_s(now_s), 0.0))

    # ---------------------------------------------------------------- deciding

    def decide(self, now_s: float) -> float | None:
        """Start what fits; at a round, make room for what does not."""
        board, knobs = self.board, self.knobs
        if not board.waiting:
            return None
        news = self.table.events - self.fitted_events
        if news and (
            now_s - self.fitted_s >= knobs.refit_s or (self.fitted_events < 1000 and news > 0.1 * self.fitted_events)
        ):
            self._refit(now_s)
        order = self._order(now_s)
        self._fill(order, now_s)
        if not board.waiting:
            return None
        if now_s >= self.round_next_s:
            self._promote(now_s)
            if knobs.stops or knobs.moves:
                self._make_room(now_s)
                due_s = min(
                    float(self.expiry.min()),
                    self.fitted_s + knobs.refit_s if self.table.events > self.fitted_events else INFINITE,
                )
            else:
                due_s = INFINITE
            due_s = min(due_s, now_s + OVERDUE_LOOK_S)
            self.round_next_s = (now_s // knobs.round_s + 1.0) * knobs.round_s
            self.due_s = (
                max(self.round_next_s, -(-due_s // knobs.round_s) * knobs.round_s) if due_s < INFINITE else INFINITE
            )
            return self.due_s if self.due_s < INFINITE else None
        return self.round_next_s

    def _order(self, now_s: float) -> list[tuple[float, float, int, Entry]]:
        """Waiting jobs by value per GPU, best first; of a class of never-started ones only the head."""
        order = []
        for (_, gpus), line in self.classes.items():
            if line:
                entry = line[0][2]
                order.append((-self._value(entry, now_s) / gpus, entry.submit_s, entry.seq, entry))
        order.extend(
            (-self._value(entry, now_s) / entry.gpus, entry.submit_s, entry.seq, entry)
            for entry in self.stopped.values()
        )
        order.sort()
        return order

    def _promote(self, now_s: float) -> None:
        """Jobs that waited past the limit become overdue, oldest first, as far as the lane has room; a gang wider than it gets it alone."""
        limit = self.knobs.overdue_s
        if limit == INFINITE:
            return
        mean_s = self.table.served_s / max(1, self.table.events)
        demand = sum(entry.gpus for entry in self.board.waiting.values())
        limit = max(limit, self.knobs.patience * mean_s) * (
            1.0 + self.knobs.crowd * demand / max(1, sum(self.board.pool.size))
        )
        cost_s = self.board.restart_cost_s
        late = [
            entry
            for entry in self.stopped.values()
            if not entry.overdue
            and entry.waited_s + now_s - entry.waits_from_s + cost_s * (entry.stops + entry.moves) > limit
        ]
        late += [
            line[0][2]
            for line in self.classes.values()
            if line and not line[0][2].overdue and now_s - line[0][0] > limit
        ]
        late.sort(key=lambda entry: (entry.submit_s, entry.seq))
        for entry in late:
            if not self.lane_used or self.lane_used + entry.gpus <= self.knobs.lane * sum(self.board.pool.size):
                self.lane_used += entry.gpus
                entry.overdue = True

    def _weight(self, gpus: int) -> float:
        return self.knobs.boost if gpus >= self.board.pool.unit else 1.0

    def _value(self, entry: Entry, now_s: float) -> float:
        service_s = entry.service_s(now_s)
        value = (
            self._weight(entry.gpus)
            * self.table.index_of(entry.group or self.table.group(entry.label, entry.gpus), now_s)[bin_of(service_s)]
        )
        return value + OVERDUE * entry.gpus if entry.overdue else value

    def _fill(self, order: list[tuple[float, float, int, Entry]], now_s: float) -> None:
        pool = self.board.pool
        least = 1 << 30
        for _, _, _, entry in order:
            gpus = entry.gpus
            if gpus >= least:
                continue
            places = pool.find(gpus)
            if places is None:
                least = gpus
                continue
            if entry.seq in self.stopped:
                self._start(entry, places, now_s)
            else:
                line = self.classes[entry.label, gpus]
                while places is not None:
                    self._start(line[0][2], places, now_s)
                    if not line:
                        break
                    entry = line[0][2]  # noqa: PLW2901  # the next of its class
                    places = pool.find(gpus)
            if not pool.free_total:
                return

    def _start(self, entry: Entry, places: Places, now_s: float) -> None:
        if self.stopped.pop(entry.seq, None) is None:
            heapq.heappop(self.classes[entry.label, entry.gpus])
            self.table.group(entry.label, entry.gpus).active[entry.seq] = entry
        entry.shield_s = now_s + self.knobs.run_min_s
        entry.moved_s = now_s
        self.board.start(entry, places, now_s)

    def _join(self, entry: Entry) -> None:
        if entry.stops:
            self.stopped[entry.seq] = entry
        else:
            heapq.heappush(self.classes.setdefault((entry.label, entry.gpus), []), (entry.submit_s, entry.seq, entry))

    def _refit(self, now_s: float) -> None:
        self.table.refit(
            (entry.gpus, entry.service_s(now_s))
            for group in (self.board.running, self.board.waiting)
            for entry in group.values()
        )
        self.fitted_s = now_s
        self.fitted_events = self.table.events
        self.expiry[:] = 0.0

    # ---------------------------------------------------------------- making room

    def _make_room(self, now_s: float) -> None:
        pool, knobs = self.board.pool, self.knobs
        for node in self.reserved:
            if node not in self.board.down:
                pool.back(node)
        self.reserved = []
        self._refresh(now_s)
        for density, _, _, entry in self._order(now_s):
            gpus = entry.gpus
            value = -density * gpus
            while True:
                places = pool.find(gpus)
                if places is None and knobs.moves and pool.free_total >= gpus and self._by_moves(gpus, entry, now_s):
                    places = pool.find(gpus)
                if places is None and knobs.stops and self._by_stops(gpus, value, entry, now_s):
                    places = pool.find(gpus)
                if places is None:
                    if entry.overdue and not self.reserved:
                        self._reserve(gpus)
                        self._refresh(now_s)
                    break
                lone = entry.seq in self.stopped
                self._start(entry, places, now_s)
                self._refresh(now_s)
                if lone or not self.classes[entry.label, gpus]:
                    break
                entry = self.classes[entry.label, gpus][0][2]  # noqa: PLW2901  # the next of its class

    def _reserve(self, gpus: int) -> None:
        """Keep new work off the nodes whose jobs may be stopped the soonest: within the guaranteed run they are the overdue gang's."""
        pool = self.board.pool
        ready: list[tuple[float, int]] = []
        for node, entries in enumerate(self.board.here):
            if (
                pool.size[node] >= min(gpus, pool.unit)
                and node not in pool.away
                and not any(entry.overdue for entry in entries)
            ):
                ready.append((max((entry.shield_s for entry in entries), default=0.0), node))
        ready.sort()
        need = -(-gpus // pool.unit)
        if len(ready) >= need:
            self.reserved = [node for _, node in ready[:need]]
            for node in self.reserved:
                pool.leave(node)

    def _refresh(self, now_s: float) -> None:
        pool = self.board.pool
        for node in pool.touched:
            self.expiry[node] = 0.0
        pool.touched.clear()
        for node in np.nonzero(self.expiry <= now_s)[0].tolist():
            self._price(node, now_s)

    def _price(self, node: int, now_s: float) -> None:
        """The rows of the node: the least value to stop, and the least GPUs to move, for each number of devices wanted."""
        pool = self.board.pool
        unit, free = pool.unit, pool.free[node]
        move_min_s = self.knobs.move_min_s
        expiry = INFINITE
        stop = [0.0] * (free + 1) + [INFINITE] * (unit - free)
        shift = stop.copy()
        for entry in self.board.here[node]:
            fixed = entry.shield_s > now_s
            many = len(entry.places) > 1
            still = many or entry.moved_s + move_min_s > now_s
            if fixed:
                expiry = min(expiry, entry.shield_s)
            if still and not many:
                expiry = min(expiry, entry.moved_s + move_min_s)
            if fixed and still:
                continue
            count = entry.places[0][1] if not many else next(count for at, count in entry.places if at == node)
            age = bin_of(entry.service_s(now_s))
            value = self._value(entry, now_s)
            if age + 1 < len(EDGES_S):
                expiry = min(expiry, now_s + EDGES_S[age + 1] - entry.service_s(now_s) + 1e-6)
            for want in range(unit, free, -1):
                base = want - count
                base = max(base, 0)
                if not fixed:
                    cost = stop[base] + value
                    stop[want] = min(stop[want], cost)
                if not still:
                    cost = shift[base] + count
                    shift[want] = min(shift[want], cost)
        if node in pool.away:
            stop = shift = [INFINITE] * (unit + 1)
        self.evict[node] = stop
        self.shift[node] = shift
        self.expiry[node] = expiry

    def _by_moves(self, gpus: int, entry: Entry, now_s: float) -> bool:
        """Move small jobs into holes so that the gang fits; all or nothing."""
        pool = self.board.pool
        unit = pool.unit
        if gpus <= unit:
            column = self.shift[:, gpus]
            for node in np.argsort(column, kind="stable")[:4].tolist():
                if column[node] == INFINITE:
                    return False
                if self._empty([(node, gpus)], now_s, entry, INFINITE, stops=False):
                    return True
            return False
        needs = self._nodes_for(self.shift, gpus)
        return needs is not None and self._empty(needs, now_s, entry, INFINITE, stops=False)

    def _nodes_for(self, rows: np.ndarray, gpus: int) -> list[tuple[int, int]] | None:
        unit = self.board.pool.unit
        whole, rest = divmod(gpus, unit)
        column = rows[:, unit]
        order = np.argsort(column, kind="stable")
        chosen = order[:whole].tolist()
        if column[chosen[-1]] == INFINITE:
            return None
        needs = [(node, unit) for node in chosen]
        if rest:
            tail = rows[:, rest].copy()
            tail[chosen] = INFINITE
            node = int(np.argmin(tail))
            if tail[node] == INFINITE:
                return None
            needs.append((node, rest))
        return needs

    def _by_stops(self, gpus: int, value: float, entry: Entry, now_s: float) -> bool:
        """Stop the cheapest set that makes the room, if the gang is worth it."""
        unit = self.board.pool.unit
        limit = value / self.knobs.hysteresis
        if gpus <= unit:
            column = self.evict[:, gpus]
            node = int(np.argmin(column))
            return bool(column[node] <= limit) and self._empty([(node, gpus)], now_s, entry, limit, stops=True)
        needs = self._nodes_for(self.evict, gpus)
        return needs is not None and self._empty(needs, now_s, entry, limit, stops=True)

    def _empty(self, needs: list[tuple[int, int]], now_s: float, because: Entry, limit: float, *, stops: bool) -> bool:
        """Empty the nodes as far as needed: each victim moves if a hole takes it, else is stopped, if that is allowed within `limit`."""
        board, pool = self.board, self.board.pool
        shut = 0
        for node, _ in needs:
            shut |= 1 << node
        victims: dict[int, Entry] = {}
        for node, want in needs:
            for entry in self._cheapest(node, want, now_s, by_value=stops):
                victims[entry.seq] = entry
        ordered = sorted(victims.values(), key=lambda entry: (-entry.gpus, entry.seq))
        going: list[tuple[Entry, Places]] = []
        cost = 0.0
        for entry in ordered:
            place = -1
            if self.knobs.moves and len(entry.places) == 1 and entry.moved_s + self.knobs.move_min_s <= now_s:
                place = pool.find_outside(entry.gpus, shut)
            if place < 0:
                cost += self._value(entry, now_s)
                if not stops or cost > limit:
                    for _, places in going:
                        pool.give(places)
                    return False
                going.append((entry, ()))
            else:
                places = ((place, entry.gpus),)
                pool.take(places)
                going.append((entry, places))
        for entry, places in going:
            if places:
                pool.give(places)
                board.move(entry, places, because)
                entry.moved_s = now_s
            else:
                board.stop(entry, now_s, because)
                self._join(entry)
        return True

    def _cheapest(self, node: int, want: int, now_s: float, *, by_value: bool) -> list[Entry]:
        """The set on the node that `_price` priced: least value, or fewest GPUs."""
        need = want - self.board.pool.free[node]
        if need <= 0:
            return []
        best: list[tuple[float, tuple[Entry, ...]]] = [(0.0, ()), *((INFINITE, ()) for _ in range(need))]
        for entry in self.board.here[node]:
            if by_value:
                if entry.shield_s > now_s:
                    continue
            elif len(entry.places) > 1 or entry.moved_s + self.knobs.move_min_s > now_s:
                continue
            count = next(count for at, count in entry.places if at == node)
            cost = self._value(entry, now_s) if by_value else float(count)
            for short in range(need, 0, -1):
                before = best[max(0, short - count)]
                if before[0] + cost < best[short][0]:
                    best[short] = (before[0] + cost, (*before[1], entry))
        return list(best[need][1])

"""Moves running jobs to faster models: to free devices, or in exchange with jobs that lose less there than the moved job gains.

The policy calls it at its rounds, for the jobs whose speed depends on the model. The aim is the largest sum over running jobs of weight x
speed, a job's speed being a share of that on its fastest model. An exchange must gain more, over the shortest rest of the runs that it
touches, than its moves lose. The rest of a run is what similar jobs ran on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import JobEntry, StopReason
from phalanx.core.scheduling.estimates.move_times import MoveTimes
from phalanx.core.scheduling.needs import Need, Places
from phalanx.core.scheduling.policies.victim_selector import Eviction

JOBS_TRIED_MAX: Final = 256  # jobs tried in one round; the next round goes on after them
LOOK_AGAIN_S: Final = 300.0  # after a search in which no exchange paid, and no job's least stay is known
HOLDERS_MAX: Final = 256  # jobs on the faster model that are compared for one exchange


class DeviceExchange:
    """Exchanges on one board.

    Attributes:
        weight: how much the policy values the job's progress against that of others.
        end_rate: the rate at which such jobs end, per second, above 0; its inverse is the expected rest of the run.
        move_times: when a job may be moved.
    """

    def __init__(
        self,
        board: Board,
        *,
        weight: Callable[[JobEntry], float],
        end_rate: Callable[[JobEntry, float], float],
        move_times: MoveTimes,
    ) -> None:
        self.board = board
        self.weight = weight
        self.end_rate = end_rate
        self.move_times = move_times
        self._fruitless: tuple[object, ...] = ()  # state in which no exchange paid
        self._look_again_s = 0.0
        self._tried = 0  # jobs tried in vain since the last exchange
        self._losses: dict[tuple[int, int], list[tuple[float, int, JobEntry, Need]]] = {}  # of this round

    def exchanges(self, now_s: float) -> Iterator[list[Eviction]]:
        """The exchanges of one round, each a job's own move first, then those of the jobs that take its place.

        The caller carries each out before it asks for the next. Cost: one look at the jobs whose speeds differ, at most `HOLDERS_MAX` jobs
        on each pair of models, and `JOBS_TRIED_MAX` trials. After a search in which no exchange paid, only the look until something changes.
        """
        placed = [(seq, entry.placed_s) for seq, entry in self.board.uneven_speeds.items()]
        state = (placed, [pool.free_total for pool in self.board.pools])
        if state == self._fruitless and now_s < self._look_again_s:
            return
        self._losses = {}
        gaining = self._gaining(now_s)
        first, self._tried = self._tried, self._tried + JOBS_TRIED_MAX
        paid = False
        for entry in gaining[first : self._tried]:
            # An earlier exchange of this round may have moved it.
            moves = self._best(entry, now_s) if self._movable(entry, now_s) else []
            if moves:
                paid = True
                yield moves
        if paid:
            self._tried = 0
        elif self._tried >= len(gaining):
            self._tried = 0
            self._fruitless = state
            ready = [self.move_times.from_s(entry) for entry in self.board.uneven_speeds.values()]
            # Expected rests grow with age, so that an exchange may pay later without any change.
            self._look_again_s = min((at_s for at_s in ready if at_s > now_s), default=now_s + self._look_again_in_s())

    def _look_again_in_s(self) -> float:
        stays = [self.move_times.least_stay_s(entry) for entry in self.board.uneven_speeds.values()]
        return min(stays, default=LOOK_AGAIN_S)

    def _gaining(self, now_s: float) -> list[JobEntry]:
        """The jobs that would run faster elsewhere and may move, the largest gain per GPU first."""
        gains = [
            (-self.weight(entry) * (1.0 - self._speed(entry)) / max(1, entry.gpus), entry.seq, entry)
            for entry in self.board.uneven_speeds.values()
            if self._speed(entry) < 1.0
            and self._is_sure(entry, self.board.kind_of(entry))
            and self._movable(entry, now_s)
        ]
        gains.sort(key=lambda gain: gain[:2])
        return [entry for _, _, entry in gains]

    def _best(self, entry: JobEntry, now_s: float) -> list[Eviction]:
        """The first exchange that pays, the fastest model first; empty for none."""
        for need in entry.job_class.needs:
            for kind in need.kinds:
                if entry.speed_on(kind) > self._speed(entry) and self._is_sure(entry, kind):
                    found = self._to_kind(entry, replace(need, kinds=(kind,)), now_s)
                    if found:
                        return found
        return []

    def _to_kind(self, entry: JobEntry, need: Need, now_s: float) -> list[Eviction]:
        places = self._find(entry, need)
        if places is not None:
            moves = [Eviction(entry, need, places, StopReason.FASTER)]
            return moves if self._pays(moves, now_s) else []
        return self._swap(entry, need, now_s)

    def _swap(self, entry: JobEntry, need: Need, now_s: float) -> list[Eviction]:
        """Exchange places with the jobs on this kind that lose the least per GPU by running where the entry runs."""
        board, here, there = self.board, self.board.kind_of(entry), need.kinds[0]
        gain = self.weight(entry) * (entry.speed_on(there) - self._speed(entry))
        leaving: list[JobEntry] = []
        needs: list[Need] = []
        board.free_devices(entry)
        places = None
        for density, _, other, own in self._losses_of(there, here):
            if other.job_class.rank > entry.job_class.rank or not self._movable(other, now_s):
                continue
            gain -= density * max(1, other.gpus)
            if gain <= 0.0 or len(leaving) > entry.gpus:
                break
            board.free_devices(other)
            leaving.append(other)
            needs.append(own)
            places = self._find(entry, need)
            if places is not None:
                break
        moves = [] if places is None else self._rehouse(entry, need, places, leaving, needs)
        for one in (entry, *leaving):
            board.retake_devices(one)
        return moves if moves and self._pays(moves, now_s) else []

    def _rehouse(
        self, entry: JobEntry, need: Need, places: Places, leaving: Sequence[JobEntry], needs: Sequence[Need]
    ) -> list[Eviction]:
        """The moves if those that leave find places too; the devices of all of them are free for this trial."""
        board = self.board
        moves = [Eviction(entry, need, places, StopReason.FASTER)]
        held = [board.occupy(need, places)]
        for other, own in zip(leaving, needs, strict=True):
            found = self._find(other, own)
            if found is None:
                break
            moves.append(Eviction(other, own, found, StopReason.SWAP))
            held.append(board.occupy(own, found))
        for move, shared in zip(moves, held, strict=True):
            board.vacate(move.need, move.places, shared)
        return moves if len(moves) == len(leaving) + 1 else []

    def _pays(self, moves: Sequence[Eviction], now_s: float) -> bool:
        """Whether quotas allow the moves, and they gain more over the shortest rest of these runs than they lose."""
        if not self.board.admits_moves([(move.entry, move.need) for move in moves if move.need is not None]):
            return False
        gain = cost = 0.0
        rest_s = float("inf")
        for move in moves:
            entry = move.entry
            weight, before = self.weight(entry), self._speed(entry)
            after = before if move.need is None else entry.speed_on(move.need.kinds[0])
            gain += weight * (after - before)
            cost += weight * after * (self.board.restart_cost_s + entry.unsaved_s(now_s))
            rest_s = min(rest_s, 1.0 / (self.end_rate(entry, now_s) * max(before, after)))
        return gain * rest_s > cost

    def _find(self, entry: JobEntry, need: Need) -> Places | None:
        return self.board.find_need(need, entry.job_class.excluded | entry.avoided_nodes | self.board.last_choice_nodes)

    def _losses_of(self, kind: int, other_kind: int) -> list[tuple[float, int, JobEntry, Need]]:
        """Jobs on the first kind that could run on the second: what each loses by that per GPU, least first; and its need there.

        At most `HOLDERS_MAX` jobs, by node. The list was made before the exchanges of this round; the jobs that they moved may not move again.
        """
        losses = self._losses.get((kind, other_kind))
        if losses is None:
            found: dict[int, JobEntry] = {}
            for node, entries in enumerate(self.board.jobs_on_node):
                if entries and self.board.pool_of_node[node] == kind:
                    found.update((entry.seq, entry) for entry in entries)
                    if len(found) >= HOLDERS_MAX:
                        break
            losses = self._losses[kind, other_kind] = []
            for seq, entry in found.items():
                need = self._need_on(entry, other_kind)
                if need is not None and self._is_sure(entry, kind) and self._is_sure(entry, other_kind):
                    loss = self.weight(entry) * (entry.speed_on(kind) - entry.speed_on(other_kind))
                    losses.append((loss / max(1, entry.gpus), seq, entry, need))
            losses.sort(key=lambda loss: loss[:2])
        return losses

    @staticmethod
    def _need_on(entry: JobEntry, kind: int) -> Need | None:
        return next((replace(need, kinds=(kind,)) for need in entry.job_class.needs if kind in need.kinds), None)

    @staticmethod
    def _is_sure(entry: JobEntry, kind: int) -> bool:
        """Whether the job's speed on this kind is known well enough to move it."""
        return kind not in entry.job_class.guessed_kinds

    def _movable(self, entry: JobEntry, now_s: float) -> bool:
        return (
            bool(entry.places)
            and not entry.shared_devices
            and not entry.never_stopped
            and not (entry.need is not None and (entry.need.nodes_max or entry.need.others))
            and entry.placed_s < now_s
            and self.move_times.may_move(entry, now_s)
        )

    def _speed(self, entry: JobEntry) -> float:
        """Its speed where it runs."""
        return entry.speed_on(self.board.kind_of(entry))

"""Growth of elastic jobs: if no waiting job can use the idle nodes, elastic jobs do, where the move costs them little."""

from __future__ import annotations

from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import JobEntry, StopReason
from phalanx.core.scheduling.estimates.move_times import GROW_PER_MOVE, MoveTimes
from phalanx.core.scheduling.needs import Need, Places
from phalanx.core.scheduling.policies.victim_selector import VictimSelector

GROW_CHECK_S = 60.0  # idle nodes are offered to elastic jobs this often


class ElasticGrowth:
    """Moves elastic jobs of one board to more nodes, or to faster ones."""

    def __init__(self, board: Board, victims: VictimSelector, move_times: MoveTimes, grow_min_s: float | None) -> None:
        """Take the board, the trials on it, and `PolicyParameters.grow_min_s`."""
        self.board = board
        self.victims = victims
        self.move_times = move_times
        self.grow_min_s = grow_min_s

    def grow(self, now_s: float) -> float | None:
        """Let elastic jobs use idle nodes, if the move costs them little; return when to look again, None if no job may grow."""
        board = self.board
        elastic = [
            entry
            for entry in board.running.values()
            if entry.need is not None
            and entry.need.nodes_max
            and (entry.need.nodes_max > len(entry.places) or entry.job_class.speeds)  # fewer nodes of a faster model
        ]
        if not elastic:
            return None
        look_s = now_s + GROW_CHECK_S
        for entry in sorted(elastic, key=lambda entry: entry.seq):
            grows_s = self._grows_from_s(entry)
            if now_s < grows_s:
                look_s = min(look_s, grows_s)
                continue
            if entry.unsaved_s(now_s) > self.board.restart_cost_s:
                continue
            self.victims.remove_for_trial(entry)  # with its quota: its current usage counts towards its limit
            found = board.find(entry)
            self.victims.revert_trial(entry)
            if found is not None and self._is_wider(entry, *found):
                board.move(entry, *found, now_s, None, StopReason.GROW)
                entry.placed_s = now_s
        return look_s

    def _grows_from_s(self, entry: JobEntry) -> float:
        """The time from which the elastic job may grow: so much later than it may move that a job that shrank does not grow back at once."""
        own = self.grow_min_s
        if entry.job_class.min_stay_s is not None or own is None:
            own = GROW_PER_MOVE * self.move_times.least_stay_s(entry)
        return entry.placed_s + own

    def _is_wider(self, entry: JobEntry, need: Need, places: Places) -> bool:
        """Whether the elastic job works faster on these places; on another model only if its speeds on both are sure."""
        board, guessed = self.board, entry.job_class.guessed_kinds
        here, there = board.kind_of(entry), board.pool_of_node[places[0][0]]
        if entry.need is None or (here != there and not entry.job_class.speeds):
            return False
        if here != there and (here in guessed or there in guessed):
            return False
        return board.work_rate(entry, need, places) > board.work_rate(entry, entry.need, entry.places)

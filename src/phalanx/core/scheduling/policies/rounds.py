"""Policies that may stop jobs at every round: `las` (Tiresias, two queues by attained GPU-seconds) and `srtf` (shortest known remaining time)."""

from __future__ import annotations

from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.entry import Because, Entry, Listener, by_submit

INFINITE = float("inf")
ROUND_S = 60.0
LAS_THRESHOLD_GPU_S = 18_000.0  # shared/data/README.md; 5 GPU-hours


class Rounds(Listener):
    """At every round the best jobs by rank that fit together run; the rest waits. Nothing starts between rounds."""

    def __init__(
        self,
        board: Board,
        *,
        exact: bool = False,
        round_s: float = ROUND_S,
        thresholds: tuple[float, ...] = (LAS_THRESHOLD_GPU_S,),
    ) -> None:
        self.board = board
        self.exact = exact
        self.round_s = round_s
        self.thresholds = thresholds
        self.next_s = INFINITE  # time of the next scheduled round

    def _rank(self, entry: Entry, now_s: float) -> tuple[float, float, int]:
        if self.exact:
            return (entry.size_s - entry.service_s(now_s), entry.submit_s, entry.seq)
        # Repeated work counts: otherwise a stop would lift the job back into the first queue, and the two jobs would alternate forever.
        used = (entry.service_s(now_s) + self.board.restart_cost_s * entry.stops) * entry.gpus
        return (float(sum(used >= threshold for threshold in self.thresholds)), entry.submit_s, entry.seq)

    def decide(self, now_s: float) -> float | None:
        """At a round, choose again; returns the time of the next round."""
        board = self.board
        # A live clock never hits the round exactly: the first call past the scheduled time is the round.
        if board.waiting and (now_s % self.round_s == 0.0 or now_s >= self.next_s):
            self._choose(now_s)
        self.next_s = (now_s // self.round_s + 1.0) * self.round_s if board.waiting else INFINITE
        return self.next_s if board.waiting else None

    def _choose(self, now_s: float) -> None:
        board = self.board
        room = sum(size for node, size in enumerate(board.size) if node not in board.down)
        candidates = sorted(
            [*board.waiting.values(), *board.running.values()],
            key=lambda entry: (not entry.repair, -entry.klass.rank, *self._rank(entry, now_s)),
        )
        chosen: list[Entry] = []
        losers: list[Entry] = []
        for entry in candidates:
            held = entry.held or entry.gpus
            if held <= room and (entry.since_s >= 0.0 or board.admits(entry.klass)):
                room -= held
                if entry.since_s < 0.0:
                    chosen.append(entry)
            elif entry.since_s >= 0.0 and not entry.fixed:
                losers.append(entry)
        self._place(chosen, losers, now_s)

    def _place(self, chosen: list[Entry], losers: list[Entry], now_s: float) -> None:
        """Start the chosen jobs on the devices that the losers would free; a loser whose devices remain unused keeps them."""
        board = self.board
        for entry in losers:
            board.give(entry)
        placed = []
        for entry in chosen:
            found = board.find(entry)
            if found is not None:
                board.occupy(*found)
                placed.append((entry, *found))
        stopped = []
        for entry in losers:
            if all(board.pools[board.kind[node]].free[node] >= count for node, count in entry.places):
                board.take(entry)
            else:
                stopped.append(entry)
        for _, need, places in placed:
            board.vacate(need, places)
        for entry in stopped:
            board.take(entry)
            board.stop(entry, now_s, because=Because.VALUE)
        for entry, need, places in placed:
            # As wide as it was found: the other starts were not counted then.
            width_admitted = (
                board.quotas is None or board.quotas.admits(entry.klass.queue, entry.klass.user, need.gpus) is None
            )
            if width_admitted and board.admits(entry.klass):
                board.start(entry, need, places, now_s)
        for entry in by_submit(board.waiting.values()):
            if not board.free_total:
                break
            found = board.find(entry) if board.admits(entry.klass) else None
            if found is not None:
                board.start(entry, *found, now_s)

"""Policies that may stop jobs every round: `las` (Tiresias, two queues by attained GPU-seconds) and `srtf` (shortest known remainder)."""

from __future__ import annotations

from phalanx.core.scheduling.board import Board, Entry, Listener, by_submit

ROUND_S = 60.0
LAS_THRESHOLD_GPU_S = 18_000.0  # shared/data/README.md; 5 GPU-hours


class Rounds(Listener):
    """At every round the best jobs by rank that fit together run; the rest wait. Between rounds free room is filled by rank."""

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
        self.next_s = 0.0

    def _rank(self, entry: Entry, now_s: float) -> tuple[float, float, int]:
        if self.exact:
            return (entry.size_s - entry.service_s(now_s), entry.submit_s, entry.seq)
        # Work done twice counts: else a stop would lift the job back into the first queue, and the two would alternate for ever.
        used = (entry.service_s(now_s) + self.board.restart_cost_s * entry.stops) * entry.gpus
        return (float(sum(used >= threshold for threshold in self.thresholds)), entry.submit_s, entry.seq)

    def decide(self, now_s: float) -> float | None:
        """Fill, or at a round choose anew; says when the next round is due."""
        board = self.board
        if not board.waiting:
            return None
        if now_s % self.round_s == 0.0:
            self._choose(now_s)
        else:
            return (now_s // self.round_s + 1.0) * self.round_s
        return (now_s // self.round_s + 1.0) * self.round_s if board.waiting else None

    def _choose(self, now_s: float) -> None:
        board = self.board
        room = sum(size for node, size in enumerate(board.pool.size) if node not in board.pool.away)
        everyone = sorted(
            [*board.waiting.values(), *board.running.values()], key=lambda entry: self._rank(entry, now_s)
        )
        chosen: list[Entry] = []
        losers: list[Entry] = []
        for entry in everyone:
            if entry.gpus <= room:
                room -= entry.gpus
                if entry.since_s < 0.0:
                    chosen.append(entry)
            elif entry.since_s >= 0.0:
                losers.append(entry)
        self._place(chosen, losers, now_s)

    def _place(self, chosen: list[Entry], losers: list[Entry], now_s: float) -> None:
        """Start the chosen on what the losers would free; a loser whose devices nobody got keeps them, so that no stop is for nothing."""
        board, pool = self.board, self.board.pool
        for entry in losers:
            pool.give(entry.places)
        placed = []
        for entry in chosen:
            places = pool.find(entry.gpus)
            if places is not None:
                pool.take(places)
                placed.append((entry, places))
        stopped = []
        for entry in losers:
            if all(pool.free[node] >= count for node, count in entry.places):
                pool.take(entry.places)
            else:
                stopped.append(entry)
        for _, places in placed:
            pool.give(places)
        for entry in stopped:
            pool.take(entry.places)
            board.stop(entry, now_s)
        for entry, places in placed:
            board.start(entry, places, now_s)
        for entry in by_submit(board.waiting.values()):
            if not pool.free_total:
                break
            places = pool.find(entry.gpus)
            if places is not None:
                board.start(entry, places, now_s)

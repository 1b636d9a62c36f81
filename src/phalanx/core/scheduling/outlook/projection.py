"""Projects how many GPUs jobs will hold and how many jobs will wait: the policy decides on the board of a trial, in virtual time.

Jobs run as long as the later bound of their forecast; a job without one holds its GPUs for ever. Later jobs, failures, begin times,
dependencies, reservations and budgets that change later are not modelled, and devices of a preempted job are free at once.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Final

from phalanx.core.scheduling.board_records import DecisionKind, JobEntry
from phalanx.core.scheduling.outlook.forecast import NEVER, Forecast
from phalanx.core.work.share import MILLI_PER_DEVICE

HORIZON_MAX_S: Final = 7 * 86400.0  # later jobs change everything beyond
EVENTS_MAX: Final = 5_000  # 16 bytes each, and one decision
WAKE_LEAST_S: Final = (
    300.0  # between decisions that only the passing of time asks for: a round of the policy is a minute
)


class FleetProjection:
    """The projection of one trial, whose board it uses up: read everything else of the trial before.

    Attributes:
        until_s: to which second from now it is known: all of HORIZON_MAX_S, unless time or EVENTS_MAX ran out.
        last_start_s, last_end_s: when the last job starts and ends in this time, in seconds from now; 0 without one.
        fleet_gpus: healthy devices of all nodes, also of cordoned ones.
    """

    def __init__(self, forecast: Forecast, has_time: Callable[[], bool]) -> None:
        self._forecast = forecast
        self._scheduler = forecast.trial.scheduler
        self._board = self._scheduler.board
        self._now_s = forecast.now_s
        self._ends: list[tuple[float, int]] = []
        self._due: dict[int, float] = {}
        self._left: dict[int, float] = {}  # of jobs that were stopped
        self._milli: dict[int, int] = {}
        self._times: list[float] = []
        self._points: list[tuple[int, int]] = []  # thousandths of GPUs held, jobs waiting
        self.until_s = 0.0
        self.last_start_s = self.last_end_s = 0.0
        self.fleet_gpus = sum(self._board.devices_of_node)
        self._run(has_time)

    def sample(self, times: Sequence[float]) -> tuple[list[float | None], list[int | None]]:
        """Return GPUs held and jobs waiting at these seconds from now; None where it is not known."""
        gpus: list[float | None] = []
        waiting: list[int | None] = []
        for at_s in times:
            known = at_s <= self.until_s
            milli, jobs = self._points[bisect_right(self._times, at_s) - 1]
            gpus.append(milli / MILLI_PER_DEVICE if known else None)
            waiting.append(jobs if known else None)
        return gpus, waiting

    # ---------------------------------------------------------------- the event loop

    def _run(self, has_time: Callable[[], bool]) -> None:
        for entry in list(self._board.running.values()):
            self._start(entry, 0.0, self._forecast.remaining_time(entry).high_s)
        self._note(0.0)
        wake_s = max(WAKE_LEAST_S, self._forecast.trial.plan.wake_s - self._now_s)
        for _ in range(EVENTS_MAX):
            if not has_time():
                return
            while self._ends and self._due.get(self._ends[0][1]) != self._ends[0][0]:
                heapq.heappop(self._ends)  # it was stopped meanwhile
            end_s = self._ends[0][0] if self._ends else NEVER
            at_s = min(end_s, wake_s if self._board.waiting else NEVER)
            if at_s > HORIZON_MAX_S:
                self.until_s = HORIZON_MAX_S
                return
            while self._ends and self._ends[0][0] <= at_s:
                due_s, seq = heapq.heappop(self._ends)
                if self._due.get(seq) == due_s:
                    self._end(seq, at_s)
            again_s = self._scheduler.policy.decide(self._now_s + at_s)
            wake_s = NEVER if again_s is None else max(again_s - self._now_s, at_s + WAKE_LEAST_S)
            self._carry_out(at_s)
            self._note(at_s)

    def _carry_out(self, at_s: float) -> None:
        for decision in self._board.take_decisions():
            entry = decision.entry
            match decision.kind:
                case DecisionKind.START:
                    self.last_start_s = at_s
                    self._start(entry, at_s, self._run_time_s(entry))
                case DecisionKind.STOP:
                    self._left[entry.seq] = self._due.pop(entry.seq, NEVER) - at_s
                    self._milli.pop(entry.seq, None)
                case DecisionKind.MOVE:
                    self._milli[entry.seq] = entry.milli_held

    def _start(self, entry: JobEntry, at_s: float, run_s: float) -> None:
        self._due[entry.seq] = at_s + run_s
        self._milli[entry.seq] = entry.milli_held
        if run_s < NEVER:
            heapq.heappush(self._ends, (at_s + run_s, entry.seq))

    def _end(self, seq: int, at_s: float) -> None:
        del self._due[seq], self._milli[seq]
        self.last_end_s = at_s
        self._board.finish(self._board.running[seq], self._now_s + at_s, learn=False)

    def _run_time_s(self, entry: JobEntry) -> float:
        """How long a job that starts runs: what was left when it was stopped, or all of its forecast."""
        left_s = self._left.pop(entry.seq, None)
        if left_s is not None:
            return left_s
        job = self._forecast.trial.snapshot.jobs[self._scheduler.job_id_by_seq[entry.seq]]
        before = self._forecast.remaining_times.get(job.id)  # the trial itself has stopped it
        if before is not None:
            return before.high_s
        _, high_s, _, _ = self._forecast.run_time_of(job)
        return NEVER if high_s is None else max(0.0, high_s - entry.attained_s)

    def _note(self, at_s: float) -> None:
        self.until_s = at_s
        self._times.append(at_s)
        waiting = len(self._board.waiting) + len(self._scheduler.ineligible)
        self._points.append((sum(self._milli.values()), waiting))

"""Replay on the policy's board alone, in virtual time: after arrivals, ends and rounds the policy decides once.

It uses the production policy without controller, records and supervisors: only the clock and the execution of decisions differ. Each job
starts, stops and ends in the same second as in `lifecycle_replay`; a test holds both equal. It knows one pool of equal GPUs and no quotas.
Jobs run exactly their duration, plus the restart cost for each preemption and move. Changes at one instant are applied together, ends
before arrivals.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from phalanx.core.errors import NeverFits
from phalanx.core.ids import Epoch
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import (
    Decision,
    DecisionKind,
    JobEntry,
)
from phalanx.core.scheduling.policy import Policy
from phalanx.core.work.pace import with_stated_end
from phalanx.simulator.fleet import TraceNode
from phalanx.simulator.results import (
    PROGRESS_EVERY,
    ReplayedJob,
    ReplayEvent,
    ReplayListener,
    ReplayResult,
)
from phalanx.simulator.trace import TraceJob


def replay_board(
    jobs: Sequence[TraceJob],
    nodes: Sequence[TraceNode],
    make_policy: Callable[[], Policy],
    *,
    restart_cost_s: Callable[[int], float] | float = 60.0,
    run_time_of: Callable[[TraceJob], float] | None = None,
    curve_step_s: float = 0.0,
    on_progress: Callable[[int, int], None] | None = None,
    on_end: Callable[[TraceJob], None] | None = None,
    on_event: ReplayListener | None = None,
) -> ReplayResult:
    """Replay `jobs` on `nodes`.

    Args:
        jobs: by submit time.
        nodes: the fleet.
        make_policy: builds the policy.
        restart_cost_s: extra work per preemption or move; a function of the job's GPUs, or a constant.
        run_time_of: run time that reference policies may use, asked at the submit; None for the exact one.
        curve_step_s: minimum time between points of the curve; 0 records none.
        on_progress: called with (ended, total) at intervals.
        on_end: called for each job that finishes, before other events of that instant.
        on_event: called for each start, stop and end; a move is a stop and a start.

    Raises:
        NeverFits: a job does not fit the empty fleet, or the policy leaves jobs waiting on an idle fleet.
    """
    machine = _BoardReplay(jobs, nodes, make_policy, restart_cost_s, run_time_of)
    machine.on_end, machine.on_event = on_end, on_event
    machine.run(curve_step_s, on_progress)
    return machine.result


class _BoardReplay:
    """State of the event loop: remaining work and due end of each job."""

    def __init__(
        self,
        jobs: Sequence[TraceJob],
        nodes: Sequence[TraceNode],
        make_policy: Callable[[], Policy],
        restart_cost_s: Callable[[int], float] | float,
        size_of: Callable[[TraceJob], float] | None,
    ) -> None:
        flat = restart_cost_s if not callable(restart_cost_s) else restart_cost_s(1)
        self.board = Board([node.gpus for node in nodes], restart_cost_s=flat)
        self.policy = make_policy()
        self.policy.attach(self.board)
        self.cost = restart_cost_s if callable(restart_cost_s) else (lambda _gpus: flat)
        self.jobs = jobs
        self.size_of = size_of
        self.on_end: Callable[[TraceJob], None] | None = None
        self.on_event: ReplayListener | None = None
        self.names = [node.name for node in nodes]
        self.labels: dict[str, int] = {}
        self.entries: list[JobEntry] = []  # of the jobs that were submitted
        self._check_fits()
        self.left = [job.duration_s for job in jobs]  # remaining work
        self.began = [0.0] * len(jobs)
        self.due = [-1.0] * len(jobs)
        self.ends: list[tuple[float, int]] = []
        self.result = ReplayResult(jobs=[ReplayedJob(job=job) for job in jobs], gpus=sum(node.gpus for node in nodes))

    def _submit(self) -> None:
        """The next job joins the waiting ones."""
        board, job = self.board, self.jobs[len(self.entries)]
        entry = JobEntry(
            seq=len(self.entries),
            job_class=board.job_class(
                (board.need_of(job.gpus),), label=self.labels.setdefault(job.virtual_cluster, len(self.labels))
            ),
            submit_s=job.submit_s,
            size_s=job.duration_s if self.size_of is None else self.size_of(job),
            stated_end=None if job.reported_pace is None else with_stated_end(None, job.reported_pace, Epoch(1), 0.0),
        )
        self.entries.append(entry)
        board.add_waiting(entry)

    def _check_fits(self) -> None:
        for gpus in sorted({job.gpus for job in self.jobs}):
            if not self.board.pools[0].fits_ever(self.board.need_of(gpus)):
                job = next(job for job in self.jobs if job.gpus == gpus)
                raise NeverFits(
                    f"job {job.id} (line {job.line}) requests {gpus} GPUs and never fits the fleet of {len(self.board.devices_of_node)} nodes",
                    hint="use a larger fleet, or skip such jobs with --skip-bad",
                )

    def run(self, curve_step_s: float, on_progress: Callable[[int, int], None] | None) -> None:
        """Run until the last job has ended."""
        board, jobs, entries, ends, due, outcomes = (
            self.board,
            self.jobs,
            self.entries,
            self.ends,
            self.due,
            self.result.jobs,
        )
        decide, on_end, on_event = self.policy.decide, self.on_end, self.on_event
        total, ended, reported = len(jobs), 0, 0
        forever = float("inf")
        wake_s, drawn_s = forever, -forever
        while ended < total:
            now_s = jobs[len(entries)].submit_s if len(entries) < total else forever
            while ends and due[ends[0][1]] != ends[0][0]:
                heapq.heappop(ends)  # the job was stopped or moved meanwhile
            if ends and ends[0][0] < now_s:
                now_s = ends[0][0]
            now_s = min(now_s, wake_s)
            if now_s == forever:
                raise NeverFits(
                    f"{len(board.waiting)} jobs wait forever on an idle fleet, the first is {self.jobs[min(board.waiting)].id}"
                )
            while ends and ends[0][0] <= now_s:
                at_s, seq = heapq.heappop(ends)
                if due[seq] == at_s:
                    due[seq] = -1.0
                    if on_end is not None:
                        on_end(jobs[seq])
                    if on_event is not None:
                        on_event(now_s, ReplayEvent.END, jobs[seq], ())
                    board.finish(entries[seq], now_s)
                    outcomes[seq].end_s = now_s
                    outcomes[seq].ran_s = jobs[seq].duration_s  # nodes of this replay have no models
                    ended += 1
            while len(entries) < total and jobs[len(entries)].submit_s <= now_s:
                self._submit()
            again_s = decide(now_s)
            wake_s = forever if again_s is None else again_s
            if board.decisions:
                for decision in board.take_decisions():
                    self._apply(decision, now_s)
            if curve_step_s and now_s - drawn_s >= curve_step_s:
                drawn_s = now_s
                self.result.curve.append((now_s, self.result.gpus - board.free_total, len(board.waiting)))
            if on_progress is not None and ended - reported >= PROGRESS_EVERY:
                reported = ended
                on_progress(ended, total)

    def _apply(self, decision: Decision, now_s: float) -> None:
        entry = decision.entry
        seq = entry.seq
        outcome = self.result.jobs[seq]
        self.result.decisions += 1
        if self.on_event is not None:
            if decision.kind is not DecisionKind.START:
                self.on_event(now_s, ReplayEvent.STOP, outcome.job, ())
            if decision.kind is not DecisionKind.STOP:
                grants = tuple((self.names[node], count) for node, count in decision.places)
                self.on_event(now_s, ReplayEvent.START, outcome.job, grants)
        match decision.kind:
            case DecisionKind.START:
                if outcome.first_start_s < 0.0:
                    outcome.first_start_s = now_s
                outcome.longest_wait_s = max(outcome.longest_wait_s, now_s - entry.waiting_since_s)
                self.began[seq] = now_s
                self._set_due(seq, now_s)
            case DecisionKind.STOP:
                self.left[seq] -= now_s - self.began[seq]
                self._charge(seq, entry)
                self.due[seq] = -1.0
                outcome.preemptions += 1
                self.result.preemptions += 1
            case DecisionKind.MOVE:
                self.left[seq] -= now_s - self.began[seq]
                self._charge(seq, entry)
                self.began[seq] = now_s
                self._set_due(seq, now_s)
                # As for a live job, which is stopped and started again.
                entry.attained_s += now_s - entry.started_s
                entry.started_s = now_s
                self.policy.on_placed(entry, now_s)
                outcome.moves += 1
                self.result.moves += 1

    def _charge(self, seq: int, entry: JobEntry) -> None:
        cost = self.cost(entry.gpus)
        self.left[seq] += cost
        self.result.lost_gpu_s += cost * entry.gpus

    def _set_due(self, seq: int, now_s: float) -> None:
        due = now_s + self.left[seq]
        self.due[seq] = due
        heapq.heappush(self.ends, (due, seq))

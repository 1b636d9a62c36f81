"""The live scheduler: runs the policy on a board that is in step with the records, and turns its decisions into a plan.

The board is the planned state, the records are the actual state. `pending_placements` bridges the two: jobs that the policy has started
while others still save and leave their nodes; they are placed as soon as the nodes are free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from phalanx.core.ids import JobId
from phalanx.core.scheduling.board_builder import ClusterSnapshot
from phalanx.core.scheduling.board_records import Decision, DecisionKind, JobEntry
from phalanx.core.scheduling.board_synchronizer import INFINITE, BoardSynchronizer
from phalanx.core.scheduling.estimates.device_speeds import SpeedSource
from phalanx.core.scheduling.feasibility.cache import FeasibilityCache
from phalanx.core.scheduling.node_demand import NodeDemand, demand_period_s, node_demand
from phalanx.core.scheduling.order_rules import OrderJudge
from phalanx.core.scheduling.outlook.explanations import WaitReasons, explain_wait, planned_stop_of
from phalanx.core.scheduling.policy import Policy
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.scheduling.staging_targets import StagingTarget
from phalanx.core.state.plan import Placement, Plan, PlannedStop, WaitReason
from phalanx.core.work.job import Job

COUNTED_SPEED_MIN: Final = (
    0.05  # of a GPU-second in the fair share: models of one fleet differ by less, and programs may report anything
)


class Scheduler(BoardSynchronizer):
    """One fleet's scheduler.

    Attributes:
        more_due: the last cycle reached its limit of placements, and more are due.
        cached_reasons: cached reasons why classes wait, cleared by each plan.
    """

    def __init__(
        self,
        settings: PolicySettings | None = None,
        *,
        policy: Policy | None = None,
        feasibility: FeasibilityCache | None = None,
    ) -> None:
        super().__init__(settings, policy=policy, feasibility=feasibility)
        self.more_due = False
        self.cached_reasons: dict[tuple[int, int, int], WaitReason] = {}
        self._demand = NodeDemand()
        self._demand_s = -INFINITE

    def plan(self, snapshot: ClusterSnapshot, now_s: float, wall_s: float | None = None) -> Plan:
        """Decide. Cost: proportional to the changes since the last call, plus the waiting classes.

        Args:
            snapshot: the records.
            now_s: seconds of a monotonic clock, for waits and run times.
            wall_s: Unix seconds, as used in the records; equal to `now_s` if None.
        """
        self._set_time(now_s, wall_s)
        if self.stale or self._wall_s >= self._judged_until_s:
            self.rebuild(snapshot, now_s)
        if self._clock_jumped:  # the clock was set: recompute everything that depends on Unix time
            self._clock_jumped = False
            self._rejudge(snapshot)
            self._charges.rebuild(self.board.quotas, snapshot.queue_usage.values(), snapshot.attempts, self._wall_s)
            self._calendar_s = -INFINITE
            self._wake_times = [(-INFINITE, job_id) for job_id in self.ineligible]
        self._check_calendar(snapshot, now_s)
        self._release_parked(snapshot, now_s)
        self._refresh_speeds(snapshot, now_s)
        self._refresh_kept_off(snapshot, now_s)
        quotas = self.board.quotas
        if quotas is not None and quotas.advance(self._wall_s):  # a budget was exhausted, or its next period has begun
            self._wake_s = -INFINITE
        stops: list[PlannedStop] = []
        self.cached_reasons = {}
        decided = now_s >= self._wake_s or bool(self.board.decisions)
        if decided:
            again_s = self.policy.decide(now_s)
            if self.board.quotas is not None and self.board.quotas.has_fair_users:  # `why` names those who go first
                still = (entry.job_class for entry in self.board.waiting.values())
                self.board.quotas.set_waiting({(klass.queue, klass.user) for klass in still})
            self._wake_s = INFINITE if again_s is None else again_s
            stops = self._apply_decisions(snapshot, self.board.take_decisions())
        placements = self._place_due(snapshot, now_s)
        more = self.more_due = len(placements) >= self.settings.placements_max
        wake_s = (
            now_s
            if more
            else min(
                self._wake_s,
                min(self._wake_times[0][0] if self._wake_times else INFINITE, self._calendar_s) - self._wall_offset_s,
            )
        )
        wake_s = min(wake_s, max(now_s, self.speeds.refresh_s))
        if quotas is not None:
            wake_s = min(wake_s, quotas.next_change_s(self._wall_s) - self._wall_offset_s)
        demand = self._update_demand(snapshot, now_s)
        if demand is not None:
            stops += self._send_home(snapshot, now_s)
        if snapshot.node_pools:
            wake_s = min(wake_s, self._demand_s + demand_period_s(len(snapshot.nodes), self.settings.demand_every_s))
        return Plan(
            version=snapshot.version,
            placements=tuple(placements),
            stops=tuple(stops),
            waits=WaitReasons(self, snapshot.jobs),
            wake_s=wake_s,
            decided=decided,
            wanted=() if demand is None else demand.wanted,
            needed=None if demand is None else demand.used,
        )

    # ---------------------------------------------------------------- decisions

    def _apply_decisions(self, snapshot: ClusterSnapshot, decisions: Iterable[Decision]) -> list[PlannedStop]:
        """The policy's decisions: stops for the plan, and jobs that become due."""
        stops: list[PlannedStop] = []
        for decision in decisions:
            job_id = self.job_id_by_seq[decision.entry.seq]
            waiting = self.pending_placements.drop(job_id)  # decided but not yet placed: nothing of it runs
            if decision.kind is not DecisionKind.START and not waiting and job_id in snapshot.attempts:
                source = self._speed_source(snapshot.jobs[job_id], decision)
                stops.append(planned_stop_of(self, job_id, decision, source))
            if decision.kind is not DecisionKind.STOP and decision.entry.places:
                self.pending_placements.add(job_id, decision.entry)
        return stops

    def _speed_source(self, job: Job, decision: Decision) -> str:
        """How the new speed of a moved job is known; empty if its user stated it."""
        if decision.speedup == 1.0 or not decision.places:
            return ""
        estimate = self.speeds.estimate(job)
        kind = self.board.pool_of_node[decision.places[0][0]]
        known = bool(estimate.speeds) and estimate.sources[kind] is not SpeedSource.STATED
        return estimate.source_text(kind) if known else ""

    def _place_due(self, snapshot: ClusterSnapshot, now_s: float) -> list[Placement]:
        """Place the due jobs whose nodes are free by now."""
        if not self.pending_placements:
            return []
        placed = self.pending_placements.place(snapshot, self.fleet_index, self.settings.placements_max)
        for entry, placement in placed:
            entry.attained_s = self._attained_s(snapshot.jobs[placement.job_id])
            entry.started_s = entry.placed_s = now_s
            self.policy.on_placed(entry, now_s)
        return [
            replace(placement, speed=self._observed_speed(snapshot.jobs[placement.job_id], entry))
            for entry, placement in placed
        ]

    def _observed_speed(self, job: Job, entry: JobEntry) -> float:
        """Its speed where it is placed, if that was observed; else 1. A queue must not save its share by tables that its users write."""
        estimate = self.speeds.estimate(job)
        if not (estimate.speeds and entry.places):
            return 1.0
        kind = self.board.kind_of(entry)
        observed = {estimate.sources[kind], estimate.sources[estimate.speeds.index(1.0)]} == {SpeedSource.OBSERVED}
        return max(estimate.speeds[kind], COUNTED_SPEED_MIN) if observed else 1.0

    def record_rejection(self, job_id: JobId, now_s: float) -> None:
        """The newest state rejected the placement: retry after further changes, and give up after a while."""
        entry = self.entries.get(job_id)
        if entry is None or entry.started_s < 0.0:
            return
        if not self.pending_placements.record_rejection(job_id, entry, now_s):
            self.board.undo_start(entry, now_s)
            self._wake_s = -INFINITE

    def _send_home(self, snapshot: ClusterSnapshot, now_s: float) -> list[PlannedStop]:
        """Moves of jobs from nodes that cost money to free own ones."""
        if self.order_rules is None or not self._rented.used_last:
            return []
        why = self.order_rules.send_home(self, snapshot, now_s, self._wall_s)
        stops = self._apply_decisions(snapshot, self.board.take_decisions()) if why else []
        return [replace(stop, why=f"{stop.why}: {why[stop.job_id]}") for stop in stops]

    # ---------------------------------------------------------------- demand and reasons

    def _update_demand(self, snapshot: ClusterSnapshot, now_s: float) -> NodeDemand | None:
        """What waiting jobs need of pools; None if it was computed a moment ago."""
        if (
            self._demand_s
            <= now_s
            < self._demand_s + demand_period_s(len(snapshot.nodes), self.settings.demand_every_s)
        ):
            return None
        self._demand_s = now_s
        waiting = WaitReasons(self, snapshot.jobs)
        self._demand = (
            node_demand(
                snapshot,
                [snapshot.jobs[job_id] for job_id in waiting],
                self._blocked_by,
                self._wall_s,
                self._judge(snapshot, now_s),
            )
            if snapshot.node_pools
            else NodeDemand()
        )
        return self._demand

    def _judge(self, snapshot: ClusterSnapshot, now_s: float) -> OrderJudge | None:
        rules = self.order_rules
        return None if rules is None else rules.judge(self, snapshot, now_s, self._wall_s)

    def wait_reason(self, job: Job) -> WaitReason | None:
        """Why the pending job waits now; None if it does not."""
        why, text = self._blocked_by(job), self._demand.texts.get(job.id)
        return why if why is None or text is None else replace(why, detail=f"{why.detail}; {text}")

    def _blocked_by(self, job: Job) -> WaitReason | None:
        parked = self.ineligible.get(job.id)
        if parked is not None:
            return parked
        entry = self.entries.get(job.id)
        return None if entry is None else explain_wait(self, job, entry)

    # ---------------------------------------------------------------- staging and trials

    def staging_targets(self, snapshot: ClusterSnapshot, now_s: float) -> list[StagingTarget]:
        """Waiting jobs whose data should be copied before they hold GPUs, and where. `snapshot`: as of the last `update`."""
        if self.stale:
            self.rebuild(snapshot, now_s)
        return self._staging.choose(self.board, self.fleet_index, self.entries)

    def copy_for_trial(self) -> Scheduler:
        """A scheduler with a copy of the policy and an empty board: for what-if trials."""
        other = Scheduler(self.settings, policy=self.policy.copy_for_trial())
        other._classes, other._history_learned = self._classes.copy(), True
        other.speeds.set_facts(self.speeds.facts)
        return other

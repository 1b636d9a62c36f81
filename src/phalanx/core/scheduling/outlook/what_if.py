"""What-if trials: one cycle on a copy of the state. Nothing of it is carried out.

Used by dry runs, forecasts and counterfactuals. A trial decides as the live scheduler does, with the same statistics, but without its
transient state: starts that wait for nodes, and the time of the last round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from phalanx.core.fleet.node import Node
from phalanx.core.ids import JobId, NodeId
from phalanx.core.resources import add_extras, extras_of
from phalanx.core.scheduling.order_rules import OrderRules
from phalanx.core.scheduling.outlook.explanations import WaitReasons
from phalanx.core.scheduling.scheduler import Scheduler
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.state.plan import Plan
from phalanx.core.state.snapshot import EMPTY_USAGE, Snapshot, Usage
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Queue

OTHER_PENDING_MAX: Final = (
    300  # other waiting jobs that are included, first in line; later ones come after the job anyway
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The result. The scheduler's board is in the state after the plan."""

    snapshot: Snapshot
    scheduler: Scheduler
    plan: Plan

    def starts(self, job_id: JobId) -> bool:
        """Whether the job starts: at once, or as soon as the jobs that it replaces have saved and stopped."""
        entry = self.scheduler.entries.get(job_id)
        return entry is not None and entry.started_s >= 0.0

    def release(self) -> None:
        """Break the reference cycles of a finished trial, so that it is freed at once and not by a rare run of the garbage collector."""
        self.scheduler.policy.release()


def what_if(snapshot: Snapshot, template: Scheduler, rules: OrderRules[Scheduler] | None = None) -> Trial:
    """One cycle on this state by a scheduler of the same policy and statistics; `rules`: on nodes that cost money. Cost: a new board."""
    scheduler = template.copy_for_trial()
    scheduler.order_rules = rules
    return Trial(snapshot=snapshot, scheduler=scheduler, plan=scheduler.plan(snapshot, snapshot.now_s))


def trim_snapshot(snapshot: Snapshot, job: Job, *, others_max: int = OTHER_PENDING_MAX) -> Snapshot:
    """The state with all running jobs, the job itself, and of the other waiting jobs only the first in line (priority, then submit time).

    The job need not be in `snapshot`: that of a dry run is not.
    """
    priority = {queue.id: queue.priority for queue in snapshot.queues.values()}
    waiting = [
        one
        for one in snapshot.jobs.values()
        if one.id not in snapshot.attempts and one.id != job.id and not one.state.terminal
    ]
    if len(waiting) > others_max:
        waiting.sort(key=lambda one: (-one.spec.priority - priority.get(one.queue, 0), one.submit_s, one.seq))
        waiting = waiting[:others_max]
    jobs = {job_id: snapshot.jobs[job_id] for job_id in snapshot.attempts if job_id in snapshot.jobs}
    jobs.update((one.id, one) for one in waiting)
    jobs[job.id] = job
    return replace(snapshot, jobs=jobs, pending=())


def modified_snapshot(
    snapshot: Snapshot,
    *,
    job: Job | None = None,
    gone: Iterable[JobId] = (),
    nodes: Iterable[Node] = (),
    queues: Iterable[Queue] = (),
) -> Snapshot:
    """The state with one job, some nodes or queues replaced, and without the jobs in `gone`."""
    removed = frozenset(gone)
    jobs = snapshot.jobs if job is None else {**snapshot.jobs, job.id: job}
    found = replace(
        snapshot,
        jobs=jobs,
        nodes={**snapshot.nodes, **{node.id: node for node in nodes}},
        queues={**snapshot.queues, **{queue.id: queue for queue in queues}},
    )
    if not removed:
        return found
    return replace(
        found,
        jobs={job_id: one for job_id, one in found.jobs.items() if job_id not in removed},
        attempts={job_id: attempt for job_id, attempt in snapshot.attempts.items() if job_id not in removed},
        usage=_usage_without(snapshot, removed),
        licence_usage=_seats_without(snapshot, removed),
    )


def _seats_without(snapshot: Snapshot, removed: Collection[JobId]) -> Mapping[str, int]:
    freed = [
        pair
        for job_id in removed
        if (attempt := snapshot.attempts.get(job_id)) is not None
        for pair in attempt.allocation.licences
    ]
    return (
        dict(add_extras(extras_of(snapshot.licence_usage.items()), extras_of(freed), -1))
        if freed
        else snapshot.licence_usage
    )


def _usage_without(snapshot: Snapshot, removed: Iterable[JobId]) -> Mapping[NodeId, Usage]:
    usage = dict(snapshot.usage)
    for job_id in removed:
        attempt = snapshot.attempts.get(job_id)
        for grant in () if attempt is None else attempt.allocation.grants:
            usage[grant.node_id] = usage.get(grant.node_id, EMPTY_USAGE).minus(grant)
    return usage


def plan_snapshot(snapshot: Snapshot, policy: PolicySettings) -> Plan:
    """The plan for this snapshot: placements in the order decided, and a reason for every other pending job.

    Equal snapshots give equal plans. Cost: a new board, linear in nodes and jobs.
    """
    whole = snapshot if snapshot.jobs else replace(snapshot, jobs={job.id: job for job in snapshot.pending})
    scheduler = Scheduler(policy)
    plan = scheduler.plan(whole, snapshot.now_s)
    return replace(plan, waits=dict(WaitReasons(scheduler, whole.jobs)))

"""A cycle tried out on a copy: what would be started if the state were this. Nothing of it is carried out.

Dry runs, forecasts and counterfactuals ask it. It decides as the live scheduler does and knows what that has learned, but for what only
a running one has: claims half cleared, and when it last made room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from phalanx.core.fleet.node import Node
from phalanx.core.ids import JobId, NodeId
from phalanx.core.scheduling.scheduler import Scheduler
from phalanx.core.state.plan import Plan
from phalanx.core.state.snapshot import EMPTY_USAGE, Snapshot, Usage
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Queue

PENDING_MAX: Final = (
    300  # others that wait and are tried beside the job: those first in line; the rest come after it anyway
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of it. The scheduler's board is as after the plan."""

    seen: Snapshot
    scheduler: Scheduler
    plan: Plan

    def starts(self, job_id: JobId) -> bool:
        """Whether the job is started: at once, or as soon as those it is given the place of have saved and left."""
        entry = self.scheduler.entries.get(job_id)
        return entry is not None and entry.since_s >= 0.0

    def over(self) -> None:
        """Nobody asks it any more: take apart what refers to itself, so that it goes at once and not with a rare pass of the collector."""
        for entry in self.scheduler.entries.values():
            entry.group = None
        for group in self.scheduler.table.groups():
            group.active.clear()
            group.burst = None


def tried(seen: Snapshot, like: Scheduler) -> Trial:
    """One cycle on this state by a scheduler of the same policy and history. Cost: the board is made anew."""
    scheduler = like.blank()
    return Trial(seen=seen, scheduler=scheduler, plan=scheduler.plan(seen, seen.now_s))


def near(seen: Snapshot, job: Job, *, others_max: int = PENDING_MAX) -> Snapshot:
    """The state with all that runs, the job itself, and of those that wait only the first in line (priority, then submit time).

    The job need not be in `seen`: a dry run's is not.
    """
    priority = {queue.id: queue.priority for queue in seen.queues.values()}
    waiting = [
        one for one in seen.jobs.values() if one.id not in seen.attempts and one.id != job.id and not one.state.terminal
    ]
    if len(waiting) > others_max:
        waiting.sort(key=lambda one: (-one.spec.priority - priority.get(one.queue, 0), one.submit_s, one.seq))
        waiting = waiting[:others_max]
    jobs = {job_id: seen.jobs[job_id] for job_id in seen.attempts if job_id in seen.jobs}
    jobs.update((one.id, one) for one in waiting)
    jobs[job.id] = job
    return replace(seen, jobs=jobs, pending=())


def changed(
    seen: Snapshot,
    *,
    job: Job | None = None,
    gone: Iterable[JobId] = (),
    nodes: Iterable[Node] = (),
    queues: Iterable[Queue] = (),
) -> Snapshot:
    """The state with one job, some nodes or queues as given, and without the jobs that are `gone`."""
    leaving = frozenset(gone)
    jobs = seen.jobs if job is None else {**seen.jobs, job.id: job}
    found = replace(
        seen, jobs=jobs, nodes={**seen.nodes, **{node.id: node for node in nodes}}, queues={**seen.queues, **{queue.id: queue for queue in queues}}
    )  # fmt: skip
    if not leaving:
        return found
    return replace(
        found,
        jobs={job_id: one for job_id, one in found.jobs.items() if job_id not in leaving},
        attempts={job_id: attempt for job_id, attempt in seen.attempts.items() if job_id not in leaving},
        usage=_freed(seen, leaving),
    )


def _freed(seen: Snapshot, leaving: Iterable[JobId]) -> Mapping[NodeId, Usage]:
    usage = dict(seen.usage)
    for job_id in leaving:
        attempt = seen.attempts.get(job_id)
        for grant in () if attempt is None else attempt.allocation.grants:
            held = usage.get(grant.node_id, EMPTY_USAGE)
            usage[grant.node_id] = Usage(
                devices=held.devices - set(grant.devices), cpus=held.cpus - grant.cpus, memory_bytes=held.memory_bytes - grant.memory_bytes
            )  # fmt: skip
    return usage

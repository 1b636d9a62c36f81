"""Views of jobs and nodes for a caller: committed records from the store, joined with live readings from memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

from phalanx.api.auth.authenticator import may_see_all_of
from phalanx.api.services import HeadServices
from phalanx.api.views.job_records import job_view
from phalanx.api.views.node_records import node_view
from phalanx.controller.maintenance_notices import latest_end_s
from phalanx.core.access.caller import Caller
from phalanx.core.fleet.node import Node
from phalanx.core.ids import Epoch, JobId, NodeId
from phalanx.core.state.records import NODE_POOLS, POOL_NODES
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.dependency import DependencyKind
from phalanx.core.work.job import Job
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.states import AttemptState, JobState
from phalanx.ports.logs import stream_key
from phalanx.ports.store import JobFilter
from phalanx.wire.api.jobs import JobView, Progress
from phalanx.wire.api.nodes import NodeView, OrderedNodeView
from phalanx.wire.supervisor import StagingSample

RUNNING_MAX = 5000  # more jobs than run at once on the largest fleet of DESIGN 6
FIRST_EPOCH = Epoch(1)  # of a job that copies data for others: it has one attempt
_EDGE_BYTES = 1 << 14  # read at both ends of a stream: the plan is at its start, the newest steps at its end


def live_job_view(
    services: HeadServices, caller: Caller, job: Job, attempts: Sequence[Attempt] | None = None
) -> JobView:
    """Return the view of one job for one caller.

    Reads the store and, after a restart of the head, both ends of a log: do not call it in bulk on the event loop.
    """
    known = services.store.attempts(job.id) if attempts is None and job.epoch else attempts or ()
    return _view(services, caller, job, known[-1] if known else None, services.store.nodes)


def live_job_views(services: HeadServices, caller: Caller, jobs: Sequence[Job]) -> list[JobView]:
    """Return the views of many jobs; at most two reads of the store, however many jobs there are."""
    newest = services.store.newest_attempts([job.id for job in jobs if job.epoch])
    nodes = cache(services.store.nodes)
    return [_view(services, caller, job, newest.get(job.id), nodes) for job in jobs]


def _view(
    services: HeadServices, caller: Caller, job: Job, attempt: Attempt | None, nodes: Callable[[], list[Node]]
) -> JobView:
    return job_view(
        job,
        attempt=attempt,
        waiting=services.controller.wait_reasons.get(job.id),
        progress=_live_progress(services, job, attempt),
        utilization=services.telemetry.utilization(job.id),
        show_all=may_see_all_of(caller, job),
        output_root=services.output_root,
        virtual=_on_virtual(services, attempt, nodes),
        waste=services.waste().alarms.get(job.id),
        staging=live_staging(services, job, attempt),
    )


def live_staging(services: HeadServices, job: Job, attempt: Attempt | None) -> dict[NodeId, StagingSample]:
    """Return how far the nodes are that copy the job's data, before it holds GPUs or as part of its start; empty once its ranks are started."""
    copies = [one.job_id for one in job.unmet_dependencies if one.kind is DependencyKind.DATA]
    if copies and job.state is JobState.PENDING:
        return services.telemetry.staging(job.staged_on, copies[0], FIRST_EPOCH)
    if not job.spec.stages_data or attempt is None or attempt.state is not AttemptState.PLACED:
        return {}
    nodes = [grant.node_id for grant in attempt.allocation.grants]
    return services.telemetry.staging(nodes, job.id, attempt.epoch)


def _live_progress(services: HeadServices, job: Job, attempt: Attempt | None) -> Progress | None:
    """Return the progress of the live attempt: until its first step, the step it resumed from, never that of the attempt before."""
    progress = progress_of(services, job, attempt)
    if attempt is None or not attempt.holds_allocation:
        return progress
    if progress is not None and (progress.epoch, progress.generation) >= (attempt.epoch, attempt.generation):
        return progress
    if attempt.resume_from is None:
        return None
    return Progress(
        epoch=attempt.epoch,
        generation=attempt.generation,
        step=attempt.resume_from.step,
        at_s=attempt.generation_s,
        steps_total=services.telemetry.steps_total(job.id),
        checkpoint_step=attempt.resume_from.step,
    )


def progress_of(services: HeadServices, job: Job, attempt: Attempt | None) -> Progress | None:
    """Return the job's progress; if this head has no reports of its newest attempt yet, from both ends of the stored step stream."""
    live = services.telemetry.progress(job.id)
    if live is not None or attempt is None:
        return live
    key = stream_key(attempt, "steps-0")
    end = services.logs.end(key)
    if end == 0:
        return None
    services.telemetry.put_steps(job.id, attempt.epoch, 0, services.logs.read(key, 0, _EDGE_BYTES), replayed=True)
    if end > _EDGE_BYTES:
        tail = services.logs.read(key, max(_EDGE_BYTES, end - _EDGE_BYTES), _EDGE_BYTES)
        # The newline ends the line that the first part left incomplete. The partial line at the start of the tail is ignored.
        services.telemetry.put_steps(job.id, attempt.epoch, 0, b"\n" + tail, replayed=True)
    return services.telemetry.progress(job.id)


def live_attempts(services: HeadServices) -> list[Attempt]:
    """Return all attempts that hold an allocation, by job in submit order. Two reads of the store."""
    running = services.store.jobs(JobFilter(states=frozenset({JobState.RUNNING}), limit=RUNNING_MAX))
    newest = services.store.newest_attempts([job.id for job in running])
    return [
        attempt for job in reversed(running) if (attempt := newest.get(job.id)) is not None and attempt.holds_allocation
    ]


def live_node_views(services: HeadServices, nodes: Iterable[Node], attempts: Iterable[Attempt]) -> list[NodeView]:
    """Return views of nodes with the attempts and reservations on them."""
    on: dict[NodeId, list[Attempt]] = {}
    for attempt in attempts:
        for grant in attempt.allocation.grants:
            on.setdefault(grant.node_id, []).append(attempt)
    reserved: dict[NodeId, list[Reservation]] = {}
    for reservation in sorted(services.store.reservations(), key=lambda one: (one.start_s, one.id)):
        for node_id in reservation.nodes:
            reserved.setdefault(node_id, []).append(reservation)
    held = {attempt.job_id for node_id in reserved for attempt in on.get(node_id, ())}
    jobs = {job_id: job for job_id in held if (job := services.store.job(job_id)) is not None}
    pooled = {member.id: member for member in services.store.records(POOL_NODES)}
    prices = {pool.id: pool.price_per_h for pool in services.store.records(NODE_POOLS)} if pooled else {}
    return [
        node_view(
            node,
            on.get(node.id, ()),
            services.telemetry.node_samples(node.id),
            reserved.get(node.id, ()),
            member := pooled.get(node.id),
            None if member is None else prices.get(member.pool),
            {one.id: _stopped(jobs, on.get(node.id, ()), one) for one in reserved.get(node.id, ())},
        )
        for node in nodes
    ]


def _stopped(jobs: Mapping[JobId, Job], attempts: Sequence[Attempt], reservation: Reservation) -> list[JobId]:
    """The jobs among those on a node that the start of a reservation will stop."""
    return [
        attempt.job_id
        for attempt in attempts
        if (job := jobs.get(attempt.job_id)) is not None
        and reservation.interrupts(job.user, job.queue, latest_end_s(job, attempt))
    ]


def ordered_node_views(services: HeadServices, nodes: Iterable[Node]) -> list[OrderedNodeView]:
    """Return views of the nodes that pools have ordered and that are not among `nodes`, by id."""
    known = {node.id for node in nodes}
    members = [member for member in services.store.records(POOL_NODES) if member.id not in known]
    pools = {pool.id: pool for pool in services.store.records(NODE_POOLS)} if members else {}
    return [
        OrderedNodeView(
            id=member.id,
            state=member.state,
            pool=pool.id,
            provider=pool.provider,
            node=pool.template.text,
            model=pool.template.devices[0].model if pool.template.devices else "",
            gpus=len(pool.template.devices),
            price_per_h=pool.price_per_h,
            requested_s=member.requested_s,
            changed_s=member.changed_s,
            why=member.reasons,
        )
        for member in sorted(members, key=lambda member: member.id)
        if (pool := pools.get(member.pool)) is not None
    ]


def _on_virtual(services: HeadServices, attempt: Attempt | None, nodes: Callable[[], list[Node]]) -> bool:
    if attempt is None or not attempt.allocation.grants:
        return False
    first = attempt.allocation.grants[0].node_id
    samples = services.telemetry.node_samples(first)
    if samples is not None and samples.devices:
        return samples.devices[0].virtual
    return any(node.virtual for node in nodes() if node.id == first)

"""Queues: their quotas, usage and waiting jobs; and replacing the whole tree at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import json_response, read_body, read_record
from phalanx.api.http.paging import AfterKey, key_page
from phalanx.api.http.routing import MediaType, RouteTable
from phalanx.api.routes.access.people import check_name
from phalanx.api.runtime import run_in_thread, runtime_of
from phalanx.api.services import HeadServices
from phalanx.core.errors import BadFile, BadRequest, Conflict, NotFound
from phalanx.core.fleet.capacity import nodes_resources
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import JobId, QueueId
from phalanx.core.resources import Extras
from phalanx.core.scheduling.feasibility.checker import FeasibilityChecker, newly_impossible
from phalanx.core.scheduling.quota import FairShareTree, charge_from_start
from phalanx.core.state.events import ChangeQueue, ImpossibleJob, PutQueues
from phalanx.core.state.plan import WaitReason
from phalanx.core.state.records import QUEUE_USAGE
from phalanx.core.state.snapshot import Snapshot
from phalanx.core.work.burst_rule import parse_burst_rule
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Amounts, Queue, QueueUsage, period_start_s
from phalanx.core.work.quotas.queue_validation import check_queue_tree
from phalanx.core.work.share import gpus_of
from phalanx.core.work.states import WaitReasonCode
from phalanx.core.work.usage.waste_terms import IdlePolicy, WasteKind, alarms_text
from phalanx.core.work.users import Action
from phalanx.user_files.queue_file import QUEUE_FILE, parse_queue_file
from phalanx.wire.api.jobs import ImpossibleJobView
from phalanx.wire.api.queues import (
    IdleSettings,
    QueueBody,
    QueueChange,
    QueueList,
    QueueReply,
    QueuesApplied,
    QueuesBody,
    QueueSetting,
    QueueSettings,
    QueueView,
    QueueWait,
    UserShare,
)

DEFAULT_QUEUE: Final = "default"  # the queue of jobs that name none (api.submit); it is never removed
IMPOSSIBLE_MAX: Final = 100  # jobs named in one answer
_USERS_MAX: Final = 20  # listed per queue, those who used most
_REASONS_MAX: Final = 5  # listed per queue; `phalanx ps` shows all

routes = RouteTable()


@routes.get("/v1/queues", Action.VIEW, reply=QueueList)
async def list_queues(request: Request, after: AfterKey = "") -> Response:
    """List all queues with their quotas, usage and waiting jobs."""
    services = runtime_of(request).services
    views = await run_in_thread(read_queues, services)
    page, further = key_page(views, after, lambda view: view.id, services.limits.answer_bytes)
    return json_response(QueueList(queues=page, next=further))


@routes.get("/v1/queues/{queue_id}", Action.VIEW, reply=QueueReply)
async def show_queue(request: Request, queue_id: QueueId) -> Response:
    """Show one queue."""
    views = await run_in_thread(read_queues, runtime_of(request).services, queue_id)
    if not views:
        raise NotFound(f"no queue {queue_id!r}", hint=Hint(HintCode.LIST_QUEUES))
    return json_response(QueueReply(queue=views[0]))


@routes.put("/v1/queues/{queue_id}", Action.OPERATE, body=QueueBody, reply=QueueReply)
async def put_queue(request: Request, queue_id: QueueId) -> Response:
    """Add or change a queue. Absent fields of an existing queue stay unchanged."""
    runtime = runtime_of(request)
    body = await read_record(request, QueueBody, runtime.services.limits.body_bytes)
    known = any(queue.id == queue_id for queue in await run_in_thread(runtime.services.store.queues))
    command = ChangeQueue(
        queue_id=queue_id if known else QueueId(check_name(queue_id, "queue")), priority=body.priority, open=body.open
    )
    await runtime.request(command)
    (view,) = await run_in_thread(read_queues, runtime.services, queue_id)
    return json_response(QueueReply(queue=view))


@routes.put("/v1/queues", Action.OPERATE, body=QueuesBody, reply=QueuesApplied)
async def put_queues(request: Request) -> Response:
    """Put the named queues, all or none. Absent fields take their defaults, except that `open` stays. Returns the changes."""
    runtime = runtime_of(request)
    body = await read_record(request, QueuesBody, runtime.services.limits.body_bytes)
    known = {queue.id: queue for queue in await run_in_thread(runtime.services.store.queues)}
    wanted = _wanted(body, known)
    remove = tuple(sorted(set(known) - {queue.id for queue in wanted} - {DEFAULT_QUEUE})) if body.prune else ()
    applied = _difference(known, wanted, remove)
    impossible: Sequence[ImpossibleJob] = ()
    if body.dry_run:
        after = {**known, **{queue.id: queue for queue in wanted}}
        after = {queue_id: queue for queue_id, queue in after.items() if queue_id not in remove}
        check_queue_tree(after)
        await run_in_thread(_reject_removal_with_jobs, runtime.services, remove)
        found = await runtime.controller_futures.result_of(runtime.services.controller.read_snapshot())
        impossible = await run_in_thread(_impossible_with, found.snapshot, after)
    elif applied.added or applied.changed or applied.removed:
        as_open = frozenset(facts.id for facts in body.queues if facts.open is None)
        impossible = await runtime.request(PutQueues(queues=wanted, remove=remove, keep_open_state=as_open))
    views, more = impossible_views(impossible)
    return json_response(msgspec.structs.replace(applied, impossible=views, impossible_more=more))


@routes.post("/v1/queues/parse", Action.OPERATE, body=MediaType.TEXT, reply=QueuesBody, transient=True)
async def parse_queues(request: Request) -> Response:
    """Turn a queue file (YAML) into the body of `PUT /v1/queues`; nothing changes. Errors name the line."""
    body = await read_body(request, QUEUE_FILE.bytes_max)
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadFile(f"queues:1: not UTF-8 at byte {error.start}", hint="save it as UTF-8") from None
    queues = await run_in_thread(partial(parse_queue_file, text, path="line"))
    return json_response(QueuesBody(queues=queues))


def impossible_views(jobs: Sequence[ImpossibleJob]) -> tuple[list[ImpossibleJobView], int]:
    """Return the first of the jobs, and the number of the others."""
    views = [ImpossibleJobView(id=one.job_id, why=one.why) for one in jobs[:IMPOSSIBLE_MAX]]
    return views, len(jobs) - len(views)


def _impossible_with(snapshot: Snapshot, queues: Mapping[QueueId, Queue]) -> tuple[ImpossibleJob, ...]:
    """The waiting jobs that these queues would make impossible; for a dry run."""
    waiting = [job for job in snapshot.jobs.values() if not job.state.terminal and job.id not in snapshot.attempts]
    before = FeasibilityChecker(snapshot, snapshot.now_s)
    after = FeasibilityChecker(replace(snapshot, queues=queues), snapshot.now_s)
    found = newly_impossible(sorted(waiting, key=lambda job: job.seq), before, after)
    return tuple(ImpossibleJob(job_id=job.id, why=outlook.detail) for job, outlook in found)


def _wanted(body: QueuesBody, known: Mapping[QueueId, Queue]) -> tuple[Queue, ...]:
    found: dict[QueueId, Queue] = {}
    for facts in body.queues:
        if facts.id in found:
            raise BadRequest(f"queue {facts.id} is listed twice", hint="names must be unique in the whole tree")
        check_name(facts.id, "queue")
        before = known.get(facts.id)
        is_open = facts.open if facts.open is not None else before is None or before.open
        found[facts.id] = Queue(
            id=facts.id,
            priority=facts.priority,
            open=is_open,
            parent=facts.parent,
            quota_gpus=facts.quota_gpus,
            borrow_gpus=facts.borrow_gpus,
            lend_gpus=facts.lend_gpus,
            weight=facts.weight,
            gpus_per_user=facts.gpus_per_user,
            jobs_per_user=facts.jobs_per_user,
            other_quotas=_amounts(facts.other_quotas),
            other_borrow=_amounts(facts.other_borrow),
            other_lend=_amounts(facts.other_lend),
            other_per_user=_amounts(facts.other_per_user),
            budget_gpu_h=facts.budget_gpu_h,
            budget_period_s=facts.budget_period_s,
            idle=_idle_policy(facts.idle),
            alarms=tuple(sorted(facts.alarms.items())),
            burst=None if facts.burst is None else parse_burst_rule(facts.burst),
            min_stay_s=facts.min_stay_s,
            fair_users=facts.fair_users,
            half_life_s=facts.half_life_s,
        )
    return tuple(found.values())


def queue_settings(queue: Queue) -> QueueSettings:
    """Return all settings of a queue, as `PUT /v1/queues` takes them."""
    names = (part.name for part in fields(Queue) if part.name not in ("idle", "alarms"))
    plain = msgspec.convert({name: _setting(queue, name) for name in names}, QueueSettings)
    return msgspec.structs.replace(plain, idle=_idle_settings(queue.idle), alarms=dict(queue.alarms))


def _difference(known: Mapping[QueueId, Queue], wanted: Iterable[Queue], remove: Iterable[QueueId]) -> QueuesApplied:
    added: list[QueueId] = []
    changed: list[QueueChange] = []
    unchanged = 0
    for queue in wanted:
        before = known.get(queue.id)
        if before is None:
            added.append(queue.id)
        elif before == queue:
            unchanged += 1
        else:
            names = [part.name for part in fields(Queue) if getattr(before, part.name) != getattr(queue, part.name)]
            changed.append(
                QueueChange(
                    id=queue.id,
                    before={name: _setting(before, name) for name in names},
                    after={name: _setting(queue, name) for name in names},
                )
            )
    return QueuesApplied(added=added, changed=changed, removed=list(remove), unchanged=unchanged)


def _amounts(given: Mapping[str, int]) -> Amounts:
    return tuple(sorted((name.strip().lower(), amount) for name, amount in given.items()))


def _idle_policy(given: IdleSettings | None) -> IdlePolicy | None:
    if given is None:
        return None
    states = tuple(kind for kind in WasteKind if kind in given.states)
    return IdlePolicy(
        action=given.action, after_s=given.after_s, grace_s=given.grace_s, states=states, exempt=given.exempt.strip()
    )


def _idle_settings(policy: IdlePolicy | None) -> IdleSettings | None:
    if policy is None:
        return None
    return IdleSettings(
        action=policy.action,
        after_s=policy.after_s,
        grace_s=policy.grace_s,
        states=policy.states,
        exempt=policy.exempt,
    )


def _setting(queue: Queue, name: str) -> QueueSetting:
    if name == "idle":
        return None if queue.idle is None else queue.idle.text
    if name == "alarms":
        return alarms_text(queue.alarms) or None
    if name == "burst":
        return None if queue.burst is None else str(queue.burst)
    value: QueueSetting | Amounts = getattr(queue, name)
    return dict(value) if isinstance(value, tuple) else value


def _reject_removal_with_jobs(services: HeadServices, remove: tuple[QueueId, ...]) -> None:
    """Refuse to remove queues with jobs, as the controller would; for a dry run."""
    active = {
        *(job.queue for job in services.controller.pending_jobs()),
        *(job.queue for job, _ in services.controller.live_attempts()),
    }
    with_jobs = sorted(active & set(remove))
    if with_jobs:
        raise Conflict(
            f"queue {with_jobs[0]} still has waiting or running jobs",
            hint=Hint(HintCode.LIST_QUEUE_JOBS, queue=with_jobs[0]),
        )


# ---- figures --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _JobCounts:
    """The jobs of one queue, without those of its child queues. `first`: the detail of the first job with each reason."""

    running: int = 0
    pending: int = 0
    pending_milli: int = 0
    jobs: Counter[WaitReasonCode] = field(default_factory=Counter)
    milli: Counter[WaitReasonCode] = field(default_factory=Counter)
    first: dict[WaitReasonCode, str] = field(default_factory=dict)


def read_queues(services: HeadServices, only: QueueId | None = None) -> list[QueueView]:
    """Return the current figures of every queue, by id; with `only` those of one queue, or nothing if it does not exist.

    The quota tree always counts the running jobs of all queues, since queues lend to each other. Cost: live jobs + queues.
    """
    now_s = services.clock.now_s()
    queues = services.store.queues()
    nodes = {node.id: node for node in services.controller.fleet_nodes() if node.schedulable}
    free_milli = nodes_resources(nodes.values(), healthy=True).milli
    tree = FairShareTree(queues, services.controller.fleet_capacity(), services.store.records(QUEUE_USAGE), now_s)
    known = {queue.id for queue in queues}
    running: dict[QueueId, list[tuple[float, Extras]]] = {}
    counts = {queue.id: _JobCounts() for queue in queues if only in (None, queue.id)}
    for job, attempt in services.controller.live_attempts():
        free_milli -= sum(grant.milli for grant in attempt.allocation.grants if grant.node_id in nodes)
        if job.queue in known:
            number, held = tree.job_node(job.queue), attempt.allocation.resources
            tree.add_running(number, job.user, held)
            charge_from_start(tree, number, attempt, now_s, job.user)
            other = held.besides_gpus()
            # A queue with others below it is on the path twice: with its own jobs, and with all.
            for name in {tree.ids[node] for node in tree.paths[number]} if other else ():
                running.setdefault(name, []).append((attempt.placed_s, other))
        if job.queue in counts:
            counts[job.queue].running += 1
    tree.advance(now_s)
    waits = services.controller.wait_reasons
    for job in services.controller.pending_jobs():
        if job.queue in counts:
            _count_waiting(counts[job.queue], job, waits)
    spent = {record.queue: record for record in services.store.records(QUEUE_USAGE)}
    return [
        _view(
            queue,
            tree,
            counts[queue.id],
            _other_s(queue, spent.get(queue.id), running.get(queue.id, ()), now_s),
            max(0, free_milli),
        )
        for queue in queues
        if queue.id in counts
    ]


def _other_s(
    queue: Queue, spent: QueueUsage | None, running: Iterable[tuple[float, Extras]], now_s: float
) -> dict[str, float]:
    """Amount-seconds of this period by ended attempts, and by those that run since the given times."""
    begun_s = period_start_s(queue, now_s)
    found = dict(spent.other_s) if spent is not None and spent.period_s == begun_s else {}
    for placed_s, amounts in running:
        for name, amount in amounts:
            found[name] = found.get(name, 0.0) + amount * max(0.0, now_s - max(placed_s, begun_s))
    return dict(sorted(found.items()))


def _count_waiting(counts: _JobCounts, job: Job, waits: Mapping[JobId, WaitReason]) -> None:
    wait = waits.get(job.id)
    # Only before its first attempt does the head write the job's own detail. Later the detail may quote the job's program.
    reason, detail = (wait.reason, wait.detail) if wait is not None else (job.reason, "" if job.epoch else job.detail)
    milli = job.spec.role.milli
    counts.pending += 1
    counts.pending_milli += milli
    counts.jobs[reason] += 1
    counts.milli[reason] += milli
    counts.first.setdefault(reason, detail)


def _view(
    queue: Queue, tree: FairShareTree, counts: _JobCounts, other_s: dict[str, float], free_milli: int
) -> QueueView:
    """Return the figures of a queue. `free_milli`: of the nodes that take work, thousandths of GPUs that no job holds."""
    whole = tree.subtree_node(queue.id)
    idle = max(0, tree.pool[whole] - tree.used[whole])
    waiting = [
        QueueWait(reason=reason, jobs=jobs, gpus=gpus_of(counts.milli[reason]), detail=counts.first[reason])
        for reason, jobs in sorted(counts.jobs.items(), key=lambda item: (-item[1], item[0]))
    ]
    return QueueView(
        id=queue.id,
        priority=queue.priority,
        open=queue.open,
        pending=counts.pending,
        running=counts.running,
        parent=queue.parent,
        quota_gpus=queue.quota_gpus,
        borrow_gpus=queue.borrow_gpus,
        lend_gpus=queue.lend_gpus,
        weight=queue.weight,
        gpus_per_user=queue.gpus_per_user,
        jobs_per_user=queue.jobs_per_user,
        other_quotas=dict(queue.other_quotas),
        other_borrow=dict(queue.other_borrow),
        other_lend=dict(queue.other_lend),
        other_per_user=dict(queue.other_per_user),
        other_used={one.resource: one.held[whole] for one in tree.others},
        gpu_s=tree.usage(queue.id).gpu_s,
        other_s=other_s,
        other_room={one.resource: one.available(tree.job_node(queue.id)) for one in tree.others},
        budget_gpu_h=queue.budget_gpu_h,
        budget_period_s=queue.budget_period_s,
        budget_left_gpu_h=tree.budget_left_gpu_h(queue.id),
        right_gpus=gpus_of(tree.right[whole]),
        used_gpus=gpus_of(tree.held[whole]),
        borrowed_gpus=gpus_of(tree.borrowed_past_right(whole)),
        lent_gpus=gpus_of(max(0, idle - tree.available_milli(whole))),
        room_gpus=gpus_of(min(free_milli, tree.available_milli(tree.job_node(queue.id)))),
        pending_gpus=gpus_of(counts.pending_milli),
        idle=_idle_settings(queue.idle),
        burst=None if queue.burst is None else str(queue.burst),
        min_stay_s=queue.min_stay_s,
        fair_users=queue.fair_users,
        half_life_s=queue.half_life_s,
        alarms=dict(queue.alarms),
        factor=tree.fair_share_factor(tree.job_node(queue.id)),
        users=[
            UserShare(user=user, gpu_s=gpu_s, factor=factor)
            for user, (gpu_s, factor) in sorted(
                tree.user_shares(queue.id).items(), key=lambda one: (-one[1][0], one[0])
            )
        ][:_USERS_MAX],
        waiting=waiting[:_REASONS_MAX],
    )

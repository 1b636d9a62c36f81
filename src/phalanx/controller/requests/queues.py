"""Requests that change or remove queues. The whole queue tree is validated; a refused request changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from phalanx.controller.impossible_jobs import record_impossible_jobs
from phalanx.controller.requests.request_handlers import RequestHandlers
from phalanx.controller.step_context import StepContext
from phalanx.core.access.audit import join_names
from phalanx.core.errors import Conflict, NotFound
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import QueueId
from phalanx.core.state.events import ChangeQueue, ImpossibleJob, PutQueue, PutQueues
from phalanx.core.work.queue import Queue
from phalanx.core.work.quotas.queue_validation import check_queue_tree
from phalanx.core.work.users import Action

handlers: Final = RequestHandlers()


def _settings(queue: Queue) -> str:
    parts = {
        "priority": queue.priority,
        "open": queue.open,
        "parent": queue.parent,
        "quota_gpus": queue.quota_gpus,
        "idle": None if queue.idle is None else f"({queue.idle.text})",
    }
    return " ".join(f"{name}={value}" for name, value in parts.items() if value is not None)


def _describe_put(request: PutQueues, _: object) -> str:
    put = "; ".join(f"{queue.id} {_settings(queue)}" for queue in request.queues)
    return f"put {put or 'none'}" + (f"; remove {join_names(request.remove)}" if request.remove else "")


@handlers.add(PutQueue, None, audit=lambda request, _: f"queue {request.queue.id} {_settings(request.queue)}")
def put_one(context: StepContext, request: PutQueue) -> Queue:
    """Put one queue."""
    put(context, PutQueues(queues=(request.queue,)))
    return request.queue


@handlers.add(
    ChangeQueue,
    Action.OPERATE,
    audit=lambda request, answer: (
        f"queue {request.queue_id}" + (f" {_settings(answer)}" if isinstance(answer, Queue) else "")
    ),
)
def change(context: StepContext, request: ChangeQueue) -> Queue:
    """Add a queue, or change the given fields of one; merged here, where no other request interleaves.

    Raises:
        BadRequest: as `put`.
    """
    queue = context.world.queues.get(request.queue_id) or Queue(id=request.queue_id)
    queue = replace(
        queue,
        priority=queue.priority if request.priority is None else request.priority,
        open=queue.open if request.open is None else request.open,
    )
    put(context, PutQueues(queues=(queue,)))
    return queue


@handlers.add(PutQueues, Action.OPERATE, audit=_describe_put)
def put(context: StepContext, request: PutQueues) -> tuple[ImpossibleJob, ...]:
    """Put some queues and remove others, all or nothing. Unchanged queues are not written. Returns the waiting jobs made impossible.

    Raises:
        BadRequest: the queues would not form a tree, or their quotas contradict each other.
        NotFound: a queue to remove does not exist.
        Conflict: a queue to remove still has live jobs.
    """
    world = context.world
    queues = [_keep_open_state(world.queues.get(queue.id), queue, request) for queue in request.queues]
    after = {**world.queues, **{queue.id: queue for queue in queues}}
    for queue_id in request.remove:
        if after.pop(queue_id, None) is None:
            raise NotFound(f"no queue {queue_id!r}", hint=Hint(HintCode.LIST_QUEUES))
    check_queue_tree(after)
    _refuse_in_use(context, request.remove)
    before = context.feasibility
    for queue in queues:
        if queue.id in after and world.queues.get(queue.id) != queue:
            context.change.put(queue)
    for queue_id in request.remove:
        if queue_id in world.queues:
            context.change.remove_queue(queue_id)
    return record_impossible_jobs(context, before, "the queues were changed")


def _keep_open_state(known: Queue | None, queue: Queue, request: PutQueues) -> Queue:
    return queue if known is None or queue.id not in request.keep_open_state else replace(queue, open=known.open)


def _refuse_in_use(context: StepContext, queue_ids: tuple[QueueId, ...]) -> None:
    if not queue_ids:
        return
    alive = [job for job in context.world.jobs.values() if job.queue in queue_ids and not job.state.terminal]
    if alive:
        first = alive[0]
        raise Conflict(
            f"queue {first.queue} still has {sum(job.queue == first.queue for job in alive)} pending or running jobs",
            hint=Hint(HintCode.CLOSE_QUEUE, queue=first.queue),
        )

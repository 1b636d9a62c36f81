"""Validates a set of queues before it is stored: it must form a tree with consistent numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import QueueId
from phalanx.core.work.gpus import GPUS_MAX
from phalanx.core.work.queue import Queue

QUEUES_MAX: Final = 10_000  # each is shown and sent; no known site has a tenth of that
TREE_DEPTH_MAX: Final = 8  # bounds the cost of every start; the deepest known trees of Slurm and Kueue have five
_COUNT_MAX: Final = 1_000_000_000  # jobs and priorities; bounds a typo
_WEIGHT_MAX: Final = 1_000_000.0
_BUDGET_MAX_GPU_H: Final = 1e12
BUDGET_PERIOD_MIN_S: Final = 3600.0  # an hour: shorter periods would be a throttle, not a budget
BUDGET_PERIOD_MAX_S: Final = 3660 * 86400.0  # ten years


def check_queue_tree(queues: Mapping[QueueId, Queue]) -> None:
    """Reject queues that do not form a tree, or whose numbers contradict each other.

    Raises:
        BadRequest: a parent is missing or a descendant, a number is out of bounds, or the quotas below a queue exceed its own.
    """
    if len(queues) > QUEUES_MAX:
        raise BadRequest(f"{len(queues)} queues; at most {QUEUES_MAX} are allowed")
    for queue in queues.values():
        _check_numbers(queue)
        _check_ancestors(queue, queues)
    _check_quota_sums(queues)


def rights_of(queues: Iterable[Queue]) -> dict[QueueId, int]:
    """Guaranteed GPUs of each queue: its quota, or without one the sum of the quotas below. Requires a checked tree."""
    known = {queue.id: queue for queue in queues}
    below = dict.fromkeys(known, 0)
    rights: dict[QueueId, int] = {}
    for queue in sorted(known.values(), key=lambda queue: -_depth(queue, known)):
        rights[queue.id] = below[queue.id] if queue.quota_gpus is None else queue.quota_gpus
        if queue.parent is not None:
            below[queue.parent] += rights[queue.id]
    return rights


def _check_numbers(queue: Queue) -> None:
    counts = {
        "quota": (queue.quota_gpus, 0, GPUS_MAX),
        "borrow": (queue.borrow_gpus, 0, GPUS_MAX),
        "lend": (queue.lend_gpus, 0, GPUS_MAX),
        "GPUs per user": (queue.gpus_per_user, 0, GPUS_MAX),
        "jobs per user": (queue.jobs_per_user, 0, _COUNT_MAX),
        "priority": (queue.priority, -_COUNT_MAX, _COUNT_MAX),
        "budget": (queue.budget_gpu_h, 0, _BUDGET_MAX_GPU_H),
        "budget period": (queue.budget_period_s, BUDGET_PERIOD_MIN_S, BUDGET_PERIOD_MAX_S),
    }
    for what, (value, least, most) in counts.items():
        if value is not None and not least <= value <= most:
            raise BadRequest(f"queue {queue.id}: {what} is {_number_text(value)}", hint=f"from {least:g} to {most:g}")
    if not 0.0 < queue.weight <= _WEIGHT_MAX:
        raise BadRequest(
            f"queue {queue.id}: weight is {_number_text(queue.weight)}", hint=f"above 0, at most {_WEIGHT_MAX:g}"
        )


def _number_text(value: float) -> str:
    """The value for messages."""
    try:
        return f"{value:g}"
    except OverflowError:
        return "an integer of hundreds of digits"


def _check_ancestors(queue: Queue, queues: Mapping[QueueId, Queue]) -> None:
    path = [queue.id]
    above = queue.parent
    while above is not None:
        if above not in queues:
            raise BadRequest(f"queue {path[-1]}: its parent {above!r} does not exist", hint=Hint(HintCode.LIST_QUEUES))
        if above in path:
            raise BadRequest(f"queue {queue.id} would be its own ancestor: {' in '.join([*path, above])}")
        path.append(above)
        if len(path) > TREE_DEPTH_MAX:
            raise BadRequest(f"queue {queue.id} is more than {TREE_DEPTH_MAX} deep: {' in '.join(path)}")
        above = queues[above].parent


def _check_quota_sums(queues: Mapping[QueueId, Queue]) -> None:
    rights = rights_of(queues.values())
    below: dict[QueueId, int] = {}
    for queue in queues.values():
        if queue.parent is not None:
            below[queue.parent] = below.get(queue.parent, 0) + rights[queue.id]
    for queue_id in sorted(below):
        quota = queues[queue_id].quota_gpus
        if quota is not None and below[queue_id] > quota:
            raise BadRequest(
                f"queue {queue_id}: its quota is {quota} GPUs, but the quotas below it sum to {below[queue_id]}",
                hint=f"raise its quota to {below[queue_id]}, or lower those below it",
            )


def _depth(queue: Queue, queues: Mapping[QueueId, Queue]) -> int:
    depth = 0
    while queue.parent is not None:
        queue = queues[queue.parent]
        depth += 1
    return depth

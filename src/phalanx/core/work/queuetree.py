"""What makes a set of queues a tree that can be counted in: refused with words before it is put, so that nobody has to doubt it after."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.ids import QueueId
from phalanx.core.work.gpus import GPUS_MAX
from phalanx.core.work.queue import Queue

QUEUES_MAX: Final = 10_000  # a figure for each is shown and sent; no site known has a tenth
DEPTH_MAX: Final = 8  # every start climbs so many steps; Slurm's and Kueue's deepest known trees have five
_COUNT_MAX: Final = 1_000_000_000  # jobs and priorities; bounds a typo
_WEIGHT_MAX: Final = 1_000_000.0
_BUDGET_MAX_GPU_H: Final = 1e12
PERIOD_MIN_S: Final = 3600.0  # an hour: below it a budget is no budget but a throttle
PERIOD_MAX_S: Final = 3660 * 86400.0  # ten years


def check_tree(queues: Mapping[QueueId, Queue]) -> None:
    """Refuse what is no tree, or whose numbers contradict each other.

    Raises:
        BadRequest: a parent is missing or above itself, a number is out of bounds, or the quotas below a queue exceed its own.
    """
    if len(queues) > QUEUES_MAX:
        raise BadRequest(f"{len(queues)} queues: there may be {QUEUES_MAX}")
    for queue in queues.values():
        _check_numbers(queue)
        _check_way_up(queue, queues)
    _check_sums(queues)


def rights_of(queues: Iterable[Queue]) -> dict[QueueId, int]:
    """GPUs that are each queue's right: its quota, or without one the sum of the rights below. Of a checked tree."""
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
        "quota": (queue.quota_gpus, 0, GPUS_MAX), "borrow": (queue.borrow_gpus, 0, GPUS_MAX),
        "lend": (queue.lend_gpus, 0, GPUS_MAX), "GPUs per user": (queue.gpus_per_user, 0, GPUS_MAX),
        "jobs per user": (queue.jobs_per_user, 0, _COUNT_MAX), "priority": (queue.priority, -_COUNT_MAX, _COUNT_MAX),
        "budget": (queue.budget_gpu_h, 0, _BUDGET_MAX_GPU_H), "budget period": (queue.budget_period_s, PERIOD_MIN_S, PERIOD_MAX_S),
    }  # fmt: skip
    for what, (value, least, most) in counts.items():
        if value is not None and not least <= value <= most:
            raise BadRequest(f"queue {queue.id}: {what} is {_shown(value)}", hint=f"from {least:g} to {most:g}")
    if not 0.0 < queue.weight <= _WEIGHT_MAX:
        raise BadRequest(
            f"queue {queue.id}: weight is {_shown(queue.weight)}", hint=f"above 0, at most {_WEIGHT_MAX:g}"
        )


def _shown(value: float) -> str:
    """For people."""
    try:
        return f"{value:g}"
    except OverflowError:
        return "an integer of hundreds of digits"


def _check_way_up(queue: Queue, queues: Mapping[QueueId, Queue]) -> None:
    way = [queue.id]
    above = queue.parent
    while above is not None:
        if above not in queues:
            raise BadRequest(f"queue {way[-1]}: its parent {above!r} does not exist", hint="phalanx queues lists them")
        if above in way:
            raise BadRequest(f"queue {queue.id} would be above itself: {' in '.join([*way, above])}")
        way.append(above)
        if len(way) > DEPTH_MAX:
            raise BadRequest(f"queue {queue.id} is more than {DEPTH_MAX} deep: {' in '.join(way)}")
        above = queues[above].parent


def _check_sums(queues: Mapping[QueueId, Queue]) -> None:
    rights = rights_of(queues.values())
    below: dict[QueueId, int] = {}
    for queue in queues.values():
        if queue.parent is not None:
            below[queue.parent] = below.get(queue.parent, 0) + rights[queue.id]
    for queue_id in sorted(below):
        quota = queues[queue_id].quota_gpus
        if quota is not None and below[queue_id] > quota:
            raise BadRequest(
                f"queue {queue_id}: the quotas below it are {below[queue_id]} GPUs together, its own is {quota}",
                hint=f"give it {below[queue_id]}, or those below it less",
            )


def _depth(queue: Queue, queues: Mapping[QueueId, Queue]) -> int:
    depth = 0
    while queue.parent is not None:
        queue = queues[queue.parent]
        depth += 1
    return depth

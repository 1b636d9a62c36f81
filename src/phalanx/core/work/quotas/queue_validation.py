"""Validates a set of queues before it is stored: it must form a tree with consistent numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import QueueId
from phalanx.core.resources import CPUS, GPUS, MEMORY, quantity, quantity_text
from phalanx.core.units import format_duration
from phalanx.core.work.extras import EXTRAS_MAX, check_extra_name
from phalanx.core.work.gpus import GPUS_MAX
from phalanx.core.work.queue import Amounts, Queue
from phalanx.core.work.usage.waste_terms import OF_QUEUES, POLICY_STATES, IdleAction

QUEUES_MAX: Final = 10_000  # each is shown and sent; no known site has a tenth of that
TREE_DEPTH_MAX: Final = 8  # bounds the cost of every start; the deepest known trees of Slurm and Kueue have five
_COUNT_MAX: Final = 1_000_000_000  # jobs and priorities; bounds a typo
_AMOUNT_MAX: Final = 1 << 60  # an exbibyte; bounds a typo
_WEIGHT_MAX: Final = 1_000_000.0
_BUDGET_MAX_GPU_H: Final = 1e12
HALF_LIFE_MIN_S: Final = 60.0  # shorter ones remember nothing from one job to the next
HALF_LIFE_MAX_S: Final = 3660 * 86400.0  # ten years
MIN_STAY_S: Final = 1.0  # as of the option of the whole cluster
IDLE_AFTER_MIN_S: Final = 10.0  # a shorter time is less than the samples that show idleness
WASTE_TIME_MAX_S: Final = 366 * 86400.0  # bounds a typo
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


def rights_of(queues: Iterable[Queue], resource: str = GPUS) -> dict[QueueId, int]:
    """Guaranteed amount of each queue: its quota, or without one the sum of the quotas below. Requires a checked tree.

    In the units of `Resources.amount_of`: GPUs in thousandths.
    """
    known = {queue.id: queue for queue in queues}
    below = dict.fromkeys(known, 0)
    rights: dict[QueueId, int] = {}
    for queue in sorted(known.values(), key=lambda queue: -_depth(queue, known)):
        quota = queue.terms_of(resource).quota
        rights[queue.id] = below[queue.id] if quota is None else quota
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
    for what, amounts in (
        ("quota", queue.other_quotas),
        ("borrow", queue.other_borrow),
        ("lend", queue.other_lend),
        ("limit per user", queue.other_per_user),
    ):
        _check_amounts(queue, what, amounts)
    _check_waste_terms(queue)
    if queue.min_stay_s is not None:
        _check_time(queue, "min_stay", queue.min_stay_s, MIN_STAY_S)
    if queue.half_life_s is not None:
        if queue.parent is not None:
            raise BadRequest(
                f"queue {queue.id}: half_life is of a whole tree of queues",
                hint="give it to the queue at the top, which has no parent",
            )
        _check_time(queue, "half_life", queue.half_life_s, HALF_LIFE_MIN_S, HALF_LIFE_MAX_S)
    if not 0.0 < queue.weight <= _WEIGHT_MAX:
        raise BadRequest(
            f"queue {queue.id}: weight is {_number_text(queue.weight)}", hint=f"above 0, at most {_WEIGHT_MAX:g}"
        )


def _check_waste_terms(queue: Queue) -> None:
    for kind, after_s in queue.alarms:
        if kind not in OF_QUEUES:
            raise BadRequest(
                f"queue {queue.id}: alarms: {kind} is no waste of jobs", hint=f"one of {', '.join(OF_QUEUES)}"
            )
        _check_time(queue, f"alarms: {kind}", after_s or 0.0, 0.0)
    idle = queue.idle
    if idle is None or idle.action is IdleAction.OFF:
        return
    _check_time(queue, "idle: after", idle.after_s, IDLE_AFTER_MIN_S)
    unknown = [state for state in idle.states if state not in POLICY_STATES]
    if unknown or not idle.states:
        raise BadRequest(
            f"queue {queue.id}: idle: states: {unknown[0] if unknown else 'none'}",
            hint=f"some of {', '.join(POLICY_STATES)}",
        )
    if idle.grace_s is not None and not 0.0 <= idle.grace_s < idle.after_s:
        raise BadRequest(
            f"queue {queue.id}: idle: grace is {format_duration(idle.grace_s)}, after {format_duration(idle.after_s)}",
            hint="the warning comes that long before the end of the time: give a shorter grace",
        )


def _check_time(queue: Queue, what: str, seconds: float, least_s: float, most_s: float = WASTE_TIME_MAX_S) -> None:
    if not least_s <= seconds <= most_s:
        raise BadRequest(
            f"queue {queue.id}: {what} is {_number_text(seconds)} seconds",
            hint=f"from {format_duration(least_s)} to {format_duration(most_s)}",
        )


def _check_amounts(queue: Queue, what: str, amounts: Amounts) -> None:
    names = [name for name, _ in amounts]
    if len(names) > EXTRAS_MAX or names != sorted(set(names)):
        raise BadRequest(f"queue {queue.id}: {what}: the names are not {EXTRAS_MAX} at most, sorted and unique")
    for name, amount in amounts:
        if name not in (CPUS, MEMORY):
            check_extra_name(name, key=f"queue {queue.id}: {what}")
        if not 0 <= amount <= _AMOUNT_MAX:
            raise BadRequest(f"queue {queue.id}: {what} of {name} is {_number_text(amount)}", hint="0 or more")


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
    for resource in sorted({GPUS, *(name for queue in queues.values() for name in queue.other_resources)}):
        _check_quota_sums_of(resource, queues)


def _check_quota_sums_of(resource: str, queues: Mapping[QueueId, Queue]) -> None:
    rights = rights_of(queues.values(), resource)
    below: dict[QueueId, int] = {}
    for queue in queues.values():
        if queue.parent is not None:
            below[queue.parent] = below.get(queue.parent, 0) + rights[queue.id]
    for queue_id in sorted(below):
        quota = queues[queue_id].terms_of(resource).quota
        if quota is not None and below[queue_id] > quota:
            own = quantity_text(resource, quantity(resource, quota))
            total = quantity_text(resource, quantity(resource, below[queue_id]), unit=False)
            raise BadRequest(
                f"queue {queue_id}: its quota is {own}, but the quotas below it sum to {total}",
                hint=f"raise its quota to {total}, or lower those below it",
            )


def _depth(queue: Queue, queues: Mapping[QueueId, Queue]) -> int:
    depth = 0
    while queue.parent is not None:
        queue = queues[queue.parent]
        depth += 1
    return depth

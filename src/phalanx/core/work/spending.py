"""GPU-seconds used by queues: per budget period, and decayed for the fair share. Formulas, and the records that store them.

Usage decays by half every FAIR_HALF_LIFE_S. A constant rate r (GPUs) that began t seconds ago contributes

    r * H / ln 2 * (1 - 2^(-t/H))        with half-life H; exact, so usage need not be sampled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from phalanx.core.ids import QueueId
from phalanx.core.work.queue import FAIR_HALF_LIFE_S, Queue, Spent

HOUR_S: Final = 3600.0  # of a GPU-hour
CLOCKS_APART_S: Final = 300.0  # heads differ by less; beyond it a clock was wrong and has been set since
_E_FOLD_S: Final = FAIR_HALF_LIFE_S / math.log(2.0)


def decay(for_s: float) -> float:
    """The factor by which usage decays in this time."""
    return math.exp2(-max(0.0, for_s) / FAIR_HALF_LIFE_S)


def left_of_rate(for_s: float) -> float:
    """Decayed GPU-seconds of one GPU that has been in use for this time up to now."""
    return -_E_FOLD_S * math.expm1(-max(0.0, for_s) / _E_FOLD_S)


def period_start_s(queue: Queue, now_s: float) -> float:
    """Start of the budget period that contains `now_s`."""
    return math.floor(now_s / queue.budget_period_s) * queue.budget_period_s


def spend(
    queues: Mapping[QueueId, Queue],
    spent: Mapping[QueueId, Spent],
    queue_id: QueueId,
    gpus: int,
    from_s: float,
    to_s: float,
) -> list[Spent]:
    """The records after `gpus` GPUs were used from `from_s` to `to_s`: of the queue and of all its ancestors, the lowest first."""
    changed: list[Spent] = []
    seen: set[QueueId] = set()
    above: QueueId | None = queue_id
    while above is not None and above in queues and above not in seen:
        seen.add(above)
        queue = queues[above]
        changed.append(_spend(queue, spent.get(above) or Spent(queue=above, at_s=to_s), gpus, from_s, to_s))
        above = queue.parent
    return changed


def _spend(queue: Queue, before: Spent, gpus: int, from_s: float, to_s: float) -> Spent:
    ahead_s = before.at_s - to_s  # attempts end out of order if the clocks of several heads differ
    at_s = to_s if ahead_s > CLOCKS_APART_S else max(before.at_s, to_s)
    period_s = period_start_s(queue, at_s)
    counted_s = max(0.0, to_s - max(from_s, period_s))
    return Spent(
        queue=queue.id,
        at_s=at_s,
        period_s=period_s,
        gpu_s=(before.gpu_s if before.period_s == period_s else 0.0) + gpus * counted_s,
        decayed_gpu_s=before.decayed_gpu_s * decay(at_s - before.at_s)
        + gpus * left_of_rate(to_s - from_s) * decay(at_s - to_s),
    )

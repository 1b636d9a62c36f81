"""The table of checks, and the advice of a job: what it could have asked for instead, with the exact option.

Of several checks that decide the same thing, the first in the table speaks, so that advice never contradicts itself. A job that ran too briefly
gets none. What was not measured is unknown, and no check takes it for zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from phalanx.core.accounting.advice import gpu_checks as gpu
from phalanx.core.accounting.advice import host_checks as host
from phalanx.core.accounting.advice.evidence import Advice, JobEvidence, Topic
from phalanx.core.accounting.advice.judged_time import JUDGED_MIN_S


class Check(NamedTuple):
    """One row. It is skipped if earlier advice decided one of `decides` or `needs`, and then decides `decides` itself."""

    judge: Callable[[JobEvidence], Advice | None]
    decides: frozenset[Topic]
    needs: frozenset[Topic] = frozenset()


def _topics(*topics: Topic) -> frozenset[Topic]:
    return frozenset(topics)


_GPUS, _HOST = _topics(Topic.GPUS), _topics(Topic.CPUS, Topic.MEMORY)
_CPUS, _MEMORY = _topics(Topic.CPUS), _topics(Topic.MEMORY)
_LOADER, _TIME, _SAVES = _topics(Topic.LOADER), _topics(Topic.TIME), _topics(Topic.CHECKPOINTS)
CHECKS: Final = (
    # Other nodes or another number of GPUs: what a node needs of CPUs and memory is then another question.
    Check(gpu.unused_gpus, _GPUS | _LOADER | _HOST),
    Check(gpu.low_utilization, _GPUS | _HOST),
    Check(gpu.spread_over_nodes, _GPUS | _HOST),
    Check(gpu.waits_for_data, _LOADER | _CPUS),
    # A GPU that waits for data is little used, and would be little used in part too: the loader comes first.
    Check(gpu.fits_mig_slice, _GPUS, _LOADER),
    Check(gpu.fits_quarter, _GPUS, _LOADER),
    Check(gpu.too_powerful, _GPUS, _LOADER),
    Check(host.idle_nodes, _HOST),
    Check(host.spread_cpus, _HOST),
    Check(host.serial_code, _CPUS),
    Check(host.low_cpu_use, _CPUS),
    Check(host.cpus_per_gpu, _CPUS),
    Check(host.excess_memory, _MEMORY),
    Check(host.long_limit, _TIME),
    Check(host.saves_too_often, _SAVES),
    Check(host.saves_too_rarely, _SAVES),
)


def advise(job: JobEvidence) -> tuple[Advice, ...]:
    """All advice for a job: what would have saved most GPU-hours first, the rest in the order of the table."""
    if job.run_s < JUDGED_MIN_S or job.service:
        return ()
    decided: set[Topic] = set()
    found: list[Advice] = []
    for check in CHECKS:
        if decided & (check.decides | check.needs):
            continue
        advice = check.judge(job)
        if advice is not None:
            decided |= check.decides
            found.append(advice)
    return tuple(sorted(found, key=lambda one: -one.gpu_hours))

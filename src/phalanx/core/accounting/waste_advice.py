"""What to do about waste: the one change that mends it, as a hint that front ends render, and the reason in a sentence. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from phalanx.core.accounting.advice.settings import same_kind_setting
from phalanx.core.accounting.usage_alarms import WasteSighting
from phalanx.core.hints import Hint, HintCode
from phalanx.core.resources import MILLI_PER_DEVICE
from phalanx.core.work.job import Job
from phalanx.core.work.usage.waste_terms import WasteKind

QUARTER: Final = "1/4"
CPUS_PER_GPU: Final = (
    8  # a first try for a job that requests no CPUs; GPU servers have 8 to 16 cores a GPU (HGX H100: 112 for 8)
)

ADVICE: Final[Mapping[WasteKind, str]] = {
    WasteKind.UNOCCUPIED: "no process uses its GPUs",
    WasteKind.IDLE: "its processes do not use their GPUs",
    WasteKind.HUNG: "its steps have stopped coming",
    WasteKind.LOW: "it uses less than 10 % of its GPUs: a part of one, or fewer, would do",
    WasteKind.DATA_BOUND: "it waits for data most of the time: more CPUs for its loader, or faster storage",
    WasteKind.COMMUNICATING: "it waits for other ranks most of the time: nearer nodes, or fewer",
    WasteKind.CRASH_LOOP: "it fails again and again without progress",
    WasteKind.BROKEN: "its devices cannot be used",
    WasteKind.FRAGMENTED: "no job that waits or started lately fits into what is free",
}


def remedy(seen: WasteSighting) -> Hint:
    """The change that mends it."""
    job = seen.job
    if job is None:
        return _remedy_of_node(seen)
    match seen.kind:
        case WasteKind.UNOCCUPIED | WasteKind.IDLE:
            return _remedy_of_idle(job, seen)
        case WasteKind.HUNG:
            return Hint(HintCode.RESTART_JOB, job=job.id)
        case WasteKind.LOW:
            return _submit_with(*same_kind_setting(job.spec.role.gpus, _less(seen)))
        case WasteKind.DATA_BOUND:
            return _submit_with("cpus", str(_more_cpus(job, seen)))
        case WasteKind.COMMUNICATING:
            return _remedy_of_communication(job, seen)
        case WasteKind.CRASH_LOOP if job.replica is None:
            return Hint(HintCode.END_FAILING_JOB, job=job.id)
        case WasteKind.CRASH_LOOP:
            return Hint(HintCode.READ_JOB_LOG, job=job.id)
        case WasteKind.BROKEN | WasteKind.FRAGMENTED:
            return _remedy_of_node(seen)


def _remedy_of_node(seen: WasteSighting) -> Hint:
    node = seen.nodes[0]
    if seen.kind is WasteKind.BROKEN:
        if seen.down:
            return Hint(HintCode.FORGET_NODE, node=node)
        return Hint(HintCode.UNDRAIN_NODES, nodes=node) if seen.cordoned else Hint(HintCode.REPAIR_NODE, node=node)
    if seen.holders:
        return Hint(HintCode.MOVE_JOB, job=seen.holders[0], node=node)
    return Hint(HintCode.SHOW_NODE, node=node)


def _remedy_of_idle(job: Job, seen: WasteSighting) -> Hint:
    """End it if it uses none of its GPUs; else ask for those that it uses."""
    if job.replica is not None:
        terms = job.spec.service
        code = HintCode.SLEEP_SERVICE if terms is not None and terms.sleep else HintCode.SCALE_SERVICE
        return Hint(code, service=job.replica.service)
    used = seen.held_milli - seen.milli
    if used >= MILLI_PER_DEVICE:
        return _submit_with(*same_kind_setting(job.spec.role.gpus, str(used // MILLI_PER_DEVICE)))
    return Hint(HintCode.CANCEL_JOB, job=job.id)


def _remedy_of_communication(job: Job, seen: WasteSighting) -> Hint:
    gpus = seen.held_milli // MILLI_PER_DEVICE
    if 1 < len(seen.nodes) == gpus <= seen.node_gpus:  # one GPU on each of several nodes
        return _submit_with("within", "node")
    if len(seen.nodes) > 1:
        return _submit_with("within", "leaf")
    return Hint(HintCode.COMPARE_LAYOUTS, job=job.id)


def _submit_with(key: str, value: str) -> Hint:
    return Hint(HintCode.SUBMIT_WITH, key=key, value=value)


def _less(seen: WasteSighting) -> str:
    """A smaller request: half of several GPUs, a quarter of one, half of a share."""
    if seen.held_milli > MILLI_PER_DEVICE:
        return str(max(1, seen.held_milli // MILLI_PER_DEVICE // 2))
    if seen.held_milli == MILLI_PER_DEVICE:
        return QUARTER
    return f"1/{max(2, round(2 * MILLI_PER_DEVICE / seen.held_milli))}"


def _more_cpus(job: Job, seen: WasteSighting) -> int:
    """Twice the CPUs that it requests for a node."""
    gpus = max(1, seen.held_milli // MILLI_PER_DEVICE // max(1, len(seen.nodes)))
    return 2 * job.spec.role.cpus or CPUS_PER_GPU * gpus

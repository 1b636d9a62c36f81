"""Checks of how a job used its GPUs. Each returns advice, or None if its threshold is not reached or something that it needs is unknown."""

from __future__ import annotations

from math import ceil
from typing import Final

from phalanx.core.accounting.activity import IDLE_BELOW
from phalanx.core.accounting.advice.evidence import Advice, JobEvidence
from phalanx.core.accounting.advice.settings import (
    MARGIN,
    Setting,
    cpus_setting,
    gpus_setting,
    memory_setting,
    percent,
    same_kind_setting,
)
from phalanx.core.accounting.usage_states import LARGER_PART, UsageState
from phalanx.core.units import format_bytes, format_duration

UNUSED_BELOW: Final = IDLE_BELOW
"""Mean utilization of a GPU below which it was not used. The ledger calls a GPU idle below it. Job Defense Shield takes 0 % in all samples;
a context that is made and never used already exceeds that."""
SMALL_MOST: Final = 0.15
"""Mean utilization up to which a part of a GPU, or a lesser one, is enough. Source: Job Defense Shield, gpu-model-too-powerful, default."""
LOW_MOST: Final = 0.25
"""Mean utilization up to which fewer GPUs are enough. Source: Job Defense Shield, low-gpu-efficiency, eff_thres_pct."""
LOW_TARGET: Final = 0.75
"""The utilization that fewer GPUs should have. Source: the e-mail of Job Defense Shield for low-gpu-efficiency ("75 % and above")."""
PART: Final = 0.25  # of a GPU; smaller ones gain little more, and fit rarely
MIG_COMPUTE_SLICES: Final = 7  # of a whole GPU. Source: NVIDIA MIG User Guide, as in `core.fleet.mig`
BUSY_CPUS_FROM: Final = (
    0.8  # of those requested: then more CPUs load data faster. Source: Job Defense Shield, cpu_eff_threshold
)
_HOUR_S: Final = 3600.0


def unused_gpus(job: JobEvidence) -> Advice | None:
    """GPUs that did nothing. Job Defense Shield: cancel-zero-gpu-jobs, zero-util-gpu-hours."""
    means = job.means
    idle = sum(mean < UNUSED_BELOW for mean in means)
    if not idle or job.roles > 1:
        return None
    saved = job.gpu_s * idle / len(means) / _HOUR_S
    busiest = percent(max(mean for mean in means if mean < UNUSED_BELOW))
    span = f"{busiest} used on average over {format_duration(job.run_s)}"
    if idle == len(means):
        found = f"The GPU did nothing: {span}" if idle == 1 else f"The {idle} GPUs did nothing: {span} at most"
        return Advice(
            check="unused_gpus",
            measured=found,
            change="run it without a GPU, or find out why it does not use one",
            settings=(("gpus", "0"),),
            gpu_hours=saved,
        )
    if not job.fixed:
        return None
    return Advice(
        check="unused_gpus",
        measured=f"{idle} of {len(means)} GPUs did nothing: {span} at most",
        change="ask for those that it uses",
        settings=_settings_for_used(job, len(means) - idle),
        gpu_hours=saved,
    )


def _settings_for_used(job: JobEvidence, used: int) -> tuple[Setting, ...]:
    """The request for so many GPUs: on one node where they fit, with the CPUs and the memory of all of them."""
    each, size = len(job.nodes[0].devices), min(node.gpus for node in job.nodes)
    if len(job.nodes) == 1 or used <= 1 or used > size:
        return (gpus_setting(job.gpus, used, nodes=1 if len(job.nodes) == 1 and job.gpus.nodes else None),)
    host = _host_settings(job, used / max(1, each))
    return (gpus_setting(job.gpus, used),) if host is None else (gpus_setting(job.gpus, used, nodes=1), *host)


def spread_over_nodes(job: JobEvidence) -> Advice | None:
    """Few GPUs on each of many nodes, though fewer nodes have room. Job Defense Shield: multinode-gpu-fragmentation."""
    nodes, total = len(job.nodes), len(job.devices)
    size = min((node.gpus for node in job.nodes), default=0)
    if nodes < 2 or not total or not size or not job.fixed or total % nodes:
        return None
    if any(len(node.devices) >= size for node in job.nodes):
        return None
    fewer = next((count for count in range(ceil(total / size), nodes) if total % count == 0), None)
    host = None if fewer is None else _host_settings(job, nodes / fewer)
    if fewer is None or host is None:
        return None
    waits = job.by_state.get(UsageState.COMMUNICATING, 0.0)
    talk = ""
    if job.gpu_s and waits / job.gpu_s >= LARGER_PART:
        talk = f", and {percent(waits / job.gpu_s)} of the time it waited for other ranks"
    each = total // nodes
    return Advice(
        check="spread_over_nodes",
        measured=f"It ran on {nodes} nodes with {each} {'GPU' if each == 1 else 'GPUs'} each; a node has {size}{talk}",
        change="use one node" if fewer == 1 else f"use {fewer} nodes",
        settings=(gpus_setting(job.gpus, total, nodes=fewer), *host),
        gpu_hours=waits / _HOUR_S if talk else 0.0,
    )


def _host_settings(job: JobEvidence, factor: float) -> list[Setting] | None:
    """CPUs, memory and tasks of each of fewer nodes, where they were asked for; None if a node has not so much."""
    settings: list[Setting] = []
    if job.cpus:
        settings.append(cpus_setting(job.cpus * factor))
        if job.cpus * factor > min(node.cpus for node in job.nodes):
            return None
    if job.memory_bytes:
        peak = job.host_peak_bytes
        wanted = job.memory_bytes * factor if peak is None else min(job.memory_bytes, peak * MARGIN) * factor
        if wanted > min(node.memory_bytes for node in job.nodes):
            return None
        settings.append(memory_setting(wanted / MARGIN))
    if job.tasks_fixed:
        settings.append(("tasks_per_node", str(ceil(job.tasks_per_node * factor))))
    return settings


def waits_for_data(job: JobEvidence) -> Advice | None:
    """Steps that wait for data for most of the time, as the job reports it."""
    waits = job.by_state.get(UsageState.DATA_BOUND, 0.0)
    if not job.gpu_s or waits / job.gpu_s < LARGER_PART:
        return None
    busy = job.busy_cpus
    span = f"{waits / _HOUR_S:.2f} of {job.gpu_s / _HOUR_S:.2f} GPU-hours"
    measured = f"{percent(waits / job.gpu_s)} of the time ({span}) its steps waited for data"
    room = min((node.cpus for node in job.nodes), default=0)
    if job.cpus and job.roles == 1 and busy is not None and busy >= BUSY_CPUS_FROM * job.cpus and room > job.cpus:
        wanted = min(2 * job.cpus, room)
        return Advice(
            check="waits_for_data",
            measured=f"{measured}, and {busy:.1f} of {job.cpus} CPUs were busy",
            change="give the loader more CPUs, and as many workers",
            settings=(("cpus", str(wanted)),),
            gpu_hours=waits / _HOUR_S,
        )
    per_rank = max(2, (job.cpus or _cpus_of_its_gpus(job)) // max(1, job.tasks_per_node))
    return Advice(
        check="waits_for_data",
        measured=measured,
        change="load with more workers and ahead of time, in the script",
        code=f"DataLoader(num_workers={per_rank}, prefetch_factor=4)",
        gpu_hours=waits / _HOUR_S,
    )


def _cpus_of_its_gpus(job: JobEvidence) -> int:
    """The part of a node's CPUs that belongs to the job's GPUs there, of the node where it is least; 0 if unknown."""
    return min((node.cpus * len(node.devices) // node.gpus for node in job.nodes if node.gpus), default=0)


def fits_mig_slice(job: JobEvidence) -> Advice | None:
    """A single GPU that a MIG slice of the fleet replaces. Job Defense Shield: gpu-model-too-powerful, towards MIG."""
    need = _small_need(job)
    if need is None:
        return None
    mean, memory = need
    fits = [
        (profile.compute_slices, profile.memory_bytes, model, profile)
        for model, profile in job.mig
        if profile.memory_bytes >= memory * MARGIN and profile.compute_slices / MIG_COMPUTE_SLICES >= mean
    ]
    if not fits:
        return None
    _, _, model, profile = min(fits, key=lambda one: one[:3])
    return Advice(
        check="fits_mig_slice",
        measured=_small(job, mean, memory),
        change=f"use a MIG slice with {format_bytes(profile.memory_bytes)}",
        settings=(("gpus", f"{model}.{profile.name}"),),
        gpu_hours=job.gpu_s * (1 - profile.compute_slices / MIG_COMPUTE_SLICES) / _HOUR_S,
    )


def fits_quarter(job: JobEvidence) -> Advice | None:
    """A single GPU of which a quarter is enough."""
    need = _small_need(job)
    size = job.devices[0].memory_bytes if need else 0
    if need is None or need[1] * MARGIN > size * PART:
        return None
    return Advice(
        check="fits_quarter",
        measured=_small(job, *need),
        change=f"use a quarter of a GPU, which has {format_bytes(size * PART)}",
        settings=(same_kind_setting(job.gpus, "1/4"),),
        gpu_hours=job.gpu_s * (1 - PART) / _HOUR_S,
    )


def too_powerful(job: JobEvidence) -> Advice | None:
    """A single GPU that a lesser model of the fleet replaces. Job Defense Shield: gpu-model-too-powerful."""
    need = _small_need(job)
    if need is None:
        return None
    kind = next((kind for kind in job.lesser_kinds if kind.memory_bytes >= need[1] * MARGIN), None)
    if kind is None:
        return None
    return Advice(
        check="too_powerful",
        measured=_small(job, *need),
        change=f"use a lesser GPU, with {format_bytes(kind.memory_bytes)}",
        settings=(("gpus", f"{kind.model}:1"),),
    )


def low_utilization(job: JobEvidence) -> Advice | None:
    """Several GPUs that are little used, and not because they wait. Job Defense Shield: low-gpu-efficiency."""
    means, peak = job.means, job.peak_memory_bytes
    if len(means) < 2 or not job.fixed or peak is None:
        return None
    mean, count = sum(means) / len(means), len(means)
    size = min(device.memory_bytes for device in job.devices)
    memory = sum(device.memory_peak_bytes or 0 for device in job.devices) * MARGIN
    waits = sum(job.by_state.get(state, 0.0) for state in (UsageState.DATA_BOUND, UsageState.COMMUNICATING))
    if mean > LOW_MOST or not size or waits >= LARGER_PART * job.gpu_s > 0:
        return None
    need = max(ceil(count * mean / LOW_TARGET), ceil(memory / size), 1)
    fewer = 1 << (need - 1).bit_length()  # a power of two: batches and layouts divide by it
    if fewer >= count:
        return None
    return Advice(
        check="low_utilization",
        measured=f"{count} GPUs were used {percent(mean)} on average, with {format_bytes(peak)} of memory at most",
        change="fewer GPUs have room for it",
        settings=_settings_for_used(job, fewer),
        gpu_hours=job.gpu_s * (1 - fewer / count) / _HOUR_S,
    )


def _small_need(job: JobEvidence) -> tuple[float, int] | None:
    """Utilization and memory of a job that used little of its only GPU."""
    memory = job.peak_memory_bytes
    if len(job.means) != 1 or not job.fixed or memory is None or not job.devices[0].memory_bytes:
        return None
    return None if not UNUSED_BELOW <= job.means[0] <= SMALL_MOST else (job.means[0], memory)


def _small(job: JobEvidence, mean: float, memory: int) -> str:
    size = format_bytes(job.devices[0].memory_bytes)
    return f"The GPU was used {percent(mean)} on average, with {format_bytes(memory)} of {size} at most"

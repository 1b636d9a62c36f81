"""Checks of CPUs, host memory, time limit and checkpoints. Each returns advice, or None, as in `gpu_checks`."""

from __future__ import annotations

from math import ceil
from typing import Final

from phalanx.core.accounting.advice.evidence import Advice, JobEvidence
from phalanx.core.accounting.advice.settings import MARGIN, cpus_setting, memory_setting, percent, time_setting
from phalanx.core.units import GIB, format_bytes, format_duration

ZERO_CPUS_BELOW: Final = 0.01
"""CPUs in use on a node below which it did nothing. Job Defense Shield (zero-cpu-utilization) takes 0 % of the node; a waiting shell needs less."""
SERIAL_FROM: Final = 0.85
"""CPUs in use from which one core was busy all the time. Source: Job Defense Shield, serial-allocating-multiple, lower_ratio."""
SERIAL_MOST: Final = 1.1  # above it, more than one core worked at a time
LOW_CPU_MOST: Final = 0.60  # of the CPUs. Source: Job Defense Shield, low-cpu-efficiency, eff_thres_pct
CPUS_PER_GPU_FROM: Final = 1.5
"""Times a GPU's part of its node's CPUs. Source: Job Defense Shield, too-many-cores-per-gpu: limit 18, target 12."""
CPUS_PER_GPU_BUSY: Final = 0.80  # of the CPUs: above it they are needed. Source: the same, cpu_eff_threshold
NODE_PART_MOST: Final = 0.5
"""CPUs requested, of all that the nodes have. Source: Job Defense Shield, multinode-cpu-fragmentation, cores_fraction."""
MEMORY_MOST: Final = 0.35  # of the memory. Source: Job Defense Shield, excess-cpu-memory, ratio_threshold
MEMORY_PER_GPU_MOST: Final = 0.80  # the same. Source: Job Defense Shield, too-much-cpu-mem-per-gpu, mem_eff_thres
MEMORY_UNUSED_MIN: Final = GIB  # less is not worth a change
TIME_MOST: Final = 0.10
"""Of the time limit: a limit ten times too long. Job Defense Shield (excessive-time) has 0.2 over all jobs of a user; a single one varies more."""
SAVE_FACTOR: Final = 4.0
"""Times the optimum. Stalls and expected losses then cost 2.1 times as much as at the optimum: (4 + 1/4) / 2 of Young's first-order cost."""
SAVES_MIN: Final = 3  # the first one is early: phalanx.torch measures its stall
STALL_SHARE_MIN: Final = 0.02  # of the training time: below it, saving too often costs little
UNSAVED_MIN_S: Final = 7200.0
"""Training without any checkpoint. phalanx.torch saves after at most 30 minutes, whatever the failure rate."""


def idle_nodes(job: JobEvidence) -> Advice | None:
    """Nodes of a CPU job that did nothing. Job Defense Shield: zero-cpu-utilization."""
    busy = [node.busy_cpus for node in job.nodes if node.busy_cpus is not None]
    idle = sum(each < ZERO_CPUS_BELOW for each in busy)
    if job.devices or job.roles > 1 or len(busy) < len(job.nodes) or not 0 < idle < len(busy):
        return None
    return Advice(
        check="idle_nodes",
        measured=f"{idle} of {len(busy)} nodes used no CPU in {format_duration(job.run_s)}",
        change="ask for those that it uses, or start its tasks on all",
        settings=(("nodes", str(len(busy) - idle)),),
    )


def serial_code(job: JobEvidence) -> Advice | None:
    """One core that works beside others that do not. Job Defense Shield: serial-allocating-multiple."""
    busy = job.busy_cpus
    if job.devices or len(job.nodes) != 1 or job.tasks_per_node != 1 or job.cpus < 2 or busy is None:
        return None
    if not SERIAL_FROM <= busy <= SERIAL_MOST:
        return None
    return Advice(
        check="serial_code",
        measured=f"{busy:.2f} of {job.cpus} CPUs were busy on average: the program seems to use one core",
        change="ask for one",
        settings=(("cpus", "1"),),
    )


def spread_cpus(job: JobEvidence) -> Advice | None:
    """A CPU job on more nodes than its CPUs need. Job Defense Shield: multinode-cpu-fragmentation."""
    nodes, peak = len(job.nodes), job.host_peak_bytes
    room = min((node.cpus for node in job.nodes), default=0)
    memory = min((node.memory_bytes for node in job.nodes), default=0)
    if job.devices or job.roles > 1 or nodes < 2 or not job.cpus or not room or not memory or peak is None:
        return None
    busy = [node.busy_cpus for node in job.nodes if node.busy_cpus is not None]
    if job.cpus > NODE_PART_MOST * room or len(busy) < nodes or min(busy) < ZERO_CPUS_BELOW:
        return None
    wanted = peak * MARGIN * nodes
    fewer = max(ceil(nodes * job.cpus / room), ceil(wanted / memory))
    if fewer >= nodes:
        return None
    settings = [("nodes", str(fewer)), cpus_setting(nodes * job.cpus / fewer)]
    settings += [memory_setting(peak * nodes / fewer)] if job.memory_bytes else []
    settings += [("tasks_per_node", str(ceil(nodes * job.tasks_per_node / fewer)))] if job.tasks_fixed else []
    return Advice(
        check="spread_cpus",
        measured=f"It ran on {nodes} nodes with {job.cpus} CPUs each; a node has {room}",
        change="use one node" if fewer == 1 else f"use {fewer} nodes",
        settings=tuple(settings),
    )


def low_cpu_use(job: JobEvidence) -> Advice | None:
    """CPUs of a CPU job that are little used. Job Defense Shield: low-cpu-efficiency."""
    busy = job.busy_cpus
    if job.devices or job.roles > 1 or not job.cpus or busy is None or busy > LOW_CPU_MOST * job.cpus:
        return None
    wanted = max(job.tasks_per_node, ceil(max(node.busy_cpus or 0.0 for node in job.nodes) * MARGIN), 1)
    if wanted >= job.cpus:
        return None
    return Advice(
        check="low_cpu_use",
        measured=f"{busy:.1f} of {job.cpus} CPUs were busy on average ({percent(busy / job.cpus)})",
        change="ask for fewer",
        settings=(cpus_setting(wanted),),
    )


def cpus_per_gpu(job: JobEvidence) -> Advice | None:
    """More than a GPU's part of the CPUs of its node, so that other GPUs cannot be used. Job Defense Shield: too-many-cores-per-gpu."""
    busy = job.busy_cpus
    if not job.devices or job.roles > 1 or not job.cpus or busy is None or busy > CPUS_PER_GPU_BUSY * job.cpus:
        return None
    parts = [node.cpus / node.gpus * len(node.devices) for node in job.nodes if node.gpus and node.devices]
    if len(parts) < len(job.nodes) or job.cpus < CPUS_PER_GPU_FROM * min(parts):
        return None
    wanted = max(1, int(min(parts)), ceil(busy * MARGIN))
    if wanted >= job.cpus:
        return None
    return Advice(
        check="cpus_per_gpu",
        measured=f"It took {job.cpus} CPUs on a node, of which {busy:.1f} were busy; its GPUs' part is {min(parts):g}",
        change="leave CPUs for the other GPUs",
        settings=(cpus_setting(wanted),),
    )


def excess_memory(job: JobEvidence) -> Advice | None:
    """Host memory that is not used. Job Defense Shield: excess-cpu-memory; with GPUs, too-much-cpu-mem-per-gpu."""
    peak, asked = job.host_peak_bytes, job.memory_bytes
    if job.roles > 1 or not asked or peak is None or asked - peak * MARGIN < MEMORY_UNUSED_MIN:
        return None
    parts = [node.memory_bytes / node.gpus * len(node.devices) for node in job.nodes if node.gpus and node.devices]
    crowds = len(parts) == len(job.nodes) and asked > min(parts, default=asked)
    if peak > MEMORY_MOST * asked and not (crowds and peak < MEMORY_PER_GPU_MOST * asked):
        return None
    beside = f"; its GPUs' part of the node is {format_bytes(min(parts))}" if crowds else ""
    return Advice(
        check="excess_memory",
        measured=f"It used {format_bytes(peak)} of {format_bytes(asked)} of memory at most ({percent(peak / asked)}){beside}",
        change="ask for less",
        settings=(memory_setting(peak),),
    )


def long_limit(job: JobEvidence) -> Advice | None:
    """A time limit far above the time that was needed. Job Defense Shield: excessive-time."""
    limit_s = job.time_limit_s
    if limit_s is None or not job.succeeded or job.service or job.held_s > TIME_MOST * limit_s:
        return None
    return Advice(
        check="long_limit",
        measured=f"It ended after {format_duration(job.held_s)} of a time limit of {format_duration(limit_s)}",
        change="a shorter limit starts sooner: it fits into gaps",
        settings=(time_setting(job.held_s),),
    )


def saves_too_often(job: JobEvidence) -> Advice | None:
    """Checkpoints that cost more than the failures that they guard against."""
    saves = job.saves
    if saves is None or saves.count < SAVES_MIN or saves.interval_s * SAVE_FACTOR > saves.wanted_s:
        return None
    share = saves.stall_s / (saves.interval_s + saves.stall_s) if saves.interval_s + saves.stall_s else 0.0
    if share < STALL_SHARE_MIN:
        return None
    better = saves.stall_s / (saves.wanted_s + saves.stall_s)
    return Advice(
        check="saves_too_often",
        measured=f"{_saves(saves.count)} stalled training for {percent(share)} of the time; the optimum is one every {format_duration(saves.wanted_s)}",
        change="save less often",
        code=_every_steps(saves.wanted_s, saves.step_s),
        gpu_hours=max(0.0, share - better) * job.gpu_s / 3600,
    )


def saves_too_rarely(job: JobEvidence) -> Advice | None:
    """Checkpoints so rare that a failure loses more than they cost, or none at all."""
    saves = job.saves
    if saves is None:
        return None
    if not saves.count:
        if saves.trained_s < UNSAVED_MIN_S:
            return None
        return Advice(
            check="saves_too_rarely",
            measured=f"It reported no checkpoint in {format_duration(saves.trained_s)}: a failure loses all of it",
            change="let it save, at the interval that costs least",
            code="phalanx.torch.checkpoint(model, optimizer)",
        )
    if saves.count < SAVES_MIN or not saves.wanted_s or saves.interval_s < SAVE_FACTOR * saves.wanted_s:
        return None
    return Advice(
        check="saves_too_rarely",
        measured=f"It saved every {format_duration(saves.interval_s)}; the optimum is every {format_duration(saves.wanted_s)}",
        change="save more often",
        code=_every_steps(saves.wanted_s, saves.step_s),
    )


def _saves(count: int) -> str:
    return f"{count} checkpoints"


def _every_steps(wanted_s: float, step_s: float) -> str:
    """The argument of `phalanx.torch.checkpoint`; without it the interval is the optimum."""
    if not step_s:
        return "phalanx.torch.checkpoint(model, optimizer)"
    return f"phalanx.torch.checkpoint(model, optimizer, every_steps={max(1, round(wanted_s / step_s))})"

"""Evaluate one layout: memory, time, cost and checkpoints, by the formulas of `core.performance`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.hints import Hint, HintCode
from phalanx.core.recovery.interval import daly_interval_s, expected_wall_s, gang_mtbf_s
from phalanx.core.work.layouts.layout import Layout
from phalanx.core.work.layouts.layout_split import SplitLimits, check_split
from phalanx.planner.cost.collectives import RankNetwork
from phalanx.planner.cost.host_memory import COPY_SHARE, exceeds_host, is_tight_on_host, ranks_of_node
from phalanx.planner.cost.layer_time import NARROW
from phalanx.planner.cost.machine import Gpu
from phalanx.planner.cost.memory import estimate_memory, exceeds_memory
from phalanx.planner.cost.optimizers import Offload, OptimizerKind
from phalanx.planner.cost.step_time import StepTime, StepTimeCalculator
from phalanx.planner.cost.training_task import Objective, TrainingMethod, TrainingTask
from phalanx.planner.cost.uncertainty import interval_s
from phalanx.planner.search.candidates import Z3
from phalanx.planner.search.request import CheckpointEstimate, EvaluatedLayout, LayoutRequest
from phalanx.planner.search.sample_batches import UnevenStepTimeCalculator
from phalanx.planner.serving.rollout import RolloutRequest, RolloutTimer

RESTART_S: Final = 180.0
"""Time from a failure until the gang computes again, without loading the checkpoint: detection, placement, imports, first step.
Source: our drills take seconds, imports and compilation of a large model minutes; A. Kokolis et al., HPCA 2025, give 2 to 8 minutes."""
STATE_BYTES: Final = 12.0
"""Per trained parameter in a checkpoint: 32-bit weight and two moments of Adam, as DCP writes the states of FSDP2."""
HOUR_S: Final = 3600.0
FAILURES_MAX: Final = 50.0
"""Failures between two checkpoints; beyond, the useful share (e^-50) is 0 and Daly's formula overflows."""


def training_task(request: LayoutRequest) -> TrainingTask:
    """Return the training task of a request."""
    task = TrainingTask(
        model=request.model,
        seq=request.seq,
        method=request.method,
        adapter_share=request.adapter_share,
        optimizer=request.optimizer,
        offload=request.offload,
        objective=request.objective,
    )
    if request.written is None:
        return task
    return replace(task, engine_bytes=_rollout_timer(request, task, request.written).least_bytes)


def step_time_calculator(request: LayoutRequest) -> StepTimeCalculator:
    """Return the calculator of step times for this request; reuse it for many layouts."""
    timer = None if request.written is None else rollout_timer(request)
    task = training_task(request)
    if request.samples is None:
        task = replace(task, seq=request.mean_seq)
    plain = StepTimeCalculator(task, request.machine, request.physics, request.stack, timer)
    return plain if request.samples is None else UnevenStepTimeCalculator(plain, request.samples)


def rollout_timer(request: LayoutRequest) -> RolloutTimer:
    """Return the timer of the rollouts of this request, whose objective is GRPO."""
    assert request.written is not None
    return _rollout_timer(request, training_task(request), request.written)


def _rollout_timer(request: LayoutRequest, task: TrainingTask, rollout: RolloutRequest) -> RolloutTimer:
    network = RankNetwork(request.machine, request.physics)
    return RolloutTimer(task, request.machine, network, rollout, request.stack)


def evaluate_layout(
    request: LayoutRequest, layout: Layout, *, costs: StepTimeCalculator | None = None, why: str = ""
) -> EvaluatedLayout:
    """Evaluate one layout, whether it fits or not."""
    step = (costs or step_time_calculator(request)).step_time(layout)
    task = training_task(request)
    held = estimate_memory(task, layout, request.machine.gpu, request.stack)
    over_host = exceeds_host(held.host_bytes, layout, request.machine)
    low_s, high_s = interval_s(
        step,
        request.physics,
        request.stack.spread,
        request.machine.gpu,
        mixture=request.model.mixture is not None,
        adapters=request.method is not TrainingMethod.FULL,
    )
    slowdown = request.machine.measured.slowdown if request.machine.measured is not None else 1.0
    low_s, middle_s, high_s = low_s * slowdown, step.total_s * slowdown, high_s * slowdown
    step_tokens = layout.global_batch * request.mean_seq * task.sequences
    tokens_per_s = step_tokens / middle_s
    train = hours = cost = None
    if request.tokens is not None:
        steps = math.ceil(request.tokens / step_tokens)
        train = (steps * low_s, steps * middle_s, steps * high_s)
        hours = _scaled(train, layout.ranks / HOUR_S)
        if request.machine.price is not None:
            cost = _scaled(hours, request.machine.price.usd_per_gpu_hour)
    return EvaluatedLayout(
        layout=layout,
        memory=held,
        step=_slowed(step, slowdown),
        low_s=low_s,
        high_s=high_s,
        tokens_per_s=tokens_per_s,
        mfu=mfu(request, tokens_per_s, layout.ranks),
        checkpoint=checkpoint_cost(request, layout),
        train_s=train,
        gpu_hours=hours,
        cost_usd=cost,
        host_bytes=held.host_bytes * ranks_of_node(layout, request.machine),
        fits=not exceeds_memory(held) and not over_host,
        exceeds_host=over_host,
        host_limit_bytes=request.machine.host_memory_bytes,
        tight_on_host=is_tight_on_host(held.host_bytes, layout, request.machine),
        why=why,
    )


def mfu(request: LayoutRequest, tokens_per_s: float, gpus: int) -> float:
    """Return model FLOP/s over the dense 16-bit peak of the devices. Frozen weights need no gradients: a third less."""
    peak = peak_flops(request.machine.gpu)
    span = request.mean_seq if request.samples is None else round(request.samples.span)
    flops_per_token = request.model.flops_per_token(span, frozen=request.method is not TrainingMethod.FULL)
    return tokens_per_s * flops_per_token / (gpus * peak)


def peak_flops(gpu: Gpu) -> float:
    """Return the peak that MFU refers to: dense 16-bit products, or fp32 on a device without them."""
    return gpu.flops.get("bf16") or gpu.flops.get("fp16") or gpu.flops["fp32"]


def checkpoint_cost(request: LayoutRequest, layout: Layout) -> CheckpointEstimate:
    """Return size, times and the optimal interval of checkpoints: J. T. Daly, 2006, see `core.recovery.interval`."""
    trained = request.model.parameters * (1.0 if request.method is TrainingMethod.FULL else request.adapter_share)
    bytes_ = trained * STATE_BYTES
    machine = request.machine
    nodes = max(1, -(-layout.ranks // machine.gpus_per_node))
    storage = machine.storage_bytes_per_s
    if machine.measured is not None and machine.measured.storage_bytes_per_s:
        storage = machine.measured.storage_bytes_per_s
    write_s = bytes_ / (nodes * storage)
    stall_s = bytes_ / layout.ranks / (machine.gpu.pcie_bytes_per_s * COPY_SHARE)
    mtbf_s = gang_mtbf_s(devices=layout.ranks)
    interval_s = max(daly_interval_s(stall_s=stall_s, mtbf_s=mtbf_s), write_s)
    restart_s = RESTART_S + write_s
    goodput = 0.0
    if (interval_s + stall_s + restart_s) / mtbf_s < FAILURES_MAX:
        goodput = HOUR_S / expected_wall_s(
            work_s=HOUR_S, interval_s=interval_s, stall_s=stall_s, mtbf_s=mtbf_s, restart_s=restart_s
        )
    return CheckpointEstimate(bytes=bytes_, write_s=write_s, stall_s=stall_s, interval_s=interval_s, goodput=goodput)


def validate_request(request: LayoutRequest) -> None:
    """Validate a request.

    Raises:
        BadRequest: a size is not positive, the device lacks the precision, the nodes have no network, or the stack lacks what is asked.
    """
    for name, value in (("seq", request.seq), ("global batch", request.global_batch), ("GPUs", request.machine.gpus)):
        if value < 1:
            raise BadRequest(f"{name} is {value}; it must be at least 1")
    machine, gpu = request.machine, request.machine.gpu
    if machine.nodes > 1 and RankNetwork(machine, request.physics).far_bytes_per_s <= 0.0:
        raise BadRequest(
            f"the {machine.nodes} nodes have no network between them (0 bit/s), so no model can be split over them",
            hint=Hint(HintCode.GIVE_VALUE, key="network", value="100gbit"),
        )
    have = sorted({*gpu.flops, *gpu.best_flops})
    if request.precision not in have:
        raise BadRequest(f"{gpu.name} does not support {request.precision}", hint=f"it supports {', '.join(have)}")
    _validate_method(request)
    if request.precision not in request.stack.precisions:
        raise BadRequest(
            f"{request.stack.name} does not train in {request.precision}",
            hint=Hint(HintCode.GIVE_VALUE, key="stack", value="megatron-core")
            if request.precision in NARROW
            else Hint(HintCode.GIVE_VALUE, key="precision", value=request.stack.precisions[0]),
        )
    _validate_optimizer(request)


def _validate_method(request: LayoutRequest) -> None:
    stack, writes = request.stack, request.objective is Objective.GRPO
    able = "transformers"
    if request.model.mixture is not None:
        able = "nemo-rl" if writes and request.method is TrainingMethod.FULL else "megatron-core"
    hint = Hint(HintCode.GIVE_VALUE, key="stack", value=able)
    if stack.methods and request.method.value not in stack.methods:
        raise BadRequest(
            f"{stack.name} has no method {request.method.value}, only {', '.join(stack.methods)}", hint=hint
        )
    if request.objective is not Objective.CROSS_ENTROPY and not stack.compares:
        raise BadRequest(
            f"{stack.name} trains on text only, not on answers that are compared ({request.objective.value})", hint=hint
        )


def _validate_optimizer(request: LayoutRequest) -> None:
    stack, optimizer, offload = request.stack, request.optimizer, request.offload
    if stack.optimizers and optimizer.value not in stack.optimizers:
        raise BadRequest(
            f"{stack.name} has no optimizer {optimizer.value}",
            hint=Hint(HintCode.GIVE_VALUE, key="stack", value="fsdp2-eager"),
        )
    if offload is Offload.NONE:
        return
    if offload.value not in stack.offloads:
        have = f"it offloads {' and '.join(stack.offloads)}" if stack.offloads else f"{stack.name} offloads nothing"
        raise BadRequest(
            f"{stack.name} cannot offload: {offload.value} ({have})",
            hint=Hint(HintCode.GIVE_VALUE, key="stack", value="deepspeed"),
        )
    if optimizer is not OptimizerKind.ADAMW:
        raise BadRequest(
            f"optimizer {optimizer.value} runs on the GPU, but offload {offload.value} updates on the CPU",
            hint="give one of the two",
        )
    layout = request.layout
    least = Z3 if offload is Offload.PARAMETERS else 1
    if layout is not None and layout.data > 1 and layout.zero < least:
        raise BadRequest(
            f"offload {offload.value} needs zero={least} or more over {layout.data} data-parallel ranks; the layout has zero={layout.zero}",
            hint=f"write fsdp={layout.data} instead of dp",
        )


def complete_layout(request: LayoutRequest, layout: Layout) -> Layout:
    """Validate the layout of a user and fill in its number of micro-batches and its precision.

    Raises:
        BadRequest: it does not match the machine, or it cannot split this model and batch.
    """
    if layout.ranks != request.machine.gpus:
        raise BadRequest(
            f"layout {layout} is for {layout.ranks} ranks, but the plan is for {request.machine.gpus} GPUs",
            hint="choose axes whose product is the number of GPUs",
        )
    least = layout.data * layout.micro_batch * request.updates
    if request.global_batch % least:
        times = "" if request.updates == 1 else f" in each of {request.updates} updates"
        raise BadRequest(
            f"global batch {request.global_batch} is not divisible by {layout.data} data-parallel ranks "
            f"with micro-batches of {layout.micro_batch} sequences{times}",
            hint=f"use a multiple of {least}",
        )
    model = request.model
    filled = _filled(layout, request)
    check_split(
        filled,
        SplitLimits(
            layers=model.layers,
            heads=model.heads,
            kv_heads=model.kv_heads if model.latent is None else model.heads,
            widths=(("ffn", model.ffn),),
            sequence=request.seq,
            batch=request.global_batch,
            experts=1 if model.mixture is None else model.mixture.experts,
        ),
    )
    return filled


def _filled(layout: Layout, request: LayoutRequest) -> Layout:
    precision = request.precision if layout.precision == Layout().precision else layout.precision
    micro_batches = request.global_batch // (layout.data * layout.micro_batch)
    return replace(layout, micro_batches=micro_batches, precision=precision)


def _scaled(three: tuple[float, float, float], factor: float) -> tuple[float, float, float]:
    return three[0] * factor, three[1] * factor, three[2] * factor


def _slowed(step: StepTime, factor: float) -> StepTime:
    if factor == 1.0:
        return step
    return StepTime(
        items={item: seconds * factor for item, seconds in step.items.items()},
        total_s=step.total_s * factor,
        stages=(step.stages[0] * factor, step.stages[1] * factor),
    )

"""Prediction of the planner for the rank-order benchmark: the same model, with the rates that the ranks measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from phalanx.core.work.layouts.layout import Layout
from phalanx.planner.cost.coefficients import Stack
from phalanx.planner.cost.machine import Machine, MeasuredRates
from phalanx.planner.cost.model_shape import ModelShape
from phalanx.planner.cost.step_time import step_time
from phalanx.planner.cost.training_task import TrainingTask
from phalanx.planner.facts.coefficient_table import physics
from phalanx.planner.facts.gpus import find_gpu


def planned_s(
    layout: Layout, shape: Mapping[str, int], found: Mapping[str, float], *, hosts: int, devices: int
) -> float:
    """Return the predicted seconds of one step, with ranks numbered host by host.

    `found` has `flops` and `memory_bytes_per_s` of one rank while all are busy, and `within_bytes_per_s` and `between_bytes_per_s`: bytes per
    second that one rank sends in an all-reduce of one activation, inside its host and between hosts.
    """
    width, heads = shape["width"], shape["heads"]
    model = ModelShape(
        name="rank-order",
        layers=shape["layers"],
        hidden=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        ffn=4 * width,
        vocab=shape["vocabulary"],
        gated=False,
    )
    measured = MeasuredRates(
        flops={"fp32": found["flops"], "bf16": found["flops"]},
        memory_bytes_per_s=found["memory_bytes_per_s"],
        within_bytes_per_s=found["within_bytes_per_s"],
        between_bytes_per_s=found["between_bytes_per_s"],
    )
    machine = Machine(
        gpu=find_gpu("virtual").gpu,
        nodes=hosts,
        gpus_per_node=devices,
        network_bytes_per_s=found["between_bytes_per_s"],
        network_kind="tcp",
        measured=measured,
    )
    # Nothing overlaps, no kernel is fused, the host is the device, and there is no flash attention.
    loop = Stack(
        name="rank-order",
        elementwise=1.0,
        host_s=0.0,
        tensor_exposed=1.0,
        data_exposed=1.0,
        reduce_bytes=4.0,
        flash_shares={"": physics().matmul_share},
    )
    task = TrainingTask(model=model, seq=shape["sequence"])
    return step_time(
        task, replace(layout, precision="fp32"), machine, replace(physics(), pipeline_exposed=1.0), loop
    ).total_s

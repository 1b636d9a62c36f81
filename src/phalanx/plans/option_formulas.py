"""The part of `phalanx plan --explain` about optimizer, host and objective. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from phalanx.planner.cost.coefficients import Stack
from phalanx.planner.cost.host_memory import COPY_SHARE, UPDATE_BYTES, UPDATE_SHARE, ranks_of_node
from phalanx.planner.cost.machine import Machine
from phalanx.planner.cost.optimizers import Offload, OptimizerKind, optimizer_state_bytes
from phalanx.planner.cost.step_time import StepItem
from phalanx.planner.cost.training_task import Objective, TrainingTask, updated_parameters
from phalanx.plans.amounts import format_decimal_bytes, format_seconds
from phalanx.plans.records import Formula, LayoutFigures

_NARROW: Final = 'T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022, section 2 and table 5'
_FOUR: Final = 'B. Li et al., "Memory Efficient Optimizers with 4-bit States", 2023; github:pytorch/ao torchao/optim'
_PAGED: Final = 'T. Dettmers et al., "QLoRA", 2023, section 3'
_OFFLOAD: Final = 'J. Ren et al., "ZeRO-Offload", 2021, sections 4 and 5.1'
_DPO: Final = 'R. Rafailov et al., "Direct Preference Optimization", 2023, section 4'
_GRPO: Final = 'Z. Shao et al., "DeepSeekMath", 2024, section 4.1; G. Sheng et al., "HybridFlow", 2024, section 5'


def explain_options(task: TrainingTask, stack: Stack, machine: Machine, figures: LayoutFigures) -> Iterator[Formula]:
    """Yield a formula for each option of the task that is not at its default."""
    items = dict(figures.step_items_s)
    if task.optimizer.is_narrow:
        four = task.optimizer is OptimizerKind.ADAMW_4BIT
        yield Formula(
            name=f"{'4' if four else '8'}-bit optimizer",
            symbols=f"two moments of {'1/2 + 4/128' if four else '1 + 4/256'} bytes for each parameter, with the master copy",
            numbers=f"{optimizer_state_bytes(stack, task.optimizer):.4g} bytes a parameter instead of {stack.state_bytes:g}: {_seconds(items, StepItem.OPTIMIZER)}",
            source=_FOUR if four else _NARROW,
        )
    if task.optimizer.is_paged:
        yield Formula(
            name="paged states",
            symbols="twice the states that have no room beside the activations, over a share of PCIe",
            numbers=f"{COPY_SHARE:.0%} of {machine.gpu.pcie_bytes_per_s / 1e9:.3g} GB/s: {_seconds(items, StepItem.HOST_COPIES)}",
            source=_PAGED,
        )
    if task.offload is not Offload.NONE:
        yield _host(task, machine, figures, items)
    if task.objective is Objective.DPO:
        yield Formula(
            name="preferences",
            symbols="two sequences a sample, each computed by the trained model (forward and backward) and by the reference (forward)",
            numbers=_seconds(items, StepItem.REFERENCE),
            source=_DPO,
        )
    if task.objective is Objective.GRPO:
        yield Formula(
            name="rollout",
            symbols="answers begin together and end at every token with equal probability, at the latest at the limit; then they are scored",
            numbers=f"{_seconds(items, StepItem.ROLLOUT)}, {stack.scoring_passes} forward passes to score {_seconds(items, StepItem.REFERENCE)}",
            source=f"{_GRPO}; the engine as in plans of inference",
        )


def _host(task: TrainingTask, machine: Machine, figures: LayoutFigures, items: Mapping[str, float]) -> Formula:
    ranks = ranks_of_node(figures.layout, machine)
    return Formula(
        name="update on the host",
        symbols=f"r n {UPDATE_BYTES:g} / ({UPDATE_SHARE:g} B), r ranks of a node, n parameters that each updates, B of the host's memory",
        numbers=(
            f"r {ranks}, n {updated_parameters(task, figures.layout) / 1e9:.4g}B, B {machine.host_bytes_per_s / 1e9:.4g} GB/s "
            f"({machine.host_fact.source or 'not stated'}), {format_decimal_bytes(figures.host_bytes)} on a host: "
            f"{_seconds(items, StepItem.OPTIMIZER)}, copies that nothing hides {_seconds(items, StepItem.HOST_COPIES)}"
        ),
        source=_OFFLOAD,
    )


def _seconds(items: Mapping[str, float], item: StepItem) -> str:
    return f"{format_seconds(items.get(item.value, 0.0))} a step"

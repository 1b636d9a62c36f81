"""Parse `--global-batch`: sequences per step over all ranks, or the usual number of them."""

from __future__ import annotations

from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.layouts.layout import Layout
from phalanx.planner.cost.training_task import Objective, TrainingMethod
from phalanx.planner.search.request import batch_grain, next_batch
from phalanx.plans.amounts import format_tokens, parse_count
from phalanx.plans.method import WrittenAnswers
from phalanx.plans.training import TrainingInputs

BATCH_DEFAULT_TOKENS: Final = 4_194_304  # per step in full training: as Llama 1 and 2
ADAPTER_BATCH_DEFAULT: Final = 64  # sequences per step for adapters: published recipes use 16 to 128
SAMPLES_DEFAULT: Final = {
    Objective.DPO: (128, "pairs of answers per step"),  # recipes use 32 to 256
    Objective.GRPO: (512, "answers per step"),  # 64 prompts with the usual eight answers
}


def parse_global_batch(
    text: object, training: TrainingInputs, *, layout: Layout | None, gpus: int, notes: list[str]
) -> int:
    """Return the given sequences per step, else those of the given layout, else the usual number; `notes` receives the latter.

    Raises:
        BadRequest: not a number, or answers that cannot be divided among prompts and updates.
    """
    if text is not None:
        batch = parse_count(text, what="global-batch")
    elif layout is not None and (layout.micro_batches > 1 or layout.micro_batch > 1):
        batch = layout.global_batch
    else:
        batch = _usual_batch(training, grain_of(gpus, training.answers), notes)
    answers = training.answers
    if answers is not None and batch % answers.group:
        raise BadRequest(
            f"global batch {batch} is not divisible by groups of {answers.group} answers",
            hint=f"use a multiple of {answers.group}",
        )
    if answers is not None and batch % answers.updates:
        raise BadRequest(
            f"global batch {batch} is not divisible by {answers.updates} updates", hint="use a divisor for --updates"
        )
    return batch


def grain_of(gpus: int, answers: WrittenAnswers | None) -> int:
    """Return `batch_grain` of what is written."""
    return batch_grain(gpus) if answers is None else batch_grain(gpus, answers.group, answers.updates)


def _usual_batch(training: TrainingInputs, grain: int, notes: list[str]) -> int:
    if training.objective is not Objective.CROSS_ENTROPY:
        usual, what = SAMPLES_DEFAULT[training.objective]
        batch = next_batch(usual, grain)
        if batch > 2 * usual:  # answers to a prompt, or updates, would make the step much larger
            batch = usual
        notes.append(f"global batch not stated: {batch} {what}")
        return batch
    tokens = training.sequence_tokens
    adapts = training.method is not TrainingMethod.FULL
    batch = next_batch(ADAPTER_BATCH_DEFAULT if adapts else max(1, BATCH_DEFAULT_TOKENS // tokens), grain)
    notes.append(f"global batch not stated: {batch} sequences = {format_tokens(batch * tokens)} tokens per step")
    return batch

"""The timeline of a pipeline: when each stage computes which micro-batch. Pure; times in seconds.

1F1B after D. Narayanan et al., "PipeDream", 2019, and interleaved after D. Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", 2021, section 2.2. Transfers take no time here: `core.performance` computes the real
step time, and the picture is scaled to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class PipelinePass(NamedTuple):
    """One pass of one micro-batch through one chunk of layers."""

    micro_batch: int
    chunk: int
    forward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSlot:
    """One pass on a stage, with its time."""

    stage: int
    work: PipelinePass
    start_s: float
    end_s: float


def pipeline_schedule(
    stages: int, chunks: int, micro_batches: int, *, forward_s: float, backward_s: float
) -> list[PipelineSlot]:
    """Return every slot by stage and time.

    Args:
        stages: pipeline stages.
        chunks: chunks of layers per stage (`Layout.interleave`); plain 1F1B if the micro-batches do not fill whole rounds.
        micro_batches: number per step.
        forward_s: time of one micro-batch through one chunk.
        backward_s: the same for the backward pass.
    """
    if chunks > 1 and micro_batches % stages:
        chunks, forward_s, backward_s = 1, forward_s * chunks, backward_s * chunks
    left = [deque(_order(stage, stages, chunks, micro_batches)) for stage in range(stages)]
    free_s = [0.0] * stages
    done: dict[tuple[int, PipelinePass], float] = {}
    slots: list[list[PipelineSlot]] = [[] for _ in range(stages)]
    while any(left):
        before = len(done)
        for stage, queue in enumerate(left):
            while queue and (ready_s := _ready_s(stage, queue[0], stages, chunks, done)) is not None:
                work = queue.popleft()
                start_s = max(free_s[stage], ready_s)
                free_s[stage] = done[stage, work] = start_s + (forward_s if work.forward else backward_s)
                slots[stage].append(PipelineSlot(stage=stage, work=work, start_s=start_s, end_s=free_s[stage]))
        assert len(done) > before, "the pipeline order has a deadlock"
    return [slot for stage in slots for slot in stage]


def _ready_s(
    stage: int, work: PipelinePass, stages: int, chunks: int, done: dict[tuple[int, PipelinePass], float]
) -> float | None:
    """Return when the inputs of the pass are ready; None while unknown."""
    first, last = stage == 0, stage == stages - 1
    if work.forward:
        if first and work.chunk == 0:
            return 0.0
        return done.get((stages - 1, work._replace(chunk=work.chunk - 1)) if first else (stage - 1, work))
    if last and work.chunk == chunks - 1:
        return done.get((stage, work._replace(forward=True)))
    return done.get((0, work._replace(chunk=work.chunk + 1)) if last else (stage + 1, work))


def _order(stage: int, stages: int, chunks: int, micro_batches: int) -> Iterator[PipelinePass]:
    """Yield the passes of a stage in order: forward passes that fill the pipeline, then alternating forward and backward."""
    total = micro_batches * chunks
    ahead = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    ahead = min(ahead, total)
    for number in range(ahead):
        yield _work(number, stages, chunks, forward=True)
    for number in range(total - ahead):
        yield _work(number + ahead, stages, chunks, forward=True)
        yield _work(number, stages, chunks, forward=False)
    for number in range(total - ahead, total):
        yield _work(number, stages, chunks, forward=False)


def _work(number: int, stages: int, chunks: int, *, forward: bool) -> PipelinePass:
    """Return the n-th pass: rounds of `stages` micro-batches go through one chunk after the other."""
    if chunks == 1:
        return PipelinePass(number, 0, forward)
    turn, place = divmod(number, stages * chunks)
    chunk, micro_batch = divmod(place, stages)
    return PipelinePass(turn * stages + micro_batch, chunk if forward else chunks - 1 - chunk, forward)

"""Training samples of unequal length: which positions a step computes for them, and which of these count.

A sample has a mean length m and at most L tokens. It is taken to end at every token with the same probability (`sequence_lengths`): the least
that one assumes of a length with a mean and a limit. By the way in which samples are put together, a sequence of the batch has
    padded      the tokens of one sample, and pads up to the longest sample of its micro-batch. Ranks that gather each layer's parameters together
                (ZeRO 3), and stages, wait for the longest of all their micro-batches
    unpadded    the tokens of one sample. Such ranks wait for the micro-batch with the most tokens: of r ranks with n sequences each,
                as many times the mean as `SequenceLengths.slowest_share` says
                Other ranks wait once a step, for the one whose n sequences of all its micro-batches have the most tokens
    packed      L positions, filled with samples, first fit decreasing; a token attends to its own sample only
Memory is planned for a micro-batch of longest samples, which comes sooner or later.
Sources: padding: docs of transformers, DataCollatorForLanguageModeling; unpadded and packed: docs of trl, "Reducing memory usage", padding-free
batching, and packing with strategy "bfd"; H. Ding et al., "Fewer Truncations Improve Language Modeling", 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phalanx.core.work.layouts.layout import Layout
from phalanx.planner.cost.sequence_lengths import SequenceBatching, SequenceLengths
from phalanx.planner.cost.step_time import StepTime, StepTimeCalculator

_SHARDED: Final = 3  # the ZeRO degree whose ranks gather each layer's parameters together


@dataclass(frozen=True)
class SampleBatches:
    """Samples, and how they are put together. `mean` and `longest` in tokens; a mean of `longest` is a batch of equal samples."""

    mean: int
    longest: int
    batching: SequenceBatching

    @property
    def lengths(self) -> SequenceLengths:
        """The distribution of the lengths."""
        return SequenceLengths(0, self.mean, self.longest)

    @property
    def tokens(self) -> float:
        """Tokens that count in one sequence of the batch: of a sample, or of the samples of a pack."""
        if self.batching is SequenceBatching.PACKED:
            return self.longest * self.lengths.filled
        return float(self.mean)

    @property
    def span(self) -> float:
        """Length of equal samples with as much attention for each token: the mean square of a length over its mean."""
        return self.lengths.mean_square / self.mean

    def positions(self, layout: Layout) -> float:
        """Return the expected positions that are computed for one sequence, with what faster ranks wait for the slowest."""
        if self.batching is SequenceBatching.PACKED:
            return float(self.longest)
        sharded = layout.zero == _SHARDED
        together = layout.pipeline * (layout.data if sharded else 1)
        sequences = layout.micro_batch
        length = float(self.mean)
        if self.batching is SequenceBatching.PADDED:
            length = self.lengths.longest_of(layout.micro_batch * together)
        if not sharded:  # ranks wait for each other once a step
            sequences *= layout.micro_batches
        if self.batching is SequenceBatching.UNPADDED or not sharded:
            length *= self.lengths.slowest_share(sequences, layout.pipeline * layout.data)
        return min(length, float(self.longest))

    def attended(self, layout: Layout) -> float:
        """Return the share of the scores of so long a sequence that is computed."""
        if self.batching is SequenceBatching.PADDED:
            return 1.0
        if self.batching is SequenceBatching.PACKED:
            return self.tokens * self.span / self.longest**2
        return min(1.0, self.span / self.positions(layout))

    def wasted(self, layout: Layout) -> float:
        """Return the share of the computed positions that are no tokens: pads, unfilled packs, and waiting."""
        return 1.0 - self.tokens / self.positions(layout)


class UnevenStepTimeCalculator(StepTimeCalculator):
    """Step times of samples of unequal length: those of equal sequences as long as what is computed for one."""

    def __init__(self, plain: StepTimeCalculator, samples: SampleBatches) -> None:
        """`plain` computes steps of whole sequences."""
        super().__init__(plain.task, plain.machine, plain.physics, plain.stack, plain.rollout)
        self.samples = samples
        self._by_length: dict[tuple[int, float], StepTimeCalculator] = {}

    def step_time(self, layout: Layout) -> StepTime:
        """Return the expected step time of one layout."""
        computed = self.task.computed(layout)
        key = (round(self.samples.positions(computed)), round(self.samples.attended(computed), 4))
        found = self._by_length.get(key)
        if found is None:
            task = self.task.with_lengths(seq=key[0], attended=key[1])
            found = StepTimeCalculator(task, self.machine, self.physics, self.stack, self.rollout)
            self._by_length[key] = found
        return found.step_time(layout)

"""Sequences of unequal length: how long the longest of many is, and what unequal lengths cost ranks that compute them together.

A sequence is an answer that a model wrote after a prompt, or a training sample, which has no prompt. It is taken to end at every token with the
same probability, at the latest at the limit L: the least that one assumes of a length with a mean and a limit. With s the mean without the limit:
    longest of n      integral from 0 to L of 1 - (1 - exp(-x / s))^n
    padded            every sequence is computed as long as the longest
    packed            sequences fill packs of the longest sequence, first fit decreasing; ranks that wait for each other compute whole packs
    unpadded          ranks that gather each layer's parameters together wait for the one with the most tokens: of r ranks with m sequences
                      each, (1 + v / sqrt(m) E[largest of r standard normals]) times the mean, with v the relative deviation of a length
    attention         grows with the mean square of a length, not with the square of the mean
Sources: order statistics: H. David, H. Nagaraja, "Order Statistics", 2003, sections 2.1 and 4.5 (G. Blom's approximation); packing: D. Johnson et
al., SIAM J. Comput. 3(4), 1974; who pads and packs: `stacks.json`.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Final

_STEPS: Final = 400  # of the integral
_PACKED: Final = 512  # sequences whose packing stands for that of all
_BLOM: Final = 0.375


class SequenceBatching(enum.StrEnum):
    """How sequences of unequal length are computed together."""

    PADDED = "padded"
    PACKED = "packed"
    UNPADDED = "unpadded"


@dataclass(frozen=True, slots=True)
class Unevenness:
    """Time of work on all sequences, relative to as many of the mean length. `linear`: of products; `square`: of attention."""

    linear: float = 1.0
    square: float = 1.0


@dataclass(frozen=True)
class SequenceLengths:
    """Prompts of equal length, and answers with a mean and a limit (`longest`). In tokens. Samples are answers to prompts of no token."""

    prompt: int
    answer: int
    longest: int

    @cached_property
    def scale(self) -> float:
        """The mean of an answer without the limit."""
        return untruncated_mean(self.answer, self.longest)

    @property
    def mean(self) -> float:
        """Mean tokens of a prompt with its answer."""
        return float(self.prompt + self.answer)

    @cached_property
    def mean_square(self) -> float:
        """Mean square of these."""
        scale, most = self.scale, float(self.longest)
        cut = math.exp(-most / scale)
        square = 2.0 * scale * scale * (1.0 - cut) - 2.0 * scale * most * cut
        return self.prompt**2 + 2.0 * self.prompt * self.answer + square

    @property
    def deviation(self) -> float:
        """Standard deviation of a prompt with its answer, relative to the mean."""
        return math.sqrt(max(0.0, self.mean_square - self.mean**2)) / self.mean

    def longest_of(self, answers: int) -> float:
        """Return the expected tokens of the longest of so many answers."""
        return max(float(self.answer), min(_longest(self.scale, self.longest, answers), float(self.longest)))

    def slowest_share(self, sequences: int, ranks: int) -> float:
        """Return the expected tokens of the fullest of so many ranks, with so many sequences each, relative to the mean of all."""
        return 1.0 + self.deviation / math.sqrt(max(1, sequences)) * _largest_normal(ranks)

    def quantile(self, share: float) -> float:
        """Return the tokens that this share of the answers does not exceed."""
        return min(float(self.longest), -self.scale * math.log1p(-share))

    @cached_property
    def filled(self) -> float:
        """Share of packs of the longest sequence that holds tokens, packed first fit decreasing."""
        limit = float(self.prompt + self.longest)
        sizes = sorted((self.prompt + self.quantile((one + 0.5) / _PACKED) for one in range(_PACKED)), reverse=True)
        rooms: list[float] = []
        for size in sizes:
            place = next((number for number, room in enumerate(rooms) if room >= size), None)
            if place is None:
                rooms.append(limit - size)
            else:
                rooms[place] -= size
        return sum(sizes) / (len(rooms) * limit)

    def unevenness(self, batching: SequenceBatching, *, together: int, sequences: int, answers: int) -> Unevenness:
        """Return what unequal lengths cost.

        Args:
            batching: of the stack.
            together: ranks that wait for each other in every micro-batch.
            sequences: of one micro-batch.
            answers: of one step, over all ranks.
        """
        squares = self.mean_square / self.mean**2
        if batching is SequenceBatching.PADDED:
            linear = (self.prompt + self.longest_of(answers)) / self.mean
            return Unevenness(linear, linear**2)
        if batching is SequenceBatching.PACKED:
            linear = 1.0 / self.filled if together > 1 else 1.0
            return Unevenness(linear, squares * linear)
        linear = self.slowest_share(sequences, together)
        return Unevenness(linear, squares * linear)


@lru_cache(maxsize=1024)
def _longest(scale: float, most: int, answers: int) -> float:
    width = most / _STEPS
    ended = (-math.expm1(-(step + 0.5) * width / scale) for step in range(_STEPS))
    return width * sum(-math.expm1(answers * math.log(one)) for one in ended)


def _largest_normal(count: int) -> float:
    """Return the expected largest of so many standard normal numbers (Blom); 0 for one."""
    return 0.0 if count <= 1 else NormalDist().inv_cdf((count - _BLOM) / (count - 2.0 * _BLOM + 1.0))


def untruncated_mean(mean: float, most: float) -> float:
    """Return the mean m of an exponential distribution that has this mean where it is cut at `most`: m (1 - exp(-most / m)) = mean."""
    low, high = mean, 1e4 * most  # beyond, nearly all are cut
    for _ in range(60):
        middle = math.sqrt(low * high)
        if middle * -math.expm1(-most / middle) < mean:
            low = middle
        else:
            high = middle
    return high

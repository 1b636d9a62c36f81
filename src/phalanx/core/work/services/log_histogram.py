"""Counts of positive figures in classes of equal ratio. Histograms of several processes add up; a quantile is right within 5 %."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

RATIO: Final = 1.1
LEAST: Final = 0.001  # the lower end of class 0: 1 ms, if the figures are seconds
CLASSES: Final = 170  # up to 1e4
LogHistogram = Mapping[int, int]  # how many figures are in each class


def class_of(figure: float) -> int:
    """The class of a figure; smaller and larger ones are in the first and last class."""
    if figure <= LEAST:
        return 0
    return min(CLASSES - 1, int(math.log(figure / LEAST) / math.log(RATIO)))


def middle_of(number: int) -> float:
    """The geometric middle of a class."""
    return float(LEAST * RATIO ** (number + 0.5))


def merged(histograms: Iterable[LogHistogram]) -> dict[int, int]:
    """The sum of histograms."""
    total: dict[int, int] = {}
    for one in histograms:
        for number, count in one.items():
            total[number] = total.get(number, 0) + count
    return total


def quantile(histogram: LogHistogram, share: float) -> float:
    """The figure below which this share lies; 0 for an empty histogram."""
    total = sum(histogram.values())
    rank = share * total
    seen = 0
    for number in sorted(histogram):
        seen += histogram[number]
        if seen >= rank:
            return middle_of(number)
    return 0.0

"""The spreads between sources: so wide that 80 % intervals hold four of five rows of sources that the fit left out.

A source is off as a whole, so each counts by the square root of its rows, as in the fit: a source of 216 rows counts five times as much as one
of 8. The spread of a kind of runs (dense, then mixtures and adapters in addition) is the least with which the weighted share of rows inside
their intervals reaches `HELD`. It is found from |log error| and the variance of the items of each row, without any assumption on the errors'
distribution (V. Vovk et al., "Algorithmic Learning in a Random World", 2005, chapter 2: split conformal prediction).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

from benchmarks.prediction_score import PredictionScore
from phalanx.planner.cost.uncertainty import ADAPTERS, MIXTURE, SOURCE, Z_80

HELD: Final = 0.86
"""Share of rows inside: in the upper half of the wanted 75 to 90 %, because sources that nobody collected differ more than those here."""


def spread_lines(left: Sequence[PredictionScore], adapted: Sequence[PredictionScore]) -> list[str]:
    """Return the first cells of the lines of coefficients.csv, from left-out scores and from scores of tunings that were never fitted."""
    dense = needed_spread([one for one in left if not one.run.is_mixture])
    mixed = needed_spread([one for one in left if one.run.is_mixture])
    tuned = needed_spread([one for one in adapted if one.run.has_adapters])
    further = {MIXTURE: mixed, ADAPTERS: tuned}
    return [
        f"spread,{SOURCE},{dense:.3g}",
        *(f"spread,{name},{math.sqrt(max(0.0, value**2 - dense**2)):.3g}" for name, value in further.items()),
    ]


def needed_spread(scores: Sequence[PredictionScore]) -> float:
    """Return the least spread, beside that of the items, with which the intervals hold `HELD` of the rows by weight; 0 without rows."""
    timed = [one for one in scores if one.run.step_s is not None]
    counts = Counter(one.run.source for one in timed)
    needed = sorted(
        (
            math.sqrt(max(0.0, (math.log1p(one.error) / Z_80) ** 2 - one.item_variance)),
            1.0 / math.sqrt(counts[one.run.source]),
        )
        for one in timed
    )
    left = HELD * sum(weight for _, weight in needed)
    for spread, weight in needed:
        left -= weight
        if left <= 0.0:
            return spread
    return 0.0

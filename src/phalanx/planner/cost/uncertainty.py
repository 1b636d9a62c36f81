"""The uncertainty of a step time, from the spread of each item, of the stack, and between the sources of measurements.

The logarithm of measured over predicted time is modelled as normal, with the variance
    sum over items (share of the step x spread of the item)^2 + spread of the stack^2 + spread between sources^2
and a further spread for a GPU without measured runs, for a mixture, and for adapters. The errors of items are independent, so their variances
add: a step of matrix products has less uncertainty than one that waits for the network. All runs of one source share its program, machines and
habits of measuring, so a source is off as a whole: that spread does not shrink with the number of rows. The spreads are data
(`phalanx.planner.facts`). Those between sources follow from the errors on sources that a fit left out (`benchmarks.interval_spreads`).
"""

from __future__ import annotations

import math
from typing import Final

from phalanx.planner.cost.coefficients import Physics
from phalanx.planner.cost.machine import Gpu
from phalanx.planner.cost.step_time import StepTime

Z_80: Final = 1.2816
"""Standard deviations on either side of the mean of a normal distribution that contain 80 %."""
UNMEASURED_GPU: Final = "another gpu"
MIXTURE: Final = "mixture"


ADAPTERS: Final = "adapters"
SOURCE: Final = "source"


def item_variance(step: StepTime, physics: Physics, stack_spread: float, gpu: Gpu) -> float:
    """Return the variance of the logarithm of the step time that follows from its items, the stack and the GPU."""
    variance = stack_spread**2
    for item, seconds in step.items.items():
        variance += (seconds / step.total_s * physics.spreads[item.value]) ** 2
    if not gpu.name.startswith(physics.fitted_gpus):
        variance += physics.spreads[UNMEASURED_GPU] ** 2
    return variance


def sigma(
    step: StepTime, physics: Physics, stack_spread: float, gpu: Gpu, *, mixture: bool, adapters: bool = False
) -> float:
    """Return the standard deviation of the logarithm of the step time."""
    variance = item_variance(step, physics, stack_spread, gpu) + physics.spreads[SOURCE] ** 2
    if mixture:
        variance += physics.spreads[MIXTURE] ** 2
    if adapters:
        variance += physics.spreads[ADAPTERS] ** 2
    return math.sqrt(variance)


def interval_s(
    step: StepTime, physics: Physics, stack_spread: float, gpu: Gpu, *, mixture: bool, adapters: bool = False
) -> tuple[float, float]:
    """Return the 80 % interval of the step time, in seconds."""
    wide = math.exp(Z_80 * sigma(step, physics, stack_spread, gpu, mixture=mixture, adapters=adapters))
    return step.total_s / wide, step.total_s * wide

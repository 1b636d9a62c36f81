"""The uncertainty of a step time, from the spread of each item and the spread of the stack.

The logarithm of measured over predicted time is modelled as normal, with the variance
    sum over items (share of the step x spread of the item)^2 + spread of the stack^2
and a further spread for a GPU without measured runs, and one for a mixture. The errors of items are independent, so their variances
add: a step of matrix products has less uncertainty than one that waits for the network. The spreads are data (`phalanx.planner.facts`), chosen
so that 80 % intervals cover sources that the fit did not use.
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


def sigma(step: StepTime, physics: Physics, stack_spread: float, gpu: Gpu, *, mixture: bool) -> float:
    """Return the standard deviation of the logarithm of the step time."""
    spreads = physics.spreads
    variance = stack_spread**2
    for item, seconds in step.items.items():
        variance += (seconds / step.total_s * spreads[item.value]) ** 2
    if not gpu.name.startswith(physics.fitted_gpus):
        variance += spreads[UNMEASURED_GPU] ** 2
    if mixture:
        variance += spreads[MIXTURE] ** 2
    return math.sqrt(variance)


def interval_s(
    step: StepTime, physics: Physics, stack_spread: float, gpu: Gpu, *, mixture: bool
) -> tuple[float, float]:
    """Return the 80 % interval of the step time, in seconds."""
    wide = math.exp(Z_80 * sigma(step, physics, stack_spread, gpu, mixture=mixture))
    return step.total_s / wide, step.total_s * wide

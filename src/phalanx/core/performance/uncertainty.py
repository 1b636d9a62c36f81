"""How sure a step time is: each item has a spread of its own, and a stack one beside them.

The logarithm of measured over predicted time is taken as normal, with the variance
    sum over items (share of the step x spread of the item)^2 + spread of the stack^2
and, where no measured run was on such a GPU, or the model is a mixture, a spread for that. Items
err for reasons of their own, so their variances add; a step that is mostly matrix products is surer than one that waits for a
network. The spreads are data (`phalanx.facts`), set so that 80 % intervals held on sources that the fit had not seen.
"""

from __future__ import annotations

import math
from typing import Final

from phalanx.core.performance.coefficients import Physics
from phalanx.core.performance.machine import Gpu
from phalanx.core.performance.step import StepTime

WITHIN_80: Final = 1.2816
"""Standard deviations on either side of the middle of a normal distribution that hold 80 %."""
OTHER_GPU: Final = "another gpu"
MIXTURE: Final = "mixture"


def sigma(step: StepTime, physics: Physics, stack_spread: float, gpu: Gpu, *, mixture: bool) -> float:
    """Standard deviation of the logarithm of the step time."""
    spreads = physics.spreads
    variance = stack_spread**2
    for item, seconds in step.items.items():
        variance += (seconds / step.total_s * spreads[item.value]) ** 2
    if not gpu.name.startswith(physics.seen):
        variance += spreads[OTHER_GPU] ** 2
    if mixture:
        variance += spreads[MIXTURE] ** 2
    return math.sqrt(variance)


def interval_s(
    step: StepTime, physics: Physics, stack_spread: float, gpu: Gpu, *, mixture: bool
) -> tuple[float, float]:
    """The 80 % interval of the step, in seconds."""
    wide = math.exp(WITHIN_80 * sigma(step, physics, stack_spread, gpu, mixture=mixture))
    return step.total_s / wide, step.total_s * wide

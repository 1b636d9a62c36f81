"""What is known of the speed of devices whatever runs on them, for the scheduler: calibrated and peak rates of matrix multiplications."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.core.scheduling.estimates.device_speeds import SpeedFacts
from phalanx.planner.calibration.profile import Profile, parse_profile
from phalanx.planner.facts.gpus import find_gpu

# The precision that models train in, where both sides of a ratio have it; older devices have no bf16.
_PRECISIONS: Final = ("bf16", "fp16", "fp32")


def device_speed_facts(models: Sequence[str], profile: Mapping[str, Any] | None) -> SpeedFacts:
    """The rates of these models, as nodes name them. Unknown models are left out, and so are devices that stand in for others on CPUs.

    Args:
        models: of the fleet.
        profile: the fleet's profile as `phalanx calibrate` stored it; None without one.

    Raises:
        BadRequest: the profile is not one.
    """
    return SpeedFacts(
        calibrated={} if profile is None else _calibrated(models, parse_profile(profile)), peak=_peaks(models)
    )


def _calibrated(models: Sequence[str], profile: Profile) -> dict[str, float]:
    rates = {
        model: {
            precision: [
                node.flops[precision] for node in profile.nodes if node.gpu == model and precision in node.flops
            ]
            for precision in _PRECISIONS
        }
        for model in models
    }
    return _in_one_precision(
        {model: {one: median(flops) for one, flops in by.items() if flops} for model, by in rates.items()}
    )


def _peaks(models: Sequence[str]) -> dict[str, float]:
    found = {}
    for model in models:
        try:
            gpu = find_gpu(model).gpu
        except BadRequest:  # not in the table
            continue
        if not gpu.virtual:
            found[model] = dict(gpu.flops)
    return _in_one_precision(found)


def _in_one_precision(rates: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The rate of each model in the first precision that most of them have: rates of different precisions are not comparable."""
    best = max(_PRECISIONS, key=lambda one: sum(one in by for by in rates.values()))
    return {model: by[best] for model, by in rates.items() if best in by}

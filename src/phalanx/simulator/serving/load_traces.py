"""Rates of requests over time: bursts, ramps, days, noise, spikes, steps and silence. Each trace is drawn from its seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Final

Rate = Callable[[float], float]
"""Requests per second at a time in seconds."""


def load_trace(seed: int) -> tuple[str, Rate]:
    """Return the name and the rate of a trace; seeds that differ by the number of shapes have the same shape with other figures."""
    dice = Random(seed)
    name = list(_SHAPES)[seed % len(_SHAPES)]
    return name, _SHAPES[name](dice)


def _bursts(dice: Random) -> Rate:
    base, high, every_s, long_s = (
        dice.uniform(0.2, 1),
        dice.uniform(3, 6),
        dice.uniform(500, 1500),
        dice.uniform(20, 120),
    )
    return lambda at_s: high if at_s % every_s < long_s else base


def _ramp(dice: Random) -> Rate:
    high, up_s = dice.uniform(3, 6), dice.uniform(300, 1800)
    return lambda at_s: high * max(0.0, 1 - abs(at_s % (3 * up_s) - up_s) / up_s)


def _day(dice: Random) -> Rate:
    """Day and night within an hour."""
    mean, depth, day_s = dice.uniform(1.5, 3), dice.uniform(0.6, 1), dice.uniform(2400, 4800)
    return lambda at_s: max(0.0, mean * (1 - depth * math.cos(2 * math.pi * at_s / day_s)))


def _noise(dice: Random) -> Rate:
    """Another rate every ten seconds."""
    levels = [dice.expovariate(0.5) for _ in range(997)]
    return lambda at_s: min(6.0, levels[int(at_s / 10) % len(levels)])


def _spikes(dice: Random) -> Rate:
    base, high, every_s = dice.uniform(0.5, 1.5), dice.uniform(8, 16), dice.uniform(120, 900)
    return lambda at_s: high if at_s % every_s < 3 else base


def _steps(dice: Random) -> Rate:
    levels, long_s = [dice.uniform(0.3, 5) for _ in range(97)], dice.uniform(240, 1200)
    return lambda at_s: levels[int(at_s / long_s) % len(levels)]


def _silence(dice: Random) -> Rate:
    """A session now and then, and nothing in between."""
    rate, long_s, pause_s = dice.uniform(1, 4), dice.uniform(60, 400), dice.uniform(700, 1800)
    return lambda at_s: rate if at_s % (long_s + pause_s) < long_s else 0.0


_SHAPES: Final[dict[str, Callable[[Random], Rate]]] = {
    "bursts": _bursts,
    "ramp": _ramp,
    "day": _day,
    "noise": _noise,
    "spikes": _spikes,
    "steps": _steps,
    "silence": _silence,
}

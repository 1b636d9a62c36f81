"""The speed of a class of jobs on each model of the fleet, as a share of the fastest one.

Only speeds relative to each other count. Without a table, or on a fleet of one model, all speeds are equal, and placement needs none of this.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.core.fleet.summary import model_fits
from phalanx.core.scheduling.needs import Need

SpeedTable = tuple[tuple[str, float], ...]  # (model as in a request, speed relative to the others)


def speeds_on(models: Sequence[str], table: SpeedTable) -> tuple[float, ...]:
    """The speed on each of the models, the fastest at 1; empty if they are equal or unknown.

    The last matching line counts, so that a general name can stand before an exact one. A model that the table does not name is
    assumed to be as slow as the slowest named one: a job moves there only if nothing else is free.
    """
    if not table or len(models) < 2:
        return ()
    slowest = min(speed for _, speed in table)
    found = []
    for model in models:
        named = [speed for name, speed in table if model and model_fits(model, 0, name, 0)]
        found.append(named[-1] if named else slowest)
    fastest = max(found)
    return () if min(found) == fastest else tuple(speed / fastest for speed in found)


def fastest_first(needs: tuple[Need, ...], speeds: tuple[float, ...]) -> tuple[Need, ...]:
    """The alternatives in the order of their speed per gang; equal ones in the order of preference."""
    if not speeds or len(needs) < 2:
        return needs
    return tuple(sorted(needs, key=lambda need: -max(speeds[kind] for kind in need.kinds) * max(1, need.gpus)))

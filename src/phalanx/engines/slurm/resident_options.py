"""Reads the options of resident Slurm jobs: the node pool that they ask for, and Slurm's time limit for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from phalanx.core.units import parse_duration_s
from phalanx.engines.resident_option import parse_resident_pool
from phalanx.engines.slurm.options import IDLE, RESIDENT, TIME
from phalanx.engines.slurm.render import format_time_limit
from phalanx.ports.provider import EnginePool

IDLE_DEFAULT: Final = "10m"
START_LIMIT_S: Final = 86_400.0  # in Slurm's queue, behind jobs of others; then it is ordered again


def resident_pools(options: Mapping[str, str]) -> Sequence[EnginePool]:
    """Return the pool of resident Slurm jobs; none if the options name none.

    Raises:
        BadRequest: an option is wrong.
    """
    resident_time(options)
    idle_s = parse_duration_s(options.get(IDLE, "") or IDLE_DEFAULT, what=IDLE)
    return parse_resident_pool(
        options.get(RESIDENT, ""), option=RESIDENT, noun="Slurm jobs", idle_s=idle_s, start_limit_s=START_LIMIT_S
    )


def resident_time(options: Mapping[str, str]) -> str:
    """Return Slurm's time limit of resident jobs as Slurm writes it; "" for the partition's.

    Raises:
        BadRequest: it is no time.
    """
    text = options.get(TIME, "")
    return format_time_limit(parse_duration_s(text, what=TIME)) if text else ""

"""Reads the options of resident pods: the node pool that they ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from phalanx.core.units import parse_duration_s
from phalanx.engines.kubernetes.options import IDLE, NODE_WAIT, RESIDENT
from phalanx.engines.resident_option import parse_resident_pool
from phalanx.ports.provider import EnginePool

IDLE_DEFAULT: Final = "10m"
START_LIMIT_S: Final = 600.0  # to pull an image; pods that cannot start are given up earlier


def resident_pools(options: Mapping[str, str]) -> Sequence[EnginePool]:
    """Return the pool of resident pods; none if the options name none.

    Raises:
        BadRequest: an option is wrong.
    """
    idle_s = parse_duration_s(options.get(IDLE, "") or IDLE_DEFAULT, what=IDLE)
    return parse_resident_pool(
        options.get(RESIDENT, ""),
        option=RESIDENT,
        noun="pods",
        idle_s=idle_s,
        start_limit_s=START_LIMIT_S + parse_node_wait_s(options),
    )


def parse_node_wait_s(options: Mapping[str, str]) -> float:
    """Return how long pods may wait for a node that an autoscaler starts, in seconds; 0 if there is no autoscaler.

    Raises:
        BadRequest: it is no time.
    """
    text = options.get(NODE_WAIT, "")
    return parse_duration_s(text, what=NODE_WAIT) if text else 0.0

"""Reads the options of resident pods: the node pool that they ask for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.node_pool import POOL_NODES_MAX
from phalanx.core.ids import PoolId
from phalanx.core.units import parse_duration_s
from phalanx.engines.kubernetes.options import IDLE, NODE_WAIT, RESIDENT
from phalanx.ports.provider import EnginePool

GPUS_MAX: Final = 64  # of one pod
IDLE_DEFAULT: Final = "10m"
START_LIMIT_S: Final = 600.0  # to pull an image; pods that cannot start are given up earlier
_FORM: Final = re.compile(r"(?:([0-9]{1,3})-)?([1-9][0-9]{0,2})x([0-9]{1,2})")


def resident_pools(options: Mapping[str, str]) -> Sequence[EnginePool]:
    """Return the pool of resident pods; none if the options name none.

    Raises:
        BadRequest: an option is wrong.
    """
    text, idle = options.get(RESIDENT, ""), options.get(IDLE, "")
    idle_s = parse_duration_s(idle or IDLE_DEFAULT, what=IDLE)
    if not text:
        return ()
    match = _FORM.fullmatch(text)
    least, most, gpus = (int(match[1] or 0), int(match[2]), int(match[3])) if match is not None else (0, 0, 0)
    if match is None or least > most or most > POOL_NODES_MAX or gpus > GPUS_MAX:
        raise BadRequest(
            f"--{RESIDENT} {text}: not of the form [MIN-]NxG with N from MIN to {POOL_NODES_MAX} and G at most {GPUS_MAX}",
            hint=f"--{RESIDENT} 4x8, for at most 4 pods of 8 GPUs; --{RESIDENT} 2-4x8 keeps 2 of them without jobs too",
        )
    return (
        EnginePool(
            id=PoolId(f"resident-{gpus}gpu"),
            template=str(gpus),
            min_nodes=least,
            max_nodes=most,
            idle_s=idle_s,
            start_limit_s=START_LIMIT_S + parse_node_wait_s(options),
        ),
    )


def parse_node_wait_s(options: Mapping[str, str]) -> float:
    """Return how long pods may wait for a node that an autoscaler starts, in seconds; 0 if there is no autoscaler.

    Raises:
        BadRequest: it is no time.
    """
    text = options.get(NODE_WAIT, "")
    return parse_duration_s(text, what=NODE_WAIT) if text else 0.0

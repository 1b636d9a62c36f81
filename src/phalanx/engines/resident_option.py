"""The option of an engine that asks for resident nodes: `[MIN-]NxG`, at least MIN and at most N nodes of G GPUs each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.node_pool import POOL_NODES_MAX
from phalanx.core.ids import PoolId
from phalanx.ports.provider import EnginePool

GPUS_MAX: Final = 64  # of one resident node
_FORM: Final = re.compile(r"(?:([0-9]{1,3})-)?([1-9][0-9]{0,2})x([0-9]{1,2})")


def parse_resident_pool(
    text: str, *, option: str, noun: str, idle_s: float, start_limit_s: float
) -> Sequence[EnginePool]:
    """Return the pool of resident nodes that the text asks for; none for an empty text.

    `option`: its name; `noun`: what the engine runs them in, in the plural; `idle_s`, `start_limit_s`: as in `EnginePool`, in seconds.

    Raises:
        BadRequest: the text is not of that form, or too large.
    """
    if not text:
        return ()
    match = _FORM.fullmatch(text)
    least, most, gpus = (int(match[1] or 0), int(match[2]), int(match[3])) if match is not None else (0, 0, 0)
    if match is None or least > most or most > POOL_NODES_MAX or gpus > GPUS_MAX:
        raise BadRequest(
            f"--{option} {text}: not of the form [MIN-]NxG with N from MIN to {POOL_NODES_MAX} and G at most {GPUS_MAX}",
            hint=f"--{option} 4x8, for at most 4 {noun} of 8 GPUs; --{option} 2-4x8 keeps 2 of them without jobs too",
        )
    return (
        EnginePool(
            id=PoolId(f"resident-{gpus}gpu"),
            template=str(gpus),
            min_nodes=least,
            max_nodes=most,
            idle_s=idle_s,
            start_limit_s=start_limit_s,
        ),
    )

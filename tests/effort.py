"""How hard the suite tries.

`make test` proves every invariant once at small size (quick); a shard of `make prove` runs the same tests at full size, with fresh seeds.
`PHALANX_EFFORT=full` chooses the second; `tests/shards.py` lists which tests belong to which shard.
"""

from __future__ import annotations

import os

FULL = os.environ.get("PHALANX_EFFORT") == "full"
QUICK_EXAMPLES = 15  # of a hypothesis test: enough for each of our planted bugs that hypothesis finds at all


def size(quick: int, full: int) -> int:
    """A count of seeds, rounds or inputs."""
    return full if FULL else quick


def examples(full: int) -> int:
    """How many examples a hypothesis test draws that needs `full` of them in a campaign."""
    return full if FULL else min(full, QUICK_EXAMPLES)

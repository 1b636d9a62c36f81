"""Bugs planted into the code under drill, from the tests' side, to see that a drill can fail: each is caught by a named invariant."""

from tests.simulation.planted import head, lifecycle, mig, node, pools, records, scheduling, services
from tests.simulation.planted.bug import BUGS, SEEDS_MORE, Bug

__all__ = [
    "BUGS",
    "SEEDS_MORE",
    "Bug",
    "head",
    "lifecycle",
    "mig",
    "node",
    "pools",
    "records",
    "scheduling",
    "services",
]

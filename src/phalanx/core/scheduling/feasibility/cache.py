"""The checker of the present state of a cluster."""

from __future__ import annotations

from typing import Final

from phalanx.core.fleet.summary import NodeKinds
from phalanx.core.scheduling.feasibility.checker import FeasibilityChecker
from phalanx.core.scheduling.feasibility.cluster_limits import ClusterLimits

CLOCK_STEP_S: Final = 1.0  # NTP corrects smaller steps


class FeasibilityCache:
    """The checker of the present state; another one once that has changed.

    A world counts its changes (`capacity_version`). A snapshot does not, so that its owner must call `drop` after a change.

    Attributes:
        node_kinds: what is known of the nodes; it outlives a checker, since most nodes stay as they are.
    """

    __slots__ = ("_checker", "_version", "node_kinds")

    def __init__(self) -> None:
        self.node_kinds = NodeKinds()
        self._checker: FeasibilityChecker | None = None
        self._version: int | None = None

    @property
    def newest(self) -> FeasibilityChecker | None:
        """The checker used last; None before the first use."""
        return self._checker

    def checker(self, cluster: ClusterLimits, now_s: float) -> FeasibilityChecker:
        """The checker of this state at `now_s`, Unix seconds."""
        found = self._checker
        # Before its own time, a checker counts nodes as gone that are not: the clock was set back.
        if (
            found is None
            or self._version != cluster.capacity_version
            or not found.now_s - CLOCK_STEP_S <= now_s < found.valid_until_s
        ):
            found = self._checker = FeasibilityChecker(cluster, now_s, self.node_kinds)
            self._version = cluster.capacity_version
        return found

    def drop(self) -> None:
        """The state has changed."""
        if self._version is None:
            self._checker = None

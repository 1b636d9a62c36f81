"""The time from a killed node to the next step, compared with the default detection times of other systems. Pure.

The other systems' numbers are documented defaults (DESIGN 6), not measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple


class OtherSystem(NamedTuple):
    """Another system, and the default time after which it lets a dead node's job start elsewhere."""

    name: str
    seconds: float
    source: str


OTHER_SYSTEMS: Final = (
    OtherSystem("Slurm", 300.0, "slurm.conf(5): SlurmdTimeout, default 300 s"),
    OtherSystem(
        "Kubernetes",
        350.0,
        "kubernetes.io, Taints and Tolerations: default toleration 300 s, after node-monitor-grace-period 50 s",
    ),
)
OTHER_SYSTEMS_NOTE: Final = "Other systems: default time until the job may start elsewhere. " + "; ".join(
    f"{peer.name}: {peer.source}" for peer in OTHER_SYSTEMS
)


@dataclass(slots=True, kw_only=True)
class NodeKill:
    """A killed node. Times are Unix seconds.

    Attributes:
        by: "demo", or "visitor" for the user.
        held: the job had tasks on the node.
        epoch: the job's attempt at the time of the kill.
        step: the last known step.
        running_s: when all ranks of the next attempt had started.
        next_step_s: when the next attempt completed its first step.
    """

    node: str
    at_s: float
    by: str
    held: bool
    epoch: int
    step: int | None
    running_s: float | None = None
    next_step_s: float | None = None

    @property
    def recovering(self) -> bool:
        """Whether the job has not made a step since the kill."""
        return self.held and self.next_step_s is None

    def recovery_s(self, now_s: float) -> float:
        """Return the seconds from the kill to the next step, or to `now_s`."""
        return max(0.0, (now_s if self.next_step_s is None else self.next_step_s) - self.at_s)

    @property
    def to_running_s(self) -> float | None:
        """Seconds until all ranks ran again; None before that."""
        return None if self.running_s is None else max(0.0, self.running_s - self.at_s)


def latest_job_kill(kills: list[NodeKill]) -> NodeKill | None:
    """Return the newest kill that hit the job."""
    return next((kill for kill in reversed(kills) if kill.held), None)

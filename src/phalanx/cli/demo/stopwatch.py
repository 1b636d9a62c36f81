"""The stopwatch from a killed node to the next step, beside what others need before they even begin. Pure.

The figures of the others are those of DESIGN 6: their defaults, not measurements of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple


class Peer(NamedTuple):
    """Another system, and the time after which its defaults let a dead node's job start elsewhere."""

    name: str
    seconds: float
    source: str


PEERS: Final = (
    Peer("Slurm", 300.0, "slurm.conf(5): SlurmdTimeout, default 300 s"),
    Peer(
        "Kubernetes",
        350.0,
        "kubernetes.io, Taints and Tolerations: default toleration 300 s, after node-monitor-grace-period 50 s",
    ),
)
SOURCES: Final = "Others: defaults until the job may start elsewhere. " + "; ".join(
    f"{peer.name}: {peer.source}" for peer in PEERS
)


@dataclass(slots=True, kw_only=True)
class Kill:
    """A node that was killed. Times are Unix seconds.

    Attributes:
        by: "demo" or "visitor".
        held: the job had tasks on it.
        epoch: the job's attempt at that moment.
        step: the last step known then.
        running_s: when all ranks of the next attempt were exec'd.
        next_step_s: when the next attempt had made its first step.
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
    def open(self) -> bool:
        """Whether the stopwatch runs."""
        return self.held and self.next_step_s is None

    def seconds(self, now_s: float) -> float:
        """What the stopwatch shows."""
        return max(0.0, (now_s if self.next_step_s is None else self.next_step_s) - self.at_s)

    @property
    def to_running_s(self) -> float | None:
        """Seconds until all ranks ran again; None before."""
        return None if self.running_s is None else max(0.0, self.running_s - self.at_s)


def shown(kills: list[Kill]) -> Kill | None:
    """The kill whose stopwatch is shown: the newest that hit the job."""
    return next((kill for kill in reversed(kills) if kill.held), None)

"""The state that the demo displays. `conductor` fills it, the drawing modules read it; it uses no clock and no screen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from phalanx.cli.demo.loss_curve import LossCurve
from phalanx.cli.demo.recovery_time import NodeKill
from phalanx.core.fleet.node import NodeState
from phalanx.core.state.history import HistoryLine
from phalanx.wire.api.head import Overview
from phalanx.wire.api.jobs import JobView, Progress
from phalanx.wire.api.nodes import NodeView


@dataclass(slots=True, kw_only=True)
class DemoState:
    """The state of the demo at `now_s`. Times are Unix seconds.

    Attributes:
        fleet: description, as "3 nodes x 4 virtual devices".
        activity: current activity of the demo, as a sentence.
        prompt: prompt for the user; usually empty.
        has_keyboard: whether key presses are read.
        history: events of this cluster, oldest first.
    """

    started_s: float
    now_s: float
    fleet: str
    steps_total: int
    kill_step: int | None = None
    activity: str = ""
    prompt: str = ""
    has_keyboard: bool = False
    job: JobView | None = None
    nodes: list[NodeView] = field(default_factory=list)
    history: list[HistoryLine] = field(default_factory=list)
    curve: LossCurve = field(default_factory=LossCurve)
    kills: list[NodeKill] = field(default_factory=list)
    checkpoints: list[tuple[int, int]] = field(default_factory=list)  # (epoch, step), published, oldest first

    @property
    def elapsed_s(self) -> float:
        """Seconds since the demo started."""
        return max(0.0, self.now_s - self.started_s)

    def update(self, overview: Overview, job_id: str) -> None:
        """Update nodes and job from the head's overview."""
        self.nodes = list(overview.nodes)
        for job in (*overview.running, *overview.pending, *overview.recent):
            if job.id == job_id:
                self.update_job(job)

    def update_job(self, job: JobView) -> None:
        """Update the job; record all its checkpoints, as the head retains only two."""
        self.job = job
        for checkpoint in job.checkpoints:
            if (checkpoint.epoch, checkpoint.step) not in self.checkpoints:
                self.checkpoints.append((checkpoint.epoch, checkpoint.step))

    def add_events(self, lines: Iterable[HistoryLine]) -> list[HistoryLine]:
        """Add events; return the new ones."""
        last = self.history[-1].seq if self.history else 0
        fresh = [line for line in lines if line.seq > last]
        self.history.extend(fresh)
        return fresh

    def complete_kills(self) -> list[NodeKill]:
        """Complete kills after which the job has made a step; return those completed by this call."""
        completed = []
        for kill in self.kills:
            if kill.held and kill.running_s is None:
                kill.running_s = next(
                    (line.at_s for line in self.history if line.kind == "running" and (line.epoch or 0) > kill.epoch),
                    None,
                )
            after = self.curve.first_after(kill.epoch) if kill.recovering else None
            if after is not None:
                kill.next_step_s = after.at_s
                completed.append(kill)
        return completed

    def job_uses(self, node: str) -> bool:
        """Whether the job currently has tasks on the node."""
        return self.job is not None and self.job.attempt_state is not None and node in self.job.nodes

    def up_nodes(self) -> list[str]:
        """Return the names of the nodes that are up."""
        return [node.id for node in self.nodes if node.state is NodeState.UP]

    @property
    def step(self) -> int:
        """The job's current step; it decreases after a resume."""
        newest = self.curve.newest
        if self.job is None or newest is None or (self.job.epoch > newest.epoch and self.job.resume_step is None):
            return newest.step if newest is not None else 0
        return newest.step if newest.epoch >= self.job.epoch else self.job.resume_step or 0

    @property
    def progress(self) -> Progress | None:
        """Training progress; None until the current attempt has made a step."""
        found = None if self.job is None else self.job.progress
        return found if found is not None and self.job is not None and found.epoch == self.job.epoch else None

    @property
    def published_step(self) -> int | None:
        """Step of the newest published checkpoint."""
        return self.checkpoints[-1][1] if self.checkpoints else None

"""Everything the demo shows at one moment. The conductor fills it, the drawing reads it; it knows no clock and no screen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from phalanx.cli.demo.curve import Curve
from phalanx.cli.demo.stopwatch import Kill
from phalanx.core.fleet.node import NodeState
from phalanx.core.state.story import StoryLine
from phalanx.wire.api.head import Overview
from phalanx.wire.api.jobs import JobView, Progress
from phalanx.wire.api.nodes import NodeView


@dataclass(slots=True, kw_only=True)
class Scene:
    """The demo at `now_s`. Times are Unix seconds.

    Attributes:
        fleet: in words: "3 nodes x 4 virtual devices".
        stage: what the demo does now, as a sentence.
        question: what the visitor is asked; empty mostly.
        keys: whether keys are heard.
        story: lines of this cluster, oldest first.
    """

    started_s: float
    now_s: float
    fleet: str
    steps_total: int
    kill_step: int | None = None
    stage: str = ""
    question: str = ""
    keys: bool = False
    job: JobView | None = None
    nodes: list[NodeView] = field(default_factory=list)
    story: list[StoryLine] = field(default_factory=list)
    curve: Curve = field(default_factory=Curve)
    kills: list[Kill] = field(default_factory=list)
    checkpoints: list[tuple[int, int]] = field(default_factory=list)  # (epoch, step), published, oldest first

    @property
    def elapsed_s(self) -> float:
        """Since the demo began."""
        return max(0.0, self.now_s - self.started_s)

    def see(self, overview: Overview, job_id: str) -> None:
        """Take over what the head shows."""
        self.nodes = list(overview.nodes)
        for job in (*overview.running, *overview.pending, *overview.recent):
            if job.id == job_id:
                self.see_job(job)

    def see_job(self, job: JobView) -> None:
        """Take over the job, and remember its checkpoints past the two that are kept."""
        self.job = job
        for checkpoint in job.checkpoints:
            if (checkpoint.epoch, checkpoint.step) not in self.checkpoints:
                self.checkpoints.append((checkpoint.epoch, checkpoint.step))

    def hear(self, lines: Iterable[StoryLine]) -> list[StoryLine]:
        """Add story lines; gives back those that are new."""
        last = self.story[-1].seq if self.story else 0
        fresh = [line for line in lines if line.seq > last]
        self.story.extend(fresh)
        return fresh

    def settle(self) -> list[Kill]:
        """Stop the watches of kills whose next step is made; gives back those that were stopped now."""
        stopped = []
        for kill in self.kills:
            if kill.held and kill.running_s is None:
                kill.running_s = next(
                    (line.at_s for line in self.story if line.kind == "running" and (line.epoch or 0) > kill.epoch),
                    None,
                )
            after = self.curve.first_after(kill.epoch) if kill.open else None
            if after is not None:
                kill.next_step_s = after.at_s
                stopped.append(kill)
        return stopped

    def on_job(self, node: str) -> bool:
        """Whether the job has tasks on the node now."""
        return self.job is not None and self.job.attempt_state is not None and node in self.job.nodes

    def up(self) -> list[str]:
        """Names of the nodes that are up."""
        return [node.id for node in self.nodes if node.state is NodeState.UP]

    @property
    def step(self) -> int:
        """The step the job stands at: after a restart it goes back."""
        newest = self.curve.newest
        if self.job is None or newest is None or (self.job.epoch > newest.epoch and self.job.resume_step is None):
            return newest.step if newest is not None else 0
        return newest.step if newest.epoch >= self.job.epoch else self.job.resume_step or 0

    @property
    def progress(self) -> Progress | None:
        """How training goes; None while the present attempt has made no step."""
        found = None if self.job is None else self.job.progress
        return found if found is not None and self.job is not None and found.epoch == self.job.epoch else None

    @property
    def published_step(self) -> int | None:
        """The newest published checkpoint."""
        return self.checkpoints[-1][1] if self.checkpoints else None

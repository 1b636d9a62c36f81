"""What one step carries through its parts: the world, the time, and what has been changed and commanded so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from phalanx.controller.outbox import Now
from phalanx.core.ids import JobId, NodeId
from phalanx.core.lifecycle.attempt import transition
from phalanx.core.lifecycle.facts import Case, Facts, Outcome
from phalanx.core.lifecycle.happenings import Happening
from phalanx.core.recovery.failure_rate import gang_mtbf_s, node_mtbf_s
from phalanx.core.state.commands import Command, Prepare
from phalanx.core.state.story import StoryLine
from phalanx.core.state.world import Change, World
from phalanx.core.work.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the head decides once at its start."""

    checkpoint_root: str
    output_root: str


@dataclass(slots=True, kw_only=True)
class Turn:
    """One step in the making.

    Attributes:
        freed: room or eligibility may have grown.
        submitted: new job ids.
        lost: nodes whose lease ends with this step.
        ages_s: how long each live attempt has lasted on CLOCK_BOOTTIME.
    """

    world: World
    settings: Settings
    now: Now
    change: Change
    commands: list[Command] = field(default_factory=list)
    submitted: list[JobId] = field(default_factory=list)
    lost: dict[NodeId, None] = field(default_factory=dict)
    ages_s: Mapping[JobId, float] = field(default_factory=dict)
    freed: bool = False
    _mtbf: float | None = None

    @property
    def facts(self) -> Facts:
        """The surroundings of a transition in this step."""
        return Facts(
            now_s=self.now.wall_s, addresses=_Addresses(self.world), checkpoint_root=self.settings.checkpoint_root,
            output_root=self.settings.output_root, mtbf_s=self._mtbf_s(), ages_s=self.ages_s,
        )  # fmt: skip

    def case(self, job_id: JobId) -> Case:
        """The job and its live attempt.

        Raises:
            KeyError: the world holds no such job.
        """
        return Case(job=self.world.jobs[job_id], attempt=self.world.attempts.get(job_id))

    def happen(self, job_id: JobId, happening: Happening) -> None:
        """Run the attempt machine for one job; unknown jobs are left alone, since late reports are normal."""
        if job_id in self.world.jobs:
            self.apply(transition(self.case(job_id), happening, self.facts))

    def apply(self, outcome: Outcome) -> None:
        """Put an outcome's records, story and commands into this step."""
        before = self.case(outcome.job.id) if outcome.job.id in self.world.jobs else None
        if before is None or outcome.job is not before.job:
            self.change.put(outcome.job)
        if outcome.attempt is not None and (before is None or outcome.attempt is not before.attempt):
            self.change.put(outcome.attempt)
            self.freed = self.freed or not outcome.attempt.live
        for line in outcome.lines:
            self.change.tell(line)
        self.commands.extend(self._with_mtbf(outcome.job, command) for command in outcome.commands)

    def tell(self, kind: str, text: str, *, node_id: NodeId | None = None, by: str = "") -> None:
        """A story line that belongs to no job."""
        self.change.tell(StoryLine(seq=0, at_s=self.now.wall_s, kind=kind, text=text, node_id=node_id, by=by))

    def _with_mtbf(self, job: Job, command: Command) -> Command:
        """A `Prepare` learns how often this gang fails, by the fleet's rate and what the job itself has met."""
        if not isinstance(command, Prepare):
            return command
        ran_s = 0.0 if job.started_s is None else self.now.wall_s - job.started_s
        nodes = len(command.allocation.grants)
        mtbf_s = gang_mtbf_s(self._mtbf_s(), nodes=nodes, losses=job.losses, exposure_s=ran_s)
        return replace(command, mtbf_s=mtbf_s)

    def _mtbf_s(self) -> float:
        if (
            self._mtbf is None
        ):  # once a step: a sum over the fleet for each of a thousand events would be most of its cost
            nodes = self.world.nodes.values()
            exposure_s = sum(max(0.0, self.now.wall_s - node.joined_s) for node in nodes)
            self._mtbf = node_mtbf_s(sum(node.failures for node in nodes), exposure_s)
        return self._mtbf


class _Addresses(Mapping[NodeId, str]):
    """Addresses by node, read from the world when asked: building a dict for each of many events would cost nodes x events."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getitem__(self, node_id: NodeId) -> str:
        return self._world.nodes[node_id].address

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._world.nodes)

    def __len__(self) -> int:
        return len(self._world.nodes)

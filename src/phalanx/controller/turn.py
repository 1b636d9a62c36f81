"""What one step carries through its parts: the world, the time, and what has been changed and commanded so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from phalanx.controller.outbox import Now
from phalanx.controller.rulebook import Rulebook
from phalanx.core.fleet.fitness import PREFLIGHT, RECOVERY, Fault, kept_out
from phalanx.core.fleet.node import Node
from phalanx.core.ids import JobId, NodeId
from phalanx.core.lifecycle import dependencies
from phalanx.core.lifecycle.attempt import transition
from phalanx.core.lifecycle.facts import Case, Facts, Mark, Outcome
from phalanx.core.lifecycle.happenings import Happening, StopWanted
from phalanx.core.recovery.failure_rate import gang_mtbf_s, node_mtbf_s
from phalanx.core.recovery.lemon import Lemon, Marks, lemons, marked
from phalanx.core.recovery.rules import Rule
from phalanx.core.state.commands import Command
from phalanx.core.state.relations import Name
from phalanx.core.state.story import StoryLine
from phalanx.core.state.world import Change, World
from phalanx.core.work.attempt import Cause
from phalanx.core.work.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the head decides once at its start."""

    checkpoint_root: str
    output_root: str
    rules: tuple[Rule, ...] = ()  # failure rules that come with Phalanx


@dataclass(slots=True, kw_only=True)
class Turn:
    """One step in the making.

    Attributes:
        lost: nodes whose lease ends with this step.
        ended: jobs that came to their end, and for whose dependents that has not been looked at yet.
        renamed: names that live jobs have given up, the same.
        losses: the fleet's, kept from step to step.
        ages_s: how long each live attempt has lasted on CLOCK_BOOTTIME.
    """

    world: World
    settings: Settings
    now: Now
    change: Change
    commands: list[Command] = field(default_factory=list)
    lost: dict[NodeId, None] = field(default_factory=dict)
    ended: list[Job] = field(default_factory=list)
    renamed: list[Name] = field(default_factory=list)
    losses: Losses
    ages_s: Mapping[JobId, float] = field(default_factory=dict)
    rulebook: Rulebook | None = None
    _marked: bool = False
    _facts: Facts | None = None

    @property
    def facts(self) -> Facts:
        """The surroundings of a transition: the same for all of one step."""
        if self._facts is None:
            book = self.rulebook or Rulebook(self.world, self.settings.rules)
            self._facts = Facts(
                now_s=self.now.wall_s,
                addresses=_Addresses(self.world),
                nodes=self.world.nodes,
                checkpoint_root=self.settings.checkpoint_root,
                output_root=self.settings.output_root,
                gang_mtbf_s=partial(_gang_mtbf_s, self.losses, self.now.wall_s),
                ages_s=self.ages_s,
                judge=book.judge,
                judge_cause=book.judge_cause,
            )
        return self._facts

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
        job, attempt = outcome.job, outcome.attempt
        before = self.world.jobs.get(job.id)
        if job is not before:
            self.change.put(job)
            if before is not None:
                self._heed(before, job)
        if attempt is not None and attempt is not self.world.attempts.get(job.id):
            self.change.put(attempt)
        for line in outcome.lines:
            self.change.tell(line)
        self.commands += outcome.commands
        for fault in outcome.faults:
            self._keep_out(fault)
        if outcome.marks:
            self.mark(*outcome.marks)

    def _keep_out(self, fault: Fault) -> None:
        """Let no more work come to a node whose own evidence is bad, unless so many are kept out that the test is in doubt."""
        node = self.world.nodes.get(fault.node_id)
        if node is None or not fault.kept_out:
            return
        fresh = kept_out(node, fault, self.world.nodes.values(), self.now.wall_s)
        if fresh is None:
            of_preflight = fault.by == PREFLIGHT
            what, test = ("failed its preflight", "test") if of_preflight else ("is to be drained", "rule")
            text = f"{node.id} {what} ({fault.why}) and takes work all the same: too many are kept out already; is the {test} wrong?"
            self.tell("preflight_doubted" if of_preflight else "drain_doubted", text, node_id=node.id)
        elif fresh is not node:
            self.change.put(fresh)
            word = "drained" if fault.drain else "kept out"
            text = f"{node.id} is {word}: {fault.why}; phalanx nodes undrain {node.id} lets work onto it again"
            self.tell("drained" if fault.drain else "kept_out", text, node_id=node.id, by=fault.by)
            if fault.drain:
                self.move_off(node.id, by=fault.by)

    def move_off(self, node_id: NodeId, *, by: str) -> None:
        """What runs on a drained node saves and goes elsewhere."""
        for attempt in self.world.attempts_on(node_id):
            self.happen(attempt.job_id, StopWanted(cause=Cause.DRAINED, why=f"{node_id} is drained", by=by))

    def mark(self, *marks: Mark) -> None:
        """Count against nodes. Which of the fleet are lemons is judged once for all marks of a step: a rack may fall silent at once."""
        now_s = self.now.wall_s
        for mark in marks:
            node = self.world.nodes.get(mark.node_id)
            if node is not None:
                fresh = marked(Marks(sum=node.marks, at_s=node.marked_s), mark.weight, now_s)
                self.change.put(replace(node, marks=fresh.sum, marked_s=fresh.at_s))
                self._marked = True

    def judge_lemons(self) -> None:
        """Judge anew which nodes are lemons, if something was counted in this step: those are used last, and drained beyond doubt."""
        if not self._marked:
            return
        self._marked, now_s = False, self.now.wall_s
        fleet = {node.id: Marks(sum=node.marks, at_s=node.marked_s) for node in self.world.nodes.values()}
        found = lemons(fleet, now_s)
        for node in list(self.world.nodes.values()):
            if node.lemon or node.id in found:
                self._say_lemon(node, found.get(node.id))

    def _say_lemon(self, node: Node, lemon: Lemon | None) -> None:
        why = "" if lemon is None else lemon.why
        if why != node.lemon:
            self.change.put(replace(node, lemon=why))
        if bool(why) != bool(node.lemon):
            text = (
                f"{node.id} {why}: used last from now on"
                if why
                else f"{node.id} no longer fails gangs more than others"
            )
            self.tell("lemon", text, node_id=node.id, by=RECOVERY)
        if lemon is not None and lemon.drain and node.cordon is None:
            self._keep_out(Fault(node_id=node.id, why=why, kept_out=True, by=RECOVERY, drain=True))

    def settle_dependents(self) -> None:
        """Let go or end the jobs that waited for those that ended in this step, and so on: all of it is committed together.

        Not within `apply`: a chain of ten thousand jobs would be a recursion as deep, and an array whose elements end together is
        judged by all of them. It ends, since every round but the last ends jobs that lived.
        """
        names = dict.fromkeys(self.renamed)
        self.renamed = []
        while self.ended:
            ended, self.ended = self.ended, []
            names |= dict.fromkeys((job.user, job.name) for job in ended)
            for outcome in dependencies.settle(self.world, ended, self.facts):
                self.apply(outcome)
        for outcome in dependencies.let_singletons_go(self.world, names, self.facts):
            self.apply(outcome)

    def _heed(self, before: Job, job: Job) -> None:
        relations = self.world.relations
        if not (relations.dependents or relations.singletons):
            return
        if job.state is not before.state and job.state.terminal:
            self.ended.append(job)
        elif job.spec is not before.spec and job.name != before.name:
            self.renamed.append((before.user, before.name))

    def tell(self, kind: str, text: str, *, node_id: NodeId | None = None, by: str = "") -> None:
        """A story line that belongs to no job."""
        self.change.tell(StoryLine(seq=0, at_s=self.now.wall_s, kind=kind, text=text, node_id=node_id, by=by))


class Losses:
    """How often nodes fail, over the whole fleet. The sums are kept until a node's record changes: most steps touch none."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: tuple[int, int, float] | None = None  # failures, nodes, sum of when they joined

    def forget(self) -> None:
        """A node's record has changed."""
        self._known = None

    def node_mtbf_s(self, now_s: float) -> float:
        """Mean time between failures of one node, in seconds."""
        if self._known is None:
            nodes = self._world.nodes.values()
            self._known = (sum(node.failures for node in nodes), len(nodes), sum(node.joined_s for node in nodes))
        failures, nodes_known, joined_s = self._known
        return node_mtbf_s(failures, max(0.0, nodes_known * now_s - joined_s))


class _Addresses(Mapping[NodeId, str]):
    """Addresses by node, read from the world when asked: building a dict for each of many events would cost nodes x events."""

    __slots__ = ("_world",)

    def __init__(self, world: World) -> None:
        self._world = world

    def __getitem__(self, node_id: NodeId) -> str:
        return self._world.nodes[node_id].address

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._world.nodes)

    def __len__(self) -> int:
        return len(self._world.nodes)


def _gang_mtbf_s(losses: Losses, now_s: float, job: Job, nodes: int) -> float:
    """How long this gang lasts, by the fleet's rate and what the job itself has met.

    No method of the turn: its facts would hold the turn that holds them, and every step would be left to the garbage collector.
    """
    ran_s = 0.0 if job.started_s is None else now_s - job.started_s
    return gang_mtbf_s(losses.node_mtbf_s(now_s), nodes=nodes, losses=job.losses, exposure_s=ran_s)

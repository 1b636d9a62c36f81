"""Context of one step of the controller: the world, the time, and the changes and commands so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from phalanx.controller.rulebook import Rulebook
from phalanx.controller.step_result import ControllerTime
from phalanx.core.access.audit import AuditCall
from phalanx.core.fleet.fitness import (
    FULL_DISK,
    HEALTH_CHECK,
    NODE_TEST,
    OPERATOR_HOOK,
    PREFLIGHT,
    RECOVERY,
    NodeFault,
    with_automatic_cordon,
)
from phalanx.core.fleet.node import Node
from phalanx.core.ids import JobId, NodeId
from phalanx.core.lifecycle import dependencies
from phalanx.core.lifecycle.attempt import transition
from phalanx.core.lifecycle.events import AttemptEvent, StopRequested
from phalanx.core.lifecycle.transitions import (
    AttemptCase,
    FaultMark,
    TransitionContext,
    TransitionResult,
)
from phalanx.core.recovery.bad_nodes import (
    BadNode,
    MarkSum,
    add_mark,
    find_bad_nodes,
)
from phalanx.core.recovery.failure_rate import gang_mtbf_s, node_mtbf_s
from phalanx.core.recovery.failure_rules import FailureRule
from phalanx.core.scheduling.feasibility.cache import FeasibilityCache
from phalanx.core.scheduling.feasibility.checker import FeasibilityChecker
from phalanx.core.state.commands import Command, ProviderCall
from phalanx.core.state.history import HistoryFacts, HistoryLine
from phalanx.core.state.relations import UserJobName
from phalanx.core.state.reports import MachinesListed
from phalanx.core.state.world import World, WorldChange
from phalanx.core.work.attempt import EndCause
from phalanx.core.work.job import Job

_DOUBTS: Final = {
    PREFLIGHT: ("failed its preflight", "test"),
    RECOVERY: ("should be drained", "rule"),
    OPERATOR_HOOK: ("failed a hook", "hook"),
    HEALTH_CHECK: ("failed its health check", "check"),
    NODE_TEST: ("failed its test", "threshold"),
}
"""What a node did that stays in service past the limit of automatic cordons, and what may be wrong instead, by author of the cordon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """Settings that are fixed at the start of the head.

    Attributes:
        storage_key: random, drawn for this process of the head. With a number that this process assigns, it names a folder that no other job
            or attempt ever had: a process assigns each number once, even if a restored database made another process assign it before.
    """

    checkpoint_root: str
    output_root: str
    storage_key: str
    rules: tuple[FailureRule, ...] = ()  # the failure rules shipped with Phalanx


@dataclass(slots=True, kw_only=True)
class StepContext:
    """Context of one step.

    Attributes:
        machine_lists: what providers listed since the last step.
        audit_calls: what the head itself decides in this step, for the audit trail.
        lost: nodes whose lease ends with this step.
        ended: jobs that ended and whose dependents are not settled yet.
        ended_with_command: jobs with `on_end` that ended after they were placed, and whose command is not submitted yet.
        renamed: names that live jobs gave up and whose dependents are not settled yet.
        failure_rate: the fleet's failure statistics, shared by all steps.
        feasibility_cache: shared by all steps.
        ages_s: age of each live attempt in seconds of CLOCK_BOOTTIME.
    """

    world: World
    settings: ControllerSettings
    now: ControllerTime
    change: WorldChange
    commands: list[Command] = field(default_factory=list)
    provider_calls: list[ProviderCall] = field(default_factory=list)
    machine_lists: list[MachinesListed] = field(default_factory=list)
    audit_calls: list[AuditCall] = field(default_factory=list)
    lost: dict[NodeId, None] = field(default_factory=dict)
    ended: list[Job] = field(default_factory=list)
    ended_with_command: list[Job] = field(default_factory=list)
    renamed: list[UserJobName] = field(default_factory=list)
    failure_rate: FleetFailureRate
    ages_s: Mapping[JobId, float] = field(default_factory=dict)
    rulebook: Rulebook | None = None
    feasibility_cache: FeasibilityCache = field(default_factory=FeasibilityCache)
    _marked: bool = False
    _facts: TransitionContext | None = None

    @property
    def feasibility(self) -> FeasibilityChecker:
        """Judges requests against the world as it is now, after the changes of this step so far."""
        return self.feasibility_cache.checker(self.world, self.now.wall_s)

    @property
    def facts(self) -> TransitionContext:
        """Inputs of transitions, the same for the whole step."""
        if self._facts is None:
            book = self.rulebook or Rulebook(self.world, self.settings.rules)
            self._facts = TransitionContext(
                now_s=self.now.wall_s,
                addresses=_Addresses(self.world),
                nodes=self.world.nodes,
                checkpoint_root=self.settings.checkpoint_root,
                output_root=self.settings.output_root,
                storage_key=self.settings.storage_key,
                gang_mtbf_s=partial(_gang_mtbf_s, self.failure_rate, self.now.wall_s),
                ages_s=self.ages_s,
                diagnose=book.diagnose,
                diagnose_cause=book.diagnose_cause,
            )
        return self._facts

    def case(self, job_id: JobId) -> AttemptCase:
        """The job and its live attempt.

        Raises:
            KeyError: the world holds no such job.
        """
        return AttemptCase(job=self.world.jobs[job_id], attempt=self.world.attempts.get(job_id))

    def apply_event(self, job_id: JobId, event: AttemptEvent) -> None:
        """Run the attempt machine for one job. Unknown jobs are ignored, since late reports are normal."""
        if job_id in self.world.jobs:
            self.apply(transition(self.case(job_id), event, self.facts))

    def apply(self, outcome: TransitionResult) -> None:
        """Add an outcome's records, history lines and commands to this step."""
        job, attempt = outcome.job, outcome.attempt
        before = self.world.jobs.get(job.id)
        if job is not before:
            self.change.put(job)
            if before is not None:
                self._note_ended_or_renamed(before, job)
        if attempt is not None and attempt is not self.world.attempts.get(job.id):
            self.change.put(attempt)
        for line in outcome.history:
            self.change.add_history(line)
        self.commands += outcome.commands
        for fault in outcome.faults:
            self.cordon_faulty(fault)
        if outcome.marks:
            self.add_marks(*outcome.marks)

    def cordon_faulty(self, fault: NodeFault) -> None:
        """Cordon a node that failed its preflight or a failure rule, unless so many are cordoned that the check itself is doubtful."""
        node = self.world.nodes.get(fault.node_id)
        if node is None or not fault.cordon:
            return
        fresh = with_automatic_cordon(node, fault, self.world.nodes.values(), self.now.wall_s)
        if fresh is None:
            by_preflight = fault.by == PREFLIGHT
            what, check = _DOUBTS[fault.by]
            text = f"{node.id} {what} ({fault.why}) but stays in service: too many nodes are cordoned already; is the {check} wrong?"
            self.add_history("preflight_doubted" if by_preflight else "drain_doubted", text, node_id=node.id)
        elif fresh is not node:
            self.change.put(fresh)
            word = "drained" if fault.drain else "cordoned"
            text = f"{node.id} is {word}: {fault.why}"
            if fault.by == FULL_DISK:
                text += "; it returns to service when it has room"
            self.add_history("drained" if fault.drain else "kept_out", text, node_id=node.id, by=fault.by)
            if fault.drain:
                self.stop_jobs_on(node.id, by=fault.by, why=fault.why)

    def stop_jobs_on(self, node_id: NodeId, *, by: str, why: str) -> None:
        """Stop the jobs on a drained node; they save and are placed elsewhere. `why` it is drained; may be empty."""
        text = f"{node_id} is drained: {why}" if why else f"{node_id} is drained"
        for attempt in self.world.attempts_on(node_id):
            self.apply_event(attempt.job_id, StopRequested(cause=EndCause.DRAINED, why=text, by=by))

    def add_marks(self, *marks: FaultMark) -> None:
        """Count failures against nodes. `update_bad_nodes` evaluates the fleet once for all marks of a step: a whole rack may fail at once."""
        now_s = self.now.wall_s
        for mark in marks:
            node = self.world.nodes.get(mark.node_id)
            if node is not None:
                fresh = add_mark(MarkSum(sum=node.fault_score, at_s=node.fault_score_s), mark.weight, now_s)
                self.change.put(replace(node, fault_score=fresh.sum, fault_score_s=fresh.at_s))
                self._marked = True

    def update_bad_nodes(self) -> None:
        """If this step marked a node, find the bad nodes again: they are used last, and drained if the evidence is strong."""
        if not self._marked:
            return
        self._marked, now_s = False, self.now.wall_s
        fleet = {node.id: MarkSum(sum=node.fault_score, at_s=node.fault_score_s) for node in self.world.nodes.values()}
        found = find_bad_nodes(fleet, now_s)
        for node in list(self.world.nodes.values()):
            if node.bad_node_reason or node.id in found:
                self._update_bad_node(node, found.get(node.id))

    def _update_bad_node(self, node: Node, bad_node: BadNode | None) -> None:
        why = "" if bad_node is None else bad_node.why
        if why != node.bad_node_reason:
            self.change.put(replace(node, bad_node_reason=why))
        if bool(why) != bool(node.bad_node_reason):
            text = (
                f"{node.id} {why}: used last from now on"
                if why
                else f"{node.id} no longer fails more often than the others"
            )
            self.add_history("bad_node", text, node_id=node.id, by=RECOVERY)
        if bad_node is not None and bad_node.drain and node.cordon is None:
            self.cordon_faulty(NodeFault(node_id=node.id, why=why, cordon=True, by=RECOVERY, drain=True))

    def settle_dependents(self) -> None:
        """Release or cancel the jobs that waited for those that ended in this step, transitively; all in one commit.

        Not part of `apply`: a chain of ten thousand jobs would recurse as deep, and elements of an array that end together must be
        evaluated together. The loop terminates because every round but the last ends live jobs.
        """
        names = dict.fromkeys(self.renamed)
        self.renamed = []
        while self.ended:
            ended, self.ended = self.ended, []
            names |= dict.fromkeys((job.user, job.name) for job in ended)
            for outcome in dependencies.settle(self.world, ended, self.facts):
                self.apply(outcome)
        for outcome in dependencies.release_singletons(self.world, names, self.facts):
            self.apply(outcome)

    def _note_ended_or_renamed(self, before: Job, job: Job) -> None:
        if job.spec.on_end is not None and job.epoch and job.state is not before.state and job.state.terminal:
            self.ended_with_command.append(job)
        relations = self.world.relations
        if not (relations.dependents or relations.singletons):
            return
        if job.state is not before.state and job.state.terminal:
            self.ended.append(job)
        elif job.spec is not before.spec and job.name != before.name:
            self.renamed.append((before.user, before.name))

    def add_history(
        self, kind: str, text: str, *, node_id: NodeId | None = None, by: str = "", facts: HistoryFacts | None = None
    ) -> None:
        """Add a history line that belongs to no job."""
        self.change.add_history(
            HistoryLine(
                seq=0, at_s=self.now.wall_s, kind=kind, text=text, node_id=node_id, by=by, facts=dict(facts or {})
            )
        )


class FleetFailureRate:
    """Node failure rate of the whole fleet. The sums are cached until a node's record changes; most steps change none."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sums: tuple[int, int, float] | None = None  # failures, nodes, sum of join times

    def invalidate(self) -> None:
        """Drop the cached sums: a node's record has changed."""
        self._sums = None

    def node_mtbf_s(self, now_s: float) -> float:
        """Mean time between failures of one node, in seconds."""
        if self._sums is None:
            nodes = self._world.nodes.values()
            self._sums = (sum(node.failure_count for node in nodes), len(nodes), sum(node.joined_s for node in nodes))
        failures, count, joined_s = self._sums
        return node_mtbf_s(failures, max(0.0, count * now_s - joined_s))


class _Addresses(Mapping[NodeId, str]):
    """Addresses by node, read from the world on access: building a dict for each of many events would cost nodes x events."""

    __slots__ = ("_world",)

    def __init__(self, world: World) -> None:
        self._world = world

    def __getitem__(self, node_id: NodeId) -> str:
        return self._world.nodes[node_id].address

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._world.nodes)

    def __len__(self) -> int:
        return len(self._world.nodes)


def _gang_mtbf_s(losses: FleetFailureRate, now_s: float, job: Job, nodes: int) -> float:
    """Mean time between failures of this gang, from the fleet's rate and the job's own losses.

    Not a method of `Turn`: the reference cycle would leave every step to the garbage collector.
    """
    ran_s = 0.0 if job.started_s is None else now_s - job.started_s
    return gang_mtbf_s(losses.node_mtbf_s(now_s), nodes=nodes, losses=job.failure_count, exposure_s=ran_s)

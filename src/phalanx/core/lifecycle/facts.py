"""What a transition may know besides the job itself, and what it answers. Values only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from phalanx.core.fleet.fitness import Fault
from phalanx.core.fleet.node import Node
from phalanx.core.ids import JobId, NodeId
from phalanx.core.state.commands import Command
from phalanx.core.state.story import StoryLine
from phalanx.core.work.attempt import Attempt, Cause, TaskExit
from phalanx.core.work.failure import Verdict
from phalanx.core.work.job import Job

NO_PROGRESS_BUDGET: Final = (
    5  # restarts without a new step kept; what Kubernetes' backoffLimit (6) and Ray's max_failures users set
)
CRASH_GRACE_S: Final = 1.0  # peers of a dead rank hang in a collective; time for a traceback, no more
BACKOFF_FIRST_S: Final = 2.0
AVOID_MAX: Final = 8  # nodes remembered as bad for one job
NODE_MTBF_S: Final = (
    1.3e7  # where nothing is known of the fleet: 6.5 failures per 1,000 node-days (core/recovery/failure_rate.py)
)
PORT_TRIES: Final = 5  # rendezvous ports in a row; past that it is the job that binds a port of its own


HANGS_BEFORE_STOP: Final = 1  # restarts after a hang without progress in between; a second one is the job's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that counts against a node (`core.recovery.lemon`). `weight`: 1 for what is surely the node's."""

    node_id: NodeId
    weight: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The surroundings of a transition.

    Attributes:
        addresses: where each node's ranks are reached.
        nodes: their records, for what a job with a plan is told of its devices.
        gang_mtbf_s: mean time between failures of a job's gang of so many nodes.
        judge: what the failure rules make of a task's end; None where there are none, and codes and signals alone decide.
        judge_cause: the same of what ended a whole generation.
        ages_s: how long each live attempt has lasted by a clock that nobody sets; without one, by the difference of Unix times.
    """

    now_s: float
    ages_s: Mapping[JobId, float] = field(default_factory=dict)
    addresses: Mapping[NodeId, str] = field(default_factory=dict)
    nodes: Mapping[NodeId, Node] = field(default_factory=dict)
    checkpoint_root: str = ""
    output_root: str = ""
    gang_mtbf_s: Callable[[Job, int], float] = lambda _job, nodes: NODE_MTBF_S / max(1, nodes)
    judge: Callable[[TaskExit], Verdict | None] = lambda _exit: None
    judge_cause: Callable[[Cause], Verdict | None] = lambda _cause: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job and its live attempt, if it has one."""

    job: Job
    attempt: Attempt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The case after a transition, the commands it gives, and the lines it adds to the story (their seq is given later).

    Attributes:
        faults: nodes that failed their preflight, or under the job; those at fault themselves are to be kept out.
        marks: what counts against nodes.
    """

    job: Job
    attempt: Attempt | None
    commands: tuple[Command, ...] = ()
    lines: tuple[StoryLine, ...] = ()
    faults: tuple[Fault, ...] = ()
    marks: tuple[Mark, ...] = ()

    @property
    def case(self) -> Case:
        """The state alone; an ended attempt is no longer part of it."""
        return Case(job=self.job, attempt=self.attempt if self.attempt is not None and self.attempt.live else None)

    def then(self, later: Outcome) -> Outcome:
        """This outcome followed by one that started from it."""
        return replace(
            later,
            commands=self.commands + later.commands,
            lines=self.lines + later.lines,
            faults=self.faults + later.faults,
            marks=self.marks + later.marks,
        )


def line(case: Case, facts: Facts, kind: str, text: str, *, node_id: NodeId | None = None, by: str = "") -> StoryLine:
    """A story line about this case, now."""
    epoch = case.attempt.epoch if case.attempt is not None else None
    return StoryLine(
        seq=0, at_s=facts.now_s, kind=kind, text=text, job_id=case.job.id, epoch=epoch, node_id=node_id, by=by
    )

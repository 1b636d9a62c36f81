"""Inputs and results of transitions. Values only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from phalanx.core.fleet.fitness import NodeFault
from phalanx.core.fleet.node import Node
from phalanx.core.ids import JobId, NodeId
from phalanx.core.state.commands import Command
from phalanx.core.state.history import HistoryLine
from phalanx.core.work.attempt import Attempt, EndCause, TaskExit
from phalanx.core.work.failure import FailureDiagnosis
from phalanx.core.work.job import Job

# Restarts without a new step kept; similar to Kubernetes' backoffLimit (6) and the usual max_failures in Ray.
NO_PROGRESS_BUDGET: Final = 5
CRASH_GRACE_S: Final = 1.0  # peers of a dead rank hang in a collective; enough time for a traceback
BACKOFF_FIRST_S: Final = 2.0
AVOID_MAX: Final = 8  # nodes remembered as bad for one job
# If the fleet's rate is unknown: 6.5 failures per 1,000 node-days (core/recovery/failure_rate.py).
NODE_MTBF_S: Final = 1.3e7
PORT_TRIES: Final = 5  # rendezvous ports in a row; after that, the job itself is assumed to bind a fixed port
HANGS_BEFORE_STOP: Final = 1  # restarts after a hang without progress in between; a second hang is the job's own fault


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultMark:
    """A failure counted against a node (`core.recovery.bad_nodes`). `weight`: 1 if the node is certainly at fault."""

    node_id: NodeId
    weight: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionContext:
    """Inputs of a transition besides the job itself.

    Attributes:
        addresses: network address of each node's ranks.
        nodes: node records, for the topology that a job with a plan receives.
        storage_key: random, of the head that makes this transition; part of the name of a new attempt's folder.
        gang_mtbf_s: mean time between failures of a job's gang of so many nodes.
        diagnose: applies the failure rules to a task's exit; None without rules: then exit codes and signals decide.
        diagnose_cause: applies the failure rules to the end of a whole generation.
        ages_s: age of each live attempt by a monotonic clock; for attempts not in it, the difference of Unix times is used.
    """

    now_s: float
    ages_s: Mapping[JobId, float] = field(default_factory=dict)
    addresses: Mapping[NodeId, str] = field(default_factory=dict)
    nodes: Mapping[NodeId, Node] = field(default_factory=dict)
    checkpoint_root: str = ""
    output_root: str = ""
    storage_key: str = ""
    gang_mtbf_s: Callable[[Job, int], float] = lambda _job, nodes: NODE_MTBF_S / max(1, nodes)
    diagnose: Callable[[TaskExit], FailureDiagnosis | None] = lambda _exit: None
    diagnose_cause: Callable[[EndCause], FailureDiagnosis | None] = lambda _cause: None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptCase:
    """A job and its live attempt, if it has one."""

    job: Job
    attempt: Attempt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionResult:
    """The case after a transition, its commands, and its history lines (without their seq).

    Attributes:
        faults: nodes that failed their preflight or a failure rule; those at fault are cordoned.
        marks: failures counted against nodes.
    """

    job: Job
    attempt: Attempt | None
    commands: tuple[Command, ...] = ()
    history: tuple[HistoryLine, ...] = ()
    faults: tuple[NodeFault, ...] = ()
    marks: tuple[FaultMark, ...] = ()

    @property
    def case(self) -> AttemptCase:
        """The job and its live attempt; without an ended attempt."""
        return AttemptCase(
            job=self.job, attempt=self.attempt if self.attempt is not None and self.attempt.holds_allocation else None
        )

    def then(self, later: TransitionResult) -> TransitionResult:
        """This outcome followed by one that started from it."""
        return replace(
            later,
            commands=self.commands + later.commands,
            history=self.history + later.history,
            faults=self.faults + later.faults,
            marks=self.marks + later.marks,
        )


def unchanged(case: AttemptCase) -> TransitionResult:
    """The result of an event that changes nothing."""
    return TransitionResult(job=case.job, attempt=case.attempt)


def history_line(
    case: AttemptCase, facts: TransitionContext, kind: str, text: str, *, node_id: NodeId | None = None, by: str = ""
) -> HistoryLine:
    """A history line about this case, now."""
    epoch = case.attempt.epoch if case.attempt is not None else None
    return HistoryLine(
        seq=0, at_s=facts.now_s, kind=kind, text=text, job_id=case.job.id, epoch=epoch, node_id=node_id, by=by
    )

"""One life of a job between a start and an end or requeue."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from phalanx.core.fleet.fitness import BadLink
from phalanx.core.ids import Epoch, Generation, JobId, NodeId
from phalanx.core.work.allocation import Allocation
from phalanx.core.work.failure import Evidence, Verdict
from phalanx.core.work.job import Resume

FIRST_GENERATION: Final = Generation(0)


TIME_LIMIT_NOTE: Final = "time limit"  # on the exits of tasks that a supervisor ended at the job's time limit by itself


class AttemptState(enum.StrEnum):
    """PLACED -> STARTING -> RUNNING -> STOPPING -> ENDED; an in-place restart goes back to PLACED under the same epoch."""

    PLACED = "placed"  # committed; supervisors prove their devices and wait at the barrier
    STARTING = "starting"  # ranks and addresses handed out
    RUNNING = "running"  # every rank is exec'd
    STOPPING = "stopping"  # asked to end, or ended in part; waits until every member is accounted for
    ENDED = "ended"


class MemberState(enum.StrEnum):
    """One node's part of the gang."""

    ASKED = "asked"
    READY = "ready"
    STARTED = "started"
    STOPPED = "stopped"  # no process of this generation is left on the node
    LOST = "lost"  # the node died, or its lease is over


class Cause(enum.StrEnum):
    """Why an attempt (or a generation of it) ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"  # the job's own doing: non-zero exit
    CRASH = "crash"  # a task died by a signal nobody here sent
    NODE_FAIL = "node_fail"
    START_FAIL = "start_fail"
    UNFIT = "unfit"  # a node failed its preflight: placed again without it, uncharged while there are others to try
    PREEMPTED = "preempted"
    MOVED = "moved"  # to make room for another: it goes on elsewhere at once
    DRAINED = "drained"
    CANCELLED = "cancelled"
    REQUEUED = "requeued"
    TIMEOUT = "timeout"
    FREEZE = "freeze"  # frozen longer than its collectives bear: restarted, uncharged
    CONTENDED = "contended"  # a shared engine gave the place to others before ours began: placed again, uncharged
    FAULT = "fault"  # a device or node failed under it and the rules say so: placed again without that node
    HANG = "hang"  # no step for far longer than its steps take: stacks are kept, it restarts in place
    PORT_TAKEN = "port_taken"  # somebody else held the rendezvous port: again on another, uncharged a few times


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskExit:
    """How one task ended. `by_us`: we had asked it to. `code` is None when a signal ended it.

    Attributes:
        evidence: what its supervisor found beside code and signal; the head keeps the verdict in its stead.
        verdict: what the rules made of it; None for an end that was no failure, or that no rules have seen.
    """

    rank: int
    node_id: NodeId
    code: int | None
    signal: int | None
    by_us: bool
    at_s: float
    note: str = ""
    evidence: Evidence | None = None
    verdict: Verdict | None = None

    @property
    def shell_code(self) -> int:
        """As a shell says it: the code, or 128 + signal."""
        return self.code if self.code is not None else 128 + (self.signal or 0)

    @property
    def failed(self) -> bool:
        """Ended badly, and by itself."""
        return not self.by_us and self.shell_code != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One node of the gang.

    Attributes:
        port: node rank 0's choice for the rendezvous.
        probe_port: where a supervisor that was brought for this attempt alone answers its peers' probes; 0 for none.
        bad_links: what it found of its links to the others.
    """

    node_id: NodeId
    state: MemberState = MemberState.ASKED
    port: int | None = None
    why: str = ""
    probe_port: int = 0
    bad_links: tuple[BadLink, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt. Times are Unix seconds.

    Attributes:
        generation: in-place restarts so far.
        placed_s: GPU-seconds are billed from here to `ended_s`.
        generation_s: when the present generation was asked for.
        running_s: when every rank of the present generation was exec'd; None before.
        first_running_s: the same of the first generation.
        resume: what its ranks load; the candidate node rank 0 verified.
        ending: why it is STOPPING; None until then.
        then_restart: after STOPPING the gang starts again in place.
        kept: not all its nodes see the head's files, so the head keeps a copy of its checkpoints and outputs. Settled at the placement,
            so that all nodes are told alike.
    """

    job_id: JobId
    epoch: Epoch
    allocation: Allocation
    placed_s: float
    generation: Generation = FIRST_GENERATION
    state: AttemptState = AttemptState.PLACED
    members: tuple[Member, ...] = ()
    generation_s: float = 0.0
    running_s: float | None = None
    first_running_s: float | None = None
    ended_s: float | None = None
    resume: Resume | None = None
    exits: tuple[TaskExit, ...] = ()
    ending: Cause | None = None
    then_restart: bool = False
    why: str = ""
    exit_code: int | None = None
    causes: tuple[Cause, ...] = ()  # of every generation that ended, in order
    kept: bool = False

    @property
    def live(self) -> bool:
        """Whether it still holds its allocation."""
        return self.state is not AttemptState.ENDED

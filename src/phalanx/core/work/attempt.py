"""One attempt of a job, from its start to its end or requeue."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Final

from phalanx.core.fleet.fitness import BadLink
from phalanx.core.ids import Epoch, Generation, JobId, NodeId
from phalanx.core.work.allocation import Allocation
from phalanx.core.work.failure import FailureDiagnosis, FailureEvidence
from phalanx.core.work.job import PublishedCheckpoint
from phalanx.core.work.states import AttemptState

FIRST_GENERATION: Final = Generation(0)
TIME_LIMIT_NOTE: Final = "time limit"  # on exits of tasks that a supervisor itself ended at the job's time limit


class MemberState(enum.StrEnum):
    """The state of one node's part of the gang."""

    REQUESTED = "asked"
    READY = "ready"
    STARTED = "started"
    STOPPED = "stopped"  # no process of this generation remains on the node
    LOST = "lost"  # the node died, or its lease expired


class EndCause(enum.StrEnum):
    """Why an attempt (or a generation of it) ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"  # the job's own error: non-zero exit
    CRASH = "crash"  # a task died by a signal that Phalanx did not send
    NODE_FAIL = "node_fail"
    START_FAIL = "start_fail"
    # A node failed its preflight: placed again without it, uncharged while there are other nodes to try
    UNFIT = "unfit"
    PREEMPTED = "preempted"
    IDLE = "idle"  # the idle policy of its queue took its GPUs back; the job is held
    PARKED = "parked"  # its user, or its own idle limit, stopped it until it is resumed
    MOVED = "moved"  # to make room for another job: continues elsewhere at once
    DRAINED = "drained"
    CANCELLED = "cancelled"
    REQUEUED = "requeued"
    TIMEOUT = "timeout"
    FREEZE = "freeze"  # frozen longer than its collective timeout: restarted, uncharged
    CONTENDED = "contended"  # a shared engine gave the place to other jobs first: placed again, uncharged
    LIMITED = "limited"  # a limit of a shared engine keeps it from starting: waits and tries again, uncharged
    FAULT = "fault"  # a failure rule blames a device or node: placed again without that node
    HANG = "hang"  # no step for far longer than usual: stacks are captured, it restarts in place
    # Another process held the rendezvous port: retried on another port, uncharged a few times
    PORT_TAKEN = "port_taken"


class SleepPhase(enum.StrEnum):
    """Where a replica is on its way to sleep and back. Devices are free for others in ASLEEP and WAITING only."""

    FALLING_ASLEEP = "falling asleep"  # its sleep hook runs; it holds its devices until the hook has succeeded
    ASLEEP = "asleep"
    WAITING = "waiting to wake"  # for the devices that it gave back
    WAKING = "waking"  # it holds its devices again; its wake hook runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """The sleep of a replica.

    Attributes:
        devices: those that it gave back, by node rank; empty while it holds them.
        since_s: when it gave them back (Unix seconds); 0 before.
        why: what it waits for in WAITING.
    """

    phase: SleepPhase
    devices: tuple[tuple[int, ...], ...] = ()
    since_s: float = 0.0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskExit:
    """How one task ended.

    Attributes:
        code: None if a signal ended it.
        requested_by_phalanx: the exit was requested by Phalanx.
        evidence: further signs that its supervisor found; the head stores the diagnosis instead.
        diagnosis: the result of the failure rules; None if the exit was not a failure, or no rules were applied.
    """

    rank: int
    node_id: NodeId
    code: int | None
    signal: int | None
    requested_by_phalanx: bool
    ended_s: float
    note: str = ""
    evidence: FailureEvidence | None = None
    diagnosis: FailureDiagnosis | None = None

    @property
    def shell_code(self) -> int:
        """As a shell reports it: the code, or 128 + signal."""
        return self.code if self.code is not None else 128 + (self.signal or 0)

    @property
    def failed(self) -> bool:
        """Whether it failed by itself."""
        return not self.requested_by_phalanx and self.shell_code != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One node of the gang.

    Attributes:
        port: rendezvous port chosen by node rank 0.
        probe_port: where a supervisor that serves only this attempt answers link probes of its peers; 0 for none.
        address: where a supervisor that serves only this attempt is reached, if that is not the address of its node; empty otherwise.
        bad_links: the bad links to other members that it reported.
        disk_full: it refused because the disk of its node has no room.
        unsent: streams of which the head did not have all bytes when it stopped, with their lengths.
    """

    node_id: NodeId
    state: MemberState = MemberState.REQUESTED
    port: int | None = None
    why: str = ""
    probe_port: int = 0
    address: str = ""
    bad_links: tuple[BadLink, ...] = ()
    disk_full: bool = False
    unsent: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt. Times are Unix seconds.

    Attributes:
        folder: of its logs and checkpoints, inside the job's folder; also with a random key, since epochs are assigned again too.
        generation: in-place restarts so far.
        placed_s: start of billing; GPU-seconds are billed from here to `ended_s`, except while it sleeps.
        generation_s: when the current generation was requested.
        running_s: when every rank of the current generation was exec'd; None before.
        first_running_s: the same for the first generation.
        resume_from: the checkpoint that its ranks load, verified by node rank 0.
        stop_cause: why it is STOPPING; None until then.
        restart_after_stop: after STOPPING the gang starts again in place.
        causes: of every generation that ended, in order.
        head_stores_copies: some of its nodes do not see the head's files, so the head stores a copy of its checkpoints and outputs. Decided at the
            placement, so that all its nodes do the same.
        service_port: of a replica, the port on which node rank 0 serves; 0 before it is chosen.
        ready: of a replica, whether its port answered the last probes.
        speed: of the job where it runs, as a share of that on its fastest model, as observed before the placement; 1 if it was not.
        ready_s: when `ready` last changed; None before it was first ready.
        sleep: of a replica that sleeps or changes between sleep and wakefulness; None while it is awake.
        sleep_turn: number of hooks that were requested; late answers and repeated commands of earlier ones have a lower number.
        asleep_s: time that it spent without its devices, before the present sleep; not billed for devices.
        sleep_refusal: why it did not fall asleep when it was last asked to; empty if it did.
        queued_why: why a queue of the engine's cluster keeps it waiting; empty if none does. Until then nothing is billed, and no limit runs.
    """

    job_id: JobId
    epoch: Epoch
    folder: str
    allocation: Allocation
    placed_s: float
    generation: Generation = FIRST_GENERATION
    state: AttemptState = AttemptState.PLACED
    members: tuple[Member, ...] = ()
    generation_s: float = 0.0
    running_s: float | None = None
    first_running_s: float | None = None
    ended_s: float | None = None
    resume_from: PublishedCheckpoint | None = None
    exits: tuple[TaskExit, ...] = ()
    stop_cause: EndCause | None = None
    restart_after_stop: bool = False
    why: str = ""
    exit_code: int | None = None
    causes: tuple[EndCause, ...] = ()
    head_stores_copies: bool = False
    service_port: int = 0
    ready: bool = False
    ready_s: float | None = None
    speed: float = 1.0
    sleep: Sleep | None = None
    sleep_turn: int = 0
    asleep_s: float = 0.0
    sleep_refusal: str = ""
    queued_why: str = ""

    @property
    def serving(self) -> bool:
        """Whether it is a replica that is ready to serve."""
        return self.ready and self.state is AttemptState.RUNNING and self.sleep is None

    @property
    def gave_devices_back(self) -> bool:
        """Whether it sleeps: its processes live and hold CPUs and memory, and its devices are free for others."""
        return self.sleep is not None and bool(self.sleep.devices)

    @property
    def runs_hook(self) -> bool:
        """Whether a hook was requested and has not answered."""
        return self.sleep is not None and self.sleep.phase in (SleepPhase.FALLING_ASLEEP, SleepPhase.WAKING)

    @property
    def full_allocation(self) -> Allocation:
        """The allocation with the devices that it gave back."""
        if self.sleep is None or not self.sleep.devices:
            return self.allocation
        grants = zip(self.allocation.grants, self.sleep.devices, strict=True)
        return replace(self.allocation, grants=tuple(replace(grant, devices=devices) for grant, devices in grants))

    def sleep_s(self, now_s: float) -> float:
        """How long it was without its devices, at its end or at `now_s`."""
        since_s = self.sleep.since_s if self.sleep is not None and self.sleep.devices else now_s
        return self.asleep_s + max(0.0, now_s - since_s)

    def device_s(self, now_s: float) -> float:
        """How long it held its devices, until its end or `now_s`."""
        if self.queued_why:
            return 0.0
        end_s = now_s if self.ended_s is None else self.ended_s
        return max(0.0, end_s - self.placed_s - self.sleep_s(end_s))

    @property
    def holds_allocation(self) -> bool:
        """Whether it still holds its allocation."""
        return self.state is not AttemptState.ENDED

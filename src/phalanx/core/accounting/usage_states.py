"""Gives each part of a device its state: what it is used for, or why it is not used. Pure; the ledger calls it at each change and sample.

A device is divided into parts in thousandths: one for each job that holds some of it, and what is left. Each part has exactly one state at a
time. Of a held part the first that fits holds: broken, lost, hung, checkpointing, starting, preempted or draining, then by activity. Where
activity is mixed, the larger part of the time decides.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.accounting.activity import Activity, ActivityLevel
from phalanx.core.fleet.fitness import AUTOMATIC_CORDON_AUTHORS, FULL_DISK
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.fleet.node_pool import COMING_STATES, PoolNode, PoolNodeState
from phalanx.core.ids import NodeId
from phalanx.core.resources import MILLI_PER_DEVICE
from phalanx.core.work.attempt import Attempt, EndCause, MemberState
from phalanx.core.work.states import AttemptState

STARTING_MAX_S: Final = 120.0
"""A job without step reports that was not active so long after its processes began is idle, no longer starting. Imports and the loading of
weights take up to about two minutes; longer starts of jobs with step reports are recognized by the missing first step."""
FIRST_SAMPLE_S: Final = (
    10.0  # a job without samples for so long after its processes began is unobserved, no longer starting
)
HUNG_GAPS: Final = 10.0
"""Steps that fail to come for so many usual gaps: the factor over the p99 at which a supervisor ends a gang as hung (`node.logic.hang_detector`)."""
HUNG_MIN_S: Final = (
    60.0  # a shorter silence is never called a hang: garbage collection, a slow batch, an evaluation of some batches
)
LARGER_PART: Final = 0.5  # of the time of a step: the state of a second is that of its larger part
PROGRESS_UNKNOWN: Final = "progress unknown"  # note of computing: the job reports no steps
UNOBSERVED: Final = "unobserved"  # note: no samples came, or no head ran; the state follows from the records alone
FOREIGN_USE: Final = "used outside Phalanx"  # note of fragmented: jobs of a shared engine hold it


class UsageState(enum.StrEnum):
    """What a part of a device does.

    COMPUTING: kernels run, or steps are made at a good pace. LOW: active, but below `activity.LOW_BELOW`. DATA_BOUND, COMMUNICATING: more than
    half of a step waits for data, or for other ranks. CHECKPOINTING: training stands still for a save. STARTING: from the placement to the
    first step or first activity. IDLE: processes hold it and do nothing. UNOCCUPIED: held without a process. HUNG: steps were reported and have
    stopped coming. LOST: held by a gang that failed, until it is released or starts again. PREEMPTED: its job stops to make room for others.

    RESERVED: kept free by a reservation. PROVISIONING: ordered from a provider or awaited from an autoscaler, but not up yet. BROKEN: down, unhealthy, or cordoned
    for a fault. DRAINING: cordoned by an operator or a pool. FRAGMENTED: free, but no request that waits or is usual fits. FREE_DEMAND: free
    although a job that waits could use it; the note says why it does not. FREE: no job wants it.
    """

    COMPUTING = "computing"
    LOW = "low"
    DATA_BOUND = "data_bound"
    COMMUNICATING = "communicating"
    CHECKPOINTING = "checkpointing"
    STARTING = "starting"
    IDLE = "idle"
    UNOCCUPIED = "unoccupied"
    HUNG = "hung"
    LOST = "lost"
    PREEMPTED = "preempted"
    RESERVED = "reserved"
    PROVISIONING = "provisioning"
    BROKEN = "broken"
    DRAINING = "draining"
    FRAGMENTED = "fragmented"
    FREE_DEMAND = "free_demand"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class PartState:
    """A state, with a note that says more: a flag of computing, or why a job that waits does not start."""

    state: UsageState
    note: str = ""


class NodeCondition(enum.StrEnum):
    """Whether the devices of a node can be used."""

    IN_SERVICE = "in service"
    PROVISIONING = "provisioning"
    DRAINING = "draining"
    BROKEN = "broken"


class AttemptPhase(enum.StrEnum):
    """What an attempt does with its devices, as far as its record says."""

    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending"  # it has ended, or was cancelled, and cleans up
    PREEMPTED = "preempted"
    DRAINED = "drained"
    HUNG = "hung"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepActivity:
    """What a job reports of its steps. Times are seconds.

    Attributes:
        silent_s: since its newest report of a step.
        gap_s: usual time from one report to the next; 0 before there were two.
        data_share, communication_share: parts of the time of its newest steps, 0 to 1, that waited for data or for other ranks.
        share_s: for how long its newest steps have agreed on whether they mostly waited, and for what; up to the newest report.
        saving: training stands still for a save.
        announced: it said that no step comes for a while (an evaluation, the end of training).
        stepped: it made a step since its processes began.
    """

    silent_s: float
    gap_s: float
    data_share: float = 0.0
    communication_share: float = 0.0
    share_s: float = 0.0
    saving: bool = False
    announced: bool = False
    stepped: bool = True

    @property
    def hung(self) -> bool:
        """Whether steps have stopped coming, for far longer than usual."""
        return self.stepped and not self.saving and not self.announced and self.silent_s > hung_after_s(self.gap_s)


_CONDITIONS: Final = {
    NodeCondition.PROVISIONING: UsageState.PROVISIONING,
    NodeCondition.DRAINING: UsageState.DRAINING,
    NodeCondition.BROKEN: UsageState.BROKEN,
}
_STOP_PHASES: Final = {
    EndCause.PREEMPTED: AttemptPhase.PREEMPTED,
    EndCause.MOVED: AttemptPhase.PREEMPTED,
    EndCause.DRAINED: AttemptPhase.DRAINED,
    EndCause.HANG: AttemptPhase.HUNG,
    EndCause.SUCCEEDED: AttemptPhase.ENDING,
    EndCause.CANCELLED: AttemptPhase.ENDING,
    EndCause.TIMEOUT: AttemptPhase.ENDING,
    EndCause.REQUEUED: AttemptPhase.ENDING,
    EndCause.IDLE: AttemptPhase.ENDING,
    EndCause.PARKED: AttemptPhase.ENDING,
}  # every other cause is a failure
_PHASE_STATES: Final = {
    AttemptPhase.STARTING: UsageState.STARTING,
    AttemptPhase.PREEMPTED: UsageState.PREEMPTED,
    AttemptPhase.DRAINED: UsageState.DRAINING,
}
_LEVEL_STATES: Final = {
    ActivityLevel.ACTIVE: UsageState.COMPUTING,
    ActivityLevel.LOW: UsageState.LOW,
    ActivityLevel.NONE: UsageState.IDLE,
}


def hung_after_s(gap_s: float) -> float:
    """The silence after which a job with this usual gap between steps counts as hung."""
    return max(HUNG_MIN_S, HUNG_GAPS * gap_s)


def larger_part(data_share: float, communication_share: float) -> UsageState | None:
    """The state of steps of which these parts waited; None if they mostly worked."""
    if data_share > LARGER_PART:
        return UsageState.DATA_BOUND
    return UsageState.COMMUNICATING if communication_share > LARGER_PART else None


def node_condition(node: Node | None, member: PoolNode | None) -> NodeCondition:
    """The condition of a node. `node`: None before its supervisor registered; `member`: None if it belongs to no pool."""
    if member is not None and member.state in COMING_STATES:
        return NodeCondition.PROVISIONING
    if (member is not None and member.state is PoolNodeState.DOWN) or (
        node is not None and node.state is NodeState.DOWN
    ):
        return NodeCondition.BROKEN
    cordon = None if node is None else node.cordon
    if cordon is not None and cordon.by in (*AUTOMATIC_CORDON_AUTHORS, FULL_DISK):
        return NodeCondition.BROKEN
    if cordon is not None or (member is not None and member.leaving):
        return NodeCondition.DRAINING
    if node is not None and node.provisioning_reason:
        return NodeCondition.PROVISIONING
    return NodeCondition.IN_SERVICE


def attempt_phase(attempt: Attempt) -> AttemptPhase:
    """The phase of a live attempt."""
    if any(member.state is MemberState.LOST for member in attempt.members):
        return AttemptPhase.FAILED
    match attempt.state:
        case AttemptState.PLACED | AttemptState.STARTING:
            return AttemptPhase.STARTING
        case AttemptState.RUNNING:
            return AttemptPhase.RUNNING
        case AttemptState.STOPPING | AttemptState.ENDED:
            cause = attempt.stop_cause or EndCause.FAILED
            return _STOP_PHASES.get(cause, AttemptPhase.FAILED)


def held_state(
    condition: NodeCondition,
    phase: AttemptPhase,
    activity: Activity | None,
    steps: StepActivity | None,
    *,
    running_s: float,
    healthy: bool = True,
) -> PartState:
    """The state of a part that a job holds.

    Args:
        condition: of the node.
        phase: of the attempt.
        activity: of the device; None if no sample came lately.
        steps: None for a job that reports none.
        running_s: time since all processes of this generation began.
        healthy: whether the device is.
    """
    if condition is NodeCondition.BROKEN or not healthy:
        return PartState(UsageState.BROKEN)
    if phase is AttemptPhase.FAILED:
        return PartState(UsageState.LOST)
    if phase is AttemptPhase.HUNG or (phase is AttemptPhase.RUNNING and steps is not None and steps.hung):
        return PartState(UsageState.HUNG)
    if steps is not None and steps.saving:
        return PartState(UsageState.CHECKPOINTING)
    if phase in _PHASE_STATES:
        return PartState(_PHASE_STATES[phase])
    if phase is AttemptPhase.RUNNING and _still_starts(activity, steps, running_s):
        return PartState(UsageState.STARTING)
    return _state_by_activity(activity, steps)


def _still_starts(activity: Activity | None, steps: StepActivity | None, running_s: float) -> bool:
    if steps is not None:
        return not steps.stepped and not steps.announced
    if activity is None:
        return running_s < FIRST_SAMPLE_S
    return not activity.began and not activity.empty and running_s < STARTING_MAX_S


def _state_by_activity(activity: Activity | None, steps: StepActivity | None) -> PartState:
    if steps is not None and steps.stepped and not steps.announced:
        waits = larger_part(steps.data_share, steps.communication_share)
        if waits is not None:
            return PartState(waits)
        if activity is None:
            return PartState(UsageState.COMPUTING, UNOBSERVED)
        active = activity.level is ActivityLevel.ACTIVE
        return PartState(UsageState.COMPUTING if active else UsageState.LOW)  # it makes steps, so it is never idle
    if activity is None:
        return PartState(UsageState.COMPUTING, UNOBSERVED)
    if activity.empty and activity.level is ActivityLevel.NONE:
        return PartState(UsageState.UNOCCUPIED)
    state = _LEVEL_STATES[activity.level]
    unknown = state is UsageState.COMPUTING and steps is None
    return PartState(state, PROGRESS_UNKNOWN if unknown else "")


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """What one part of a job takes of a node.

    Attributes:
        devices: whole ones; 0 for a share.
        share_milli: thousandths of one device; 0 for whole devices.
        total: `devices` is the total of a job that may be spread: a node gives at most what it has.
        models: lower case; empty for any.
        nodes: only these; empty for any.
        excluded: never these nodes.
    """

    devices: int
    share_milli: int = 0
    cpus: int = 0
    memory_bytes: int = 0
    total: bool = False
    models: frozenset[str] = frozenset()
    nodes: frozenset[NodeId] = frozenset()
    excluded: frozenset[NodeId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeCapacity:
    """What is free on a node. `size`: devices that it has, `whole`: those of which nothing is held."""

    model: str
    size: int
    whole: int
    cpus: int
    memory_bytes: int
    node_id: NodeId

    def fits(self, request: NodeRequest, milli: int) -> bool:
        """Whether the request could use a part of `milli` thousandths here."""
        if request.cpus > self.cpus or request.memory_bytes > self.memory_bytes:
            return False
        if self.node_id in request.excluded or (request.nodes and self.node_id not in request.nodes):
            return False
        if request.models and not any(self.model.startswith(model) for model in request.models):
            return False
        if request.share_milli:
            return milli >= request.share_milli
        wanted = min(request.devices, self.size) if request.total else request.devices
        return milli == MILLI_PER_DEVICE and wanted <= self.whole


def free_state(
    condition: NodeCondition,
    capacity: FreeCapacity,
    milli: int,
    *,
    waiting: Mapping[NodeRequest, str],
    usual: frozenset[NodeRequest],
    reserved: bool = False,
    foreign: bool = False,
    healthy: bool = True,
) -> PartState:
    """The state of `milli` thousandths of a device that no job holds.

    Args:
        condition: of the node.
        capacity: of the node.
        milli: size of the part.
        waiting: requests of jobs that wait, and why the first of each does; jobs that their users hold back are left out.
        usual: requests of jobs seen lately.
        reserved: an active reservation has the node.
        foreign: jobs outside Phalanx use the device.
        healthy: whether the device is.
    """
    if not healthy:
        return PartState(UsageState.BROKEN)
    if condition in _CONDITIONS:
        return PartState(_CONDITIONS[condition])
    if foreign:
        return PartState(UsageState.FRAGMENTED, FOREIGN_USE)
    if reserved:
        return PartState(UsageState.RESERVED)
    why = next((why for request, why in waiting.items() if capacity.fits(request, milli)), None)
    if why is not None:
        return PartState(UsageState.FREE_DEMAND, why)
    if not any(capacity.fits(request, milli) for request in usual):
        return PartState(UsageState.FRAGMENTED)
    return PartState(UsageState.FREE)

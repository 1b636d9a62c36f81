"""Follow the pods of each attempt: (attempt, its pods, now) -> events to report, pods to delete. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from phalanx.core.ids import NodeId
from phalanx.core.state.events import Event
from phalanx.core.state.reports import AttemptQueued, AttemptWithdrawn, SeatLost
from phalanx.core.units import format_duration
from phalanx.core.work.attempt import Attempt, EndCause, MemberState
from phalanx.core.work.states import AttemptState
from phalanx.engines.kubernetes.autoscaler_notes import AutoscalerNote, notes_in_words
from phalanx.engines.kubernetes.parse import PodState
from phalanx.wire.seat import SEAT_CERTIFICATE_REJECTED, SEAT_HEAD_UNREACHABLE, SEAT_IMAGE_UNFIT

START_LIMIT_S: Final = 10.0  # until all pods of a gang have a node; then all are withdrawn, 15 s after the first create
START_LIMIT_MAX_S: Final = 60.0  # the same, while earlier pods of ours still end there
IMAGE_LIMIT_S: Final = 10.0  # a registry that fails once may answer the next time
WAIT_REPORT_S: Final = 30.0  # between two reports of why pods wait for a node
SUPERVISOR_REPORT_S: Final = 2.0  # after the end of a pod, time for its supervisor's own report, which says more
MISSING_S: Final = (
    10.0  # a pod that was created and is in no list by then is gone; watches of a busy server are seconds late
)
LINGER_S: Final = 20.0  # after an attempt's end, time for its supervisors to exit before their pods are deleted
HURRIED_GRACE_S: Final = 5  # of pods whose attempt has lost another part: no save can succeed
_NEVER_PULLED: Final = ("InvalidImageName", "ErrImageNeverPull")
NO_IMAGE: Final = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable")
NO_CONTAINER: Final = frozenset(
    ["CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError", "CrashLoopBackOff"]
)
_NOT_ADMITTED: Final = (
    "OutOf",
    "UnexpectedAdmissionError",
    "NodeAffinity",
    "NodePorts",
    "Evicted",
    "Preempt",
    "Shutdown",
)
_NOT_FOUND: Final = (126, 127, 128)
_BEFORE_START: Final = (AttemptState.PLACED, AttemptState.STOPPING)


class PodsPhase(enum.Enum):
    """WAITING: some pod has no node yet. PLACED: all have. SETTLED: all is reported."""

    WAITING = "waiting"
    PLACED = "placed"
    SETTLED = "settled"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPods:
    """One attempt's pods. Times are seconds of a monotonic clock.

    Attributes:
        names: of its pods, by node rank.
        created_s: when all were created; for an attempt that was found, when the head started.
        ended_s: when each pod was first seen ended or gone, by its name.
        reported: node ids whose end was reported.
        attempt_ended_s: when the attempt ended on our side; None while it is live.
        pulling_s: since when an image cannot be pulled; None while all can.
        deleted: its pods were deleted, or are to be.
        wait_text: why it waits for nodes of an autoscaler, as reported last; empty if it does not.
        wait_reported_s: when that was.
        wait_note: what an autoscaler said of its pods then.
        awaited: nodes whose pods Kubernetes has not placed while the attempt waits for an autoscaler.
    """

    attempt: Attempt
    names: tuple[str, ...]
    created_s: float
    phase: PodsPhase = PodsPhase.WAITING
    ended_s: Mapping[str, float] | None = None
    reported: tuple[NodeId, ...] = ()
    attempt_ended_s: float | None = None
    pulling_s: float | None = None
    deleted: bool = False
    wait_text: str = ""
    wait_reported_s: float = 0.0
    wait_note: str = ""
    awaited: tuple[NodeId, ...] = ()

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Nodes of the attempt."""
        return tuple(grant.node_id for grant in self.attempt.allocation.grants)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodsUpdate:
    """The result of one look.

    Attributes:
        pods: the new state; None if it is finished.
        events: for the controller, in order.
        delete: delete the pods and their Secret.
        grace_s: of that deletion; None for the pods' own.
        contended: nodes that others got; they count as taken for a while.
    """

    pods: AttemptPods | None
    events: tuple[Event, ...] = ()
    delete: bool = False
    grace_s: int | None = None
    contended: tuple[NodeId, ...] = ()


def evaluate(
    order: AttemptPods,
    found: Mapping[str, PodState],
    now_s: float,
    *,
    holders: Sequence[str] = (),
    cleaning_up: bool = False,
    head_url: str = "",
    image: str = "",
    creator: str = "",
    node_wait_s: float = 0.0,
    notes: Mapping[str, AutoscalerNote] | None = None,
) -> PodsUpdate:
    """Evaluate the pods of one attempt.

    Args:
        order: the state before.
        found: the pods that exist, by name.
        now_s: monotonic seconds.
        holders: other users of the nodes, for messages.
        cleaning_up: pods of ended attempts of ours still end on these nodes.
        head_url: for messages.
        image: for messages.
        creator: what creates the pods, if that is not the head.
        node_wait_s: as in `PodSettings`.
        notes: what autoscalers say of pods, by their names.
    """
    states = [found.get(name) for name in order.names]
    if order.attempt_ended_s is not None:
        return _after_attempt(order, states, now_s)
    if order.phase is PodsPhase.SETTLED:
        return PodsUpdate(pods=order)
    order = _note_pulling(_note_ends(order, states, now_s), states, now_s)
    connected = frozenset(one.node_id for one in order.attempt.members if one.state is not MemberState.REQUESTED)
    # No rank runs before all supervisors are ready: until then the gang can be withdrawn, also if some of them are.
    if order.attempt.state is AttemptState.PLACED or not connected:
        refused = _before_start(order, states, now_s, head_url=head_url, image=image, creator=creator)
        if refused is not None:
            return refused
    note = notes_in_words(order.names, notes or {})
    kept = _without_node(order, states, now_s, holders, cleaning_up=cleaning_up, node_wait_s=node_wait_s, note=note)
    if kept is not None:
        return kept
    if order.phase is PodsPhase.WAITING and all(state is not None and state.node for state in states):
        if order.wait_text or order.attempt.queued_why:
            placed = AttemptQueued(job_id=order.attempt.job_id, epoch=order.attempt.epoch, why="")
            placed_pods = replace(order, phase=PodsPhase.PLACED, wait_text="", awaited=())
            return PodsUpdate(pods=placed_pods, events=(placed,))
        order = replace(order, phase=PodsPhase.PLACED)
    return _lost_seats(order, states, now_s) if connected else PodsUpdate(pods=order)


def awaited_by(node: NodeId, orders: Sequence[AttemptPods]) -> str:
    """Return whose pods wait for a machine to stand behind a declared place; empty if a pod there has a node, or none waits."""
    there = [one for one in orders if node in one.nodes and one.phase is not PodsPhase.SETTLED]
    if not all(node in one.awaited for one in there):
        return ""
    return ", ".join(f"job {one.attempt.job_id}" for one in there)


def has_lost_members(attempt: Attempt) -> bool:
    """Whether the attempt ended with lost members: its other pods need no long grace."""
    return not attempt.holds_allocation and any(member.state is MemberState.LOST for member in attempt.members)


def _after_attempt(order: AttemptPods, states: Sequence[PodState | None], now_s: float) -> PodsUpdate:
    """Delete the pods of an ended attempt as soon as they have ended themselves, or after a while."""
    assert order.attempt_ended_s is not None
    left = [state for state in states if state is not None]
    if order.deleted:
        return PodsUpdate(pods=order if left else None)
    hurried = has_lost_members(order.attempt)
    if all(state.ended for state in left) or hurried or now_s - order.attempt_ended_s >= LINGER_S:
        return PodsUpdate(pods=replace(order, deleted=True), delete=True, grace_s=HURRIED_GRACE_S if hurried else None)
    return PodsUpdate(pods=order)


def _note_ends(order: AttemptPods, states: Sequence[PodState | None], now_s: float) -> AttemptPods:
    ended = dict(order.ended_s or {})
    for name, state in zip(order.names, states, strict=True):
        if state is None or state.ended:
            ended.setdefault(name, now_s)
        else:
            ended.pop(name, None)
    return order if ended == (order.ended_s or {}) else replace(order, ended_s=ended)


def _note_pulling(order: AttemptPods, states: Sequence[PodState | None], now_s: float) -> AttemptPods:
    failing = any(state is not None and state.waiting in NO_IMAGE for state in states)
    since_s = order.pulling_s if order.pulling_s is not None else now_s
    return replace(order, pulling_s=since_s if failing else None)


def _before_start(
    order: AttemptPods,
    states: Sequence[PodState | None],
    now_s: float,
    *,
    head_url: str,
    image: str,
    creator: str,
) -> PodsUpdate | None:
    """Withdraw the whole gang if one of its pods cannot start; None if all may."""
    if order.attempt.state not in _BEFORE_START:
        return None
    connected = {one.node_id for one in order.attempt.members if one.state is not MemberState.REQUESTED}
    for node, name, state in zip(order.nodes, order.names, states, strict=True):
        if node in connected:
            continue
        if state is None:
            if now_s - max(order.created_s, (order.ended_s or {}).get(name, now_s)) >= MISSING_S:
                why = f"pod {name} was deleted before its supervisor started"
                if creator:
                    why = (
                        f"{creator} has no pod for {node} after {MISSING_S:.0f} s: kubectl describe {creator} says why"
                    )
                return _withdraw(order, why, (node,), EndCause.CONTENDED)
            continue
        if state.waiting in _NEVER_PULLED:
            why = f"pod {state.name}: {state.waiting}: {state.waiting_text or image}"
            return _withdraw(order, why, (node,), EndCause.START_FAIL)
        if state.waiting in NO_IMAGE and order.pulling_s is not None and now_s - order.pulling_s >= IMAGE_LIMIT_S:
            why = f"{node} cannot pull the image {image}: {state.waiting_text or state.waiting}"
            return _withdraw(order, why, (node,), EndCause.START_FAIL)
        if state.waiting in NO_CONTAINER and now_s - order.created_s >= SUPERVISOR_REPORT_S:
            why = f"pod {state.name} cannot start on {node}: {state.waiting}: {state.waiting_text}"
            return _withdraw(order, why, (node,), EndCause.START_FAIL)
        if state.ended and now_s - (order.ended_s or {}).get(name, now_s) >= SUPERVISOR_REPORT_S:
            if state.exit_code == SEAT_IMAGE_UNFIT:
                why = state.message or f"kubectl logs {state.name} says why"
                return _withdraw(order, f"the image {image} cannot run the supervisor: {why}", (node,), EndCause.FAILED)
            refused = state.reason.startswith(_NOT_ADMITTED)
            cause = EndCause.CONTENDED if refused else EndCause.START_FAIL
            why = f"pod {state.name} {state.why_ended} before its supervisor connected to the head"
            hint = "" if refused else _hint(state.exit_code or 0, str(node), head_url, image)
            update = _withdraw(order, why + hint, (node,), cause)
            return replace(update, contended=(node,)) if refused else update
        if state.deleting and not order.deleted:
            why = f"pod {state.name} was deleted in Kubernetes before its supervisor connected to the head"
            return _withdraw(order, why, (node,), EndCause.CONTENDED)
    return None


def _without_node(
    order: AttemptPods,
    states: Sequence[PodState | None],
    now_s: float,
    holders: Sequence[str],
    *,
    cleaning_up: bool,
    node_wait_s: float,
    note: str,
) -> PodsUpdate | None:
    """Withdraw the whole gang if one of its pods has no node for too long; report it as waiting while an autoscaler may start one."""
    least_s = START_LIMIT_MAX_S if cleaning_up else START_LIMIT_S
    age_s = now_s - order.created_s
    pairs = zip(order.nodes, states, strict=True)
    waiting = {node: state.unschedulable for node, state in pairs if state is not None and not state.node}
    if order.attempt.state not in _BEFORE_START or not waiting:
        return None
    if order.attempt.state is AttemptState.STOPPING:  # no rank has run yet
        return _withdraw(order, "it waited for a node", tuple(waiting), order.attempt.stop_cause or EndCause.CONTENDED)
    if age_s < least_s:
        return None
    reasons = "; ".join(dict.fromkeys(filter(None, waiting.values()))) or "no scheduler has answered"
    names = ", ".join(waiting)
    if age_s < node_wait_s:
        text = f"no node in Kubernetes yet for {names}: {reasons}"
        return _await_node(
            replace(order, awaited=tuple(waiting)), order.awaited, text, now_s, node_wait_s - age_s, note
        )
    limit_s = max(least_s, node_wait_s)
    what = f"{', '.join(holders)} took {names}" if holders else f"Kubernetes did not place the pods for {names}"
    text = f"{what} within {format_duration(limit_s)}: {reasons}" + (f"; {note}" if note else "")
    return replace(_withdraw(order, text, tuple(waiting), EndCause.CONTENDED), contended=tuple(waiting))


def _await_node(
    order: AttemptPods, before: tuple[NodeId, ...], text: str, now_s: float, left_s: float, note: str
) -> PodsUpdate | None:
    """Report why the gang waits, at most each `WAIT_REPORT_S`, and at once what an autoscaler says newly or which pods got a node.

    Its pods are what makes an autoscaler start nodes, so they stay. `before`: the nodes that it waited for at the last look.
    """
    if (
        order.wait_text
        and order.awaited == before
        and note == order.wait_note
        and now_s - order.wait_reported_s < WAIT_REPORT_S
    ):
        return None
    ending = f"given up in {format_duration(left_s)}" + ("" if note else " unless an autoscaler starts one")
    waits = AttemptQueued(
        job_id=order.attempt.job_id,
        epoch=order.attempt.epoch,
        why="; ".join(filter(None, (text, note, ending))),
    )
    return PodsUpdate(pods=replace(order, wait_text=text, wait_reported_s=now_s, wait_note=note), events=(waits,))


def _lost_seats(order: AttemptPods, states: Sequence[PodState | None], now_s: float) -> PodsUpdate:
    """Report pods whose container has ended without a report of its supervisor.

    Only an end that the node itself confirmed counts: of a pod that is merely gone, processes may still run on a node that is cut off. Its
    lease decides.
    """
    lost = []
    for node, name, state in zip(order.nodes, order.names, states, strict=True):
        confirmed = state is not None and state.ended and state.exit_code is not None
        overdue = now_s - (order.ended_s or {}).get(name, now_s) >= SUPERVISOR_REPORT_S
        if confirmed and overdue and node not in order.reported:
            assert state is not None
            lost.append((node, f"pod {state.name} {state.why_ended}"))
    if not lost:
        return PodsUpdate(pods=order)
    events = tuple(
        SeatLost(job_id=order.attempt.job_id, epoch=order.attempt.epoch, node_ids=(node,), why=why)
        for node, why in lost
    )
    reported = (*order.reported, *(node for node, _ in lost))
    phase = PodsPhase.SETTLED if len(reported) == len(order.names) else order.phase
    return PodsUpdate(pods=replace(order, reported=reported, phase=phase), events=events)


def _withdraw(order: AttemptPods, why: str, nodes: tuple[NodeId, ...], cause: EndCause) -> PodsUpdate:
    """Report that no supervisor will start, and delete all pods of the gang."""
    event = AttemptWithdrawn(job_id=order.attempt.job_id, epoch=order.attempt.epoch, why=why, nodes=nodes, cause=cause)
    settled = replace(order, phase=PodsPhase.SETTLED, deleted=True)
    return PodsUpdate(pods=settled, events=(event,), delete=True, grace_s=HURRIED_GRACE_S)


def _hint(code: int, node: str, head_url: str, image: str) -> str:
    """Explain the exit code of a pod whose supervisor did not connect."""
    if code in _NOT_FOUND:
        return f"; check that the image {image} has python3"
    if code == 1:
        return f"; check that the image {image} has Phalanx: kubectl logs shows the pod's output"
    if code == SEAT_HEAD_UNREACHABLE:
        return f"; pods on {node} cannot reach the head at {head_url}: check that the head listens on an address visible to pods, and that its port is open"
    if code == SEAT_CERTIFICATE_REJECTED:
        return f"; pods on {node} reject the certificate of the head at {head_url}: compare the clocks with date -u there and here"
    return ""

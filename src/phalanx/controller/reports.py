"""Applies reports of supervisors and engines as changes of the world."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from phalanx.controller.requests import licences, people, pools, power_caps, prices
from phalanx.controller.step_context import StepContext
from phalanx.core.errors import Conflict
from phalanx.core.fleet.device import device_facts
from phalanx.core.fleet.fitness import FULL_DISK, HEALTH_CHECK, OPERATOR_HOOK, NodeFault
from phalanx.core.fleet.node import DATASETS_MAX, Node, NodeState
from phalanx.core.ids import NodeId
from phalanx.core.lifecycle.events import MemberLost, ReminderDue
from phalanx.core.lifecycle.transitions import FaultMark
from phalanx.core.state.reports import (
    AttemptQueued,
    BudgetReached,
    DatasetsHeld,
    DiskFreed,
    IdleJobsObserved,
    LoadObserved,
    MachinesListed,
    NodeDied,
    NodeHealthReported,
    NodeListed,
    OutputsReached,
    PowerLimited,
    ProviderReported,
    Report,
    SeatLost,
    SupervisorRegistered,
    UsageCounted,
)
from phalanx.core.units import format_bytes
from phalanx.core.work.attempt import MemberState
from phalanx.core.work.seats import Seat

HEALTH_TEXT_MAX: Final = 500  # characters of a reason; a supervisor sends at most a few lines of 200


class SeatEnded(Conflict):
    """A supervisor registered for an attempt that has ended. The supervisor must exit."""

    code = "seat_over"


def handle_report(context: StepContext, report: Report) -> None:
    """Apply one report. Late and repeated reports change nothing."""
    match report:
        case SupervisorRegistered():
            _register(context, report)
        case NodeDied():
            _node_dead(context, report)
        case NodeListed():
            _node_seen(context, report)
        case DiskFreed():
            _return_with_room(context, report)
        case SeatLost():
            for node_id in report.node_ids:
                lose_seat(context, Seat(node_id=node_id, job_id=report.job_id, epoch=report.epoch), report.why)
        case ProviderReported():
            pools.apply_outcome(context, report)
        case MachinesListed():
            context.machine_lists.append(report)
        case PowerLimited():
            power_caps.apply_limits(context, report)
        case DatasetsHeld():
            _apply_datasets(context, report)
        case NodeHealthReported():
            _apply_health(context, report)
        case UsageCounted():
            for hour in report.hours:
                context.change.put(hour)
            for use in report.attempts:
                context.change.put(use)
            context.change.put(report.mark)
        case IdleJobsObserved() | LoadObserved():
            pass  # for the idle policies of queues, and for the scaling of services: they judge it in the same step
        case BudgetReached():
            prices.warn_of_budget(context, report)
        case OutputsReached():
            people.warn_of_outputs(context, report)
        case _:
            context.apply_event(report.job_id, report)


def _return_with_room(context: StepContext, freed: DiskFreed) -> None:
    """End the cordon that the node has for its full disk; any other cordon stays."""
    node = context.world.nodes.get(freed.node_id)
    if node is None or node.cordon is None or node.cordon.by != FULL_DISK:
        return
    context.change.put(replace(node, cordon=None, changed_s=context.now.wall_s))
    text = f"{node.id} is in service again: {format_bytes(freed.free_bytes)} are free on its disk"
    context.add_history("undrained", text, node_id=node.id, by=FULL_DISK)


def _apply_datasets(context: StepContext, report: DatasetsHeld) -> None:
    """Remember which datasets a node has, for the placement of jobs that read them."""
    node = context.world.nodes.get(report.node_id)
    valid = (one for one in report.datasets if one.valid)
    found = tuple(sorted(valid, key=lambda one: one.key)[:DATASETS_MAX])
    if node is not None and node.datasets != found:
        context.change.put(replace(node, datasets=found))


def _apply_health(context: StepContext, report: NodeHealthReported) -> None:
    """Cordon a node whose operator's program failed; end the cordon of a health check when it passes."""
    node = context.world.nodes.get(report.node_id)
    if node is None:
        return
    if report.why:
        by = HEALTH_CHECK if report.checked else OPERATOR_HOOK
        context.cordon_faulty(NodeFault(node_id=node.id, why=report.why[:HEALTH_TEXT_MAX], cordon=True, by=by))
    elif report.checked and node.cordon is not None and node.cordon.by == HEALTH_CHECK:
        context.change.put(replace(node, cordon=None, changed_s=context.now.wall_s))
        text = f"{node.id} is in service again: its health checks pass"
        context.add_history("undrained", text, node_id=node.id, by=HEALTH_CHECK)


def lose_node(context: StepContext, node_id: NodeId, why: str, *, planned: bool = False) -> None:
    """Mark the node DOWN and remove its members from every gang. A planned stop does not count as a failure of the node."""
    node = context.world.nodes.get(node_id)
    if node is None or node.state is NodeState.DOWN:
        return
    context.change.put(
        replace(
            node,
            state=NodeState.DOWN,
            down_cause=why,
            changed_s=context.now.wall_s,
            failure_count=node.failure_count + (not planned),
        )
    )
    context.add_history("node_down", f"{node_id} is down: {why}", node_id=node_id)
    held = context.world.attempts_on(node_id)
    if held and not planned:  # an idle node that is switched off fails no job
        context.add_marks(FaultMark(node_id=node_id, weight=1.0, why=why))
    for attempt in held:
        context.apply_event(attempt.job_id, MemberLost(node_id=node_id, why=why))


def lose_seat(context: StepContext, seat: Seat, why: str) -> None:
    """Report a lost seat to its attempt; ignored if the attempt has ended."""
    attempt = context.world.attempts.get(seat.job_id)
    if attempt is not None and attempt.epoch == seat.epoch:
        context.apply_event(seat.job_id, MemberLost(node_id=seat.node_id, why=why))


def _register(context: StepContext, hello: SupervisorRegistered) -> None:
    if hello.seat is not None:
        _register_seat(context, hello.seat, hello.node)
        _update_node_of_seat(context, hello.node)
        return
    node_id = hello.node.id
    pools.check_not_released(context, node_id)
    context.lost.pop(node_id, None)
    known = context.world.nodes.get(node_id)
    if known is not None and known.supervisor_id not in (None, hello.supervisor_id):
        for attempt in context.world.attempts_on(node_id):
            context.apply_event(attempt.job_id, MemberLost(node_id=node_id, why="its supervisor was replaced"))
    fresh = pools.as_pool_member(context, _merged(known, hello, context.now.wall_s))
    fresh = licences.without_licences(context, fresh)
    if known is None or replace(known, changed_s=0.0) != replace(fresh, changed_s=0.0):
        context.change.put(fresh)
    gpus = f"{len(fresh.devices)} {'virtual devices' if fresh.virtual else 'GPUs'}"
    _record_up(context, known, fresh, f"{node_id} is up with {gpus}")
    power_caps.send_cap(context, fresh)
    running = {(job_id, epoch) for job_id, epoch, _ in hello.running}
    for attempt in context.world.attempts_on(node_id):
        member = next(m for m in attempt.members if m.node_id == node_id)
        if member.state is MemberState.STARTED and (attempt.job_id, attempt.epoch) not in running:
            continue  # the supervisor still has to send the events of its end
        context.apply_event(attempt.job_id, ReminderDue(node_id=node_id))


def _record_up(context: StepContext, known: Node | None, fresh: Node, text: str) -> None:
    """Write that a node is up, if it was not, or if it has other devices than before."""
    member = context.world.pool_nodes.get(fresh.id)
    facts = device_facts(fresh.devices, "" if member is None else member.pool)
    if known is None or known.state is not NodeState.UP or facts != device_facts(known.devices, str(facts["pool"])):
        context.add_history("node_up", text, node_id=fresh.id, facts=facts)


def _register_seat(context: StepContext, seat: Seat, reported: Node) -> None:
    """Register a supervisor that was started for one attempt, and send it its command.

    Raises:
        SeatEnded: the attempt has ended or lost this seat.
    """
    attempt = context.world.attempts.get(seat.job_id)
    member = None
    if attempt is not None and attempt.epoch == seat.epoch:
        member = next((m for m in attempt.members if m.node_id == seat.node_id), None)
    if member is None or member.state is MemberState.LOST:
        raise SeatEnded(f"attempt {seat.epoch} of job {seat.job_id} no longer has a part on {seat.node_id}")
    context.lost.pop(seat.name, None)
    known = context.world.nodes.get(seat.node_id)
    address = "" if known is None or known.address == reported.address else reported.address
    if attempt is not None and attempt.queued_why:  # a supervisor runs, so the cluster has admitted it
        context.apply_event(seat.job_id, AttemptQueued(job_id=seat.job_id, epoch=seat.epoch, why=""))
    event = ReminderDue(node_id=seat.node_id, probe_port=reported.probe_port, address=address)
    context.apply_event(seat.job_id, event)


def _update_node_of_seat(context: StepContext, reported: Node) -> None:
    """Record, for later attempts and for people, what only a supervisor on the node can find out."""
    known = context.world.nodes.get(reported.id)
    if known is None or not known.per_attempt:
        return
    fresh = replace(
        known,
        shares_head_files=reported.shares_head_files,
        limits=reported.limits,
        mounts_error=reported.mounts_error,
    )
    if fresh != known:
        context.change.put(fresh)


def _node_seen(context: StepContext, seen: NodeListed) -> None:
    """Apply the inventory of an engine whose nodes have no supervisor of their own."""
    node, known, now_s = seen.node, context.world.nodes.get(seen.node.id), context.now.wall_s
    fresh = replace(node, state=NodeState.UP, per_attempt=True, supervisor_id=None, joined_s=now_s, changed_s=now_s)
    if known is not None:
        # An operator's cordon stays, whatever the engine reports.
        by_operator = known.cordon is not None and known.cordon.by != node.engine
        fresh = replace(
            fresh,
            cordon=known.cordon if by_operator else node.cordon,
            joined_s=known.joined_s,
            failure_count=known.failure_count,
            slow_reason=known.slow_reason,
            fault_score=known.fault_score,
            fault_score_s=known.fault_score_s,
            bad_node_reason=known.bad_node_reason,
            labels={**known.labels, **node.labels},
            shares_head_files=known.shares_head_files,
            limits=known.limits,
            mounts_error=known.mounts_error,
        )
        if replace(known, changed_s=now_s) == fresh:
            return
    context.change.put(fresh)
    _record_up(context, known, fresh, f"{node.id} is up: {node.engine} reports it in service")


def _merged(known: Node | None, hello: SupervisorRegistered, now_s: float) -> Node:
    """The node as its supervisor reports it, with the fields that only the head sets."""
    if known is None:
        cordon = None if hello.node.cordon is None else replace(hello.node.cordon, since_s=now_s)
        return replace(
            hello.node,
            state=NodeState.UP,
            supervisor_id=hello.supervisor_id,
            cordon=cordon,
            joined_s=now_s,
            changed_s=now_s,
        )
    return replace(
        hello.node,
        state=NodeState.UP,
        supervisor_id=hello.supervisor_id,
        cordon=known.cordon,
        slow_reason=known.slow_reason,
        joined_s=known.joined_s,
        failure_count=known.failure_count,
        fault_score=known.fault_score,
        fault_score_s=known.fault_score_s,
        bad_node_reason=known.bad_node_reason,
        changed_s=now_s,
        labels={**known.labels, **hello.node.labels},
        down_cause="",
        power_cap=None if known.power_cap is None or known.power_cap.is_over(now_s) else known.power_cap,
        power_error=known.power_error,
    )


def _node_dead(context: StepContext, dead: NodeDied) -> None:
    node = context.world.nodes.get(dead.node_id)
    if node is None or (dead.supervisor_id is not None and node.supervisor_id != dead.supervisor_id):
        return
    if node.per_attempt:
        _mark_down(context, node, dead.why)
    elif dead.confirmed:
        lose_node(context, dead.node_id, dead.why, planned=dead.planned)
        context.lost[dead.node_id] = None  # if a supervisor still runs there (a late report), it must register first
    elif node.state is NodeState.DOWN:
        if dead.why not in node.down_cause:
            context.change.put(replace(node, down_cause=f"{node.down_cause}; {dead.why}"))
    else:
        context.add_history(
            "node_silent", f"{dead.node_id}: {dead.why}; lost once its lease expires", node_id=dead.node_id
        )


def _mark_down(context: StepContext, node: Node, why: str) -> None:
    """Mark a node DOWN that the engine took out of service. Running seats keep their own leases."""
    if node.state is NodeState.DOWN:
        return
    down = replace(
        node, state=NodeState.DOWN, down_cause=why, changed_s=context.now.wall_s, failure_count=node.failure_count + 1
    )
    context.change.put(down)
    context.add_history("node_down", f"{node.id} is down: {why}", node_id=node.id)

"""What supervisors and engines say, turned into changes of the world."""

from __future__ import annotations

from dataclasses import replace

from phalanx.controller.turn import Turn
from phalanx.core.errors import Conflict
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.ids import NodeId
from phalanx.core.lifecycle.facts import Mark
from phalanx.core.lifecycle.happenings import MemberLost, Remind
from phalanx.core.state.events import Hello, NodeDead, NodeSeen, Report, SeatLost
from phalanx.core.work.attempt import MemberState
from phalanx.core.work.seat import Seat


class SeatOver(Conflict):
    """A supervisor came for an attempt that is over. It ends."""

    code = "seat_over"


def hear(turn: Turn, report: Report) -> None:
    """Apply one report. Late and repeated ones change nothing."""
    match report:
        case Hello():
            _hello(turn, report)
        case NodeDead():
            _dead(turn, report)
        case NodeSeen():
            _seen(turn, report)
        case SeatLost():
            for node_id in report.node_ids:
                lose_seat(turn, Seat(node_id=node_id, job_id=report.job_id, epoch=report.epoch), report.why)
        case _:
            turn.happen(report.job_id, report)


def lose_node(turn: Turn, node_id: NodeId, why: str) -> None:
    """The node is gone for good or for now: mark it DOWN and take its part out of every gang."""
    node = turn.world.nodes.get(node_id)
    if node is None or node.state is NodeState.DOWN:
        return
    turn.change.put(
        replace(node, state=NodeState.DOWN, down_cause=why, changed_s=turn.now.wall_s, failures=node.failures + 1)
    )
    turn.tell("node_down", f"{node_id} is down: {why}", node_id=node_id)
    held = turn.world.attempts_on(node_id)
    if held:  # a node that is switched off idle fails nobody
        turn.mark(Mark(node_id=node_id, weight=1.0, why=why))
    for attempt in held:
        turn.happen(attempt.job_id, MemberLost(node_id=node_id, why=why))


def lose_seat(turn: Turn, seat: Seat, why: str) -> None:
    """What carried this part of an attempt is gone; of an attempt that is over, nothing is lost."""
    attempt = turn.world.attempts.get(seat.job_id)
    if attempt is not None and attempt.epoch == seat.epoch:
        turn.happen(seat.job_id, MemberLost(node_id=seat.node_id, why=why))


def _hello(turn: Turn, hello: Hello) -> None:
    if hello.seat is not None:
        _take_seat(turn, hello.seat, hello.node.probe_port)
        _learn_of_seat(turn, hello.node)
        return
    node_id = hello.node.id
    turn.lost.pop(node_id, None)
    known = turn.world.nodes.get(node_id)
    if known is not None and known.supervisor_id not in (None, hello.supervisor_id):
        for attempt in turn.world.attempts_on(node_id):
            turn.happen(attempt.job_id, MemberLost(node_id=node_id, why="its supervisor was replaced"))
    fresh = _merged(known, hello, turn.now.wall_s)
    if known is None or replace(known, changed_s=0.0) != replace(fresh, changed_s=0.0):
        turn.change.put(fresh)
    if known is None or known.state is not NodeState.UP:
        gpus = f"{len(fresh.devices)} {'virtual devices' if fresh.virtual else 'GPUs'}"
        turn.tell("node_up", f"{node_id} is up with {gpus}", node_id=node_id)
    carried = {(job_id, epoch) for job_id, epoch, _ in hello.carries}
    for attempt in turn.world.attempts_on(node_id):
        member = next(m for m in attempt.members if m.node_id == node_id)
        if member.state is MemberState.STARTED and (attempt.job_id, attempt.epoch) not in carried:
            continue  # its end is among the events the supervisor still has to send
        turn.happen(attempt.job_id, Remind(node_id=node_id))


def _take_seat(turn: Turn, seat: Seat, probe_port: int) -> None:
    """A supervisor that was brought for one attempt is there: say what it has to do.

    Raises:
        SeatOver: the attempt is over, or has lost this part of it; the supervisor has nothing left to do.
    """
    attempt = turn.world.attempts.get(seat.job_id)
    member = None
    if attempt is not None and attempt.epoch == seat.epoch:
        member = next((m for m in attempt.members if m.node_id == seat.node_id), None)
    if member is None or member.state is MemberState.LOST:
        raise SeatOver(f"attempt {seat.epoch} of job {seat.job_id} has no part on {seat.node_id} any more")
    turn.lost.pop(seat.name, None)
    turn.happen(seat.job_id, Remind(node_id=seat.node_id, probe_port=probe_port))


def _learn_of_seat(turn: Turn, said: Node) -> None:
    """What only a supervisor on the node can find out counts for the attempts to come."""
    known = turn.world.nodes.get(said.id)
    if known is not None and known.per_attempt and known.sees_head_files != said.sees_head_files:
        turn.change.put(replace(known, sees_head_files=said.sees_head_files))


def _seen(turn: Turn, seen: NodeSeen) -> None:
    """The inventory of an engine whose nodes have no supervisor of their own."""
    node, known, now_s = seen.node, turn.world.nodes.get(seen.node.id), turn.now.wall_s
    fresh = replace(node, state=NodeState.UP, per_attempt=True, supervisor_id=None, joined_s=now_s, changed_s=now_s)
    if known is not None:
        # A person's cordon outlives the engine's word.
        theirs = known.cordon is not None and known.cordon.by != node.engine
        fresh = replace(
            fresh,
            cordon=known.cordon if theirs else node.cordon,
            joined_s=known.joined_s,
            failures=known.failures,
            slow=known.slow,
            marks=known.marks,
            marked_s=known.marked_s,
            lemon=known.lemon,
            labels={**known.labels, **node.labels},
            sees_head_files=known.sees_head_files,
        )
        if replace(known, changed_s=now_s) == fresh:
            return
    turn.change.put(fresh)
    if known is None or known.state is not NodeState.UP:
        turn.tell("node_up", f"{node.id} takes work, as {node.engine} says", node_id=node.id)


def _merged(known: Node | None, hello: Hello, now_s: float) -> Node:
    """The node as it presents itself, with what the head alone knows of it."""
    if known is None:
        return replace(
            hello.node, state=NodeState.UP, supervisor_id=hello.supervisor_id, joined_s=now_s, changed_s=now_s
        )
    return replace(
        hello.node,
        state=NodeState.UP,
        supervisor_id=hello.supervisor_id,
        cordon=known.cordon,
        slow=known.slow,
        joined_s=known.joined_s,
        failures=known.failures,
        marks=known.marks,
        marked_s=known.marked_s,
        lemon=known.lemon,
        changed_s=now_s,
        labels={**known.labels, **hello.node.labels},
        down_cause="",
    )


def _dead(turn: Turn, dead: NodeDead) -> None:
    node = turn.world.nodes.get(dead.node_id)
    if node is None or (dead.supervisor_id is not None and node.supervisor_id != dead.supervisor_id):
        return
    if node.per_attempt:
        _shut(turn, node, dead.why)
    elif dead.confirmed:
        lose_node(turn, dead.node_id, dead.why)
        turn.lost[dead.node_id] = None  # should anybody still speak for it (the word came late), he says hello first
    else:
        turn.tell("node_silent", f"{dead.node_id}: {dead.why}; its lease decides", node_id=dead.node_id)


def _shut(turn: Turn, node: Node, why: str) -> None:
    """The engine gives no more work to this node. What runs there has its own leases, and those decide."""
    if node.state is NodeState.DOWN:
        return
    down = replace(node, state=NodeState.DOWN, down_cause=why, changed_s=turn.now.wall_s, failures=node.failures + 1)
    turn.change.put(down)
    turn.tell("node_down", f"{node.id} is down: {why}", node_id=node.id)

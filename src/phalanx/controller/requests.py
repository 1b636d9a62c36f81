"""Carries out users' requests as changes of the world. Each request is validated before anything is changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import assert_never

from phalanx.controller import labels, people, queues, reservations, submits
from phalanx.controller.outbox import Answer
from phalanx.controller.turn import Turn
from phalanx.core.errors import Conflict, NotFound
from phalanx.core.fleet.calibration import Calibration
from phalanx.core.fleet.node import Cordon, Node, NodeState
from phalanx.core.ids import JobId, NodeId
from phalanx.core.lifecycle import job as jobs
from phalanx.core.lifecycle.facts import Case, Outcome
from phalanx.core.performance.profile import profile_from, slow_parts
from phalanx.core.state.events import (
    Cancel,
    CancelAll,
    ChangeProject,
    ChangeQueue,
    ChangeUser,
    CordonNode,
    EndReservation,
    ForgetNode,
    Hold,
    LabelNodes,
    PlanStop,
    PutCalibration,
    PutProject,
    PutQueue,
    PutQueues,
    PutReservation,
    PutRules,
    PutToken,
    PutUser,
    Request,
    Requeue,
    RevokeToken,
    Submit,
    TokensUsed,
    UncordonNode,
    Update,
)
from phalanx.core.work.job import JobState


def hear(turn: Turn, request: Request) -> Answer:
    """Carry out one request.

    Raises:
        PhalanxError: refused; nothing was changed.
    """
    match request:
        case Submit():
            return submits.submit(turn, request)
        case Cancel():
            return _cancel(turn, request.job_id, request.by, request.why)
        case CancelAll():
            live = [job.id for job in turn.world.jobs.values() if not job.state.terminal]
            for job_id in live:
                turn.apply(jobs.cancel(turn.case(job_id), request.by, "cancelled with the head", turn.facts))
            return [turn.world.jobs[job_id] for job_id in live]
        case Hold():
            return _hold(turn, request)
        case Requeue():
            act = partial(jobs.requeue, by=request.by, facts=turn.facts)
            return _each(turn, request.job_id, act, lambda case: case.attempt is not None, "runs")
        case Update():
            return _update(turn, request)
        case CordonNode() | UncordonNode() | ForgetNode():
            return _operate(turn, request)
        case LabelNodes():
            labels.label(turn, request)
            return None
        case PutUser(user=user):
            return people.put_user(turn, user)
        case ChangeUser():
            return people.change_user(turn, request)
        case ChangeProject():
            return people.change_project(turn, request)
        case PutProject(project=project):
            turn.change.put(project)
            return project
        case PutQueue(queue=queue):
            queues.put(turn, PutQueues(queues=(queue,)))
            return queue
        case ChangeQueue():
            return queues.change(turn, request)
        case PutQueues():
            queues.put(turn, request)
            return None
        case PutReservation():
            return reservations.put(turn, request)
        case EndReservation():
            return reservations.end(turn, request)
        case PutCalibration(calibration=calibration):
            turn.change.put(calibration)
            turn.tell("calibrated", f"{calibration.by} stored the fleet's profile", by=calibration.by)
            _mark_slow(turn, calibration)
            return None
        case PutRules(document=document):
            turn.change.put(document)
            turn.tell("rules", f"{document.by} stored the operators' failure rules", by=document.by)
            return None
        case PutToken(token=token):
            return people.put_token(turn, token)
        case RevokeToken():
            return people.revoke(turn, request)
        case TokensUsed():
            people.note_use(turn, request)
            return None
        case PlanStop():
            return None
        case _:
            assert_never(request)


def _cancel(turn: Turn, job_id: JobId, by: str, why: str) -> Answer:
    return _each(turn, job_id, lambda case: jobs.cancel(case, by, why, turn.facts), lambda _: True, "is live")


def _hold(turn: Turn, wish: Hold) -> Answer:
    """Hold or release a job. Of an array only the pending elements; running ones continue, as with Slurm."""
    act = partial(jobs.hold, held=wish.held, by=wish.by, facts=turn.facts)
    return _each(turn, wish.job_id, act, lambda case: case.job.state is JobState.PENDING, "waits")


def _update(turn: Turn, update: Update) -> Answer:
    if update.queue is not None and update.queue not in turn.world.queues:
        raise NotFound(f"no queue {update.queue!r}", hint=f"there are: {', '.join(sorted(turn.world.queues))}")
    act = partial(jobs.update, event=update, facts=turn.facts)
    return _each(turn, update.job_id, act, lambda _: True, "is live")


def _each(
    turn: Turn, job_id: JobId, act: Callable[[Case], Outcome], applies: Callable[[Case], bool], word: str
) -> Answer:
    """Apply `act` to the job, or to each live element of an array for which `applies` holds; all or none.

    Raises:
        NotFound: no such job, or no live element.
        Conflict: it applies to no element; or what `act` raises for any.
    """
    world = turn.world
    if job_id in world.jobs:
        turn.apply(act(turn.case(job_id)))
        return world.jobs[job_id]
    if job_id not in world.relations.elements:
        raise NotFound(f"no job {job_id}", hint="phalanx ps -a lists them")
    cases = [case for element in world.relations.elements[job_id] if applies(case := turn.case(element))]
    if not cases:
        raise Conflict(f"no element of array {job_id} {word}", hint=f"phalanx show {job_id}")
    outcomes = [act(case) for case in sorted(cases, key=lambda case: case.job.seq)]
    for outcome in outcomes:
        turn.apply(outcome)
    return [world.jobs[outcome.job.id] for outcome in outcomes]


def _mark_slow(turn: Turn, calibration: Calibration) -> None:
    """Mark the nodes that the profile found slow, which are then used last, and unmark the others that it measured.

    Virtual nodes are skipped: they share one machine's cores, so slowness there is caused by their neighbours.
    """
    profile = profile_from(json.loads(calibration.profile))
    slowness: dict[str, list[str]] = {}
    for slow in slow_parts(profile):
        slowness.setdefault(slow.part, []).append(f"{slow.what} {slow.share:.0%} under the fleet's median")
    measured = {node.node for node in profile.nodes}
    for node in list(turn.world.nodes.values()):
        if node.id in measured and not node.virtual:
            text = "; ".join(slowness.get(node.id, ()))
            if text != node.slow:
                turn.change.put(replace(node, slow=text))
                what = f"is slow: {text}" if text else "is no longer slow"
                turn.tell("calibrated", f"node {node.id} {what}", node_id=node.id)


def _operate(turn: Turn, request: CordonNode | UncordonNode | ForgetNode) -> Node:
    node = turn.world.nodes.get(request.node_id)
    if node is None:
        raise NotFound(f"no node {request.node_id!r}", hint="phalanx nodes lists them")
    match request:
        case CordonNode():
            return _cordon(turn, node, request)
        case UncordonNode():
            if node.cordon is not None or node.lemon:
                # An operator returned the node to service: clear its marks.
                node = replace(node, cordon=None, marks=0.0, lemon="", changed_s=turn.now.wall_s)
                turn.change.put(node)
                turn.tell("undrained", f"{node.id} is in service again", node_id=node.id, by=request.by)
            return node
        case ForgetNode():
            if node.state is NodeState.UP or turn.world.attempts_on(node.id):
                raise Conflict(
                    f"{node.id} is {node.state.value} or still runs jobs", hint=f"phalanx nodes drain {node.id} first"
                )
            turn.change.remove_node(node)
            turn.tell("node_forgotten", f"{node.id} was removed from the fleet", node_id=node.id, by=request.by)
            return node


def _cordon(turn: Turn, node: Node, request: CordonNode) -> Node:
    cordon = Cordon(by=request.by, why=request.why, since_s=turn.now.wall_s, drain=request.drain)
    if node.cordon is None or (request.drain and not node.cordon.drain):
        node = replace(node, cordon=cordon, changed_s=turn.now.wall_s)
        turn.change.put(node)
        word = "drained" if request.drain else "cordoned"
        turn.tell(word, f"{node.id} is {word} by {request.by}: {request.why}", node_id=node.id, by=request.by)
        if request.drain:
            turn.move_off(NodeId(node.id), by=request.by)
    return node

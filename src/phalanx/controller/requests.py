"""What users ask for, turned into changes of the world. Each request is validated before anything is put."""

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
            turn.tell("calibrated", f"the fleet's profile was stored by {calibration.by}", by=calibration.by)
            _mark_slow(turn, calibration)
            return None
        case PutRules(document=document):
            turn.change.put(document)
            turn.tell("rules", f"{document.by} put failure rules of the operators' own", by=document.by)
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
    return _each(turn, job_id, lambda case: jobs.cancel(case, by, why, turn.facts), lambda _: True, "lives")


def _hold(turn: Turn, wish: Hold) -> Answer:
    """Of an array, the elements that wait; those that run go on, as with Slurm."""
    act = partial(jobs.hold, held=wish.held, by=wish.by, facts=turn.facts)
    answer = _each(turn, wish.job_id, act, lambda case: case.job.state is JobState.PENDING, "waits")
    return answer


def _update(turn: Turn, update: Update) -> Answer:
    if update.queue is not None and update.queue not in turn.world.queues:
        raise NotFound(f"no queue {update.queue!r}", hint=f"there are: {', '.join(sorted(turn.world.queues))}")
    act = partial(jobs.update, event=update, facts=turn.facts)
    answer = _each(turn, update.job_id, act, lambda _: True, "lives")
    return answer


def _each(
    turn: Turn, job_id: JobId, act: Callable[[Case], Outcome], takes: Callable[[Case], bool], word: str
) -> Answer:
    """Do it to the job; where an array is named, to each live element that it applies to, all or none.

    Raises:
        NotFound: there is no such job, or no live element.
        Conflict: no element `takes` it; or what `act` raises for any.
    """
    world = turn.world
    if job_id in world.jobs:
        turn.apply(act(turn.case(job_id)))
        return world.jobs[job_id]
    if job_id not in world.relations.elements:
        raise NotFound(f"no job {job_id}", hint="phalanx ps -a lists them")
    cases = [case for element in world.relations.elements[job_id] if takes(case := turn.case(element))]
    if not cases:
        raise Conflict(f"no element of array {job_id} {word}", hint=f"phalanx show {job_id}")
    outcomes = [act(case) for case in sorted(cases, key=lambda case: case.job.seq)]
    for outcome in outcomes:
        turn.apply(outcome)
    return [world.jobs[outcome.job.id] for outcome in outcomes]


def _mark_slow(turn: Turn, calibration: Calibration) -> None:
    """What the profile found slow is used last from now on, and what it found sound as before. Virtual nodes share one machine's cores:
    what is slow there is the neighbour's doing.
    """
    profile = profile_from(json.loads(calibration.profile))
    said: dict[str, list[str]] = {}
    for slow in slow_parts(profile):
        said.setdefault(slow.part, []).append(f"{slow.what} {slow.share:.0%} under the fleet's median")
    measured = {node.node for node in profile.nodes}
    for node in list(turn.world.nodes.values()):
        if node.id in measured and not node.virtual:
            words = "; ".join(said.get(node.id, ()))
            if words != node.slow:
                turn.change.put(replace(node, slow=words))
                what = f"is slow: {words}" if words else "is no longer slow"
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
                # Whoever lets work on again has looked at it: what counted against it before is settled.
                node = replace(node, cordon=None, marks=0.0, lemon="", changed_s=turn.now.wall_s)
                turn.change.put(node)
                turn.tell("undrained", f"{node.id} takes work again", node_id=node.id, by=request.by)
            return node
        case ForgetNode():
            if node.state is NodeState.UP or turn.world.attempts_on(node.id):
                raise Conflict(
                    f"{node.id} is {node.state.value} or still holds jobs", hint=f"phalanx nodes drain {node.id} first"
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

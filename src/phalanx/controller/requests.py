"""Carries out users' requests as changes of the world. Each request is validated before anything is changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import assert_never

from phalanx.controller import labels, people, queues, reservations, submits
from phalanx.controller.step_context import StepContext
from phalanx.controller.step_result import Answer
from phalanx.core.errors import Conflict, NotFound
from phalanx.core.fleet.documents import FleetDocument
from phalanx.core.fleet.node import Cordon, Node, NodeState
from phalanx.core.ids import JobId, NodeId
from phalanx.core.lifecycle import job as jobs
from phalanx.core.lifecycle.transitions import AttemptCase, TransitionResult
from phalanx.core.state.events import (
    CancelAllJobs,
    CancelJob,
    ChangeProject,
    ChangeQueue,
    ChangeUser,
    CordonNode,
    EndReservation,
    HoldJob,
    LabelNodes,
    PreparePlannedStop,
    PutCalibration,
    PutFailureRules,
    PutProject,
    PutQueue,
    PutQueues,
    PutReservation,
    PutToken,
    PutUser,
    RecordTokenUse,
    RemoveNode,
    Request,
    RequeueJob,
    RevokeToken,
    SubmitJob,
    UncordonNode,
    UpdateJob,
)
from phalanx.core.work.job import JobState
from phalanx.planner.calibration.profile import parse_profile, slow_parts


def handle_request(turn: StepContext, request: Request) -> Answer:
    """Carry out one request.

    Raises:
        PhalanxError: refused; nothing was changed.
    """
    match request:
        case SubmitJob():
            return submits.submit(turn, request)
        case CancelJob():
            return _cancel(turn, request.job_id, request.by, request.why)
        case CancelAllJobs():
            live = [job.id for job in turn.world.jobs.values() if not job.state.terminal]
            for job_id in live:
                turn.apply(jobs.cancel(turn.case(job_id), request.by, "cancelled with the head", turn.facts))
            return [turn.world.jobs[job_id] for job_id in live]
        case HoldJob():
            return _hold(turn, request)
        case RequeueJob():
            act = partial(jobs.requeue, by=request.by, facts=turn.facts)
            return _each(turn, request.job_id, act, lambda case: case.attempt is not None, "runs")
        case UpdateJob():
            return _update(turn, request)
        case CordonNode() | UncordonNode() | RemoveNode():
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
            turn.add_story("calibrated", f"{calibration.by} stored the fleet's profile", by=calibration.by)
            _mark_slow(turn, calibration)
            return None
        case PutFailureRules(rules=document):
            turn.change.put(document)
            turn.add_story("rules", f"{document.by} stored the operators' failure rules", by=document.by)
            return None
        case PutToken(token=token):
            return people.put_token(turn, token)
        case RevokeToken():
            return people.revoke_token(turn, request)
        case RecordTokenUse():
            people.record_token_use(turn, request)
            return None
        case PreparePlannedStop():
            return None
        case _:
            assert_never(request)


def _cancel(turn: StepContext, job_id: JobId, by: str, why: str) -> Answer:
    return _each(turn, job_id, lambda case: jobs.cancel(case, by, why, turn.facts), lambda _: True, "is live")


def _hold(turn: StepContext, wish: HoldJob) -> Answer:
    """Hold or release a job. Of an array only the pending elements; running ones continue, as with Slurm."""
    act = partial(jobs.hold, held=wish.held, by=wish.by, facts=turn.facts)
    return _each(turn, wish.job_id, act, lambda case: case.job.state is JobState.PENDING, "waits")


def _update(turn: StepContext, update: UpdateJob) -> Answer:
    if update.queue is not None and update.queue not in turn.world.queues:
        raise NotFound(f"no queue {update.queue!r}", hint=f"there are: {', '.join(sorted(turn.world.queues))}")
    act = partial(jobs.update, event=update, facts=turn.facts)
    return _each(turn, update.job_id, act, lambda _: True, "is live")


def _each(
    turn: StepContext,
    job_id: JobId,
    act: Callable[[AttemptCase], TransitionResult],
    applies: Callable[[AttemptCase], bool],
    word: str,
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


def _mark_slow(turn: StepContext, calibration: FleetDocument) -> None:
    """Mark the nodes that the profile found slow, which are then used last, and unmark the others that it measured.

    Virtual nodes are skipped: they share one machine's cores, so slowness there is caused by their neighbours.
    """
    profile = parse_profile(json.loads(calibration.text))
    slowness: dict[str, list[str]] = {}
    for slow in slow_parts(profile):
        slowness.setdefault(slow.part, []).append(f"{slow.what} {slow.share:.0%} under the fleet's median")
    measured = {node.node for node in profile.nodes}
    for node in list(turn.world.nodes.values()):
        if node.id in measured and not node.virtual:
            text = "; ".join(slowness.get(node.id, ()))
            if text != node.slow_reason:
                turn.change.put(replace(node, slow_reason=text))
                what = f"is slow: {text}" if text else "is no longer slow"
                turn.add_story("calibrated", f"node {node.id} {what}", node_id=node.id)


def _operate(turn: StepContext, request: CordonNode | UncordonNode | RemoveNode) -> Node:
    node = turn.world.nodes.get(request.node_id)
    if node is None:
        raise NotFound(f"no node {request.node_id!r}", hint="phalanx nodes lists them")
    match request:
        case CordonNode():
            return _cordon(turn, node, request)
        case UncordonNode():
            if node.cordon is not None or node.bad_node_reason:
                # An operator returned the node to service: clear its marks.
                node = replace(node, cordon=None, fault_score=0.0, bad_node_reason="", changed_s=turn.now.wall_s)
                turn.change.put(node)
                turn.add_story("undrained", f"{node.id} is in service again", node_id=node.id, by=request.by)
            return node
        case RemoveNode():
            if node.state is NodeState.UP or turn.world.attempts_on(node.id):
                raise Conflict(
                    f"{node.id} is {node.state.value} or still runs jobs", hint=f"phalanx nodes drain {node.id} first"
                )
            turn.change.remove_node(node)
            turn.add_story("node_forgotten", f"{node.id} was removed from the fleet", node_id=node.id, by=request.by)
            return node


def _cordon(turn: StepContext, node: Node, request: CordonNode) -> Node:
    cordon = Cordon(by=request.by, why=request.why, since_s=turn.now.wall_s, drain=request.drain)
    if node.cordon is None or (request.drain and not node.cordon.drain):
        node = replace(node, cordon=cordon, changed_s=turn.now.wall_s)
        turn.change.put(node)
        word = "drained" if request.drain else "cordoned"
        turn.add_story(word, f"{node.id} is {word} by {request.by}: {request.why}", node_id=node.id, by=request.by)
        if request.drain:
            turn.stop_jobs_on(NodeId(node.id), by=request.by)
    return node

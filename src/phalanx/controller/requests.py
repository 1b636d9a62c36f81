"""What users ask for, turned into changes of the world. Each request is validated before anything is put."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from phalanx.controller.outbox import Answer
from phalanx.controller.turn import Turn
from phalanx.core.errors import BadRequest, Conflict, NotFound, NotPermitted
from phalanx.core.fleet.node import Cordon, Node, NodeState
from phalanx.core.ids import JobId, NodeId
from phalanx.core.lifecycle import job as jobs
from phalanx.core.lifecycle.happenings import StopWanted
from phalanx.core.scheduling.shape import shape_of
from phalanx.core.state.events import (
    Cancel,
    CancelAll,
    CordonNode,
    ForgetNode,
    Hold,
    PlanStop,
    PutProject,
    PutQueue,
    PutToken,
    PutUser,
    Request,
    Requeue,
    RevokeToken,
    Submit,
    UncordonNode,
    Update,
)  # fmt: skip
from phalanx.core.state.story import StoryLine
from phalanx.core.state.world import Idempotency
from phalanx.core.work.attempt import Cause
from phalanx.core.work.job import Job, Reason
from phalanx.core.work.launchers import ONE_WORLD_PER_CALL, launcher_of
from phalanx.core.work.people import Token, User, UserRole
from phalanx.core.work.spec import Role


def hear(turn: Turn, request: Request) -> Answer:
    """Carry out one request.

    Raises:
        PhalanxError: refused; nothing was changed.
    """
    match request:
        case Submit():
            return _submit(turn, request)
        case Cancel():
            return _cancel(turn, request.job_id, request.by, request.why)
        case CancelAll():
            live = [job.id for job in turn.world.jobs.values() if not job.state.terminal]
            return [_cancel(turn, job_id, request.by, "cancelled with the head") for job_id in live]
        case Hold():
            _known(turn, request.job_id)
            turn.apply(jobs.hold(turn.case(request.job_id), request.held, request.by, turn.facts))
            turn.freed = True
            return turn.world.jobs[request.job_id]
        case Requeue():
            _known(turn, request.job_id)
            turn.apply(jobs.requeue(turn.case(request.job_id), request.by, turn.facts))
            return turn.world.jobs[request.job_id]
        case Update():
            return _update(turn, request)
        case CordonNode() | UncordonNode() | ForgetNode():
            return _operate(turn, request)
        case PutUser(user=user):
            turn.change.put(user)
            return user
        case PutProject(project=project):
            turn.change.put(project)
            return project
        case PutQueue(queue=queue):
            turn.change.put(queue)
            turn.freed = True
            return queue
        case PutToken(token=token):
            turn.change.put(token)
            return token
        case RevokeToken():
            return _revoke(turn, request)
        case PlanStop():
            return None
        case _:
            assert_never(request)


def _submit(turn: Turn, submit: Submit) -> Job:
    world = turn.world
    if submit.key:
        earlier = world.idempotency.get((submit.user, submit.key))
        if earlier is not None:
            return _same_again(turn, submit, earlier)
    _may_charge(turn, submit)
    if submit.queue not in world.queues:
        raise NotFound(f"no queue {submit.queue!r}", hint=f"there are: {', '.join(sorted(world.queues))}")
    shape = shape_of(submit.spec.role, world.nodes.values())
    _refuse_many_worlds(submit.spec.role, shape.nodes)
    seq = turn.change.new_job_seq()
    job = Job(
        id=JobId(str(seq)), seq=seq, spec=submit.spec, user=submit.user, project=submit.project, queue=submit.queue,
        submit_s=turn.now.wall_s, held=submit.spec.hold, reason=Reason.HELD if submit.spec.hold else Reason.NEW,
    )  # fmt: skip
    turn.change.put(job)
    if submit.key:
        record = Idempotency(
            user=submit.user, key=submit.key, body_sha256=submit.body_sha256, job_id=job.id, at_s=turn.now.wall_s
        )
        turn.change.put(record)
    text = f"submitted by {submit.user} for {submit.project}: {submit.spec.role.gpus.total} GPUs"
    turn.change.tell(StoryLine(seq=0, at_s=turn.now.wall_s, kind="submitted", text=text, job_id=job.id, by=submit.user))
    turn.submitted.append(job.id)
    return job


def _refuse_many_worlds(role: Role, nodes: int) -> None:
    launcher = launcher_of(role.argv, role.script)
    if nodes > 1 and launcher in ONE_WORLD_PER_CALL:
        raise BadRequest(
            f"{launcher} is started once on each of the {nodes} nodes and would make {nodes} separate worlds",
            hint="ask for one node (--nodes 1), or start the ranks without it: phalanx run -- python train.py",
        )


def _same_again(turn: Turn, submit: Submit, earlier: Idempotency) -> Job:
    if earlier.body_sha256 != submit.body_sha256:
        raise Conflict(
            f"idempotency key {submit.key!r} was used for another job ({earlier.job_id})", hint="use a fresh key"
        )
    job = turn.world.jobs.get(earlier.job_id)
    if job is None:
        raise Conflict(
            f"job {earlier.job_id} was made with this key and is long over", hint=f"phalanx show {earlier.job_id}"
        )
    return job


def _may_charge(turn: Turn, submit: Submit) -> None:
    project = turn.world.projects.get(submit.project)
    if project is None:
        raise NotFound(f"no project {submit.project!r}", hint=f"there are: {', '.join(sorted(turn.world.projects))}")
    user = turn.world.users.get(submit.user) or User(id=submit.user, role=UserRole.USER)
    member = not project.members or submit.user in project.members or submit.user in project.admins
    if not member and user.role not in (UserRole.OPERATOR, UserRole.ADMIN):
        raise NotPermitted(
            f"{submit.user} is no member of project {project.id}", hint="ask one of its admins to add you"
        )


def _cancel(turn: Turn, job_id: JobId, by: str, why: str) -> Job:
    _known(turn, job_id)
    turn.apply(jobs.cancel(turn.case(job_id), by, why, turn.facts))
    return turn.world.jobs[job_id]


def _update(turn: Turn, update: Update) -> Job:
    _known(turn, update.job_id)
    if update.queue is not None and update.queue not in turn.world.queues:
        raise NotFound(f"no queue {update.queue!r}", hint=f"there are: {', '.join(sorted(turn.world.queues))}")
    turn.apply(jobs.update(turn.case(update.job_id), update, turn.facts))
    turn.freed = True
    return turn.world.jobs[update.job_id]


def _revoke(turn: Turn, request: RevokeToken) -> Token:
    token = turn.world.tokens.get(request.token_id)
    if token is None:
        raise NotFound(f"no token {request.token_id}", hint="phalanx tokens lists them")
    if token.revoked_s is None:
        token = replace(token, revoked_s=turn.now.wall_s)
        turn.change.put(token)
    return token


def _operate(turn: Turn, request: CordonNode | UncordonNode | ForgetNode) -> Node:
    node = turn.world.nodes.get(request.node_id)
    if node is None:
        raise NotFound(f"no node {request.node_id!r}", hint="phalanx nodes lists them")
    match request:
        case CordonNode():
            return _cordon(turn, node, request)
        case UncordonNode():
            if node.cordon is not None:
                node = replace(node, cordon=None, changed_s=turn.now.wall_s)
                turn.change.put(node)
                turn.tell("undrained", f"{node.id} takes work again", node_id=node.id, by=request.by)
                turn.freed = True
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
            for attempt in turn.world.attempts_on(NodeId(node.id)):
                turn.happen(attempt.job_id, StopWanted(cause=Cause.DRAINED, why=f"{node.id} is drained", by=request.by))
    return node


def _known(turn: Turn, job_id: JobId) -> None:
    if job_id not in turn.world.jobs:
        raise NotFound(f"no job {job_id}", hint="phalanx ps -a lists them")

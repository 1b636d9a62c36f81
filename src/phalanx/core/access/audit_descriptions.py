"""Description of each request in the audit trail: names, numbers and roles, never a command, an environment or a token's hash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

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
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Project, Queue
from phalanx.core.work.users import Token, User

_NAMED_MAX = 8  # names of a list; the rest as a number


def describe_request(request: Request, answer: object) -> str:
    """Describe a request; for a submit with the job that it created."""
    match request:
        case SubmitJob():
            return _submitted(request, answer)
        case CancelJob() | HoldJob() | RequeueJob() | UpdateJob():
            return _of_job(request)
        case CancelAllJobs():
            return "all live jobs"
        case CordonNode():
            return f"node {request.node_id} {'drain' if request.drain else 'cordon'}"
        case UncordonNode() | RemoveNode():
            return f"node {request.node_id}"
        case LabelNodes(labels=labels):
            return f"nodes {join_names(sorted(labels))}"
        case PutUser(user=user):
            return _user(user)
        case ChangeUser():
            return _user(answer) if isinstance(answer, User) else f"user {request.user_id} role {request.role}"
        case PutProject(project=project):
            return _project(project)
        case ChangeProject():
            return _project(answer) if isinstance(answer, Project) else f"project {request.project_id}"
        case PutQueue(queue=queue):
            return f"queue {queue.id} {_queue(queue)}"
        case ChangeQueue():
            return f"queue {request.queue_id}" + (f" {_queue(answer)}" if isinstance(answer, Queue) else "")
        case PutQueues():
            put = "; ".join(f"{queue.id} {_queue(queue)}" for queue in request.queues)
            return f"put {put or 'none'}" + (f"; remove {join_names(request.remove)}" if request.remove else "")
        case PutReservation(reservation=one):
            return f"reservation {one.id} nodes {join_names(sorted(one.nodes))}"
        case EndReservation():
            return f"reservation {request.reservation_id}"
        case PutCalibration():
            return "the fleet's profile"
        case PutFailureRules():
            return "the operators' failure rules"
        case PutToken(token=token):
            return _token(token)
        case RevokeToken():
            return f"token {request.token_id}" + (" and all created with it" if request.with_derived else "")
        case RecordTokenUse():
            return f"{len(request.used_s)} tokens used"
        case PreparePlannedStop():
            return f"leases of {request.lease_s:g} s"
        case _:
            assert_never(request)


def join_names(names: Sequence[str]) -> str:
    """Join names; of a long list only the first few."""
    shown = ",".join(names[:_NAMED_MAX])
    return shown if len(names) <= _NAMED_MAX else f"{shown} and {len(names) - _NAMED_MAX} more"


def _submitted(request: SubmitJob, answer: object) -> str:
    jobs = [job for job in (answer if isinstance(answer, list) else [answer]) if isinstance(job, Job)]
    made = "" if not jobs else f"job {jobs[0].id} " if len(jobs) == 1 else f"jobs {jobs[0].id} to {jobs[-1].id} "
    return f"{made}project {request.project} queue {request.queue} gpus {request.spec.role.gpus.total}"


def _of_job(request: CancelJob | HoldJob | RequeueJob | UpdateJob) -> str:
    match request:
        case HoldJob():
            return f"job {request.job_id} {'hold' if request.held else 'release'}"
        case UpdateJob():
            asked = {
                "priority": request.priority,
                "queue": request.queue,
                "time_limit_s": request.time_limit_s,
                "begin_s": request.begin_s,
                "name": None if request.name is None else "changed",
            }
            return f"job {request.job_id} " + " ".join(f"{k}={v}" for k, v in asked.items() if v is not None)
        case _:
            return f"job {request.job_id}"


def _user(user: User) -> str:
    return f"user {user.id} role {user.role}{' disabled' if user.disabled else ''}"


def _project(project: Project) -> str:
    return f"project {project.id} members {join_names(sorted(project.members))} admins {join_names(sorted(project.admins))}"


def _queue(queue: Queue) -> str:
    parts = {"priority": queue.priority, "open": queue.open, "parent": queue.parent, "quota_gpus": queue.quota_gpus}
    return " ".join(f"{name}={value}" for name, value in parts.items() if value is not None)


def _token(token: Token) -> str:
    scope = f" scope {','.join(sorted(token.scope))}" if token.scope else ""
    ends = "" if token.expires_s is None else f" until {token.expires_s:.0f}"
    return f"token {token.id} of {token.user}{scope}{ends}"

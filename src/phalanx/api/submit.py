"""POST /v1/jobs: the hot route. No pydantic, one pass over the body, one wake-up of the loop for a whole group commit.

The body is checked by the very function that the command line uses. Which project and queue a job without one goes to is decided here;
whether its user may charge that project, whether the queue exists and whether the job can ever fit, the controller decides.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.arrays import parents_of
from phalanx.api.bodies import decoded, read_body, reply
from phalanx.api.readings import seen
from phalanx.api.routes import Routes
from phalanx.api.runtime import Runtime, caller_of, off_loop, runtime_of
from phalanx.api.views import fresh_job_view
from phalanx.core.access.roles import Caller
from phalanx.core.errors import BadRequest, NeverFits
from phalanx.core.fleet.node import Node
from phalanx.core.ids import ProjectId, QueueId
from phalanx.core.scheduling.shape import shape_of
from phalanx.core.scheduling.submission import plan_notes, spread_notes, with_whole_groups
from phalanx.core.state.events import Submit
from phalanx.core.work.dependency import ArrayPlace
from phalanx.core.work.job import Job
from phalanx.core.work.launchers import notes
from phalanx.core.work.people import Action
from phalanx.core.work.request import spec_from_mapping
from phalanx.core.work.requirements import requirements_note
from phalanx.core.work.spec import JobSpec, Role
from phalanx.wire.api.jobs import IDEMPOTENCY_HEADER, JobBody, Submitted

DEFAULT: Final = "default"  # the project and the queue that the first start makes
KEY_MAX: Final = 200  # characters of an idempotency key; a UUID has 36
_NOTES_KEPT: Final = 1000
_FLEET_FRESH_S: Final = 1.0  # notes are words for people: a fleet read up to this long ago is the same to them

routes = Routes()


@routes.post("/v1/jobs", Action.SUBMIT, body=JobBody, reply=Submitted, status=201, bare=True)
async def submit_job(request: Request) -> Response:
    """Submit a job. Answered once it is durable. The same Idempotency-Key and body give the same job; another body is refused."""
    runtime = runtime_of(request)
    key = request.headers.get(IDEMPOTENCY_HEADER, "")
    if len(key) > KEY_MAX:
        raise BadRequest(f"an idempotency key of {len(key)} characters; at most {KEY_MAX}", hint="a UUID does")
    body = await read_body(request, runtime.parts.limits.body_bytes)
    caller = caller_of(request)
    wish = await wish_of(runtime, caller, body, key)
    spec = wish.spec
    answer = await runtime.ask(wish)
    jobs = answer if isinstance(answer, list) else [answer]
    job = jobs[0]
    assert isinstance(job, Job)
    runtime.count("submits", len(jobs))
    runtime.hub.tell(one.id for one in jobs if isinstance(one, Job))
    fresh = job.epoch == 0 and not job.state.terminal
    view = fresh_job_view(job, output_root=runtime.parts.output_root) if fresh else seen(runtime.parts, caller, job)
    notes = notes_of(runtime, spec)
    if job.array is None:
        return reply(Submitted(job=view, notes=notes), 201)
    return reply(Submitted(job=view, notes=[_note_of_array(job.array), *notes], array_id=job.array.array_id), 201)


async def wish_of(runtime: Runtime, caller: Caller, body: bytes, key: str = "") -> Submit:
    """What a body asks the controller for.

    Raises:
        BadRequest: it is no job.
        NotFound, NotPermitted: a job that it depends on.
    """
    mapping = decoded(body, dict[str, Any])
    spec = spec_from_mapping(mapping, workdir=_workdir(mapping), now_s=runtime.parts.clock.now_s())
    if spec.plan:
        spec = with_whole_groups(spec, _fleet(runtime))
    parents = await off_loop(parents_of, runtime.parts.store, caller, spec.dependencies) if spec.dependencies else {}
    return Submit(
        spec=spec, user=caller.user, project=_project(caller, spec), queue=QueueId(spec.queue or DEFAULT), key=key,
        body_sha256=hashlib.sha256(body).hexdigest() if key else "", parents=parents,
    )  # fmt: skip


def notes_of(runtime: Runtime, spec: JobSpec) -> list[str]:
    """What the user is told of the job: shape, number of tasks, and what becomes of wishes."""
    plan = plan_notes(spec, _fleet(runtime)) if spec.plan else []
    return [*_notes(runtime, spec.role), *plan, *_wishes(runtime, spec), *requirements_note(spec.requirements)]


def _note_of_array(place: ArrayPlace) -> str:
    at_once = "" if place.running_max is None else f", at most {place.running_max} at once"
    return (
        f"{place.size} elements, {place.array_id}_{place.lowest} to {place.array_id}_{place.highest}{at_once}; of each:"
    )


def _workdir(mapping: dict[str, Any]) -> str:
    """The root folder, for a job that names none: a request comes from no folder that a relative one could be meant from."""
    asked = mapping.get("workdir")
    if isinstance(asked, str) and asked and not asked.startswith("/"):
        raise BadRequest(f"workdir: {asked!r} is relative", hint="over the API it must begin with /")
    return "/"


def _project(caller: Caller, spec: JobSpec) -> ProjectId:
    """As asked; else the caller's only one; else the default."""
    if spec.project:
        return ProjectId(spec.project)
    return next(iter(caller.projects)) if len(caller.projects) == 1 else ProjectId(DEFAULT)


def _notes(runtime: Runtime, role: Role) -> list[str]:
    """What the user is told: shape and number of tasks, as this fleet would place them now."""
    fleet = _fleet(runtime)
    known = runtime.notes.get(role)
    if known is None:
        known = runtime.notes[role] = notes(role, _devices(role, fleet))
    return known


def _fleet(runtime: Runtime) -> list[Node]:
    """The nodes, as last read; the notes made against an older fleet are dropped."""
    now_s = runtime.parts.clock.boottime_s()
    if now_s - runtime.fleet_read_s > _FLEET_FRESH_S or len(runtime.notes) > _NOTES_KEPT:
        runtime.fleet_read_s = now_s
        runtime.fleet = runtime.parts.store.nodes()
        runtime.notes.clear()
    return runtime.fleet


def _wishes(runtime: Runtime, spec: JobSpec) -> list[str]:
    """What is told of wishes: how far the job may grow, and a preferred level that this fleet does not know."""
    most = spec.role.gpus.nodes_max
    grows = [] if most is None else [f"elastic: from {spec.role.gpus.nodes} up to {most} nodes, as there is room"]
    return grows + spread_notes(spec.spread, runtime.fleet)


def _devices(role: Role, fleet: list[Node]) -> list[int]:
    if not fleet:
        return []
    try:
        shape = shape_of(role, fleet)
    except NeverFits:  # the fleet has changed since the controller took the job
        return []
    return [shape.devices] * shape.nodes + [shape.tail] * bool(shape.tail)

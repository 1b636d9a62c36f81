"""POST /v1/jobs, the hot route: no pydantic, one pass over the body, one wake-up of the loop per group commit.

The command line validates jobs with the same function. This module chooses the default project and queue. The controller decides
whether the user may charge the project, whether the queue exists, and whether the job can ever fit.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import replace
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import decode_body, json_response, read_body
from phalanx.api.http.routing import RouteTable
from phalanx.api.runtime import (
    ApiRuntime,
    caller_of,
    run_in_thread,
    runtime_of,
)
from phalanx.api.views.arrays import dependency_states
from phalanx.api.views.job_records import fresh_job_view
from phalanx.api.views.live import live_job_view
from phalanx.core.access.caller import Caller
from phalanx.core.errors import BadRequest, NeverFits
from phalanx.core.fleet.node import Node
from phalanx.core.ids import ProjectId, QueueId
from phalanx.core.scheduling.shape import preferred_shape
from phalanx.core.scheduling.submission import plan_notes, topology_notes, with_whole_tensor_groups
from phalanx.core.state.events import SubmitJob
from phalanx.core.state.records import CHANNELS
from phalanx.core.work.dependency import ArrayPosition
from phalanx.core.work.job import Job
from phalanx.core.work.job_file.data_sources import data_note
from phalanx.core.work.job_file.launchers import alternatives_notes, known_task_count, launch_notes, role_notes
from phalanx.core.work.job_file.notify import NotifyTargetKind, NotifyTerms, mail_channel, target_kind
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.job_file.requirements import requirements_note
from phalanx.core.work.sbatch_scripts.submitted_again import with_script_key
from phalanx.core.work.secret import variables_like_secrets
from phalanx.core.work.spec import JobSpec, LaunchMode, Role
from phalanx.core.work.states import JobState
from phalanx.core.work.users import Action
from phalanx.wire.api.jobs import IDEMPOTENCY_HEADER, JobBody, SubmitReply

DEFAULT_NAME: Final = "default"  # the project and the queue that the first start creates
IDEMPOTENCY_KEY_MAX: Final = 200  # characters of an idempotency key; a UUID has 36
_NOTES_MAX: Final = 1000
_FLEET_FRESH_S: Final = 1.0  # notes are informative only, so the fleet may be this old

routes = RouteTable()


@routes.post("/v1/jobs", Action.SUBMIT, body=JobBody, reply=SubmitReply, status=201, raw_request=True)
async def submit_job(request: Request) -> Response:
    """Submit a job. Answered once it is durable. The same Idempotency-Key with the same body returns the same job; another body is refused."""
    runtime = runtime_of(request)
    key = request.headers.get(IDEMPOTENCY_HEADER, "")
    if len(key) > IDEMPOTENCY_KEY_MAX:
        raise BadRequest(
            f"an idempotency key of {len(key)} characters; at most {IDEMPOTENCY_KEY_MAX}", hint="use a UUID"
        )
    body = await read_body(request, runtime.services.limits.body_bytes)
    caller = caller_of(request)
    command = await submit_request(runtime, caller, body, key)
    spec = command.spec
    answer = await runtime.request(command)
    jobs = answer if isinstance(answer, list) else [answer]
    job = jobs[0]
    runtime.count("submits", len(jobs))
    runtime.hub.notify(one.id for one in jobs)
    fresh = job.epoch == 0 and not job.state.terminal
    view = (
        fresh_job_view(job, output_root=runtime.services.output_root)
        if fresh
        else live_job_view(runtime.services, caller, job)
    )
    notes, warnings = submit_notes(runtime, spec), await submit_warnings(runtime, job)
    tasks = known_task_count(spec.role)
    if job.array is None:
        return json_response(SubmitReply(job=view, tasks=tasks, notes=notes, warnings=warnings), 201)
    notes = [_array_note(job.array), *notes]
    return json_response(
        SubmitReply(job=view, tasks=tasks, notes=notes, warnings=warnings, array_id=job.array.array_id), 201
    )


async def submit_request(runtime: ApiRuntime, caller: Caller, body: bytes, key: str = "") -> SubmitJob:
    """Return the controller request for a submitted body.

    Raises:
        BadRequest: the body is not a valid job.
        NotFound, NotPermitted: it depends on a job that does not exist, or that the caller may not see.
    """
    spec = submitted_spec(runtime, decode_body(body, dict[str, Any]))
    if spec.role.launch is LaunchMode.ONCE:  # its processes on several nodes recognize each other by it
        spec = replace(spec, gang_key=secrets.token_hex(16))
    spec = with_script_key(spec, secrets.token_hex(16))
    if spec.plan:
        spec = with_whole_tensor_groups(spec, _fleet(runtime))
    parents = (
        await run_in_thread(dependency_states, runtime.services.store, caller, spec.dependencies)
        if spec.dependencies
        else {}
    )
    return SubmitJob(
        spec=spec,
        user=caller.user,
        project=_project(caller, spec),
        queue=QueueId(spec.queue or DEFAULT_NAME),
        key=key,
        body_sha256=hashlib.sha256(body).hexdigest() if key else "",
        parents=parents,
    )


def submitted_spec(runtime: ApiRuntime, mapping: dict[str, Any]) -> JobSpec:
    """Return the spec that the keys of a job file describe.

    Raises:
        BadRequest: they are not a valid job or service.
    """
    return spec_from_mapping(mapping, workdir=_workdir(mapping), now_s=runtime.services.clock.now_s())


async def submit_warnings(runtime: ApiRuntime, job: Job) -> list[str]:
    """Return the warnings for a submitted or hypothetical job: secrets in clear, mail without a channel, no place to run."""
    terms = job.spec.notify
    mail = [] if terms is None else await run_in_thread(_mail_warnings, runtime, terms, job.project)
    return [*_secret_warnings(job.spec), *_feasibility_warnings(runtime, job), *mail]


def submit_notes(runtime: ApiRuntime, spec: JobSpec) -> list[str]:
    """Return the notes for the user: shape, number of tasks, plan, elasticity and topology."""
    plan = plan_notes(spec, _fleet(runtime)) if spec.plan else []
    return [
        *_shape_notes(runtime, spec.role),
        *plan,
        *_elastic_and_topology_notes(runtime, spec),
        *requirements_note(spec.packages_file),
        *_data_notes(runtime, spec),
    ]


def _data_notes(runtime: ApiRuntime, spec: JobSpec) -> list[str]:
    if not spec.data:
        return []
    return data_note(spec.data, spec.data_mode, {node.id: node.datasets for node in runtime.services.store.nodes()})


def _secret_warnings(spec: JobSpec) -> list[str]:
    """Return the warning for variables that the user wrote. A batch script gets the whole environment of its user's shell, without one."""
    names = () if spec.is_batch_script else variables_like_secrets(spec.env)
    if not names:
        return []
    named = ", ".join(names)
    return [
        f"env: {named} will lie in clear in the head's database and its backups; to avoid that, set {named} as a secret and list the name under secrets"
    ]


def _mail_warnings(runtime: ApiRuntime, terms: NotifyTerms, project: ProjectId) -> list[str]:
    """Return the warning for mail addresses that this head cannot reach."""
    addresses = [one for one in terms.to if target_kind(one) is NotifyTargetKind.MAIL]
    if not addresses or mail_channel(runtime.services.store.records(CHANNELS), project) is not None:
        return []
    return [
        f"notify: nothing is mailed to {', '.join(addresses)} until an admin adds a mail channel with the topic notify"
    ]


def _feasibility_warnings(runtime: ApiRuntime, job: Job) -> list[str]:
    """Return why nothing here now can run the waiting job, or why it can never start; empty if it can."""
    checker = runtime.services.controller.feasibility
    if checker is None or job.state is not JobState.PENDING:
        return []
    outlook = checker.check_job(job)
    if outlook.never:
        return [f"it can never start: {outlook.detail}"]
    return [outlook.detail] if outlook.detail else []


def _array_note(place: ArrayPosition) -> str:
    at_once = "" if place.running_max is None else f", at most {place.running_max} at once"
    return f"{place.size} elements, {place.array_id}_{place.lowest} to {place.array_id}_{place.highest}{at_once}; for each:"


def _workdir(mapping: dict[str, Any]) -> str:
    """Return the root folder as the default; a relative one is refused, as a request has no current folder."""
    asked = mapping.get("workdir")
    if isinstance(asked, str) and asked and not asked.startswith("/"):
        raise BadRequest(f"workdir: {asked!r} is relative", hint="over the API it must begin with /")
    return "/"


def _project(caller: Caller, spec: JobSpec) -> ProjectId:
    """Return the project asked for, else the caller's only project, else the default."""
    if spec.project:
        return ProjectId(spec.project)
    return next(iter(caller.projects)) if len(caller.projects) == 1 else ProjectId(DEFAULT_NAME)


def _shape_notes(runtime: ApiRuntime, role: Role) -> list[str]:
    """Return the notes on shape and number of tasks, as the current fleet would place them."""
    fleet = _fleet(runtime)
    known = runtime.notes.get(role)
    if known is None and role.others:
        alone = [_devices(one, fleet) for one in role.each]
        known = runtime.notes[role] = role_notes(role, [devices or () for devices in alone])
    if known is None:
        each = [_devices(replace(role, gpus=one), fleet) for one in role.gpus.choices]
        known = alternatives_notes(role, each) if role.gpus.alternatives else launch_notes(role, each[0] or ())
        runtime.notes[role] = known
    return known


def _fleet(runtime: ApiRuntime) -> list[Node]:
    """Return the nodes, at most _FLEET_FRESH_S old; reading them again drops the notes made for the old fleet."""
    now_s = runtime.services.clock.boottime_s()
    if now_s - runtime.fleet_read_s > _FLEET_FRESH_S or len(runtime.notes) > _NOTES_MAX:
        runtime.fleet_read_s = now_s
        runtime.fleet = runtime.services.store.nodes()
        runtime.notes.clear()
    return runtime.fleet


def _elastic_and_topology_notes(runtime: ApiRuntime, spec: JobSpec) -> list[str]:
    """Return the notes on how far the job may grow, and on a preferred topology level that this fleet lacks."""
    grows = [
        f"elastic: from {one.nodes} up to {one.nodes_max} nodes{on_kind}, as resources allow"
        for one in spec.role.gpus.choices
        if one.nodes_max is not None
        for on_kind in [f" on {one.kinds_text or 'any model'}" if spec.role.gpus.alternatives else ""]
    ]
    return grows + topology_notes(spec.topology, runtime.fleet)


def _devices(role: Role, fleet: list[Node]) -> list[int] | None:
    """Return the devices on each node; empty for a fleet without nodes, None if they cannot hold it."""
    if not fleet:
        return []
    try:
        shape = preferred_shape(role, fleet)
    except NeverFits:  # another alternative fits, or the fleet has changed since the controller accepted the job
        return None
    return [shape.devices] * shape.nodes + [shape.last_node_devices] * bool(shape.last_node_devices)

"""The keys of a job file that would submit a job, an array or a service again. They contain the command and variables: only for the callers that may read its output."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.auth.authenticator import authorize_job, require_job_access
from phalanx.api.http.bodies import json_response
from phalanx.api.http.routing import RouteTable
from phalanx.api.routes.services import known_service
from phalanx.api.routes.submit import DEFAULT_NAME
from phalanx.api.runtime import ApiRuntime, caller_of, run_in_thread, runtime_of
from phalanx.api.views.archives import find_archived
from phalanx.api.views.arrays import element_states
from phalanx.core.access.caller import Caller
from phalanx.core.errors import Conflict, NotFound
from phalanx.core.ids import JobId, ServiceId
from phalanx.core.state.records import REVISIONS
from phalanx.core.work.array import format_indices
from phalanx.core.work.dependency import DependencyKind
from phalanx.core.work.job import COPY_NAME, Job
from phalanx.core.work.job_file.job_keys import job_keys
from phalanx.core.work.sbatch_scripts.submitted_again import without_script_key
from phalanx.core.work.services.service import Service
from phalanx.core.work.spec import JobSpec
from phalanx.core.work.users import Action
from phalanx.ports.store import Store
from phalanx.wire.api.jobs import JobKeysReply

routes = RouteTable()


@routes.get("/v1/jobs/{job_id}/request", Action.VIEW_OUTPUT, reply=JobKeysReply)
async def show_job_keys(request: Request, job_id: JobId) -> Response:
    """Show the keys that would submit the job or array again, in its present queue and project. Only its owner sees the values of variables.

    A job that only copies data for another is refused.
    """
    runtime, caller = runtime_of(request), caller_of(request)

    def read() -> JobKeysReply:
        job = _job(runtime, caller, job_id)
        if job.copies_ahead:
            raise Conflict(
                f"job {job.id} only copies data for job {job.name.removeprefix(COPY_NAME)}",
                hint="submit that job again",
            )
        return _keys_reply(runtime, caller, job, _spec_again(runtime.services.store, job, job_id))

    return json_response(await run_in_thread(read))


@routes.get("/v1/services/{service_id}/request", Action.VIEW_OUTPUT, reply=JobKeysReply)
async def show_service_keys(request: Request, service_id: ServiceId) -> Response:
    """Show the keys that would submit the newest revision of the service again. Only its owner sees the values of variables."""
    runtime, caller = runtime_of(request), caller_of(request)

    def read() -> JobKeysReply:
        service = known_service(runtime.services.store, service_id)
        require_job_access(caller, Action.VIEW_OUTPUT, service)
        revision = runtime.services.store.record(REVISIONS, (service.id, service.revision))
        assert revision is not None  # the current revision is kept
        return _keys_reply(runtime, caller, service, revision.spec)

    return json_response(await run_in_thread(read))


def _job(runtime: ApiRuntime, caller: Caller, job_id: JobId) -> Job:
    """Return the job, from an archive if the store no longer has it; of an array the first element."""
    try:
        return authorize_job(runtime.services.store, caller, Action.VIEW_OUTPUT, job_id, arrays=True)
    except NotFound:
        job = find_archived(runtime.archives, job_id)[1].job
    require_job_access(caller, Action.VIEW_OUTPUT, job)
    return job


def _spec_again(store: Store, job: Job, asked: JobId) -> JobSpec:
    """Return the spec with the elements that were asked for, and without conditions that hold for good."""
    spec = job.spec
    if job.array is not None and asked != job.id:
        every = element_states(store, job)
        elements = format_indices(int(id_.rpartition("_")[2]) for id_ in every)
        spec = replace(spec, array=elements, array_max=job.array.running_max)
    elif job.array is not None:
        spec = replace(spec, array=str(job.array.index))
    # A job that ended keeps its state, so a condition that held once holds again; its job may be archived by now.
    open_ones = tuple(
        one
        for one in spec.dependencies
        if one.kind is DependencyKind.SINGLETON
        or one in job.unmet_dependencies
        or (one.kind is DependencyKind.AFTER_CORR and store.job(JobId(f"{one.job_id}_{_index(job)}")) is not None)
    )
    return replace(spec, dependencies=open_ones)


def _index(job: Job) -> int:
    return 0 if job.array is None else job.array.index


def _keys_reply(runtime: ApiRuntime, caller: Caller, owned: Job | Service, spec: JobSpec) -> JobKeysReply:
    """Return the keys of a spec in the queue and the project of the job or service."""
    services, own = runtime.services, caller.user == owned.user
    spec = replace(
        without_script_key(spec),
        project=owned.project if spec.project or owned.project != DEFAULT_NAME else "",
        queue=owned.queue if spec.queue or owned.queue != DEFAULT_NAME else "",
    )
    return JobKeysReply(
        keys=job_keys(spec if own else replace(spec, env=()), now_s=services.clock.now_s()),
        hidden_env=[] if own else [name for name, _ in spec.env],
        copy_lost=bool(spec.upload) and not services.blobs.has(spec.upload),
    )

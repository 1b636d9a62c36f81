"""Secrets: list them without values, set and remove them, encrypt them again, and hand their values to the supervisors of jobs that name them."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.auth.authenticator import require_project_admin
from phalanx.api.auth.secret_seal import SecretSeal
from phalanx.api.http.bodies import json_response, read_record
from phalanx.api.http.paging import AfterKey, key_page
from phalanx.api.http.routing import MediaType, RouteTable
from phalanx.api.nodes.supervisors import require_own_seat
from phalanx.api.runtime import ApiRuntime, caller_of, run_in_thread, runtime_of
from phalanx.api.services import HeadServices
from phalanx.core.access.caller import Caller, may
from phalanx.core.access.membership import is_open
from phalanx.core.access.rules import AccessScope
from phalanx.core.errors import Conflict, NotFound, NotPermitted
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import Epoch, JobId, ProjectId
from phalanx.core.state.events import PutOwnSecret, PutSecret, RemoveOwnSecret, RemoveSecret, ReplaceSecrets
from phalanx.core.state.records import PROJECTS, SECRETS, SIGN_IN
from phalanx.core.work.seats import node_of_supervisor
from phalanx.core.work.secret import (
    Secret,
    SecretScope,
    check_secret_name,
    check_secret_value,
    find_secret,
    secret_id,
)
from phalanx.core.work.sign_in import PROVIDER
from phalanx.core.work.states import AttemptState
from phalanx.core.work.users import Action
from phalanx.wire.api.secrets import SecretBody, SecretList, SecretRemoved, SecretReply, SecretsRotated, SecretView
from phalanx.wire.supervisor import SecretValues

routes = RouteTable()


@routes.get("/v1/secrets", Action.VIEW, reply=SecretList)
async def list_secrets(request: Request, after: AfterKey = "") -> Response:
    """List the secrets that the caller's jobs may use; an admin sees those of all projects. No value is returned."""
    services, caller = runtime_of(request).services, caller_of(request)
    views = await run_in_thread(_views, services, caller)
    page, further = key_page(
        views, after, lambda view: f"{view.name}:{view.scope}:{view.owner}", services.limits.answer_bytes
    )
    return json_response(SecretList(secrets=page, next=further))


@routes.put("/v1/projects/{project_id}/secrets/{name}", Action.MANAGE_PROJECT, body=SecretBody, reply=SecretReply)
async def put_project_secret(request: Request, project_id: ProjectId, name: str) -> Response:
    """Set a secret of a project. Jobs that start later get the new value."""
    require_project_admin(caller_of(request), project_id)
    secret, value = await _read(request, SecretScope.PROJECT, project_id, name)
    require_project_admin(
        caller_of(request), project_id
    )  # again: the caller may have lost the right while the body arrived
    runtime = runtime_of(request)
    async with runtime.secrets_lock:
        return _reply(
            await runtime.request(PutSecret(secret=await run_in_thread(runtime.secret_seal.seal, secret, value)))
        )


@routes.delete("/v1/projects/{project_id}/secrets/{name}", Action.MANAGE_PROJECT, reply=SecretRemoved)
async def remove_project_secret(request: Request, project_id: ProjectId, name: str) -> Response:
    """Remove a secret of a project. Jobs that name it and start later fail."""
    require_project_admin(caller_of(request), project_id)
    command = RemoveSecret(scope=SecretScope.PROJECT, owner=project_id, name=name)
    return json_response(SecretRemoved(jobs=await runtime_of(request).request(command)))


@routes.put("/v1/own-secrets/{name}", Action.SUBMIT, body=SecretBody, reply=SecretReply)
async def put_own_secret(request: Request, name: str) -> Response:
    """Set a secret that only the caller's own jobs may use, in any project."""
    secret, value = await _read(request, SecretScope.USER, caller_of(request).user, name)
    runtime = runtime_of(request)
    async with runtime.secrets_lock:
        sealed = await run_in_thread(runtime.secret_seal.seal, secret, value)
        return _reply(await runtime.request(PutOwnSecret(secret=sealed)))


@routes.delete("/v1/own-secrets/{name}", Action.SUBMIT, reply=SecretRemoved)
async def remove_own_secret(request: Request, name: str) -> Response:
    """Remove a secret of the caller."""
    command = RemoveOwnSecret(scope=SecretScope.USER, owner=caller_of(request).user, name=name)
    return json_response(SecretRemoved(jobs=await runtime_of(request).request(command)))


@routes.post("/v1/secrets/rotate-key", Action.ADMINISTER, body=MediaType.NOTHING, reply=SecretsRotated)
async def rotate_secrets_key(request: Request) -> Response:
    """Encrypt all secrets with a new key: one that the head makes, or the first of the key file that it was given.

    An interrupted rotation leaves secrets of both keys, and both keys; the next one finishes it.
    """
    runtime = runtime_of(request)
    async with runtime.secrets_lock:
        return json_response(await _rotate(runtime))


@routes.get("/v1/node/secrets/{job_id}/{epoch}", Action.SUPERVISE, reply=SecretValues, scope=AccessScope.UNOWNED)
async def fetch_secrets(request: Request, job_id: JobId, epoch: int) -> Response:
    """Return the values of the secrets that a job names, to a supervisor that is about to start its part of it."""
    runtime = runtime_of(request)
    name = caller_of(request).node_id
    assert name is not None, "only node tokens have the action SUPERVISE"
    runtime.supervisors.require(name)
    require_own_seat(name, job_id, Epoch(epoch))
    runtime.supervisors.require_grant(node_of_supervisor(name), job_id, Epoch(epoch))
    values = await run_in_thread(_values, runtime.services, runtime.secret_seal, job_id, Epoch(epoch))
    return json_response(SecretValues(values=values))


async def _read(request: Request, scope: SecretScope, owner: str, name: str) -> tuple[Secret, str]:
    """Return the secret of a body, without value, and the value."""
    runtime = runtime_of(request)
    check_secret_name(name)
    body = await read_record(request, SecretBody, runtime.services.limits.body_bytes)
    check_secret_value(name, body.value)
    secret = Secret(
        id=secret_id(scope, owner, name),
        scope=scope,
        owner=owner,
        name=name,
        sealed="",
        key="",
        version=0,
        by=caller_of(request).user,
        at_s=runtime.services.clock.now_s(),
    )
    return secret, body.value


async def _rotate(runtime: ApiRuntime) -> SecretsRotated:
    seal, store = runtime.secret_seal, runtime.services.store
    before, records = await run_in_thread(lambda: (seal.current, list(store.records(SECRETS))))
    if seal.given and all(one.key == before for one in records):
        raise Conflict(
            f"all secrets are encrypted with the first key of {seal.given}",
            hint="write a new key above it, on all heads, and try again; then remove the old one",
        )
    await run_in_thread(seal.begin_rotation)
    current = await run_in_thread(lambda: seal.current)
    fresh, unreadable = await run_in_thread(lambda: _sealed_again(seal, store.records(SECRETS), current))
    count = await runtime.request(ReplaceSecrets(secrets=tuple(fresh)))
    left = await run_in_thread(lambda: [one for one in store.records(SECRETS) if one.key != current])
    if len(left) == len(unreadable):
        await run_in_thread(seal.end_rotation)
    return SecretsRotated(count=count, key=current, unreadable=unreadable)


def _sealed_again(seal: SecretSeal, records: Sequence[Secret], current: str) -> tuple[list[Secret], list[str]]:
    """Return the secrets of other keys, sealed with the current one, and the names of those that do not open."""
    fresh: list[Secret] = []
    unreadable: list[str] = []
    for secret in records:
        if secret.key == current:
            continue
        try:
            fresh.append(seal.seal(secret, seal.open(secret)))
        except Conflict:
            unreadable.append(f"{secret.name} of {secret.scope} {secret.owner}")
    return fresh, unreadable


def _values(services: HeadServices, seal: SecretSeal, job_id: JobId, epoch: Epoch) -> dict[str, str]:
    """Return the values for a live attempt.

    Raises:
        NotPermitted: the attempt has ended.
        NotFound: a secret was removed after the submit.
        Conflict: a secret cannot be decrypted.
    """
    job = services.store.job(job_id)
    attempt = next((one for one in services.store.attempts(job_id) if one.epoch == epoch), None)
    if job is None or attempt is None or job.epoch != epoch or attempt.state is AttemptState.ENDED:
        raise NotPermitted(f"job {job_id} epoch {epoch} is not about to start")
    if not job.spec.secrets:
        return {}
    known = {secret.id: secret for secret in services.store.records(SECRETS)}
    values: dict[str, str] = {}
    for name in job.spec.secrets:
        secret = find_secret(known, name, user=job.user, project=job.project)
        if secret is None:
            raise NotFound(
                f"secret {name} of project {job.project} was removed after job {job_id} was submitted",
                hint=Hint(HintCode.SET_SECRET, secret=name, project=job.project),
            )
        values[name] = seal.open(secret)
    return values


def _views(services: HeadServices, caller: Caller) -> list[SecretView]:
    settings = next((one for one in services.store.records(SIGN_IN) if one.id == PROVIDER), None)
    open_projects = {project.id for project in services.store.records(PROJECTS) if is_open(project, settings)}
    projects = {*caller.projects, *caller.admin_of, *open_projects}
    all_projects = may(caller, Action.ADMINISTER)
    found = [
        _view(one)
        for one in services.store.records(SECRETS)
        if (one.scope is SecretScope.USER and one.owner == caller.user)
        or (one.scope is SecretScope.PROJECT and (all_projects or one.owner in projects))
    ]
    return sorted(found, key=lambda view: f"{view.name}:{view.scope}:{view.owner}")


def _view(secret: Secret) -> SecretView:
    return SecretView(
        name=secret.name,
        scope=secret.scope.value,
        owner=secret.owner,
        version=secret.version,
        by=secret.by,
        at_s=secret.at_s,
    )


def _reply(secret: Secret) -> Response:
    return json_response(SecretReply(secret=_view(secret)))

"""Requests that set, remove and re-encrypt secrets. Values arrive encrypted: neither the controller nor the store ever has one in clear."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from phalanx.controller.requests.request_handlers import RequestHandlers
from phalanx.controller.step_context import StepContext
from phalanx.core.errors import BadRequest, NotFound
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import ProjectId, UserId
from phalanx.core.state.events import (
    PutOwnSecret,
    PutSecret,
    RemoveOwnSecret,
    RemoveSecret,
    ReplaceSecrets,
)
from phalanx.core.state.records import PROJECTS, SECRETS
from phalanx.core.work.secret import Secret, SecretScope, find_secret
from phalanx.core.work.spec import JobSpec
from phalanx.core.work.users import Action

OWNER_SECRETS_MAX: Final = 200  # of one project or user: all stay in memory, encrypted
handlers: Final = RequestHandlers()


def _describe_put(request: PutSecret, answer: object) -> str:
    version = f" version {answer.version}" if isinstance(answer, Secret) else ""
    return f"secret {request.secret.name} of {request.secret.scope} {request.secret.owner}{version}"


def _describe_removal(request: RemoveSecret, _answer: object) -> str:
    return f"secret {request.name} of {request.scope} {request.owner}"


@handlers.add(PutSecret, Action.MANAGE_PROJECT, audit=_describe_put)
def put_secret(context: StepContext, request: PutSecret) -> Secret:
    """Set a secret; jobs that start later get the new value.

    Raises:
        NotFound: its project does not exist.
        BadRequest: the project or user has too many.
    """
    secret, world = request.secret, context.world
    if secret.scope is SecretScope.PROJECT and ProjectId(secret.owner) not in world.table(PROJECTS):
        raise NotFound(f"no project {secret.owner!r}", hint=Hint(HintCode.LIST_PROJECTS))
    known = world.table(SECRETS).get(secret.id)
    if known is None:
        _check_count(context, secret)
    secret = replace(secret, version=1 if known is None else known.version + 1)
    context.change.put(secret)
    return secret


@handlers.add(PutOwnSecret, Action.SUBMIT, audit=_describe_put)
def put_own_secret(context: StepContext, request: PutOwnSecret) -> Secret:
    """Set a secret of the caller."""
    return put_secret(context, request)


@handlers.add(RemoveSecret, Action.MANAGE_PROJECT, audit=_describe_removal)
def remove_secret(context: StepContext, request: RemoveSecret) -> int:
    """Remove a secret. Running processes keep the value that they have.

    Raises:
        NotFound: no secret has this name.
    """
    table = context.world.table(SECRETS)
    secret = table.get(request.secret_id)
    if secret is None:
        raise NotFound(
            f"{request.scope} {request.owner} has no secret {request.name}", hint=Hint(HintCode.LIST_SECRETS)
        )
    users = sum(
        secret.name in job.spec.secrets
        and not job.state.terminal
        and find_secret(table, secret.name, user=job.user, project=job.project) is secret
        for job in context.world.jobs.values()
    )
    context.change.remove(SECRETS, secret.id)
    return users


@handlers.add(RemoveOwnSecret, Action.SUBMIT, audit=_describe_removal)
def remove_own_secret(context: StepContext, request: RemoveOwnSecret) -> int:
    """Remove a secret of the caller."""
    return remove_secret(context, request)


@handlers.add(ReplaceSecrets, Action.ADMINISTER, audit=lambda _request, answer: f"secrets encrypted again: {answer}")
def replace_secrets(context: StepContext, request: ReplaceSecrets) -> int:
    """Store secrets encrypted with another key; those that were set or removed meanwhile are left as they are."""
    count = 0
    for secret in request.secrets:
        known = context.world.table(SECRETS).get(secret.id)
        if known is not None and (known.version, known.at_s) == (secret.version, secret.at_s):
            context.change.put(secret)
            count += 1
    return count


def check_known_secrets(context: StepContext, spec: JobSpec, *, user: UserId, project: ProjectId) -> None:
    """Check that each secret that a job names exists.

    Raises:
        NotFound: one does not.
    """
    missing = missing_secrets(context, spec.secrets, user=user, project=project)
    if missing:
        raise NotFound(
            f"no secret {missing[0]} of project {project}, and none of user {user}",
            hint=Hint(HintCode.SET_SECRET, secret=missing[0], project=project),
        )


def missing_secrets(context: StepContext, names: Collection[str], *, user: UserId, project: ProjectId) -> list[str]:
    """Return the names under which a job of this user and project gets nothing."""
    table = context.world.table(SECRETS)
    return [name for name in names if find_secret(table, name, user=user, project=project) is None]


def _check_count(context: StepContext, secret: Secret) -> None:
    owned = sum((one.scope, one.owner) == (secret.scope, secret.owner) for one in context.world.table(SECRETS).values())
    if owned >= OWNER_SECRETS_MAX:
        raise BadRequest(
            f"{secret.scope} {secret.owner} has {owned} secrets, the most that are allowed",
            hint=Hint(HintCode.LIST_SECRETS),
        )

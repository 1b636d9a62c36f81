"""Requests about the sign-in at a provider: its settings, and what it says about people.

The API has verified what the provider said before the request arrives here. Here it is compared with the users and settings of this moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from phalanx.controller.requests.request_handlers import RequestHandlers
from phalanx.controller.step_context import StepContext
from phalanx.core.access.audit import AuditCall, join_names
from phalanx.core.errors import Conflict, NotFound, NotPermitted, NotSignedIn
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import ProjectId, TokenId, UserId
from phalanx.core.state.events import PutSignIn, RemoveSignIn, SignInUser, UpdateIdentity
from phalanx.core.state.records import PROJECTS, SIGN_IN, USERS
from phalanx.core.work.sign_in import PROVIDER, SignInSettings
from phalanx.core.work.users import Action, Identity, User

LOST: Final = "sign_in_lost"
# The head's own name in the audit trail, and the account as which a node of root would run the jobs of a user with that name.
_RESERVED: Final = frozenset({"head", "root"})
handlers: Final = RequestHandlers()


@handlers.add(PutSignIn, Action.ADMINISTER, audit=lambda request, _: describe_settings(request.settings))
def put_sign_in(context: StepContext, request: PutSignIn) -> None:
    """Replace the settings. Users of another provider lose access; those of this one are evaluated again soon.

    Raises:
        NotFound: a project of the groups does not exist.
        Conflict: a project that groups no longer give would be open to all.
    """
    settings = request.settings
    unknown = sorted(settings.projects - context.world.table(PROJECTS).keys())
    if unknown:
        raise NotFound(f"no project {unknown[0]!r}", hint=Hint(HintCode.LIST_PROJECTS))
    _check_none_opens(context, settings.projects)
    for user, identity in _signed_in(context):
        if identity.issuer == settings.issuer or not identity.subject:
            linked = replace(identity, issuer=settings.issuer, confirmed_s=0.0)
            context.change.put(replace(user, identity=linked))
        elif not identity.ended:
            _end(context, user, f"the sign-in provider is now {settings.issuer}")
    context.change.put(settings)


@handlers.add(RemoveSignIn, Action.ADMINISTER, audit=lambda _request, _answer: "sign-in at a provider")
def remove_sign_in(context: StepContext, request: RemoveSignIn) -> None:
    """Remove the provider. All who signed in there lose access.

    Raises:
        NotFound: no provider is set.
        Conflict: a project that its groups give would be open to all.
    """
    del request
    if PROVIDER not in context.world.table(SIGN_IN):
        raise NotFound("this head has no sign-in provider")
    _check_none_opens(context, ())
    for user, identity in _signed_in(context):
        if not identity.subject:
            context.change.put(replace(user, identity=None))  # never signed in there
        elif not identity.ended:
            _end(context, user, "the sign-in provider was removed from this head")
    context.change.remove(SIGN_IN, PROVIDER)


@handlers.add(
    SignInUser,
    None,
    audit=lambda request, answer: (
        describe_access(answer) if isinstance(answer, User) else f"user {request.user_id} role {request.role}"
    ),
)
def sign_in_user(context: StepContext, request: SignInUser) -> User:
    """Add or update the user of a person at the provider.

    Raises:
        NotPermitted: the name belongs to another user, or the settings have changed meanwhile.
        NotSignedIn: an admin has disabled the user.
    """
    identity = request.identity
    settings = context.world.table(SIGN_IN).get(PROVIDER)
    if settings is None or settings.at_s != request.settings_at_s:
        raise NotPermitted("the sign-in settings of this head have just changed", hint="sign in again")
    own = (identity.issuer, identity.subject)
    known = next((user for user, one in _signed_in(context) if (one.issuer, one.subject) == own), None)
    if known is None:
        known = context.world.table(USERS).get(request.user_id)
        if known is not None and (known.identity is None or known.identity.subject):
            raise NotPermitted(
                f"user {known.id} exists already on this head, and is not this person at {identity.issuer}",
                hint=Hint(HintCode.LINK_USER, user=known.id),
            )
    if known is None:
        if request.user_id in _RESERVED:
            raise NotPermitted(f"the name {request.user_id!r} is reserved on this head", hint="ask an admin")
        known = User(id=request.user_id, role=request.role, created_s=context.now.wall_s)
    if known.disabled:
        raise NotSignedIn(f"user {known.id} is disabled", hint="ask an admin")
    user = replace(known, role=request.role, identity=identity)
    context.change.put(user)
    return user


@handlers.add(UpdateIdentity, None, audit=lambda request, _: f"user {request.user_id} role {request.role or 'none'}")
def update_identity(context: StepContext, request: UpdateIdentity) -> None:
    """Record what the provider says about a user now. Nothing changes if settings or user are no longer those that it was asked about."""
    user, settings = context.world.table(USERS).get(request.user_id), context.world.table(SIGN_IN).get(PROVIDER)
    identity, before = request.identity, None if user is None else user.identity
    if user is None or before is None or (before.issuer, before.subject) != (identity.issuer, identity.subject):
        return
    if before.ended or settings is None:
        return
    if settings.at_s != request.settings_at_s:  # asked again soon; the refresh token may work only once
        if not identity.ended:
            context.change.put(replace(user, identity=replace(before, sealed=identity.sealed)))
        return
    if identity.ended:
        if before.confirmed_s <= identity.confirmed_s:  # else the user has signed in again meanwhile
            _end(context, user, identity.ended)
        return
    changed = replace(user, role=request.role or user.role, identity=identity)
    context.change.put(changed)
    if describe_access(changed) != describe_access(user):
        _note(context, user.id, "sign-in recheck", describe_access(changed))


def describe_settings(settings: SignInSettings) -> str:
    """Describe settings in one line, without secrets."""
    grants = [
        f"{grant.group}: {' '.join(filter(None, [grant.role or '', join_names(sorted({*grant.projects, *grant.admin_of}))]))}"
        for grant in settings.grants
    ]
    return f"{settings.issuer} client {settings.client_id} at {' '.join(settings.urls)} groups {'; '.join(grants) or 'none'}"


def describe_access(user: User) -> str:
    """Describe what a user of the provider may do."""
    identity = user.identity
    if identity is None:
        return f"user {user.id} role {user.role}"
    projects = f" projects {join_names(sorted(identity.projects))}" if identity.projects else ""
    admin_of = f" admin of {join_names(sorted(identity.admin_of))}" if identity.admin_of else ""
    return f"user {user.id} role {user.role}{projects}{admin_of}"


def _signed_in(context: StepContext) -> list[tuple[User, Identity]]:
    """All users of a provider."""
    return [(user, user.identity) for user in context.world.table(USERS).values() if user.identity is not None]


def _end(context: StepContext, user: User, why: str) -> None:
    """End the access of a user of the provider, with a line in the audit trail. The refresh token is dropped."""
    assert user.identity is not None
    context.change.put(replace(user, identity=replace(user.identity, ended=why, sealed="")))
    _note(context, user.id, "sign-in recheck", f"user {user.id} has lost access: {why}", result=LOST)


def _note(context: StepContext, user_id: UserId, action: str, detail: str, result: str = "") -> None:
    context.audit_calls.append(
        AuditCall(
            user=UserId("head"),
            token_id=TokenId(""),
            origin="head",
            action=action,
            target=f"user_id={user_id}",
            detail=detail,
            result=result,
        )
    )


def _check_none_opens(context: StepContext, kept: Iterable[ProjectId]) -> None:
    """Check that no project without members of its own stops being one of groups: it would be open to all users.

    Raises:
        Conflict: one would be.
    """
    settings = context.world.table(SIGN_IN).get(PROVIDER)
    for project_id in sorted((settings.projects if settings is not None else frozenset()) - frozenset(kept)):
        project = context.world.table(PROJECTS).get(project_id)
        if project is not None and not project.members:
            raise Conflict(
                f"project {project_id} has no members of its own: without its groups it would be open to all users",
                hint=Hint(HintCode.ADD_MEMBER, project=project_id),
            )

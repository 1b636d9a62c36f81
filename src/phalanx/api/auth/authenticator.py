"""Authentication and authorization: identifies the caller, and checks the route's action. Every route calls this first.

Tokens are looked up by their SHA-256. Callers are cached until the store's `access_version` changes; commits raise it whenever a user,
token or project is written. A store without that number is read every time.

A caller with the action SEE sees that every job exists and its state, as all users wait in the same queues. So a forbidden action on
another user's job is refused with 403, and 404 means that the job does not exist.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from phalanx.api.auth.browser_sessions import BrowserSession, BrowserSessions
from phalanx.core.access.caller import Caller, may, may_access_job
from phalanx.core.access.membership import administers, belongs
from phalanx.core.access.node_tokens import (
    is_machine_token,
    join_expiry,
    looks_like_join,
    node_of_machine_token,
    node_of_token,
)
from phalanx.core.access.rules import (
    AccessDecision,
    AccessScope,
    CallerRelation,
    decide,
)
from phalanx.core.errors import BadRequest, NotFound, NotPermitted, NotSignedIn
from phalanx.core.fleet.node_pool import COMING_STATES
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import JobId, NodeId, ProjectId, TokenId, UserId
from phalanx.core.state.records import POOL_NODES
from phalanx.core.work.job import Job
from phalanx.core.work.seats import node_of_supervisor
from phalanx.core.work.services.service import Service
from phalanx.core.work.users import (
    Action,
    Token,
    User,
    UserRole,
)
from phalanx.ports.clock import Clock
from phalanx.ports.store import JobFilter, Store, Viewer

_DIGITS_MAX: Final = 18  # of a submit number; SQLite's integers have no more
_CACHED_MAX: Final = 20_000  # cached callers; with more tokens in use at once, the others are looked up each time
_DESCRIPTIONS: Final = {
    Action.VIEW: "see jobs and nodes",
    Action.SUBMIT: "submit",
    Action.CHANGE_OWN: "change jobs",
    Action.VIEW_OUTPUT: "read output",
    Action.OPERATE: "operate nodes, queues or the head",
    Action.ADMINISTER: "administer the cluster: its users, projects, tokens and stored files",
    Action.MANAGE_OWN_TOKENS: "manage tokens",
    Action.MANAGE_PROJECT: "manage projects",
    Action.SUPERVISE: "act as a supervisor",
    Action.JOIN: "join a server",
}
_OF_A_JOB: Final = {Action.CHANGE_OWN: "change", Action.VIEW_OUTPUT: "read the output of"}
LAST_USE_PRECISION_S: Final = 300.0  # precision of a token's last use after a restart: recording one costs a write
_SCHEME: Final = "bearer "
_HINT: Final = Hint(HintCode.SEND_TOKEN)


class Authenticator:
    """Finds callers by their token or by their browser's session. Use it on the event loop only.

    `join_salt` returns the current salt of join tokens.
    """

    def __init__(
        self, store: Store, node_secret: bytes, clock: Clock, join_salt: Callable[[], str] = lambda: ""
    ) -> None:
        self._store = store
        self._node_secret = node_secret
        self._join_salt = join_salt
        self._clock = clock
        self.browser_sessions = BrowserSessions(clock)
        self._version: object = None
        self._cached: dict[str, tuple[Caller, Token, User]] = {}
        self._supervisors: dict[str, Caller] = {}  # by the digest of their tokens, which do not expire
        self._used: dict[TokenId, float] = {}  # last use; only of existing tokens, so it is bounded
        self._recorded: dict[TokenId, float] = {}

    def authenticate(self, authorization: str | None) -> Caller:
        """Return the caller that an Authorization header identifies.

        Raises:
            NotSignedIn: there is no token, or it is unknown, expired, revoked or of a disabled user.
        """
        if authorization is None or authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise NotSignedIn("no token was sent", hint=_HINT)
        secret = authorization[len(_SCHEME) :].strip()
        digest = hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
        supervisor = self._supervisors.get(digest)
        if supervisor is not None:
            return supervisor
        if digest in self._cached:
            return self.caller_of_digest(digest)
        expires_s = join_expiry(self._node_secret, secret, self._join_salt()) if secret.isascii() else None
        if expires_s is not None:
            return _joining(expires_s, self._clock.now_s())
        machine = node_of_machine_token(secret) if secret.isascii() else None
        if machine is not None:
            return self._joining_machine(machine, secret)
        if looks_like_join(secret):
            raise NotSignedIn(
                "this head does not know the join token: it is of another head, truncated, or revoked by a newer one",
                hint=Hint(HintCode.PRINT_JOIN_LINE),
            )
        node_id = node_of_token(self._node_secret, secret) if secret.isascii() else None
        if node_id is not None:
            caller = Caller(
                user=UserId(f"node:{node_id}"), role=UserRole.NODE, token_id=TokenId(f"node:{node_id}"), node_id=node_id
            )
            if len(self._supervisors) < _CACHED_MAX:
                self._supervisors[digest] = caller
            return caller
        return self.caller_of_digest(digest)

    def _joining_machine(self, node_id: NodeId, secret: str) -> Caller:
        """Return the caller of the token of a pool's order: it may only join, as that node, and only before the node is up.

        Raises:
            NotSignedIn: the order is over, or the token is not of this head.
        """
        order = next((one for one in self._store.records(POOL_NODES) if one.id == node_id), None)
        if order is None or not is_machine_token(self._node_secret, secret, node_id, order.token):
            raise NotSignedIn(f"no pool of this head has ordered {node_id[:80]!r} with this join token")
        if order.state not in COMING_STATES:
            raise NotSignedIn(f"the join token of {node_id} was used, or its order is over")
        return Caller(
            user=UserId(f"node:{node_id}"),
            role=UserRole.NODE,
            token_id=TokenId(f"join:{node_id}"),
            scope=frozenset({Action.JOIN}),
            joins_as=node_id,
        )

    def caller_of_digest(self, digest: str) -> Caller:
        """Return the caller whose token has that SHA-256, and note the use of the token.

        Raises:
            NotSignedIn: the token is unknown, expired, revoked or of a disabled user.
        """
        caller = self._cached_caller(digest)
        self._used[caller.token_id] = self._clock.now_s()
        return caller

    def authenticate_session(self, secret: str) -> tuple[Caller, BrowserSession]:
        """Return the caller and the session that a browser's cookie identifies; a session of an invalid token is closed.

        Raises:
            NotSignedIn: the session or its token is no longer valid.
        """
        session = self.browser_sessions.find(secret)
        try:
            return self.caller_of_session(session), session
        except NotSignedIn:
            self.browser_sessions.close(secret)
            raise

    def caller_of_session(self, session: BrowserSession) -> Caller:
        """Return the caller of an open session.

        Raises:
            NotSignedIn: its token is no longer valid.
        """
        return replace(self.caller_of_digest(session.token_sha256), session=session.key)

    def refresh(self, caller: Caller, action: Action) -> Caller:
        """Return the caller with its current permissions; called while a stream or session is open. Derived tokens do not change.

        Raises:
            NotSignedIn, NotPermitted: the caller is no longer permitted.
        """
        if not caller.sha256:
            return caller
        fresh = self._cached_caller(caller.sha256)
        if caller.session:
            self.browser_sessions.require_open(caller.session)
            fresh = replace(fresh, session=caller.session)
        require_action(fresh, action)
        return fresh

    def last_used_s(self, token: Token) -> float | None:
        """Return when a token was last used, in Unix seconds."""
        return self._used.get(token.id, token.used_s)

    def take_unrecorded_uses(self) -> dict[TokenId, float]:
        """Return the last uses to record: those at least LAST_USE_PRECISION_S later than the recorded ones."""
        fresh = {
            one: used_s
            for one, used_s in self._used.items()
            if used_s - self._recorded.get(one, 0.0) >= LAST_USE_PRECISION_S
        }
        self._recorded.update(fresh)
        return fresh

    def _cached_caller(self, digest: str) -> Caller:
        version = getattr(self._store, "access_version", None)
        if version is None or version != self._version:
            self._cached.clear()
            self._version = version
        caller, token, user = self._cached.get(digest) or self._look_up(digest)
        now_s = self._clock.now_s()
        if not token.is_valid(now_s):
            raise NotSignedIn(f"token {token.id} is expired or revoked", hint=Hint(HintCode.ADD_TOKEN))
        if why := user.refusal(now_s):
            raise NotSignedIn(why, hint="ask an admin" if user.disabled else Hint(HintCode.SIGN_IN_AGAIN))
        return caller

    def _look_up(self, digest: str) -> tuple[Caller, Token, User]:
        token = self._store.token(digest)
        user = None if token is None else self._store.user(token.user)
        if token is None or user is None:
            raise NotSignedIn("this head does not know the token", hint=_HINT)
        found = (self._caller_of(token, user), token, user)
        if len(self._cached) < _CACHED_MAX:
            self._cached[digest] = found
        return found

    def _caller_of(self, token: Token, user: User) -> Caller:
        projects = self._store.projects()
        return Caller(
            user=user.id,
            role=user.role,
            token_id=token.id,
            scope=token.scope,
            node_id=token.node_id,
            request_limits=token.request_limits,
            limited_as=token.limited_as,
            sha256=token.sha256,
            projects=frozenset(p.id for p in projects if belongs(p, user.id, user)),
            admin_of=frozenset(p.id for p in projects if administers(p, user.id, user)),
        )


def require_action(caller: Caller, action: Action) -> None:
    """Check that the caller may take the action on anything at all.

    Raises:
        NotPermitted: the role or the token's scope does not include it.
    """
    if not may(caller, action):
        scoped = f" with a token for {', '.join(sorted(caller.scope))}" if caller.scope else ""
        raise NotPermitted(
            f"{caller.user} ({caller.role}{scoped}) may not {_DESCRIPTIONS[action]}",
            hint="ask an admin for a role or token with that permission",
        )


def require_csrf(session: BrowserSession, value: str) -> None:
    """Check that a change by a session repeats the session's CSRF value, which pages of other sites cannot read.

    Raises:
        NotPermitted: it does not.
    """
    if not hmac.compare_digest(session.csrf.encode(), value.encode("utf-8", "surrogateescape")):
        raise NotPermitted("the request does not come from a page of this head", hint=Hint(HintCode.OPEN_DASHBOARD))


def require_project_admin(caller: Caller, project_id: ProjectId) -> None:
    """Check that the caller may manage the members of the project.

    Raises:
        NotPermitted: the caller is not an admin of it.
    """
    found = decide(
        caller.role,
        caller.scope,
        Action.MANAGE_PROJECT,
        AccessScope.PROJECT,
        CallerRelation.OTHER_PROJECT,
        project_admin=project_id in caller.admin_of,
    )
    if found is not AccessDecision.ALLOWED:
        raise NotPermitted(
            f"{caller.user} is not an admin of project {project_id}", hint="ask an admin of the project or of the head"
        )


def _joining(expires_s: float, now_s: float) -> Caller:
    """Return the caller of a join token: it may only ask to join.

    Raises:
        NotSignedIn: the join token has expired.
    """
    if now_s >= expires_s:
        raise NotSignedIn(
            "the join token has expired; join tokens are valid for one day",
            hint=Hint(HintCode.PRINT_JOIN_LINE),
        )
    return Caller(user=UserId("joining"), role=UserRole.NODE, token_id=TokenId("join"), scope=frozenset({Action.JOIN}))


def require_job(store: Store, job_id: JobId) -> Job:
    """Return the job.

    Raises:
        NotFound: it does not exist.
        BadRequest: the id names an array, and one element is needed.
    """
    job = store.job(job_id)
    if job is None:
        first = first_element(store, job_id)
        if first is not None and first.array is not None:
            raise BadRequest(
                f"job {job_id} is an array of {first.array.size} elements",
                hint=f"name one element, {first.id} to {job_id}_{first.array.highest}",
            )
        raise NotFound(f"no job {job_id}", hint=Hint(HintCode.LIST_JOBS))
    return job


def first_element(store: Store, array_id: JobId) -> Job | None:
    """Return the first element of an array: elements have consecutive submit numbers, and the first number names the array."""
    if not array_id.isdecimal() or len(array_id) > _DIGITS_MAX:
        return None
    found = store.jobs(JobFilter(before_seq=int(array_id) + 1, limit=1))
    return found[0] if found and found[0].array is not None and found[0].array.array_id == array_id else None


def authorize_job(store: Store, caller: Caller, action: Action, job_id: JobId, *, arrays: bool = False) -> Job:
    """Return the job if the caller may take the action on it; with `arrays` also the first element of an array, for the whole array.

    Raises:
        NotFound: the job does not exist.
        NotPermitted: it belongs to another user.
    """
    job = (first_element(store, job_id) if arrays and store.job(job_id) is None else None) or require_job(store, job_id)
    require_job_access(caller, action, job)
    return job


def require_job_access(caller: Caller, action: Action, job: Job | Service) -> None:
    """Check that the caller may take the action on a job or service.

    Raises:
        NotPermitted: it belongs to another user.
    """
    if not may_access_job(caller, action, owner=job.user, project=job.project):
        kind = "job" if isinstance(job, Job) else "service"
        raise NotPermitted(
            f"{kind} {job.id} belongs to {job.user} in {job.project}; {caller.user} may not {_OF_A_JOB.get(action, 'access')} it",
            hint="ask its owner, an admin of its project or an operator",
        )


def reauthorize(
    gate: Authenticator, store: Store, caller: Caller, action: Action, job_id: JobId | None = None
) -> Callable[[], None]:
    """Return a check to repeat while a stream is open. It raises NotSignedIn or NotPermitted once the caller loses the permission."""

    def check() -> None:
        fresh = gate.refresh(caller, action)
        if job_id is not None:
            authorize_job(store, fresh, action, job_id)

    return check


def may_see_all_of(caller: Caller, job: Job | Service) -> bool:
    """Whether the caller also sees the command, folders and labels: the owner, members of the project, operators and admins."""
    return (
        job.user == caller.user or job.project in caller.projects or caller.role in (UserRole.OPERATOR, UserRole.ADMIN)
    )


def viewer_of(caller: Caller) -> Viewer | None:
    """Return for a query whose jobs the caller sees all of, as `may_see_all_of` decides for one; None for those of all."""
    return None if caller.role in (UserRole.OPERATOR, UserRole.ADMIN) else (caller.user, frozenset(caller.projects))


def require_own_node(caller: Caller, node_id: NodeId) -> None:
    """Check that the supervisor acts for its own node.

    Raises:
        NotPermitted: it names another node.
    """
    if caller.node_id is None or node_of_supervisor(caller.node_id) != node_id:
        raise NotPermitted(f"the token of node {caller.node_id} is not valid for node {node_id}")

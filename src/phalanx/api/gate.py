"""The one gate: who calls, and whether they may do what the route does. Every route passes here before anything else happens.

Tokens are found by their SHA-256. What was found is kept until the store says that access changed (`access_version`, a number its
commits raise whenever a user, token or project is written); a store without that number is asked every time.

Others' jobs: who may SEE sees that a job exists and how it stands, as everybody waits in the same queues. So what one may not do to
another's job is refused with 403, and 404 means that there is no such job.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final

from phalanx.core.access.node_keys import join_expiry, looks_like_join, node_of
from phalanx.core.access.roles import Caller, may, may_touch
from phalanx.core.access.rules import Reach, Tie, Verdict, judge
from phalanx.core.errors import BadRequest, NotFound, NotPermitted, NotSignedIn
from phalanx.core.ids import JobId, NodeId, ProjectId, TokenId, UserId
from phalanx.core.work.job import Job
from phalanx.core.work.people import Action, Token, User, UserRole
from phalanx.core.work.seat import node_of_supervisor
from phalanx.ports.clock import Clock
from phalanx.ports.store import JobFilter, Store

_DIGITS_MAX: Final = 18  # of a submit number; SQLite's integers have no more
_KEPT_MAX: Final = 20_000  # callers kept; more tokens than this in use at once only cost look-ups
_IN_WORDS: Final = {
    Action.SEE: "see jobs and nodes",
    Action.SUBMIT: "submit",
    Action.CHANGE_OWN: "change jobs",
    Action.SEE_OUTPUT: "read output",
    Action.OPERATE: "operate nodes, queues or the head",
    Action.ADMINISTER: "administer users, projects and tokens",
    Action.OWN_TOKENS: "manage tokens",
    Action.MANAGE_PROJECT: "manage projects",
    Action.SUPERVISE: "speak as a supervisor",
    Action.JOIN: "bring a server in",
}
_OF_A_JOB: Final = {Action.CHANGE_OWN: "change", Action.SEE_OUTPUT: "read the output of"}
USE_TOLD_S: Final = 300.0  # how exact the last use of a token is after a restart: each costs a write
_SCHEME: Final = "bearer "
_HINT: Final = "send `Authorization: Bearer <token>`; `phalanx tokens` makes them"


class Gate:
    """Callers by token. Used on the event loop alone. `join_salt` is what join tokens are made with at present."""

    def __init__(
        self, store: Store, node_secret: bytes, clock: Clock, join_salt: Callable[[], str] = lambda: ""
    ) -> None:
        self._store = store
        self._node_secret = node_secret
        self._join_salt = join_salt
        self._clock = clock
        self._version: object = None
        self._kept: dict[str, tuple[Caller, Token]] = {}
        self._used: dict[TokenId, float] = {}  # of tokens that are known, so no more than there are
        self._taken: dict[TokenId, float] = {}

    def caller(self, authorization: str | None) -> Caller:
        """The caller that an Authorization header names.

        Raises:
            NotSignedIn: no token, or one that is unknown, expired, revoked or of a disabled user.
        """
        if authorization is None or authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise NotSignedIn("no token was sent", hint=_HINT)
        secret = authorization[len(_SCHEME) :].strip()
        expires_s = join_expiry(self._node_secret, secret, self._join_salt()) if secret.isascii() else None
        if expires_s is not None:
            return _joining(expires_s, self._clock.now_s())
        if looks_like_join(secret):
            raise NotSignedIn(
                "the join token is unknown here: another head's, cut off, or ended by `phalanx join --new-token`",
                hint="phalanx join --print on the head prints the line that counts",
            )
        node_id = node_of(self._node_secret, secret) if secret.isascii() else None
        if node_id is not None:
            return Caller(
                user=UserId(f"node:{node_id}"), role=UserRole.NODE, token_id=TokenId(f"node:{node_id}"), node_id=node_id
            )
        digest = hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
        caller = self._good(digest)
        self._used[caller.token_id] = self._clock.now_s()
        return caller

    def again(self, caller: Caller, action: Action) -> Caller:
        """The same caller as they stand now: asked while a stream or a session is open. Derived tokens do not change.

        Raises:
            NotSignedIn, NotPermitted: they would not be let in any more.
        """
        if not caller.sha256:
            return caller
        fresh = self._good(caller.sha256)
        permit(fresh, action)
        return fresh

    def used_s(self, token: Token) -> float | None:
        """When a token was last used, Unix seconds."""
        return self._used.get(token.id, token.used_s)

    def take_used(self) -> dict[TokenId, float]:
        """Last uses worth writing down: later than the one written before by more than USE_TOLD_S."""
        fresh = {one: used_s for one, used_s in self._used.items() if used_s - self._taken.get(one, 0.0) >= USE_TOLD_S}
        self._taken.update(fresh)
        return fresh

    def _good(self, digest: str) -> Caller:
        version = getattr(self._store, "access_version", None)
        if version is None or version != self._version:
            self._kept.clear()
            self._version = version
        caller, token = self._kept.get(digest) or self._look_up(digest)
        if not token.good(self._clock.now_s()):
            raise NotSignedIn(f"token {token.id} is expired or revoked", hint="make another: phalanx tokens add")
        return caller

    def _look_up(self, digest: str) -> tuple[Caller, Token]:
        token = self._store.token(digest)
        user = None if token is None else self._store.user(token.user)
        if token is None or user is None:
            raise NotSignedIn("the token is unknown here", hint=_HINT)
        if user.disabled:
            raise NotSignedIn(f"user {user.id} is disabled", hint="ask an admin")
        found = (self._make(token, user), token)
        if len(self._kept) < _KEPT_MAX:
            self._kept[digest] = found
        return found

    def _make(self, token: Token, user: User) -> Caller:
        projects = self._store.projects()
        return Caller(
            user=user.id,
            role=user.role,
            token_id=token.id,
            scope=token.scope,
            node_id=token.node_id,
            sha256=token.sha256,
            projects=frozenset(p.id for p in projects if user.id in p.members or user.id in p.admins),
            admin_of=frozenset(p.id for p in projects if user.id in p.admins),
        )


def permit(caller: Caller, action: Action) -> None:
    """Nothing, if the caller may take the action at all.

    Raises:
        NotPermitted: the role or the token's scope does not have it.
    """
    if not may(caller, action):
        scoped = f" with a token for {', '.join(sorted(caller.scope))}" if caller.scope else ""
        raise NotPermitted(
            f"{caller.user} ({caller.role}{scoped}) may not {_IN_WORDS[action]}",
            hint="ask an admin for a role or token that may",
        )


def manage(caller: Caller, project_id: ProjectId) -> None:
    """Nothing, if the caller may say who belongs to the project.

    Raises:
        NotPermitted: they are no admin of it.
    """
    found = judge(
        caller.role,
        caller.scope,
        Action.MANAGE_PROJECT,
        Reach.PROJECT,
        Tie.OTHER_PROJECT,
        project_admin=project_id in caller.admin_of,
    )
    if found is not Verdict.YES:
        raise NotPermitted(
            f"{caller.user} is no admin of project {project_id}", hint="its admins and those of the head may"
        )


def _joining(expires_s: float, now_s: float) -> Caller:
    """Whoever holds a join token: may ask to be a node, and nothing else.

    Raises:
        NotSignedIn: it has expired.
    """
    if now_s >= expires_s:
        raise NotSignedIn(
            "the join token has expired: they are good for a day",
            hint="phalanx join --print on the head prints a fresh line",
        )
    return Caller(user=UserId("joining"), role=UserRole.NODE, token_id=TokenId("join"), scope=frozenset({Action.JOIN}))


def known_job(store: Store, job_id: JobId) -> Job:
    """The job.

    Raises:
        NotFound: there is none.
        BadRequest: it is an array, where one element must be meant.
    """
    job = store.job(job_id)
    if job is None:
        first = first_element(store, job_id)
        if first is not None and first.array is not None:
            raise BadRequest(
                f"job {job_id} is an array of {first.array.size} elements",
                hint=f"name one of them, {first.id} to {job_id}_{first.array.highest}",
            )
        raise NotFound(f"no job {job_id}", hint="phalanx ps -a lists them")
    return job


def first_element(store: Store, array_id: JobId) -> Job | None:
    """The first element of an array, found by its number: elements are numbered one after the other, and the first names the array."""
    if not array_id.isdecimal() or len(array_id) > _DIGITS_MAX:
        return None
    found = store.jobs(JobFilter(before_seq=int(array_id) + 1, limit=1))
    return found[0] if found and found[0].array is not None and found[0].array.array_id == array_id else None


def touch(store: Store, caller: Caller, action: Action, job_id: JobId, *, arrays: bool = False) -> Job:
    """The job, if the caller may do it to this one; with `arrays` an array's first element, which stands for all.

    Raises:
        NotFound: there is no such job.
        NotPermitted: it is another's.
    """
    job = (first_element(store, job_id) if arrays and store.job(job_id) is None else None) or known_job(store, job_id)
    if not may_touch(caller, action, owner=job.user, project=job.project):
        raise NotPermitted(
            f"job {job.id} belongs to {job.user} in {job.project}; {caller.user} may not {_OF_A_JOB.get(action, 'touch')} it",
            hint="its owner, an admin of its project or an operator may",
        )
    return job


def still(gate: Gate, store: Store, caller: Caller, action: Action, job_id: JobId | None = None) -> Callable[[], None]:
    """A question to ask again while a stream is open: whether the caller would still be let in, and to that job.

    What comes back raises NotSignedIn or NotPermitted once they would not.
    """

    def ask() -> None:
        fresh = gate.again(caller, action)
        if job_id is not None:
            touch(store, fresh, action, job_id)

    return ask


def sees_all_of(caller: Caller, job: Job) -> bool:
    """Whether the caller sees a job's command, folders and labels too: its owner, its project, operators."""
    return (
        job.user == caller.user or job.project in caller.projects or caller.role in (UserRole.OPERATOR, UserRole.ADMIN)
    )


def own_node(caller: Caller, node_id: NodeId) -> None:
    """Nothing, if the supervisor speaks for its own node.

    Raises:
        NotPermitted: for another.
    """
    if caller.node_id is None or node_of_supervisor(caller.node_id) != node_id:
        raise NotPermitted(f"the token of node {caller.node_id} does not speak for {node_id}")

"""A head with everybody on it who may call one: each role, each kind of token, each tie to a job, a session, a token and a project.

Both clocks stand still, so that nothing falls due by itself: what changes, a call has changed.
"""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import asyncio
import hashlib
import os
from dataclasses import dataclass, field, replace

import httpx
import msgspec

from phalanx.api.app import build_app
from phalanx.api.auth.access_matrix import CallerKind
from phalanx.app.certificates import CertificateAuthority
from phalanx.app.join_service import HeadJoinService, ListenAddress
from phalanx.app.machine_files import MachineFiles
from phalanx.app.state_folder import StateFolder
from phalanx.core.access.node_tokens import join_token, node_token
from phalanx.core.access.rules import CallerRelation
from phalanx.core.state.events import PutProject, PutToken, PutUser, RevokeToken
from phalanx.core.work.queue import Project
from phalanx.core.work.users import (
    Action,
    Token,
    User,
    UserRole,
)
from phalanx.engines.local.engine import LocalEngine
from tests.contract.api_head import JOB, SECRET, ApiHead, Supervisor, until
from tests.contract.exec_socket import upgraded

NOW_S, BOOT_S = 1_800_000_000.0, 5_000.0
V, U, O, A, N = UserRole.VIEWER, UserRole.USER, UserRole.OPERATOR, UserRole.ADMIN, UserRole.NODE  # noqa: E741  # as in a table


class SilentNotifier:
    """Accepts every message and sends none."""

    def describe(self, url):
        return url

    def send(self, url, message):
        pass


@dataclass(frozen=True)
class Who:
    """Somebody who calls. `name` of a user; `refused`: nobody looks at who they are."""

    title: str
    name: str
    column: CallerKind | None = None
    refused: bool = False
    token: str | None = None

    @property
    def secret(self):
        return self.token if self.token is not None else f"secret-of-{self.name}"


def person(title, role, **more):
    return Who(title, title.replace(" ", "-"), CallerKind(title=title, role=role, **more))


ROLES = [
    person("viewer", V),
    person("user", U),
    person("project admin", U, project_admin=True),
    person("operator", O),
    person("admin", A),
]
SCOPED = Who(
    "scoped token", "user", CallerKind(title="scoped", role=U, scope=frozenset({Action.VIEW})), token="scoped-of-user"
)
ADMIN_SCOPED = Who(
    "admin's token to see",
    "admin",
    CallerKind(title="scoped", role=A, scope=frozenset({Action.VIEW})),
    token="scoped-of-admin",
)
STRANGERS = [
    Who("no token", "nobody", refused=True, token=""),
    Who("unknown token", "nobody", refused=True, token="never issued"),
    Who("expired token", "admin", refused=True, token="expired-of-admin"),
    Who("revoked token", "admin", refused=True, token="revoked-of-admin"),
    Who("disabled user", "dan", refused=True),
    Who("another head's supervisor", "n0", refused=True, token=node_token(b"another head's secret", "n0")),
    Who("join token of yesterday", "joining", refused=True, token=join_token(SECRET, NOW_S - 1)),
]
SUPERVISOR = Who("supervisor", "n0", CallerKind(title="supervisor", role=N), token=node_token(SECRET, "n0"))
OTHER_SUPERVISOR = Who(
    "supervisor of another node", "n1", CallerKind(title="supervisor", role=N), token=node_token(SECRET, "n1")
)
JOINING = Who(
    "join token",
    "h1",
    CallerKind(title="joining", role=N, scope=frozenset({Action.JOIN})),
    token=join_token(SECRET, NOW_S + 3600),
)

# (who, tie): for people each tie; the others are tied as they are.
CALLS = [
    *((who, tie) for who in ROLES for tie in CallerRelation),
    (SCOPED, CallerRelation.OWN),
    (ADMIN_SCOPED, CallerRelation.OTHER_PROJECT),
    *((who, CallerRelation.OTHER_PROJECT) for who in STRANGERS),
    (SUPERVISOR, CallerRelation.OWN),
    (OTHER_SUPERVISOR, CallerRelation.OTHER_PROJECT),
    (JOINING, CallerRelation.OTHER_PROJECT),
]


@dataclass
class Bench:
    """The head, a client, and what each call may be about."""

    home: str
    head: ApiHead = field(init=False)
    jobs: dict = field(default_factory=dict)
    fresh: int = 0

    def __post_init__(self):
        self.head = ApiHead(self.home, notifier=SilentNotifier())
        setattr(self.head.clock, "now_s", lambda: NOW_S)  # the clock of the head, which every part of it holds
        setattr(self.head.clock, "boottime_s", lambda: BOOT_S)
        authority = CertificateAuthority(StateFolder.open(f"{self.home}/home"))
        joining = HeadJoinService(
            authority=authority,
            address=ListenAddress(host="127.0.0.2", port=7600),
            node_secret=SECRET,
            head_id="head-1",
            engines=[LocalEngine(home=self.home, environment=dict, token_of=lambda _: "")],
            machine_files=MachineFiles(path=f"{self.home}/machine-files.tar.gz"),
        )
        limits = replace(self.head.limits, exec_sessions=4_000)  # each asks about one of its own
        self.head.parts = replace(self.head.parts, join_service=joining, limits=limits)
        self.head.app = build_app(self.head.parts)
        self.head.app.state.runtime.channel_sender.close()  # it would write how far the channels are during a refused call
        self._people()

    def _people(self):
        ask = self.head.ask
        everybody = [*(who.name for who in ROLES), "sam", "otto", "dan", "nobody-yet"]
        for name in everybody:  # all as users at first, so that the viewer too has a job: of the time before
            ask(PutUser(user=User(id=name, role=U, created_s=1.0)))
            self.give(name, f"secret-of-{name}")
        self.give("user", "scoped-of-user", scope=frozenset({Action.VIEW}))
        self.give("admin", "scoped-of-admin", scope=frozenset({Action.VIEW}))
        self.give("admin", "expired-of-admin", expires_s=NOW_S)
        self.give("admin", "revoked-of-admin")
        ask(RevokeToken(token_id=token_id("revoked-of-admin")))
        members = frozenset(name for name in everybody if name != "otto")
        ask(PutProject(project=Project(id="nlp", members=members, admins=frozenset({"project-admin"}))))
        ask(PutProject(project=Project(id="cv", members=frozenset({"otto"}))))

    def promote(self):
        """The people become what they are."""
        for who in ROLES:
            self.head.ask(PutUser(user=User(id=who.name, role=who.column.role, created_s=1.0)))
        self.head.ask(PutUser(user=User(id="dan", role=A, created_s=1.0, disabled=True)))

    def give(self, name, secret, **more):
        sha256 = hashlib.sha256(secret.encode()).hexdigest()
        self.head.ask(PutToken(token=Token(id=token_id(secret), user=name, sha256=sha256, created_s=1.0, **more)))
        return token_id(secret)

    # ---- what a call is about -------------------------------------------------------------------------------------

    def owner(self, who, tie):
        return (
            who.name
            if tie is CallerRelation.OWN and who.column and who.column.role is not N
            else "otto"
            if tie is CallerRelation.OTHER_PROJECT
            else "sam"
        )

    def open(self, call):
        """Say hello, and one running, one held and one waiting job of everybody."""
        self.call = call
        self.n0, self.n1 = Supervisor(call, "n0", "s0", devices=128), Supervisor(call, "n1", "s1", devices=1)
        self.n0.hello()
        self.n1.hello()
        for name in [*(who.name for who in ROLES), "sam", "otto"]:
            for kind in ("running", "held", "waiting"):
                self.jobs[name, kind] = self.job(name, kind)
        self.promote()
        self.settle()

    def job(self, name, kind):
        """A job of this user, by their own token where they may submit, else by one who may in their name's place."""
        more = {"running": {}, "held": {"hold": True}, "waiting": {"begin": "now+2d"}}[kind]
        body = {**JOB, "gpus": 2, "name": f"{name}-{kind}", "project": "cv" if name == "otto" else "nlp", **more}
        headers = {"authorization": f"Bearer secret-of-{name}"}
        reply = self.call(None, "POST", "/v1/jobs", body, headers=headers)
        assert reply.status_code == 201, reply.text
        job_id = reply.json()["job"]["id"]
        if kind == "running":
            until(lambda: self.head.store.attempts(job_id))
            assert self.head.store.attempts(job_id)[-1].allocation.grants[0].node_id == "n0"
            self.n0.run(job_id)
        return job_id

    # ---- what a call has changed ----------------------------------------------------------------------------------

    def settle(self):
        """Until the loop has nothing left to do."""
        before = None
        while (now := self.state()) != before:
            before = now
            self.rest()

    def rest(self):
        """Until the driver has done what it was asked, and the event loop what that set going: a change of access ends sessions there."""
        self.head.driver.read_snapshot().result(timeout=60)
        loop = self.head.app.state.runtime._upkeep.get_loop()
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(timeout=60)

    def state(self):
        """All that a call could change, but for the audit trail, which tells of refusals too."""
        tables = self.head.store._tables
        runtime = self.head.app.state.runtime
        sessions = {
            name: (one.input.end, one.input_closed, one.rows, one.cols, one.output.end, one.ended)
            for name, one in runtime.sessions._open.items()
        }
        kept = {name: repr(getattr(tables, name)) for name in tables.__slots__ if name != "audit"}
        boxes = {
            node: [(one.seq, one.kind, bytes(one.body)) for one in self.head.mailboxes.take(node, 0)[0]]
            for node in ("n0", "n1")
        }
        files = {path: os.path.getsize(path) for folder in walk(self.home) for path in folder}
        memory = {
            "leases": repr(self.head.driver.leases._leases),
            "salt": self.head.parts.join_service.salt.value,
            "samples": repr([self.head.telemetry.node_samples(node) for node in ("n0", "n1")]),
            "stopped": self.head.stopped.is_set(),
            "supervisors": repr(runtime.supervisors._registered.keys()),
            "streams": repr(self.head.logs.streams(self.head.store.attempts(self.jobs.get(("sam", "running"), "1")))),
        }
        return {**kept, "boxes": boxes, "files": files, "sessions": sessions, **memory}

    def audit(self):
        return self.head.store.audit(after=0, limit=1_000_000)


def walk(home):
    for folder, _, names in os.walk(home):
        yield [os.path.join(folder, name) for name in names]


def token_id(secret):
    return f"t-{secret}"


def send(call, who, method, path, *, json=None, content=None):
    """One request; of an endless reply the status alone. A WebSocket is closed once its first frame was answered."""
    headers = {"authorization": f"Bearer {who.secret}"} if who.secret else {}
    if method == "WEBSOCKET":
        found = upgraded(call.url, path, headers)
        if isinstance(found, httpx.Response):
            return found
        with found:
            found.send(msgspec.json.encode(json).decode())
            found.recv(20)
        return httpx.Response(101)
    body = msgspec.json.encode(json) if json is not None else content
    with call.client.stream(method, path, headers=headers, content=body) as reply:
        if reply.headers.get("content-type", "").startswith("text/event-stream") and reply.status_code == 200:
            return httpx.Response(reply.status_code)
        reply.read()
        return reply

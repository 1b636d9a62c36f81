"""A head for API tests: the real controller, driver and routes over a memory store; supervisors are played by the test."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import hashlib
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import msgspec

from phalanx.api.app import build_app
from phalanx.api.http.server import ApiServer
from phalanx.api.services import ApiLimits, HeadServices, ProgramListener
from phalanx.app.secret_key_file import SecretKeyFile
from phalanx.app.state_folder import StateFolder
from phalanx.controller.controller import Controller
from phalanx.controller.driver import ControllerDriver
from phalanx.controller.leases import LeaseBook
from phalanx.controller.mailboxes import Mailboxes
from phalanx.controller.step_context import ControllerSettings
from phalanx.controller.telemetry import Telemetry
from phalanx.controller.usage.usage_recorder import UsageRecorder
from phalanx.core.access.node_tokens import node_token
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.fleet.node_pool import NodeTemplate
from phalanx.core.state.events import PutProject, PutQueue, PutToken, PutUser
from phalanx.core.state.records import USERS
from phalanx.core.state.reports import MemberReady, MemberStarted, MemberStopped, TaskExited
from phalanx.core.work.attempt import TaskExit
from phalanx.core.work.queue import Project, Queue
from phalanx.core.work.users import Token, User, UserRole
from phalanx.ports.provider import CloudRights
from phalanx.providers.identity.oidc import OidcProvider
from phalanx.store.blobs.files import FileBlobs
from phalanx.store.history.memory import MemoryHistory
from phalanx.store.history.recorder import HistoryRecorder
from phalanx.store.logs.files import FileLogs
from phalanx.store.memory import MemoryStore
from phalanx.wire.supervisor import (
    Envelope,
    EventsRequest,
    HelloRequest,
    LeaseRequest,
    StreamChunk,
    StreamsRequest,
    encode_envelope,
)

SECRET = b"a secret of this test's head....."
PEOPLE = {
    "viewer": ("vic", UserRole.VIEWER),
    "user": ("ada", UserRole.USER),
    "other": ("bob", UserRole.USER),
    "operator": ("opal", UserRole.OPERATOR),
    "admin": ("root", UserRole.ADMIN),
}
TOKENS = {role: f"secret-of-{name}" for role, (name, _) in PEOPLE.items()}
JOB = {"run": ["python", "train.py"], "gpus": 2, "workdir": "/tmp", "name": "train"}


class Clock:
    """The machine's clocks, which a test may push on."""

    def __init__(self, ahead_s=0.0):
        self.ahead_s = ahead_s

    def now_s(self):
        return time.time() + self.ahead_s

    def boottime_s(self):
        return time.monotonic() + self.ahead_s


@dataclass
class ApiHead:
    """Everything that a test may want to look at."""

    home: str
    limits: ApiLimits = field(
        default_factory=lambda: ApiLimits(heartbeat_s=0.3, recheck_s=0.02, wait_s=3.0, plan_stop_wait_s=0.2)
    )
    store: MemoryStore = field(default_factory=MemoryStore)
    head_id: str = "head-1"
    storage_key: str = "k"
    notifier: object = None
    ahead_s: float = 0.0
    programs: str | None = None  # serves pages of web programs; the domain of their names, or "" for none
    shows_states: bool = False  # of GPUs on the page of the fleet, by the ledger of states

    def __post_init__(self):
        self.clock, self.logs = Clock(self.ahead_s), FileLogs(f"{self.home}/logs")
        self.mailboxes, self.telemetry = Mailboxes(), Telemetry()
        self.stopped = threading.Event()
        self.output_root = f"{self.home}/outputs"
        settings = ControllerSettings(
            checkpoint_root=f"{self.home}/checkpoints", output_root=self.output_root, storage_key=self.storage_key
        )
        controller = Controller(
            world=self.store.load(),
            leases=LeaseBook(guard=threading.Lock()),
            settings=settings,
            head_id=self.head_id,
        )
        self.usage = UsageRecorder(controller.world, self.store, self.telemetry, self.clock, waits=controller.waits)
        self.history = HistoryRecorder(MemoryHistory(), self.clock)
        self.telemetry.sample_listeners.append(self.history.add_samples)
        self.telemetry.step_listeners.append(self.history.add_steps)
        self.driver = ControllerDriver(
            on_commit=self.usage.committed,
            controller=controller,
            store=self.store,
            mailboxes=self.mailboxes,
            telemetry=self.telemetry,
            clock=self.clock,
            head_id=self.head_id,
        )
        self.driver.start()
        if not controller.world.table(USERS):
            self._people()
        self.sockets = [] if self.programs is None else [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        ports = [one.getsockname()[1] for one in self.sockets]
        listener = None
        if self.programs is not None:
            url = f"http://127.0.0.1:{ports[0]}"
            listener = ProgramListener(port=ports[1], names=self.programs, head_ports={"http": ports[0]}, head_url=url)
        self.parts = HeadServices(
            programs=listener,
            check_provider=lambda *_: CloudRights(rights=[]),
            offer=lambda _, terms: NodeTemplate(text=terms.template, devices=(), cpus=1, memory_bytes=1),
            controller=self.driver,
            store=self.store,
            logs=self.logs,
            blobs=FileBlobs(f"{self.home}/blobs"),
            mailboxes=self.mailboxes,
            telemetry=self.telemetry,
            usage_spans=self.usage.spans,
            usage_hours=self.usage.hours,
            notifier=self.notifier,
            identity=OidcProvider(f"{self.home}/secrets", self.clock.now_s),
            waste=self.usage.waste,
            attempt_use=self.usage.attempt_use,
            **({"part_states": self.usage.part_states} if self.shows_states else {}),
            history=self.history,
            secret_keys=SecretKeyFile(home=StateFolder(path=self.home)),
            clock=self.clock,
            node_secret=SECRET,
            version="0.1.0",
            output_root=self.output_root,
            checkpoint_root=settings.checkpoint_root,
            archive_root=f"{self.home}/archives",
            on_stop=self.stopped.set,
            limits=self.limits,
        )
        self.app = build_app(self.parts)

    def _people(self):
        for role, (name, kind) in PEOPLE.items():
            self.ask(PutUser(user=User(id=name, role=kind)))
            self.ask(PutToken(token=token_of(name, TOKENS[role])))
        self.ask(PutProject(project=Project(id="default")))
        self.ask(PutQueue(queue=Queue(id="default")))

    def ask(self, event):
        return self.driver.request(event).result(timeout=60)

    def close(self):
        self.driver.stop()
        self.logs.close()

    @contextmanager
    def calling(self):
        """A caller: `call("user", "GET", "/v1/jobs")`."""
        # Plain HTTP: without `verify` the client does not load the machine's CAs, which takes 20 ms.
        with self.served() as url, httpx.Client(base_url=url, timeout=30, trust_env=False, verify=False) as client:
            yield Caller(client, url)

    @contextmanager
    def served(self, **options):
        """A real server on loopback: its URL."""
        server = ApiServer(self.app, host="127.0.0.1", **{"port": 0, **options})
        thread = threading.Thread(target=server.run, args=[self.sockets or None], daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=100)
            assert not thread.is_alive(), "the server did not stop"


class Caller:
    def __init__(self, client, url):
        self.client, self.url = client, url

    def __call__(self, role, method, path, json=None, **more):
        headers = {**bearer(role), **more.pop("headers", {})}
        if json is not None:
            more["content"] = msgspec.json.encode(json)
        return self.client.request(method, path, headers=headers, **more)

    def submit(self, role="user", **changes):
        reply = self(role, "POST", "/v1/jobs", {**JOB, **changes})
        assert reply.status_code == 201, reply.text
        return reply.json()["job"]["id"]


class Supervisor:
    """Plays the supervisor of one node over the caller's HTTP."""

    def __init__(self, call, node_id="n0", supervisor_id="s1", devices=4):
        self.call, self.node_id, self.id, self.devices, self.seq = call, node_id, supervisor_id, devices, 0

    def post(self, route, message):
        return self.call(f"node:{self.node_id}", "POST", f"/v1/node/{route}", message)

    def hello(self, carries=(), challenge=None):
        node = make_node(self.node_id, self.devices)
        said = HelloRequest(version=1, supervisor_id=self.id, node=node, members=list(carries), challenge=challenge)
        reply = self.post("hello", said)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def lease(self, epochs=()):
        return self.post("lease", LeaseRequest(supervisor_id=self.id, node_id=self.node_id, epochs=list(epochs)))

    def framed(self, *events):
        self.seq += len(events)
        return [encode_envelope(self.seq - len(events) + number + 1, event) for number, event in enumerate(events)]

    def tell(self, *events):
        reply = self.post("events", EventsRequest(supervisor_id=self.id, events=self.framed(*events)))
        assert reply.status_code == 200, reply.text
        return reply.json()["acked"]

    def ship(self, job_id, epoch, stream, offset, data):
        chunk = StreamChunk(job_id=job_id, epoch=epoch, stream=stream, offset=offset, data=data)
        return self.post("streams", StreamsRequest(supervisor_id=self.id, chunks=[chunk]))

    def run(self, job_id, epoch=1):
        """Bring the job's part on this node to run."""
        place = {"job_id": job_id, "epoch": epoch, "generation": 0, "node_id": self.node_id}
        self.tell(MemberReady(**place, port=29500))
        self.tell(MemberStarted(**place, at_s=time.time()))

    def end(self, job_id, epoch=1, code=0, ranks=2, at_s=None, unsent=()):
        at_s = at_s or time.time()
        place = {"job_id": job_id, "epoch": epoch, "generation": 0}
        exits = [
            TaskExited(
                **place,
                exit=TaskExit(
                    rank=rank,
                    node_id=self.node_id,
                    code=code,
                    signal=None,
                    requested_by_phalanx=False,
                    ended_s=at_s,
                ),
            )
            for rank in range(ranks)
        ]
        self.tell(*exits, MemberStopped(**place, node_id=self.node_id, at_s=at_s, unsent=unsent))


def bearer(role):
    if role is None:
        return {}
    secret = node_token(SECRET, role.removeprefix("node:")) if role.startswith("node:") else TOKENS.get(role, role)
    return {"authorization": f"Bearer {secret}"}


def token_of(name, secret, **more):
    digest = hashlib.sha256(secret.encode()).hexdigest()
    return Token(id=f"t-{name}-{len(secret)}", user=name, sha256=digest, created_s=0.0, **more)


def make_node(node_id="n0", devices=4):
    return Node(
        id=node_id,
        engine="local",
        cpus=8,
        memory_bytes=8 << 30,
        state=NodeState.UP,
        virtual=True,
        hostname="here",
        devices=tuple(
            Device(index=i, uuid=f"VIRTUAL-{node_id}-{i}", model="virtual", memory_bytes=1 << 30, virtual=True)
            for i in range(devices)
        ),
    )


def unknown_event(seq):
    return Envelope(seq=seq, kind="FromTheFuture", body=msgspec.Raw(b"{}"))


def code(reply):
    """How a refusal is told: HTTP's number and our word."""
    return reply.status_code, reply.json()["error"]["code"]


def until(true, timeout_s=20.0):
    """Wait for the controller's thread; a hang guard, never an assertion about time."""
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)

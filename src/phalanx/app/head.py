"""The head: picks the classes, puts them together, and runs them until it is told to stop.

    python -m phalanx.app.head [--home DIR] [--port 7600] [--virtual 3x4] [--lease SECONDS] [--policy NAME]

One process: uvicorn's event loop on the main thread, the controller on its own, the local engine's watch on a third.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import logging
import logging.handlers
import os
import resource
import secrets
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from phalanx import __version__
from phalanx.api.app import build_app
from phalanx.api.parts import HeadParts
from phalanx.api.server import ApiServer, TlsListener
from phalanx.app.clock import SystemClock
from phalanx.app.home import Home, boot_id
from phalanx.app.joining import Joining, Listen, Salt, bind, secured
from phalanx.app.options import Options, arguments, options_of
from phalanx.app.ray import (
    LOOPBACK,
    RayOptions,
    ray_engine,
    ray_joining,
)
from phalanx.app.slurm import (
    SlurmOptions,
    slurm_engine,
)
from phalanx.controller.controller import Controller
from phalanx.controller.driver import Driver
from phalanx.controller.leases import MARGIN_S, LeaseBook
from phalanx.controller.mailboxes import Mailboxes
from phalanx.controller.telemetry import Telemetry
from phalanx.controller.turn import Settings
from phalanx.core.access.node_keys import node_token
from phalanx.core.errors import Conflict, PhalanxError
from phalanx.core.fleet.node import NodeState
from phalanx.core.ids import ProjectId, QueueId, TokenId, UserId
from phalanx.core.state.events import ForgetNode, NodeDead, PutProject, PutQueue, PutToken, PutUser
from phalanx.core.work.people import Token, User, UserRole
from phalanx.core.work.queue import Project, Queue
from phalanx.engines.joined.records import ENGINE_NAME
from phalanx.engines.local.engine import LocalEngine
from phalanx.engines.ray.engine import RayEngine
from phalanx.engines.slurm.engine import SlurmEngine
from phalanx.store.blobs.files import FileBlobs
from phalanx.store.logs.files import FileLogs
from phalanx.store.sql.store import SqliteStore

if TYPE_CHECKING:
    from phalanx.app.certificates import Authority

LEASES_GRANTED_WITHIN_S: Final = 10.0  # a stopping head grants long leases no longer than this
LOG_BYTES_MAX: Final = 10_000_000
HOSTS_OF_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
_log = logging.getLogger("phalanx.head")


def main(argv: list[str] | None = None) -> int:
    """Run a head. Returns its exit code; the reason for a refusal is the last line of its output."""
    try:
        given = arguments(argv)
        home = Home.open(given.home)
        lock = home.lock()
        try:
            _log_to(home)
            _open_many()
            Head(options_of(given, home, lock)).run()
        finally:
            os.close(lock)
    except PhalanxError as error:
        sys.stderr.write(f"phalanx: error: {error.message}{f' ({error.hint})' if error.hint else ''}\n")
        return int(error.exit_code)
    return 0


def _open_many() -> None:
    """Have as many descriptors as the system allows: a supervisor takes five of them, and the usual soft limit is 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Head:
    """One life of the head."""

    def __init__(self, options: Options) -> None:
        self._home = options.home
        self._options = options
        self._clock = SystemClock()
        self._head_id = secrets.token_hex(8)
        self._socket = _listen(options.port)
        self._url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._outer = bind(options.listen) if options.listen is not None else None
        self._listen = None
        if options.listen is not None and self._outer is not None:
            self._listen = replace(options.listen, port=self._outer.getsockname()[1])
        options.home.say_who_holds(options.lock, {"pid": os.getpid(), "url": self._url})
        options.home.write_private("cluster.json", json.dumps(options.remembered))
        self._secret = self._home.secret()
        self._set_aside_orphans()
        self._store = SqliteStore(self._home.at("phalanx.db"))
        self._logs = FileLogs(self._home.at("logs"))
        self._mailboxes, self._telemetry = Mailboxes(), Telemetry()
        self._engine = LocalEngine(
            home=self._home.path, environment=self._node_environment, token_of=lambda node: node_token(self._secret, node),
            revive_after_s=options.revive_after_s,
        )  # fmt: skip
        # Ray listens on every address whatever it is told, so its processes speak TLS also where nobody joins.
        self._authority = self._ca() if self._listen is not None or options.ray is not None else None
        self._ray = None if options.ray is None else self._on_ray(options.ray)
        self._slurm = None if options.slurm is None else self._on_slurm(options.slurm)
        self._engines = [engine for engine in (self._engine, self._slurm, self._ray) if engine is not None]
        settings = Settings(checkpoint_root=self._home.at("checkpoints"), output_root=self._home.at("outputs"))
        controller = Controller(
            world=self._store.load(),
            leases=LeaseBook(lease_s=options.lease_s, guard=threading.Lock()),
            guard=threading.Lock(),
            settings=settings,
            policy=options.policy,
        )
        self._driver = Driver(
            controller=controller, store=self._store, mailboxes=self._mailboxes, telemetry=self._telemetry,
            clock=self._clock, head_id=self._head_id, engines=self._engines,
        )  # fmt: skip
        self._server = self._api_server(settings)

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or a planned stop by the API."""
        # uvicorn stops on these by handlers of its own, restores ours, and raises the signal again: it must not end us before `_shut`.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        if self._slurm is not None:
            world = self._driver.controller.world
            live = [(world.jobs[attempt.job_id], attempt) for attempt in world.attempts.values()]
            self._slurm.adopt(list(world.nodes.values()), live)
        self._driver.start(leases_until_s=self._long_leases_until_s())
        try:
            self._bootstrap()
            self._bury_dead_nodes()
            self._server.run(sockets=[self._socket])
        finally:
            self._shut()

    def _on_slurm(self, options: SlurmOptions) -> SlurmEngine:
        if self._listen is None or self._authority is None:
            return slurm_engine(options, secret=self._secret, head_url=self._url, ca_pem="")
        return slurm_engine(options, secret=self._secret, head_url=self._listen.url, ca_pem=self._authority.ca_pem)

    def _api_server(self, settings: Settings) -> ApiServer:
        listen = self._listen
        tls, welcome, hosts = None, None, HOSTS_OF_LOOPBACK
        if listen is not None and self._outer is not None and self._authority is not None:
            tls, welcome = self._welcome(self._outer, listen, self._authority)
            hosts |= {listen.host, f"[{listen.host}]", socket.gethostname()}
        app = build_app(
            HeadParts(
                driver=self._driver, store=self._store, logs=self._logs, blobs=FileBlobs(self._home.at("blobs")),
                mailboxes=self._mailboxes, telemetry=self._telemetry, clock=self._clock, node_secret=self._secret,
                version=__version__, output_root=settings.output_root, checkpoint_root=settings.checkpoint_root,
                on_stop=self._stop_soon, on_long_leases=self._remember_long_leases, welcome=welcome, hosts_allowed=hosts,
            )
        )  # fmt: skip
        app.router.on_startup.append(self._ready)
        return ApiServer(app, tls=tls)

    def _ca(self) -> Authority:
        """Of a head that listens off loopback; `cryptography` is imported by those who need it alone."""
        from phalanx.app.certificates import Authority

        return Authority(self._home)

    def _welcome(self, outer: socket.socket, listen: Listen, authority: Authority) -> tuple[TlsListener, Joining]:
        """TLS off loopback, and how servers come in."""
        ray = ray_joining(self._ray)
        joining = Joining(
            authority=authority, where=listen, node_secret=self._secret, head_id=self._head_id,
            engine=ENGINE_NAME if ray is None else "ray", ray=ray, salt=Salt.kept(self._home),
        )  # fmt: skip
        return secured(outer, authority, listen), joining

    def _on_ray(self, options: RayOptions) -> RayEngine:
        return ray_engine(
            options, home=self._home, nodes=self._options.carried, authority=self._authority, far=self._listen is not None, environment=self._far_environment,
            address=LOOPBACK if self._listen is None else self._listen.host, token_of=lambda node: node_token(self._secret, node),
        )  # fmt: skip

    def _far_environment(self) -> dict[str, str]:
        """Where supervisors find the head that may be on another machine."""
        if self._listen is not None:
            return {"PHALANX_HEAD_URL": self._listen.url}
        return {"PHALANX_HEAD_URL": self._url, "PHALANX_HEAD_FILE": self._home.at("head.json")}

    def _ready(self) -> None:
        """The socket is bound and the world is loaded: say where the head is, then bring up the nodes."""
        record = {
            "url": self._url, "pid": os.getpid(), "head_id": self._head_id, "version": __version__, "started_s": time.time(),
            "listen": "" if self._listen is None else self._listen.url,
        }  # fmt: skip
        self._home.write_private("head.json", json.dumps(record))
        threading.Thread(target=self._open_engine, name="engine-open", daemon=True).start()
        _log.info(
            f"head {self._head_id} serves {self._url}, {len(self._options.nodes)} nodes, {self._options.policy.name}"
        )

    def _open_engine(self) -> None:
        for engine in self._engines:
            try:
                engine.open()
            except OSError:
                _log.exception("the %s nodes could not be started", engine.name)

    def _bury_dead_nodes(self) -> None:
        """Before anyone can submit: nodes of this machine that the store believes up and that do not run are down.

        They ended with an earlier head, or died while there was none; what is left of them has been swept.
        """
        living, gone = set(self._engine.adopt(self._options.nodes)), set() if self._ray is None else self._ray.gone()
        deaths = [
            NodeDead(
                node_id=node.id,
                supervisor_id=node.supervisor_id,
                why="it did not run when the head started",
                confirmed=True,
            )
            for node in self._driver.controller.world.nodes.values()
            if node.state is NodeState.UP
            and (
                node.id not in living if node.engine == self._engine.name else node.engine == "ray" and node.id in gone
            )
        ]
        engines = {self._engine.name} | ({self._slurm.name} if self._slurm is not None else set())
        deaths += [
            NodeDead(node_id=node.id, supervisor_id=None, why=f"this head does not use {node.engine}", confirmed=False)
            for node in self._driver.controller.world.nodes.values()
            if node.per_attempt and node.engine not in engines and node.state is NodeState.UP
        ]
        if deaths:
            self._driver.report(deaths).result(timeout=30)
        fleet = {node.id for node in self._options.nodes}
        for node in list(self._driver.controller.world.nodes.values()):
            if node.engine == self._engine.name and node.state is NodeState.DOWN and node.id not in fleet:
                with contextlib.suppress(PhalanxError):  # it still holds a job that has to settle first
                    self._driver.request(ForgetNode(node_id=node.id, by=UserId("head"))).result(timeout=30)

    def _set_aside_orphans(self) -> None:
        """Without a database, job numbers begin anew: output of the numbers before must not pass for theirs."""
        database = self._home.at("phalanx.db")
        if os.path.exists(database) and os.path.getsize(database):
            return
        for name in ("logs", "outputs", "checkpoints"):
            folder = self._home.at(name)
            if os.path.isdir(folder) and any(not name.startswith(".") for name in os.listdir(folder)):
                aside = f"{folder}.before-{time.strftime('%Y%m%d-%H%M%S')}"
                os.rename(folder, aside)
                _log.warning("there is no database: %s is set aside as %s", folder, aside)

    def _node_environment(self) -> dict[str, str]:
        return {
            "PHALANX_HEAD_URL": self._url,
            "PHALANX_HEAD_FILE": self._home.at("head.json"),
            "PHALANX_HOME": self._home.path,
            "PHALANX_NODE_ADDRESS": "127.0.0.1" if self._listen is None else self._listen.host,
        }

    def _bootstrap(self) -> None:
        """The first start: this user is the admin, with a token in the state folder; one project and one queue exist."""
        world, now_s = self._driver.controller.world, self._clock.now_s()
        admins = sorted(user.id for user in world.users.values() if user.role is UserRole.ADMIN and not user.disabled)
        if not world.users:
            admins = [UserId(getpass.getuser())]
            for event in (
                PutUser(user=User(id=admins[0], role=UserRole.ADMIN, created_s=now_s)),
                PutProject(project=Project(id=ProjectId("default"), created_s=now_s)),
                PutQueue(queue=Queue(id=QueueId("default"))),
            ):
                self._driver.request(event).result(timeout=30)
        if admins and not self._token_is_good(now_s):
            self._make_token(admins[0], now_s)

    def _token_is_good(self, now_s: float) -> bool:
        """Whether the state folder's token opens this head; it may be lost, or of another database."""
        try:
            with open(self._home.at("token"), encoding="utf-8") as file:
                known = self._store.token(hashlib.sha256(file.read().strip().encode()).hexdigest())
        except (OSError, UnicodeDecodeError):
            return False
        return known is not None and known.good(now_s)

    def _make_token(self, admin: UserId, now_s: float) -> None:
        secret = secrets.token_urlsafe(32)
        token = Token(
            id=TokenId(secrets.token_hex(6)), user=admin, sha256=hashlib.sha256(secret.encode()).hexdigest(), created_s=now_s,
            note="made by the head for its own state folder",
        )  # fmt: skip
        self._driver.request(PutToken(token=token)).result(timeout=30)
        self._home.write_private("token", secret)
        _log.info("made token %s for %s", token.id, admin)

    def _long_leases_until_s(self) -> float:
        """Up to when a planned stop of the head before has granted leases, on CLOCK_BOOTTIME of this boot; else 0."""
        record = self._home.read_json("planned_stop.json")
        return float(record["until_s"]) if record.get("boot_id") == boot_id() else 0.0

    def _stop_soon(self) -> None:
        self._server.should_exit = True

    def _remember_long_leases(self, lease_s: float) -> None:
        """Before the first is granted: a head that starts within their time must not believe a silent node dead."""
        until_s = self._clock.boottime_s() + lease_s + LEASES_GRANTED_WITHIN_S + MARGIN_S
        self._home.write_private("planned_stop.json", json.dumps({"until_s": until_s, "boot_id": boot_id()}))

    def _shut(self) -> None:
        """End in order. Nodes on which jobs run go on without the head; idle ones end with it."""
        running = bool(self._driver.controller.world.attempts)
        self._driver.stop()
        for engine in self._engines:
            engine.close(keep_nodes=running)
        self._logs.close()
        self._store.close()
        self._home.remove("head.json")
        _log.info("head %s stopped; nodes %s", self._head_id, "go on" if running else "ended")


def _listen(port: int) -> socket.socket:
    """The loopback socket, bound before anything else happens, so that a second head changes nothing.

    Raises:
        Conflict: the port is taken.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise Conflict(
            f"port {port} on 127.0.0.1: {error.strerror}", hint="phalanx up --port PORT takes another"
        ) from error
    listener.listen(1024)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.set_inheritable(False)
    return listener


def _log_to(home: Home) -> None:
    handler = logging.handlers.RotatingFileHandler(home.at("head.log"), maxBytes=LOG_BYTES_MAX, backupCount=3)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=os.environ.get("PHALANX_LOG", "INFO").upper(), handlers=[handler])


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.exit(main())

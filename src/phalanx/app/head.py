"""The head: chooses the classes, connects them, and runs them until it is asked to stop.

    python -m phalanx.app.head [--home DIR] [--port 7600] [--virtual 3x4] [--lease SECONDS] [--policy NAME]

One process: uvicorn's event loop on the main thread, the controller on a second, the monitoring of the local engine on a third.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import hashlib
import json
import logging
import logging.handlers
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from phalanx import __version__
from phalanx.api.app import build_app
from phalanx.api.http.relay_agent import RelaySettings
from phalanx.api.http.server import ApiServer, TlsSocket
from phalanx.api.services import HeadServices, JobTracing
from phalanx.app.account_name import name_account
from phalanx.app.audit_checkpoints import FileAuditCheckpoints
from phalanx.app.clock import SystemClock
from phalanx.app.engine_pools import keep_engine_pools
from phalanx.app.engines import create_engines, create_provider, engine_context, parallel_calls
from phalanx.app.join_service import HeadJoinService, ListenAddress, with_tls
from phalanx.app.machine_files import MachineFiles
from phalanx.app.options import HeadOptions, parse_arguments, resolve_options
from phalanx.app.renewal_delegate import RenewalHandover, new_secret
from phalanx.app.resources import (
    HeadResources,
    bind_listeners,
    head_file_record,
    single_head_resources,
)
from phalanx.app.secret_key_file import SecretKeyFile
from phalanx.app.state_folder import StateFolder
from phalanx.controller.audit_trail import AuditTrail
from phalanx.controller.controller import Controller
from phalanx.controller.driver import ControllerDriver
from phalanx.controller.leases import LONG_LEASES_GRANTED_WITHIN_S, MARGIN_S, LeaseBook
from phalanx.controller.mailboxes import Mailboxes
from phalanx.controller.provider_calls import ProviderCalls
from phalanx.controller.step_context import ControllerSettings
from phalanx.controller.telemetry import Telemetry
from phalanx.controller.usage.shared_hours import shared_hours
from phalanx.controller.usage.usage_recorder import UsageRecorder
from phalanx.core.access.audit import AuditCall, audit_key
from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.node import NodeState
from phalanx.core.ids import ProjectId, QueueId, TokenId, UserId
from phalanx.core.state.events import PutProject, PutQueue, PutToken, PutUser, RemoveNode
from phalanx.core.state.records import USERS
from phalanx.core.state.reports import NodeDied
from phalanx.core.work.queue import Project, Queue
from phalanx.core.work.users import Token, User, UserRole
from phalanx.node.logs.log_format import OneLineFormatter
from phalanx.node.processes.file_limits import raise_file_limit
from phalanx.planner.facts.device_speeds import device_speed_facts
from phalanx.planner.facts.failure_rules import shipped_rules
from phalanx.ports.engine import Discovery
from phalanx.providers.identity.oidc import OidcProvider
from phalanx.providers.notifications.apprise_notifier import AppriseNotifier
from phalanx.providers.tracing.otlp_exporter import OtlpExporter
from phalanx.providers.tracing.position_file import PositionFile
from phalanx.store.blobs.files import FileBlobs
from phalanx.store.history.recorder import HistoryRecorder
from phalanx.store.logs.files import FileLogs
from phalanx.store.sql.sqlite.history_file import HistoryFile
from phalanx.store.sql.sqlite.store import SqliteStore
from phalanx.store.unknown_files import describe_unknown
from phalanx.web.command_hints import error_line
from phalanx.wire.renewals import RenewalSettings

if TYPE_CHECKING:
    from phalanx.app.certificates import CertificateAuthority

M_ARENA_MAX: Final = -8  # of mallopt(3)
ARENAS_MAX: Final = 2  # one for the interpreter, which runs one thread at a time, one for SQLite and disk access
LOG_BYTES_MAX: Final = 10_000_000
HEAD_CALL: Final = AuditCall(user=UserId("head"), token_id=TokenId(""), origin="head", action="start")
_log = logging.getLogger("phalanx.head")


def main(argv: list[str] | None = None) -> int:
    """Run a head, and return its exit code; the last line of its output has the reason of an error."""
    try:
        name_account()
        given = parse_arguments(argv)
        home = StateFolder.open(given.home)
        lock = home.lock()
        try:
            _log_to(home)
            raise_file_limit()
            limit_malloc_arenas()
            _run(resolve_options(given, home, lock))
        finally:
            os.close(lock)
    except PhalanxError as error:
        sys.stderr.write(f"phalanx: error: {error_line(error.message, error.hint)}\n")
        return int(error.exit_code)
    return 0


def _run(options: HeadOptions) -> None:
    if options.store:
        from phalanx.app.standby import StandbyHead  # psycopg is an extra that a single head does not need

        StandbyHead(options).run(lambda resources: Head(options, resources))
        return
    options.state_folder.remove("store")
    listeners = bind_listeners(options.port, options.listen, options.programs_port, options.programs_host)
    options.state_folder.write_lock_holder(options.lock, {"pid": os.getpid(), "url": listeners.loopback_url})
    records, history = options.state_folder.path_of("phalanx.db"), options.state_folder.path_of("history.db")
    resources = single_head_resources(
        options.state_folder, listeners, lambda: SqliteStore(records), lambda: HistoryFile(history)
    )
    Head(options, resources).run()


def limit_malloc_arenas() -> None:
    """Limit glibc to two heaps instead of one per thread: freed pages stay in the heap of their thread (docs/reliability/load.md)."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS_MAX)


class Head:
    """One process of the head."""

    def __init__(self, options: HeadOptions, resources: HeadResources) -> None:
        self._home, self._options, self._resources = options.state_folder, options, resources
        self._clock = SystemClock()
        self._head_id, self._secret = resources.head_id, resources.secret
        self._socket, self._url = resources.listeners.loopback, resources.listeners.loopback_url
        self._outer, self._listen = resources.listeners.external, resources.listeners.listen
        if (
            resources.elector is None and options.previous_lease_s > options.lease_s
        ):  # recorded before cluster.json is overwritten
            self._home.record_long_leases(self._clock.boottime_s() + options.previous_lease_s + MARGIN_S)
        options.state_folder.write_private("cluster.json", json.dumps(options.to_store))
        self._audit_key, self._anchors = (
            audit_key(self._secret),
            FileAuditCheckpoints(self._home.path_of("audit.anchors")),
        )
        self._store = resources.open_store()
        self._logs = FileLogs(self._files("logs"))
        self._mailboxes, self._telemetry = Mailboxes(), Telemetry()
        context = engine_context(options, resources.listeners, secret=self._secret, sole_head=resources.elector is None)
        self._engines = create_engines(options, context, resources.default_engine)
        self._providers = ProviderCalls(
            create=lambda name: create_provider(name, options, context),
            parallel_calls=parallel_calls,
        )
        settings = ControllerSettings(
            checkpoint_root=self._files("checkpoints"),
            output_root=self._files("outputs"),
            storage_key=self._head_id,
            rules=shipped_rules(),
        )
        world = self._store.load()
        self._report_unknown_files(world.next_job_seq - 1)
        controller = Controller(
            world=world,
            leases=LeaseBook(lease_s=options.lease_s, guard=threading.Lock()),
            guard=threading.Lock(),
            settings=settings,
            policy=options.policy,
            head_id=self._head_id,
            device_facts=device_speed_facts,
        )
        self._usage = UsageRecorder(world, self._store, self._telemetry, self._clock, waits=controller.waits)
        self._history = HistoryRecorder(resources.open_history(), self._clock)
        self._telemetry.sample_listeners.append(self._history.add_samples)
        self._telemetry.step_listeners.append(self._history.add_steps)
        self._driver = ControllerDriver(
            controller=controller,
            store=self._store,
            mailboxes=self._mailboxes,
            telemetry=self._telemetry,
            clock=self._clock,
            head_id=self._head_id,
            engines=self._engines,
            providers=self._providers,
            on_commit=self._usage.committed,
            audit=AuditTrail(key=self._audit_key),
            on_superseded=lambda why: None if resources.elector is None else resources.elector.lose_term(why),
        )
        self._server = self._api_server(settings)

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or a planned stop by the API."""
        # uvicorn handles these itself, then restores these handlers and raises the signal again; that must not end the process yet.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        world = self._driver.controller.world
        known = list(world.nodes.values())
        live = [(world.jobs[attempt.job_id], attempt) for attempt in world.attempts.values()]
        found = [engine.discover(known, live) for engine in self._engines]
        self._driver.start(leases_until_s=self._long_leases_until_s())
        self._usage.start(self._driver.report)
        self._history.start()
        try:
            self._anchors.check_not_truncated(self._driver.audit_tip)
            self._bootstrap()
            keep_engine_pools(
                self._options.engine, self._options.engine_options, self._driver, self._providers, self._clock.now_s()
            )
            self._admit_peer_heads()
            self._mark_missing_nodes_down(found)
            self._server.run(sockets=[self._socket, *self._resources.listeners.programs[:1]])
        finally:
            self._shut_down()

    def _files(self, name: str) -> str:
        """Return the path of a folder with files of jobs."""
        return os.path.join(self._resources.files_root, name)

    def _api_server(self, settings: ControllerSettings) -> ApiServer:
        listen, listeners = self._listen, self._resources.listeners
        tls, welcome, programs_tls = None, None, None
        self._renewals: RenewalHandover | None = None
        if listen is not None and self._outer is not None:
            authority = self._ca()
            tls, welcome = self._join_service(self._outer, listen, authority)
            self._renewals = self._renewal_handover(authority)
            if len(listeners.programs) > 1:
                outer, below = listeners.programs[1], listeners.programs_host
                programs_tls = with_tls(outer, authority, listen, stem="programs", below=below)
        app = build_app(
            HeadServices(
                controller=self._driver,
                store=self._store,
                logs=self._logs,
                blobs=FileBlobs(self._files("blobs")),
                mailboxes=self._mailboxes,
                telemetry=self._telemetry,
                history=self._history,
                usage_hours=partial(shared_hours, self._store, self._usage.hours),
                unshared_usage_hours=self._usage.hours,
                usage_spans=self._usage.spans,
                attempt_use=self._usage.attempt_use,
                part_states=self._usage.part_states,
                state_totals=self._usage.state_totals,
                waste=self._usage.waste,
                client_active=self._usage.client_active,
                notifier=AppriseNotifier(),
                tracing=self._tracing(),
                identity=OidcProvider(self._home.path_of("secrets"), self._clock.now_s),
                secret_keys=SecretKeyFile(
                    home=self._home, given=self._options.secrets_key, shares_store=self._resources.elector is not None
                ),
                clock=self._clock,
                node_secret=self._secret,
                version=__version__,
                output_root=settings.output_root,
                checkpoint_root=settings.checkpoint_root,
                archive_root=self._files("archives"),
                on_stop=self._stop_soon,
                before_long_leases=self._remember_long_leases,
                join_service=welcome,
                hosts_allowed=listeners.hosts,
                programs=listeners.program_listener,
                url=listeners.url,
                audit_key=self._audit_key,
                audit_checkpoints=self._anchors,
                token_lifetime_max_s=self._options.token_life_max_s,
                leader_status=self._resources.elector,
                renewals=self._renewals,
                output_elsewhere=self._resources.output_elsewhere,
                check_provider=lambda provider, settings: self._providers.provider(provider).check(settings),
                offer=lambda provider, terms: self._providers.provider(provider).offer(terms),
            )
        )
        app.router.on_startup.append(self._on_ready)
        take = (lambda _: False) if self._renewals is None else self._renewals.take
        relay = None
        if listen is not None and listen.is_relay:
            assert welcome is not None  # a head with a relay listens
            key = self._options.relay_key
            relay = RelaySettings(host=listen.host, port=listen.port, key=key, status=welcome.relay)
        return ApiServer(app, tls=tls, programs_tls=programs_tls, relay=relay, hand_over=take)

    def _tracing(self) -> JobTracing | None:
        """Return where traces of jobs go; None without a collector."""
        if not self._options.otlp:
            return None
        position = PositionFile(self._files("trace_position"))
        exporter = OtlpExporter(self._options.otlp, __version__)
        return JobTracing(exporter=exporter, read_position=position.read, write_position=position.write)

    def _ca(self) -> CertificateAuthority:
        """Return the CA; `cryptography` is imported only if needed."""
        from phalanx.app.certificates import CertificateAuthority

        return CertificateAuthority(self._home)

    def _join_service(
        self, outer: socket.socket, listen: ListenAddress, authority: CertificateAuthority
    ) -> tuple[TlsSocket, HeadJoinService]:
        """Return the TLS listener off loopback, and the service by which servers join."""
        joining = HeadJoinService(
            authority=authority,
            address=listen,
            node_secret=self._secret,
            head_id=self._head_id,
            engines=self._engines[::-1],  # the chosen one first
            salt=self._resources.salt,
            machine_files=MachineFiles(path=self._home.path_of("machine-files.tar.gz")),
        )
        return with_tls(outer, authority, listen), joining

    def _renewal_handover(self, authority: CertificateAuthority) -> RenewalHandover:
        """Return what hands renewals to another process. Beside other heads it answers by its own clock until the term ends."""
        leases = self._driver.leases
        certificate, key = authority.files("head")
        host, port = self._socket.getsockname()[:2]
        handover = RenewalHandover(
            settings=RenewalSettings(
                certificate=certificate, key=key, api=(host, port), secret=new_secret(), head_id=self._head_id
            ),
            crowded=lambda: leases.crowded,
            attach=leases.attach_delegate,
        )
        if (elector := self._resources.elector) is not None:
            elector.on_renewed = handover.leads_until
            handover.leads_until(elector.leads_until_s())
        return handover

    def _on_ready(self) -> None:
        """Publish the head's address and start the nodes, once the socket is bound and the state is loaded."""
        self._write_head_file()
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

    def _mark_missing_nodes_down(self, found: Sequence[Discovery]) -> None:
        """Mark nodes down that the store has as up but that do not run, before any job can be submitted.

        They ended with an earlier head, or died while no head ran; their remaining processes were removed.
        """
        nodes, used = self._driver.controller.world.nodes, {engine.name for engine in self._engines}
        deaths = [death for one in found for death in one.deaths]
        deaths += [
            NodeDied(node_id=node.id, supervisor_id=None, why=f"this head does not use {node.engine}", confirmed=False)
            for node in nodes.values()
            if node.per_attempt and node.engine not in used and node.state is NodeState.UP
        ]
        if deaths:
            self._driver.report(deaths).result(timeout=30)
        for node_id in (node_id for one in found for node_id in one.retired):
            if nodes[node_id].state is NodeState.DOWN:
                with contextlib.suppress(PhalanxError):  # it still has a job that must end first
                    self._driver.request(RemoveNode(node_id=node_id, by=UserId("head"))).result(timeout=30)

    def _report_unknown_files(self, last_job_seq: int) -> None:
        """Log which folders belong to jobs that the database does not know: they are never read, and nothing removes them."""
        for text in describe_unknown(self._resources.files_root, last_job_seq):
            _log.warning("%s", text)

    def _bootstrap(self) -> None:
        """At the first start, make this user the admin, with a token in the state folder, and create one project and one queue."""
        world, now_s = self._driver.controller.world, self._clock.now_s()
        admins = sorted(user.id for user in world.table(USERS).values() if user.stays_admin)
        if not world.table(USERS):
            admins = [UserId(getpass.getuser())]
            for event in (
                PutUser(user=User(id=admins[0], role=UserRole.ADMIN, created_s=now_s)),
                PutProject(project=Project(id=ProjectId("default"), created_s=now_s)),
                PutQueue(queue=Queue(id=QueueId("default"))),
            ):
                self._driver.request(event, HEAD_CALL).result(timeout=30)
        if admins and not self._token_is_good(now_s):
            self._make_token(admins[0], now_s)

    def _admit_peer_heads(self) -> None:
        """Accept the tokens of the other heads' state folders, so that commands work on their machines."""
        campaign = self._resources.elector
        if campaign is None:
            return
        campaign.on_heads_changed = self._admit_peer_heads
        users = self._driver.controller.world.table(USERS)
        for head in campaign.heads():
            if head.token_sha256 and self._store.token(head.token_sha256) is None:
                admins = sorted(user.id for user in list(users.values()) if user.stays_admin)
                owner = next((name for name in admins if name == head.user), admins[0] if admins else None)
                if owner is not None:
                    token = Token(
                        id=TokenId(secrets.token_hex(6)),
                        user=owner,
                        sha256=head.token_sha256,
                        created_s=self._clock.now_s(),
                        note=f"made by the head {head.name} for its own state folder",
                    )
                    self._driver.request(PutToken(token=token), HEAD_CALL)  # retried at the next call if it is refused
        self._write_head_file()

    def _write_head_file(self) -> None:
        """Write head.json, from which clients and supervisors of this machine read the address of the head."""
        found = head_file_record(self._head_id, self._resources.listeners, self._resources.elector)
        self._home.write_private("head.json", json.dumps(found))

    def _token_is_good(self, now_s: float) -> bool:
        """Whether this head accepts the state folder's token; the token may be lost, or of another database."""
        try:
            with open(self._home.path_of("token"), encoding="utf-8") as file:
                known = self._store.token(hashlib.sha256(file.read().strip().encode()).hexdigest())
        except (OSError, UnicodeDecodeError):
            return False
        return known is not None and known.is_valid(now_s)

    def _make_token(self, admin: UserId, now_s: float) -> None:
        secret = secrets.token_urlsafe(32)
        token = Token(
            id=TokenId(secrets.token_hex(6)),
            user=admin,
            sha256=hashlib.sha256(secret.encode()).hexdigest(),
            created_s=now_s,
            note="made by the head for its own state folder",
        )
        self._driver.request(PutToken(token=token), HEAD_CALL).result(timeout=30)
        self._home.write_private("token", secret)
        _log.info("made token %s for %s", token.id, admin)

    def _long_leases_until_s(self) -> float:
        """Return until when leases of earlier heads may last, in CLOCK_BOOTTIME of this boot; 0 if no longer than this head's own."""
        if self._resources.elector is not None:
            return self._resources.leases_until_s
        return self._home.long_leases_until_s()

    def _stop_soon(self) -> None:
        self._server.should_exit = True

    def _remember_long_leases(self, lease_s: float) -> None:
        """Record long leases before the first is granted: a head that starts while they last must not mark silent nodes down."""
        if self._resources.elector is not None:
            self._resources.elector.record_long_leases(lease_s + LONG_LEASES_GRANTED_WITHIN_S + MARGIN_S)
            return
        self._home.record_long_leases(self._clock.boottime_s() + lease_s + LONG_LEASES_GRANTED_WITHIN_S + MARGIN_S)

    def _shut_down(self) -> None:
        """Shut down in order. If jobs run, all nodes continue without the head; otherwise they end with it."""
        running = bool(self._driver.controller.world.attempts)
        if self._renewals is not None:
            self._renewals.close()
        self._usage.stop()
        self._history.stop()
        self._providers.close(keep_nodes=running)  # before the driver: what is stopped now is still recorded
        self._driver.stop()
        self._anchors.record(self._driver.audit_tip)
        for engine in self._engines:
            engine.close(keep_nodes=running)
        self._logs.close()
        self._store.close()
        self._home.remove("head.json")
        _log.info("head %s stopped; nodes %s", self._head_id, "continue" if running else "ended")


def _log_to(home: StateFolder) -> None:
    handler = logging.handlers.RotatingFileHandler(home.path_of("head.log"), maxBytes=LOG_BYTES_MAX, backupCount=3)
    handler.setFormatter(OneLineFormatter())
    logging.basicConfig(level=os.environ.get("PHALANX_LOG", "INFO").upper(), handlers=[handler])


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.exit(main())

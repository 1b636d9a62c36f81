"""One of several heads: it is a standby, with open sockets and running local nodes, until it leads and becomes a normal head.

A head that loses its term does not clean up: it replaces its process image (exec). So everything that it was doing when it was stopped,
disconnected or suspended ends there, and it is a standby again.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from phalanx import __version__
from phalanx.api.http.follower import FollowerApp
from phalanx.api.http.security import SecurityMiddleware
from phalanx.api.http.server import HeadServer, TlsSocket
from phalanx.app.clock import SystemClock
from phalanx.app.engines import create_default_engine, engine_context
from phalanx.app.join_service import StoredJoinSalt, with_tls
from phalanx.app.leader_elector import LeaderElector
from phalanx.app.options import HeadOptions
from phalanx.app.resources import HeadResources, bind_listeners, head_file_record
from phalanx.controller.driver import tune_gc
from phalanx.controller.leadership import Tenure, previous_leases_s
from phalanx.controller.leases import MARGIN_S
from phalanx.core.errors import TryLater
from phalanx.node.logs.log_format import log_with_timeout
from phalanx.node.membership import running_attempts
from phalanx.ports.election import Election, ElectionUnavailable, HeadRecord
from phalanx.ports.history import HistoryStore
from phalanx.ports.store import Store

if TYPE_CHECKING:
    from phalanx.app.certificates import CertificateAuthority

_NODE_SECRET: Final = "node_secret"  # noqa: S105  # the name of one
_CA_KEY: Final = "tls/ca.key"
_CA: Final = "tls/ca.pem"
_SALT: Final = "join_salt"
_log = logging.getLogger("phalanx.heads")


@dataclass(slots=True, kw_only=True)
class SharedJoinSalt(StoredJoinSalt):
    """The salt of the join tokens of all heads, stored in the shared store."""

    election: Callable[[], Election]

    def renew(self) -> None:
        """Replace the salt. It is stored first, so that revoked tokens stay revoked."""
        fresh = secrets.token_hex(16)
        election = self.election()
        try:
            election.replace_shared(_SALT, fresh)
        finally:
            election.close()
        self.value = fresh


class LeadingHead(Protocol):
    """A head whose state is loaded."""

    def run(self) -> None:
        """Lead until asked to stop."""
        ...


class StandbyHead:
    """One process of a head, from its start until it leads."""

    def __init__(self, options: HeadOptions) -> None:
        self._options, self._home = options, options.state_folder
        self._clock = SystemClock()
        self._head_id = secrets.token_hex(8)
        # A standby must not write head.json any more once this head leads.
        self._head_file_lock = threading.Lock()
        self._listeners = bind_listeners(options.port, options.listen, options.programs_port, options.programs_host)
        options.state_folder.write_lock_holder(options.lock, {"pid": os.getpid(), "url": self._listeners.loopback_url})
        self._election = self._open_election()
        self._share_secrets()
        self._campaign = LeaderElector(
            self._election,
            self._own_record(),
            self._clock,
            lease_s=options.lease_s,
            on_lost=self._restart_process,
            on_heads_changed=self._write_head_file,
        )
        self._engine = create_default_engine(
            options, engine_context(options, self._listeners, secret=self._home.secret(), sole_head=False)
        )
        self._terminated = threading.Event()
        self._leading = False

    def run(self, make: Callable[[HeadResources], LeadingHead]) -> None:
        """Be a standby until this head is elected, lead with the head that `make` builds, and release the term at the end."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._terminated.set())
        options = self._options
        self._home.write_private("cluster.json", json.dumps(options.to_store))
        self._home.write_private("store", options.store)
        self._engine.discover((), ())
        self._write_head_file()
        threading.Thread(target=self._engine.open, name="engine-open", daemon=True).start()
        tune_gc()  # now, so that a takeover does not scan all that was imported
        led = False
        try:
            made = self._stand_by(make)
            if made is not None and not self._terminated.is_set():
                self._lead(made)
                led = True
        finally:
            if not led:
                self._engine.close(keep_nodes=self._has_running_attempts())
                self._home.remove("head.json")
            self._campaign.release()

    # ---- shared secrets -----------------------------------------------------------------------------------------------

    def _open_election(self) -> Election:
        from phalanx.store.sql.postgres.election import PostgresElection

        return PostgresElection(self._options.store, head_id=self._head_id)

    def _share_secrets(self) -> None:
        """Store the cluster's secrets in the state folder. The secrets of the first head are used by all heads.

        Raises:
            ElectionUnavailable: the database is unreachable, and this folder was never used with it.
        """
        mine = {
            _NODE_SECRET: self._home.secret().hex(),
            _SALT: str(self._home.read_json("join_salt.json").get("salt", "")),
        }
        if self._authority() is not None:  # which creates the files if needed
            for name in (_CA_KEY, _CA):
                with open(self._home.path_of(name), encoding="ascii") as file:
                    mine[name] = file.read()
        try:
            self._election.prepare()
            shared = self._election.share(mine)
        except ElectionUnavailable as error:
            if self._options.store != self._options.previous_store:
                raise
            _log.warning("%s; this head is a standby until the database answers", error.message)
            return
        for name in (_NODE_SECRET, _CA_KEY, _CA):
            if name in mine and shared[name] != mine[name]:
                _log.warning("%s is replaced by that of the other heads; the old one is saved as %s.before", name, name)
                self._home.write_private(f"{name}.before", mine[name])
                self._home.write_private(name, shared[name])

    def _own_record(self) -> HeadRecord:
        where = self._listeners.listen.url if self._listeners.listen is not None else self._listeners.loopback_url
        port = where.rpartition(":")[2]
        return HeadRecord(
            name=f"{socket.gethostname()}:{port}",
            head_id=self._head_id,
            url=where,
            version=__version__,
            user=getpass.getuser(),
            token_sha256=self._token_sha256(),
            started_s=time.time(),
        )

    def _token_sha256(self) -> str:
        """Return the hash of the state folder's token, created if missing. The leader accepts the token, so commands work on this machine."""
        try:
            with open(self._home.path_of("token"), encoding="ascii") as file:
                secret = file.read().strip()
        except (OSError, UnicodeDecodeError):
            secret = ""
        if not secret:
            secret = secrets.token_urlsafe(32)
            self._home.write_private("token", secret)
        return hashlib.sha256(secret.encode()).hexdigest()

    def _write_head_file(self) -> None:
        """Write head.json, from which clients and supervisors of this machine read the address of the head."""
        with self._head_file_lock:
            if not self._leading:
                found = head_file_record(self._head_id, self._listeners, self._campaign, role="standby")
                self._home.write_private("head.json", json.dumps(found))

    # ---- standby ------------------------------------------------------------------------------------------------------

    def _stand_by(self, make: Callable[[HeadResources], LeadingHead]) -> Future[LeadingHead] | None:
        """Serve as a standby until this head leads or is asked to stop. The head is built while the standby's server shuts down."""
        authority = self._authority()
        app = FollowerApp(self._campaign, version=__version__, ca_pem="" if authority is None else authority.ca_pem)
        server = HeadServer(
            SecurityMiddleware(app, hosts_allowed=self._listeners.hosts),
            tls=self._tls(authority),
            lifespan="off",
            timeout_graceful_shutdown=1,  # standby answers take no time
        )
        made: Future[LeadingHead] = Future()

        def stand() -> None:
            tenure = self._campaign.wait_for_term()
            server.should_exit = True
            if tenure is None or self._terminated.is_set():
                return
            with self._head_file_lock:
                self._leading = True
            try:
                made.set_result(make(self._resources(tenure)))
            except BaseException as error:  # noqa: BLE001  # raised on the main thread
                made.set_exception(error)

        waiting = threading.Thread(target=stand, name="campaign", daemon=True)
        waiting.start()
        server.run(
            sockets=[self._listeners.loopback.dup()]
        )  # uvicorn closes its sockets; the leader still needs this one
        if self._campaign.leads():
            waiting.join()
        else:
            self._campaign.stop_waiting()
            waiting.join(timeout=10.0)
        return made if made.done() else None

    def _tls(self, authority: CertificateAuthority | None) -> TlsSocket | None:
        if authority is None or self._listeners.external is None or self._listeners.listen is None:
            return None
        return with_tls(self._listeners.external.dup(), authority, self._listeners.listen)

    def _authority(self) -> CertificateAuthority | None:
        if self._listeners.listen is None:
            return None
        from phalanx.app.certificates import CertificateAuthority  # `cryptography` is imported only if needed

        return CertificateAuthority(self._home)

    # ---- leader -------------------------------------------------------------------------------------------------------

    def _lead(self, made: Future[LeadingHead]) -> None:
        try:
            made.result().run()
        except TryLater as error:  # the database became unreachable between the claim and the loading
            if self._terminated.is_set():
                raise
            self._campaign.lose_term(error.message)

    def _resources(self, tenure: Tenure) -> HeadResources:
        """Return the resources of the leading head. Supervisors may still have longer leases of earlier heads."""
        before = self._campaign.previous_leader
        election = self._open_election()
        try:
            shared = election.share({})
        finally:
            election.close()
        others = [head.url for head in self._campaign.heads() if head.name != self._campaign.own_record.name]
        return HeadResources(
            head_id=self._head_id,
            listeners=self._listeners,
            secret=self._home.secret(),
            salt=SharedJoinSalt(value=shared.get(_SALT, ""), election=self._open_election),
            files_root=self._options.shared_files or self._home.path,
            open_store=lambda: self._store(tenure.term),
            open_history=lambda: self._history(tenure.term),
            default_engine=self._engine,
            elector=self._campaign,
            leases_until_s=self._clock.boottime_s() + previous_leases_s(before) + MARGIN_S,
            output_elsewhere="" if self._options.shared_files else ", ".join(others) or before.url,
        )

    def _store(self, term: int) -> Store:
        from phalanx.store.sql.postgres.election import leading_dsn
        from phalanx.store.sql.postgres.store import PostgresStore

        return PostgresStore(leading_dsn(self._options.store, self._head_id), term=term)

    def _history(self, term: int) -> HistoryStore:
        from phalanx.store.sql.postgres.election import leading_dsn
        from phalanx.store.sql.postgres.history_table import HistoryTable

        return HistoryTable(leading_dsn(self._options.store, self._head_id), term=term)

    def _restart_process(self, _why: str) -> None:
        """Replace this process by a new one with the same arguments. Descriptors close on exec; the nodes of this machine continue."""
        try:
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  # no shell
        except OSError as error:
            # Python was moved or removed: exit, rather than be neither a leader nor a standby.
            reason = str(error)
            log_with_timeout(lambda: _log.critical("the head cannot restart and ends: %s", reason))
            os._exit(os.EX_OSERR)

    def _has_running_attempts(self) -> bool:
        """Whether attempts run on this machine's nodes: they continue under the next leader."""
        return bool(running_attempts(self._home.path))

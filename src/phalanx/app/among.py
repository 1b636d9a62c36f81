"""A head among others: it stands by, with its doors open and its machine's nodes up, until it leads; then it is a head like any other.

A head that loses its term does not tidy up: it begins anew, as a process image that knows nothing of what it held. So whatever it was
about to do when it was stopped, cut off or suspended ends there, and it stands by.
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
from phalanx.api.rim import Rim
from phalanx.api.server import DoorServer, TlsListener
from phalanx.api.standing import Standby
from phalanx.app.campaign import Campaign
from phalanx.app.clock import SystemClock
from phalanx.app.ground import Ground, head_record, open_doors
from phalanx.app.joining import Salt, secured
from phalanx.app.machine import local_engine, node_environment
from phalanx.app.options import Options
from phalanx.controller.driver import calm_collector
from phalanx.controller.leadership import Tenure, granted_s
from phalanx.controller.leases import MARGIN_S
from phalanx.core.errors import TryLater
from phalanx.engines.joined.records import works
from phalanx.node.shell.journal import briefly
from phalanx.ports.election import Election, HeadRecord, NoElection
from phalanx.ports.store import Store
from phalanx.store.lost_numbers import RESTORES, TERMS, judged, restores_of, with_term

if TYPE_CHECKING:
    from phalanx.app.certificates import Authority

_NODE_SECRET: Final = "node_secret"  # noqa: S105  # the name of one
_CA_KEY: Final = "tls/ca.key"
_CA: Final = "tls/ca.pem"
_SALT: Final = "join_salt"
_log = logging.getLogger("phalanx.heads")


@dataclass(slots=True, kw_only=True)
class SharedSalt(Salt):
    """Of the join tokens of all heads: kept in the shared store."""

    election: Callable[[], Election]

    def renew(self) -> None:
        """Have another: written first, so that a token that was ended stays so."""
        fresh = secrets.token_hex(16)
        election = self.election()
        try:
            election.replace_shared(_SALT, fresh)
        finally:
            election.close()
        self.value = fresh


class Leading(Protocol):
    """A head whose world is loaded."""

    def run(self) -> None:
        """Lead, until told to end."""
        ...


class Standing:
    """One process among the heads, up to where it leads."""

    def __init__(self, options: Options) -> None:
        self._options, self._home = options, options.home
        self._clock = SystemClock()
        self._head_id = secrets.token_hex(8)
        # What a standby writes into head.json is written before we lead, or not at all.
        self._telling = threading.Lock()
        self._doors = open_doors(options.port, options.listen)
        options.home.say_who_holds(options.lock, {"pid": os.getpid(), "url": self._doors.inner_url})
        self._election = self._voice()
        self._share()
        self._campaign = Campaign(
            self._election,
            self._row(),
            self._clock,
            grants_s=options.lease_s,
            on_lost=self._begin_anew,
            on_news=self._tell_home,
        )
        self._local = local_engine(options, self._home.secret(), lambda: node_environment(options, self._doors))
        self._terminated = threading.Event()
        self._leading = False

    def run(self, make: Callable[[Ground], Leading]) -> None:
        """Stand by, lead with what `make` gives when it is our turn, and hand over at the end."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._terminated.set())
        options = self._options
        self._home.write_private("cluster.json", json.dumps(options.remembered))
        self._home.write_private("store", options.store)
        self._local.adopt(options.nodes)
        self._tell_home()
        threading.Thread(target=self._local.open, name="engine-open", daemon=True).start()
        calm_collector()  # once now and not within a takeover: what was imported is no garbage
        led = False
        try:
            made = self._stand_by(make)
            if made is not None and not self._terminated.is_set():
                self._lead(made)
                led = True
        finally:
            if not led:
                self._local.close(keep_nodes=self._carries())
                self._home.remove("head.json")
            self._campaign.release()

    # ---- what the heads share -----------------------------------------------------------------------------------------

    def _voice(self) -> Election:
        from phalanx.store.sql.postgres.election import PostgresElection

        return PostgresElection(self._options.store, head_id=self._head_id)

    def _share(self) -> None:
        """Have the cluster's secrets in our folder: as they count, which is as the first head offered them.

        Raises:
            NoElection: the database is away, and this folder has never been that of one of its heads.
        """
        mine = {
            _NODE_SECRET: self._home.secret().hex(),
            _SALT: str(self._home.read_json("join_salt.json").get("salt", "")),
        }
        if self._authority() is not None:  # made by the first who asks
            for name in (_CA_KEY, _CA):
                with open(self._home.at(name), encoding="ascii") as file:
                    mine[name] = file.read()
        try:
            self._election.prepare()
            shared = self._election.share(mine)
        except NoElection as error:
            if self._options.store != self._options.store_before:
                raise
            _log.warning("%s; this head stands by until it answers", error.message)
            return
        for name in (_NODE_SECRET, _CA_KEY, _CA):
            if name in mine and shared[name] != mine[name]:
                _log.warning("%s is that of the other heads from now on", name)
                self._home.write_private(f"{name}.before", mine[name])
                self._home.write_private(name, shared[name])

    def _row(self) -> HeadRecord:
        where = self._doors.listen.url if self._doors.listen is not None else self._doors.inner_url
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
        """Of the token in our folder, made now where there is none: the leader lets it in, so that commands work here too."""
        try:
            with open(self._home.at("token"), encoding="ascii") as file:
                secret = file.read().strip()
        except (OSError, UnicodeDecodeError):
            secret = ""
        if not secret:
            secret = secrets.token_urlsafe(32)
            self._home.write_private("token", secret)
        return hashlib.sha256(secret.encode()).hexdigest()

    def _tell_home(self) -> None:
        """Where clients and supervisors of this machine look."""
        with self._telling:
            if not self._leading:
                found = head_record(self._head_id, self._doors, self._campaign, role="standby")
                self._home.write_private("head.json", json.dumps(found))

    # ---- waiting for our turn -----------------------------------------------------------------------------------------

    def _stand_by(self, make: Callable[[Ground], Leading]) -> Future[Leading] | None:
        """Answer that we stand by until we lead, or are told to end. What we lead with is made while our doors are being changed."""
        authority = self._authority()
        app = Standby(self._campaign, version=__version__, ca_pem="" if authority is None else authority.ca_pem)
        server = DoorServer(
            Rim(app, hosts_allowed=self._doors.hosts),
            tls=self._tls(authority),
            lifespan="off",
            timeout_graceful_shutdown=1,  # answers are made at once
        )
        made: Future[Leading] = Future()

        def stand() -> None:
            tenure = self._campaign.stand()
            server.should_exit = True
            if tenure is None or self._terminated.is_set():
                return
            with self._telling:
                self._leading = True
            try:
                made.set_result(make(self._ground(tenure)))
            except BaseException as error:  # noqa: BLE001  # the main thread's to raise
                made.set_exception(error)

        waiting = threading.Thread(target=stand, name="campaign", daemon=True)
        waiting.start()
        server.run(sockets=[self._doors.inner.dup()])  # uvicorn closes what it is given; the next life of us needs it
        if self._campaign.leads():
            waiting.join()
        else:
            self._campaign.end()
            waiting.join(timeout=10.0)
        return made if made.done() else None

    def _tls(self, authority: Authority | None) -> TlsListener | None:
        if authority is None or self._doors.outer is None or self._doors.listen is None:
            return None
        return secured(self._doors.outer.dup(), authority, self._doors.listen)

    def _authority(self) -> Authority | None:
        if self._doors.listen is None:
            return None
        from phalanx.app.certificates import Authority  # `cryptography` is imported by those who need it alone

        return Authority(self._home)

    # ---- our turn -----------------------------------------------------------------------------------------------------

    def _lead(self, made: Future[Leading]) -> None:
        try:
            made.result().run()
        except TryLater as error:  # the database went away between the claim and the loading
            if self._terminated.is_set():
                raise
            self._campaign.lost(error.message)

    def _ground(self, tenure: Tenure) -> Ground:
        """What this head leads on. Supervisors may hold leases of heads before, which were longer if those were told to grant such."""
        before = self._campaign.before
        voice = self._voice()
        try:
            shared = voice.share({})
            terms = shared.get(TERMS, "")
            voice.replace_shared(TERMS, with_term(terms, tenure.term))
        finally:
            voice.close()
        others = [head.url for head in self._campaign.heads() if head.name != self._campaign.mine.name]
        return Ground(
            head_id=self._head_id,
            doors=self._doors,
            secret=self._home.secret(),
            salt=SharedSalt(value=shared.get(_SALT, ""), election=self._voice),
            files=self._options.files or self._home.path,
            open_store=lambda: self._store(tenure.term),
            local=self._local,
            campaign=self._campaign,
            leases_until_s=self._clock.boottime_s() + granted_s(before) + MARGIN_S,
            earlier_output="" if self._options.files else ", ".join(others) or before.url,
            restores=judged(restores_of(shared.get(RESTORES, "")), terms, tenure.term),
        )

    def _store(self, term: int) -> Store:
        from phalanx.store.sql.postgres.election import leading_dsn
        from phalanx.store.sql.postgres.store import PostgresStore

        return PostgresStore(leading_dsn(self._options.store, self._head_id), term=term)

    def _begin_anew(self, _why: str) -> None:
        """Be the process that this one was at its start. Descriptors close with the image; the nodes of this machine go on."""
        try:
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  # no shell is wanted
        except OSError as error:
            # Python is no longer where it was: an end is better than a head that neither leads nor stands by.
            said = str(error)
            briefly(lambda: _log.critical("it cannot begin anew and ends: %s", said))
            os._exit(os.EX_OSERR)

    def _carries(self) -> bool:
        """Whether attempts run on this machine's nodes: they go on under whoever leads."""
        return bool(works(self._home.path))

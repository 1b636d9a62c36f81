"""The resources of a head: its sockets, secret, files and store; for a single head, or for one of several with a shared database."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from phalanx import __version__
from phalanx.api.services import ProgramListener
from phalanx.app.join_service import ListenAddress, StoredJoinSalt, bind_socket
from phalanx.app.leader_elector import LeaderElector
from phalanx.app.state_folder import StateFolder
from phalanx.core.errors import Conflict
from phalanx.ports.engine import Engine
from phalanx.ports.history import HistoryStore
from phalanx.ports.store import Store

_PROGRAMS_DISTANCE: Final = 100  # from 7600 to 7700: heads on one machine often have neighbouring ports
_PORTS: Final = 1 << 16
_TRIES: Final = 5
LOOPBACK_HOSTS: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """The sockets on which a head listens. `external` and `listen` are None if it listens only on loopback.

    With a relay, `external` is a socket on loopback too, and `listen` is the address of the relay.

    `programs`: for pages of web programs of jobs, in the order of the other two; empty if it serves none.
    """

    loopback: socket.socket
    external: socket.socket | None = None
    listen: ListenAddress | None = None
    programs: tuple[socket.socket, ...] = ()
    programs_host: str = ""

    @property
    def loopback_url(self) -> str:
        """Its URL on loopback."""
        return f"http://127.0.0.1:{self.loopback.getsockname()[1]}"

    @property
    def url(self) -> str:
        """The URL for other heads, supervisors and clients."""
        return self.loopback_url if self.listen is None else self.listen.url

    @property
    def program_listener(self) -> ProgramListener | None:
        """Where pages of web programs lie."""
        if not self.programs:
            return None
        ports = {"http": int(self.loopback.getsockname()[1])}
        if self.listen is not None:
            ports["https"] = self.listen.port
        port = int(self.programs[0].getsockname()[1])
        return ProgramListener(port=port, names=self.programs_host, head_ports=ports, head_url=self.url)

    @property
    def hosts(self) -> frozenset[str]:
        """The names that a Host header may carry."""
        if self.listen is None:
            return LOOPBACK_HOSTS
        return LOOPBACK_HOSTS | {self.listen.host, f"[{self.listen.host}]", socket.gethostname()}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadResources:
    """The resources of one process of a head.

    Attributes:
        head_id: the id of this process.
        files_root: the folder with logs, blobs, outputs and copies of checkpoints.
        salt: of its join tokens.
        default_engine: the engine of this machine, if it already runs.
        elector: of one of several heads; its term is held.
        leases_until_s: CLOCK_BOOTTIME until which leases of the previous head may last; 0 if no longer than this head's own.
        output_elsewhere: the other heads that have the output missing in `files_root`; empty if none is missing.
    """

    head_id: str
    listeners: Listeners
    secret: bytes
    salt: StoredJoinSalt
    files_root: str
    open_store: Callable[[], Store]
    open_history: Callable[[], HistoryStore]
    default_engine: Engine | None = None
    elector: LeaderElector | None = None
    leases_until_s: float = 0.0
    output_elsewhere: str = ""


def bind_listeners(
    port: int, listen: ListenAddress | None, programs_port: int | None = None, programs_host: str = ""
) -> Listeners:
    """Bind all sockets, before anything else happens, so that a second head changes nothing.

    Raises:
        Conflict: a port is in use, or an address is not of this machine.
    """
    inner = _loopback(port)
    if listen is None or listen.is_relay:
        outer, bound, reached = None if listen is None else _loopback(0, listens=False), listen, None
    else:
        outer = bind_socket(listen)
        bound = reached = replace(listen, port=outer.getsockname()[1])
    programs: tuple[socket.socket, ...] = ()
    if programs_port is not None:
        programs = _bind_programs(programs_port, int(inner.getsockname()[1]), reached)
    return Listeners(loopback=inner, external=outer, listen=bound, programs=programs, programs_host=programs_host)


def _bind_programs(wanted: int, port: int, listen: ListenAddress | None) -> tuple[socket.socket, ...]:
    """Bind one port on all addresses of the head; without a wish that of the head and a distance, or any free one. They do not listen yet.

    Raises:
        Conflict: the wanted port is in use.
    """
    tried = [wanted] if wanted else [port + _PROGRAMS_DISTANCE] * (port + _PROGRAMS_DISTANCE < _PORTS) + [0] * _TRIES
    for number in tried:
        try:
            inner = _loopback(number, listens=False, option="--programs-port")
        except Conflict:
            if number == tried[-1]:
                raise
            continue
        if listen is None:
            return (inner,)
        try:
            return inner, bind_socket(replace(listen, port=int(inner.getsockname()[1])), listens=False)
        except Conflict:
            inner.close()
            if wanted:
                raise
    raise Conflict("no port is free for pages of web programs", hint="phalanx up --programs-port PORT, or off")


def single_head_resources(
    home: StateFolder, listeners: Listeners, open_store: Callable[[], Store], open_history: Callable[[], HistoryStore]
) -> HeadResources:
    """Return the resources of a single head, without a shared store."""
    return HeadResources(
        head_id=secrets.token_hex(8),
        listeners=listeners,
        secret=home.secret(),
        salt=StoredJoinSalt.stored(home),
        files_root=home.path,
        open_store=open_store,
        open_history=open_history,
    )


def _loopback(port: int, *, listens: bool = True, option: str = "--port") -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise Conflict(
            f"port {port} on 127.0.0.1: {error.strerror}", hint=f"choose another port: phalanx up {option} PORT"
        ) from error
    if listens:
        listener.listen(1024)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.set_inheritable(False)
    return listener


def head_file_record(
    head_id: str, listeners: Listeners, elector: LeaderElector | None, *, role: str = "leader"
) -> dict[str, Any]:
    """Return the content of head.json: the address of this folder's head, and of the other heads."""
    return {
        "url": listeners.loopback_url,
        "pid": os.getpid(),
        "head_id": head_id,
        "version": __version__,
        "started_s": time.time(),
        "listen": "" if listeners.listen is None else listeners.listen.url,
        "role": "" if elector is None else role,
        "heads": [] if elector is None else elector.urls(),
    }

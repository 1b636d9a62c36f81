"""What a head stands on: its sockets, its secret, its files and its store; alone on its machine, or among heads that share a database."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from phalanx import __version__
from phalanx.app.campaign import Campaign
from phalanx.app.home import Home
from phalanx.app.joining import Listen, Salt, bind
from phalanx.core.errors import Conflict
from phalanx.engines.local.engine import LocalEngine
from phalanx.ports.store import Store
from phalanx.store.lost_numbers import Restore

LOOPBACK_HOSTS: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """Where a head listens. `outer` and `listen` are there where other servers reach it."""

    inner: socket.socket
    outer: socket.socket | None = None
    listen: Listen | None = None

    @property
    def inner_url(self) -> str:
        """On loopback."""
        return f"http://127.0.0.1:{self.inner.getsockname()[1]}"

    @property
    def url(self) -> str:
        """By which other heads, supervisors and clients find it."""
        return self.inner_url if self.listen is None else self.listen.url

    @property
    def hosts(self) -> frozenset[str]:
        """Names that a Host header may carry."""
        if self.listen is None:
            return LOOPBACK_HOSTS
        return LOOPBACK_HOSTS | {self.listen.host, f"[{self.listen.host}]", socket.gethostname()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What one life of a head is built on.

    Attributes:
        head_id: this life.
        files: the folder that holds logs, blobs, outputs and kept checkpoints.
        salt: of its join tokens.
        local: this machine's nodes, where they are up already.
        campaign: of a head among others; its term is held.
        leases_until_s: CLOCK_BOOTTIME up to which the head before may have granted leases; 0 for no longer than our own.
        earlier_output: which other head has the output that is not in `files`; empty where all of it is.
        restores: into a database that heads share, of which `files` may not have heard.
    """

    head_id: str
    doors: Doors
    secret: bytes
    salt: Salt
    files: str
    open_store: Callable[[], Store]
    local: LocalEngine | None = None
    campaign: Campaign | None = None
    leases_until_s: float = 0.0
    earlier_output: str = ""
    restores: Sequence[Restore] = ()


def open_doors(port: int, listen: Listen | None) -> Doors:
    """Every socket, bound before anything else happens, so that a second head changes nothing.

    Raises:
        Conflict: a port is taken, or an address is not this machine's.
    """
    inner = _loopback(port)
    if listen is None:
        return Doors(inner=inner)
    outer = bind(listen)
    return Doors(inner=inner, outer=outer, listen=replace(listen, port=outer.getsockname()[1]))


def alone(home: Home, doors: Doors, open_store: Callable[[], Store]) -> Ground:
    """Of a head that shares its store with no other."""
    return Ground(
        head_id=secrets.token_hex(8),
        doors=doors,
        secret=home.secret(),
        salt=Salt.kept(home),
        files=home.path,
        open_store=open_store,
    )


def _loopback(port: int) -> socket.socket:
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


def head_record(head_id: str, doors: Doors, campaign: Campaign | None, *, role: str = "leader") -> dict[str, Any]:
    """What head.json says: where the head of this folder is, and which others there are."""
    return {
        "url": doors.inner_url,
        "pid": os.getpid(),
        "head_id": head_id,
        "version": __version__,
        "started_s": time.time(),
        "listen": "" if doors.listen is None else doors.listen.url,
        "role": "" if campaign is None else role,
        "heads": [] if campaign is None else campaign.urls(),
    }

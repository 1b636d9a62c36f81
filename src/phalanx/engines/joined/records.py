"""What a server that joined remembers: which head, under which name, and the little it needs to come back after a restart.

    <state folder>/joined/   joined.json  token  ca.pem  keeper.lock  keeper.log  nodes/<name>/  [ray/]

The token lies in a file of its own, for its owner alone; it is in no argv and in no log.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from dataclasses import asdict, dataclass
from typing import Final

from phalanx.core.ids import NodeId
from phalanx.engines.local.private import write_private
from phalanx.wire.join import RAY_RECONNECT_S

ENGINE_NAME: Final = "joined"
_RECORD: Final = "joined.json"
_LOCK: Final = "keeper.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """One membership.

    Attributes:
        url: of the head, https://.
        address: where other nodes reach this server's ranks.
        devices: virtual devices it pretends to have, or its GPUs.
        ray_address: of the Ray cluster that brings the supervisor; empty where the server starts its own.
        ray_reconnect_s: how long its Ray node waits for a Ray head that is gone.
        heads: where the others are that share the head's store, with commas; its supervisor learns of later ones by itself.
    """

    url: str
    fingerprint: str
    node_id: NodeId
    engine: str
    address: str
    devices: int
    virtual: bool
    ray_address: str = ""
    ray_reconnect_s: int = RAY_RECONNECT_S
    heads: str = ""


def folder_of(home: str) -> str:
    """Where it all lies under a state folder."""
    return os.path.join(home, "joined")


def read(folder: str) -> Joined | None:
    """The membership; None where there is none that can be read."""
    try:
        with open(os.path.join(folder, _RECORD), encoding="utf-8") as file:
            record = json.load(file)
        return Joined(**{**record, "node_id": NodeId(record["node_id"])})
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        OverflowError,
        RecursionError,
    ):  # whatever a damaged file may hold
        return None


def write(folder: str, joined: Joined, *, token: str, ca_pem: str) -> None:
    """Remember; the record comes last, so that it never stands without token and CA."""
    os.makedirs(
        os.path.dirname(folder), mode=0o700, exist_ok=True
    )  # `makedirs` gives its mode to the last folder alone
    os.makedirs(folder, mode=0o700, exist_ok=True)
    write_private(folder, "token", token)
    write_private(folder, "ca.pem", ca_pem)
    write_private(folder, _RECORD, json.dumps(asdict(joined)))


def token(folder: str) -> str:
    """The node's own token; empty where there is none."""
    try:
        with open(os.path.join(folder, "token"), encoding="ascii") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def ca_file(folder: str) -> str:
    """Where the head's CA lies."""
    return os.path.join(folder, "ca.pem")


def forget(folder: str) -> None:
    """Remove the membership and all that belongs to it. Harmless twice."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, _RECORD))
    shutil.rmtree(folder, ignore_errors=True)


def hold(folder: str) -> int | None:
    """The keeper's lock, with this process's number in it; None while another keeper lives."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    fd = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def keeper(folder: str) -> int | None:
    """The pid of the keeper that lives; None where none does."""
    try:
        with open(os.path.join(folder, _LOCK), "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read() or b"0") or None
    except (OSError, ValueError):
        return None
    return None


def works(folder: str) -> list[str]:
    """Attempts that run on this server, as `<job>.<epoch>`: what a supervisor has made scratch folders for."""
    nodes = os.path.join(folder, "nodes")
    found: list[str] = []
    with contextlib.suppress(OSError):
        for name in os.listdir(nodes):
            with contextlib.suppress(OSError):
                found += os.listdir(os.path.join(nodes, name, "attempts"))
    return sorted(found)

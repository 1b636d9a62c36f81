"""The membership record of a joined server: its head, its name, and what it needs to reconnect after a restart.

    <state folder>/joined/   joined.json  heads.json  token  ca.pem  keeper.lock  keeper.log  nodes/<name>/  [files of its engine]

The token is in its own file, readable by its owner alone; it is in no argv and in no log.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from dataclasses import asdict
from typing import Final

from phalanx.core.ids import NodeId
from phalanx.node.files.private_files import write_private
from phalanx.ports.engine import Membership

_RECORD: Final = "joined.json"
_HEADS: Final = "heads.json"
_LOCK: Final = "keeper.lock"


def membership_folder(home: str) -> str:
    """Return the membership's folder under a state folder."""
    return os.path.join(home, "joined")


def read(folder: str) -> Membership | None:
    """Return the membership; None if it is missing or unreadable."""
    try:
        with open(os.path.join(folder, _RECORD), encoding="utf-8") as file:
            record = json.load(file)
        return Membership(**{**record, "node_id": NodeId(record["node_id"])})
    # Any of these for a damaged file.
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def write(folder: str, joined: Membership, *, token: str, ca_pem: str) -> None:
    """Write the membership; the record comes last, so that it never exists without token and CA."""
    # Two calls: `makedirs` applies its mode only to the last folder.
    os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    write_private(folder, "token", token)
    write_private(folder, "ca.pem", ca_pem)
    others = [url for url in joined.heads.split(",") if url]
    write_private(folder, _HEADS, json.dumps({"url": joined.url, "heads": others}))
    write_private(folder, _RECORD, json.dumps(asdict(joined)))


def heads_file(folder: str) -> str:
    """Return the path of the file with the addresses of the heads. A supervisor whose head is silent reads it again."""
    return os.path.join(folder, _HEADS)


def read_token(folder: str) -> str:
    """Return the node's own token; empty if it has none."""
    try:
        with open(os.path.join(folder, "token"), encoding="ascii") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def ca_file(folder: str) -> str:
    """Return the path of the head's CA certificate."""
    return os.path.join(folder, "ca.pem")


def remove(folder: str) -> None:
    """Remove the membership and its folder. Idempotent."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, _RECORD))
    shutil.rmtree(folder, ignore_errors=True)


def lock_keeper(folder: str) -> int | None:
    """Take the keeper's lock and write our pid into it; None while another keeper runs."""
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


def keeper_pid(folder: str) -> int | None:
    """Return the pid of the running keeper; None without one."""
    try:
        with open(os.path.join(folder, _LOCK), "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read() or b"0") or None
    except (OSError, ValueError):
        return None
    return None


def running_attempts(folder: str) -> list[str]:
    """Return the attempts that run on this server, as `<job>.<epoch>`: those with a scratch folder."""
    nodes = os.path.join(folder, "nodes")
    found: list[str] = []
    with contextlib.suppress(OSError):
        for name in os.listdir(nodes):
            with contextlib.suppress(OSError):
                found += os.listdir(os.path.join(nodes, name, "attempts"))
    return sorted(found)

"""Reads the state folder: its location, the head recorded in it, and the options of that head."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from phalanx.client.connection.discovery import lock_holder, state_folder
from phalanx.client.input_files import read_small_json


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedHead:
    """The head recorded in head.json, or in the lock file: then `head_id` is empty.

    `role`: leader or standby, if the head shares its store with others.
    """

    url: str
    pid: int
    head_id: str
    role: str = ""


def home_folder() -> str:
    """Return `PHALANX_HOME`, or ~/.phalanx, or for root the folder of the system service."""
    return state_folder()


def read_head_file(home: str) -> RecordedHead | None:
    """Return the head in head.json, dead or alive; None if none is recorded."""
    try:
        record = read_small_json(os.path.join(home, "head.json"))
        return RecordedHead(
            url=str(record["url"]),
            pid=int(record["pid"]),
            head_id=str(record["head_id"]),
            role=str(record.get("role", "")),
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def find_local_head(home: str) -> RecordedHead | None:
    """Return the head in head.json, else the live head that holds the folder's lock: head.json may have been removed."""
    found = read_head_file(home)
    if found is not None:
        return found
    held = lock_holder(home)
    return None if held is None else RecordedHead(url=held[0], pid=held[1], head_id="")


def read_cluster_file(home: str) -> dict[str, Any]:
    """Return the options that the head of this folder stored; empty if they cannot be read."""
    try:
        found = read_small_json(os.path.join(home, "cluster.json"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def own_node_names(home: str) -> set[str]:
    """Return the names of the nodes that the head of this folder starts; empty if unknown."""
    nodes = read_cluster_file(home).get("nodes")
    return {str(name) for name in nodes} if isinstance(nodes, list) else set()


def listen_url(home: str) -> str:
    """Return the URL at which other servers reach the head of this folder; empty if it listens on loopback only."""
    try:
        return str(read_small_json(os.path.join(home, "head.json")).get("listen", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def files_folder(home: str) -> str:
    """Return the folder of logs, outputs and checkpoints: the state folder, or the directory that the heads share."""
    return str(read_cluster_file(home).get("files") or home)


def shares_files(home: str) -> bool:
    """Return whether the files of jobs are in a directory that the heads share."""
    return files_folder(home) != home


def is_alive(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[:1] != ["Z"]
    except OSError:
        return False

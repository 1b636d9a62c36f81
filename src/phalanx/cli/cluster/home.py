"""The state folder as the command line sees it: where it is, and which head last said it runs there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from phalanx.client.discovery import lock_holder
from phalanx.client.given import small_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a head wrote into head.json when it was ready, or into its lock: `head_id` is then empty.

    `role`: leader or standby, of a head that shares its store with others.
    """

    url: str
    pid: int
    head_id: str
    role: str = ""


def home_folder() -> str:
    """`PHALANX_HOME`, or ~/.phalanx."""
    return os.path.abspath(os.environ.get("PHALANX_HOME") or os.path.join(os.path.expanduser("~"), ".phalanx"))


def recorded(home: str) -> Recorded | None:
    """The head of this folder, dead or alive; None where none is recorded."""
    try:
        record = small_json(os.path.join(home, "head.json"))
        return Recorded(
            url=str(record["url"]), pid=int(record["pid"]), head_id=str(record["head_id"]), role=str(record.get("role", ""))
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def running(home: str) -> Recorded | None:
    """The head of this folder as recorded, or else the live one that holds the folder's lock: its record may have been removed."""
    found = recorded(home)
    if found is not None:
        return found
    held = lock_holder(home)
    return None if held is None else Recorded(url=held[0], pid=held[1], head_id="")


def remembered(home: str) -> dict[str, Any]:
    """What the head of this folder was brought up with, as far as it can be read."""
    try:
        found = small_json(os.path.join(home, "cluster.json"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def fleet(home: str) -> set[str]:
    """Names of the nodes that the head of this folder brings up; empty where it did not say."""
    nodes = remembered(home).get("nodes")
    return {str(name) for name in nodes} if isinstance(nodes, list) else set()


def listens(home: str) -> str:
    """The URL by which other servers reach the head of this folder; empty where it listens on loopback alone."""
    try:
        return str(small_json(os.path.join(home, "head.json")).get("listen", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def files_folder(home: str) -> str:
    """Where logs, outputs and checkpoints lie: the folder itself, or the directory that its heads share."""
    return str(remembered(home).get("files") or home)


def shares_files(home: str) -> bool:
    """Whether what jobs write lies in a directory that the heads share."""
    return files_folder(home) != home


def alive(pid: int) -> bool:
    """Whether such a process is there and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[:1] != ["Z"]
    except OSError:
        return False

"""The state folder as the command line sees it: where it is, and which head last said it runs there."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a head wrote into head.json when it was ready."""

    url: str
    pid: int
    head_id: str


def home_folder() -> str:
    """`PHALANX_HOME`, or ~/.phalanx."""
    return os.path.abspath(os.environ.get("PHALANX_HOME") or os.path.join(os.path.expanduser("~"), ".phalanx"))


def recorded(home: str) -> Recorded | None:
    """The head of this folder, dead or alive; None where none is recorded."""
    try:
        with open(os.path.join(home, "head.json"), encoding="utf-8") as file:
            record = json.load(file)
        return Recorded(url=str(record["url"]), pid=int(record["pid"]), head_id=str(record["head_id"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def alive(pid: int) -> bool:
    """Whether such a process is there and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[:1] != ["Z"]
    except OSError:
        return False

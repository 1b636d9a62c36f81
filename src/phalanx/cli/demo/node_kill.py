"""Kill a node abruptly: SIGKILL to its supervisor and to all processes below it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from typing import Final

from phalanx.core.errors import Conflict
from phalanx.engines.local import records
from phalanx.node.processes.proctable import (
    ProcessIdentity,
    alive,
    descendants,
    process_environment,
    read_table,
    send_signal,
)

_PASSES_MAX: Final = 20  # bounds the race against a forking process tree
_NODE_KEY: Final = b"PHALANX_NODE_KEY"


def kill_node(home: str, node: str) -> int:
    """Kill all processes of a local node and return their number.

    Raises:
        Conflict: no such node is running here.
    """
    living = records.read(os.path.join(home, "nodes", node))
    if living is None or not alive(living.identity):
        raise Conflict(f"{node} is not running", hint="list running nodes with phalanx nodes")
    killed: set[ProcessIdentity] = set()
    for _ in range(_PASSES_MAX):
        found = _tree(living.identity.pid, living.node_key.encode()) - killed
        if not found:
            break
        killed |= found
        _kill(found)
    return len(killed)


def kill_marked(marks: Iterable[str]) -> int:
    """Kill every other process whose environment contains one of the marks (a path or a key); return their number.

    Raises:
        Conflict: some processes could not be killed.
    """
    wanted = [mark.encode() for mark in marks if mark]
    killed: set[ProcessIdentity] = set()
    found: set[ProcessIdentity] = set()
    for _ in range(_PASSES_MAX):
        table = read_table()
        found = {
            row.identity
            for row in table.values()
            if row.pid != os.getpid() and not row.dead and _has_mark(row.pid, wanted)
        }
        if not found:
            return len(killed)
        killed |= found
        _kill(found)
        time.sleep(0.02)  # SIGKILL takes effect with a delay
    raise Conflict(f"processes {sorted(process.pid for process in found)} cannot be killed")


def _tree(root: int, key: bytes) -> set[ProcessIdentity]:
    """Return all descendants by parent, plus reparented processes by the node's key."""
    table = read_table()
    below = {root, *descendants(table, [root])}
    keyed = {pid for pid in table if process_environment(pid).get(_NODE_KEY) == key}
    return {table[pid].identity for pid in below | keyed if pid in table and not table[pid].dead}


def _has_mark(pid: int, marks: list[bytes]) -> bool:
    return any(mark in value for value in process_environment(pid).values() for mark in marks)


def _kill(processes: Iterable[ProcessIdentity]) -> None:
    for process in processes:
        send_signal(process, signal.SIGKILL)

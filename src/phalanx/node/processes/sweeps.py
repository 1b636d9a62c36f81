"""Sweeps: stop or kill a changing set of processes, by repeating until two passes agree.

`containment` sweeps one attempt; the local engine (in the head) calls `sweep_node` after a supervisor died, so that nothing of its node is left.
One pass is never enough: a process may fork between the look and the signal. Stopped and dead processes do not fork, so passes converge.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.node.processes import cgroups
from phalanx.node.processes.proctable import (
    ProcessIdentity,
    ProcessRow,
    descendants,
    process_environment,
    read_table,
    send_signal,
)

NODE_KEY_VARIABLE: Final = "PHALANX_NODE_KEY"
TASK_KEY_VARIABLE: Final = "PHALANX_TASK_KEY"
SPAWNER_VARIABLE: Final = "PHALANX_SPAWNER"  # "1" in the environment of spawners, zygotes and their keepers
_STILL: Final = "Tt"
_PAUSE_S: Final = 0.001  # doubled up to _PAUSE_MAX_S between passes: a signal takes effect within a scheduler tick
_PAUSE_MAX_S: Final = 0.02

Table = Mapping[int, ProcessRow]
Members = Callable[[Table], set[int]]


def stop_until_still(members: Members, timeout_s: float) -> bool:
    """SIGSTOP everything `members` finds until two consecutive passes find the same processes, all stopped.

    A process in an uninterruptible call (state D, as the parent in a vfork) counts as stopped once it was signalled: it stops
    before it executes another instruction of its own.

    Returns:
        False if they did not stop in time.
    """
    limit = time.monotonic() + timeout_s
    pause_s = _PAUSE_S
    signalled: set[ProcessIdentity] = set()
    before: set[ProcessIdentity] | None = None
    while True:
        table = read_table()
        rows = [table[pid] for pid in members(table) if not table[pid].dead]
        now = {row.identity for row in rows}
        still = all(row.state in _STILL or (row.state == "D" and row.identity in signalled) for row in rows)
        if still and now == before:
            return True
        before = now if still else None
        for row in rows:
            if row.state not in _STILL and signal_where_allowed(row.identity, signal.SIGSTOP):
                signalled.add(row.identity)
        if time.monotonic() > limit:
            return False
        if not still:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)


def kill_until_none(
    members: Members, timeout_s: float, *, certain: Callable[[], bool], pause: Callable[[float], object] = time.sleep
) -> list[int]:
    """SIGKILL everything `members` finds until two consecutive passes find nothing, or `certain` returns true.

    Args:
        members: selects from a table of processes; called again in each pass.
        timeout_s: time limit.
        certain: true if it is known that nothing is left, as a keeper knows; called before each pass.
        pause: waits between passes, at most so many seconds; may return early when `certain` has changed.

    Returns:
        The pids that were left on timeout (uninterruptible, or of another user), sorted.
    """
    limit = time.monotonic() + timeout_s
    pause_s = _PAUSE_S
    clean = 0
    while not certain():
        table = read_table()
        rows = [table[pid] for pid in members(table) if not table[pid].dead]
        clean = 0 if rows else clean + 1
        if clean == 2:
            break
        for row in rows:
            signal_where_allowed(row.identity, signal.SIGKILL)
        if rows and time.monotonic() > limit:
            return sorted(row.pid for row in rows)
        if rows:
            pause(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
    return []


def signal_where_allowed(process: ProcessIdentity, number: int) -> bool:
    """Signal it if permitted; another user's process stays and counts as left over."""
    try:
        return send_signal(process, number)
    except PermissionError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSweepResult:
    """The result of a sweep of one node.

    Attributes:
        killed: processes it signalled; those that a cgroup's kill or their keeper killed first are not counted.
        leftover: pids that did not die.
        cgroups_removed: cgroups it removed; a keeper may have removed them first.
    """

    killed: int
    leftover: tuple[int, ...]
    cgroups_removed: int

    @property
    def clean(self) -> bool:
        """True when nothing of the node runs any more."""
        return not self.leftover


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodeMembers:
    supervisors: set[int]  # have the node's key only
    tasks: set[int]  # ranks and their descendants
    spawners: set[int]  # spawners, zygotes, keepers: the subreapers


def sweep_node(node_key: str, *, timeout_s: float = 5.0, root: ProcessIdentity | None = None) -> NodeSweepResult:
    """Kill everything that belongs to a node and remove its cgroups.

    It finds the processes in the node's cgroups; those with the node's key or one of its task keys in their environment; the sessions of
    those tasks; all descendants. Order matters: supervisors first (they would start more), then tasks, and the subreapers only when
    no task is left, so that no process is reparented to init when its keeper dies.

    Without cgroups it does not find a process that cleared its environment and left its session *after* another program killed its
    keeper. The caller's own process and its ancestors are never signalled.

    Args:
        node_key: unique on this machine.
        timeout_s: time limit; then the leftovers are reported.
        root: the supervisor, if the caller knows it.
    """
    limit = time.monotonic() + timeout_s
    pause_s = _PAUSE_S
    killed: set[ProcessIdentity] = set()
    sessions: set[int] = set()
    leftover: set[int] = set()
    folders = cgroups.find_node_cgroups(node_key)
    clean = 0
    while clean < 2:
        for folder in folders:
            cgroups.Cgroup(folder).kill()
        table = read_table()
        members = _node_members(table, node_key, folders=folders, root=root, sessions=sessions)
        first = members.supervisors | members.tasks
        targets = first or members.spawners
        for pid in targets:
            if signal_where_allowed(table[pid].identity, signal.SIGKILL):
                killed.add(table[pid].identity)
        clean = 0 if targets else clean + 1
        leftover = first | members.spawners
        if leftover and time.monotonic() > limit:
            break
        if targets:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
    removed = 0
    for folder in cgroups.find_node_cgroups(node_key):
        count = sum(1 for _ in os.walk(folder))
        if cgroups.Cgroup(folder).remove():
            removed += count
    return NodeSweepResult(killed=len(killed), leftover=tuple(sorted(leftover)), cgroups_removed=removed)


def _node_members(
    table: Table, node_key: str, *, folders: list[str], root: ProcessIdentity | None, sessions: set[int]
) -> _NodeMembers:
    """Sort the node's live processes by role; `sessions` grows by the sessions its tasks were seen in."""
    supervisors: set[int] = set()
    spawners: set[int] = set()
    tasks: set[int] = set()
    if root is not None and root.pid in table and table[root.pid].identity == root:
        supervisors.add(root.pid)
    for folder in folders:
        tasks |= cgroups.Cgroup(folder).members() & table.keys()
    for pid in table:
        match node_role(process_environment(pid), node_key):
            case "task":
                tasks.add(pid)
                # A task creates its own session: it is never the session that started the node.
                sessions.add(table[pid].session)
            case "spawner":
                spawners.add(pid)
            case "supervisor":
                supervisors.add(pid)
            case _:
                pass
    sessions.discard(0)  # the number of a session outside this pid namespace
    tasks |= {row.pid for row in table.values() if row.session in sessions}
    tasks |= descendants(table, tasks | spawners | supervisors) - spawners - supervisors
    spared = _self_and_ancestors(table)
    alive = {pid for pid, row in table.items() if not row.dead} - spared
    return _NodeMembers(supervisors=supervisors & alive, tasks=tasks & alive, spawners=spawners & alive)


def node_role(block: Mapping[bytes, bytes], node_key: str) -> str | None:
    """The role of a process with this environment on the node: "task", "spawner", "supervisor", or None for an unrelated process."""
    key = node_key.encode()
    task = block.get(TASK_KEY_VARIABLE.encode(), b"").strip()
    if task:
        return "task" if task.endswith(b"." + key) and task.split(b".", 3)[3:] == [key] else None
    if block.get(NODE_KEY_VARIABLE.encode()) != key:
        return None
    return "spawner" if block.get(SPAWNER_VARIABLE.encode()) == b"1" else "supervisor"


def _self_and_ancestors(table: Table) -> set[int]:
    spared = {os.getpid()}
    row = table.get(os.getpid())
    while row is not None and row.parent not in spared:
        spared.add(row.parent)
        row = table.get(row.parent)
    return spared


def processes_with_marker(table: Table, marker: str) -> set[int]:
    """The processes that have this task key in their environment."""
    wanted = marker.encode()
    key = TASK_KEY_VARIABLE.encode()
    return {pid for pid in table if process_environment(pid).get(key, b"").strip() == wanted}

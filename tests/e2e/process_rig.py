"""A rig for tests with real processes: a ProcessHost with its reports collected, and looks at what is left on the machine."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import time
import uuid

from phalanx.node.logic.warm_start import parse_warm_command
from phalanx.node.processes import cgroups
from phalanx.node.processes.attempt_limits import NO_LIMITS
from phalanx.node.processes.attempt_processes import ProcessHost, TaskProcessExit, TaskSpec
from phalanx.node.processes.containment import AttemptKey, ContainmentFactory, ContainmentKind
from phalanx.node.processes.proctable import process_environment, read_table

PATIENCE_S = 100.0  # a hang guard, not an expectation
BARE = {"PATH": f"{os.path.dirname(sys.executable)}:{os.defpath}"}


def cgroups_work() -> bool:
    found = cgroups.claim_node_cgroup(f"ask-{uuid.uuid4().hex[:8]}")
    if found.folder is not None:
        cgroups.Cgroup(found.folder).remove()
    return found.folder is not None


MODES = ["session", *(["cgroup"] if cgroups_work() else [])]


class Rig:
    """One node's processes. Use as a context manager."""

    def __init__(self, mode: str | None = None, *, limits: str | None = None) -> None:
        self.node_key = f"test-{uuid.uuid4().hex[:8]}"
        self.exits: queue.Queue[TaskProcessExit] = queue.Queue()
        self.empties: queue.Queue[AttemptKey] = queue.Queue()
        self.host = ProcessHost(
            node_key=self.node_key,
            on_exit=self.exits.put,
            on_empty=self.empties.put,
            containments=ContainmentFactory(self.node_key, mode=mode, limits=limits),
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        leftover = self.host.close()
        assert leftover == []
        assert self.left_behind() == []

    def key(self, job="j1", epoch=1, generation=0):
        return AttemptKey(job_id=job, epoch=epoch, generation=generation, node_key=self.node_key)

    def open(self, job="j1", zygote=None, limits=NO_LIMITS, **key):
        return self.host.open(self.key(job, **key), zygote=zygote, limits=limits)

    def run(self, attempt, command, *, task="rank-0", cwd="/", env=None, warm=False):
        """Start a task; returns its pid and a function that gives all of its output (and waits for the end of it)."""
        read_end, write_end = os.pipe()
        spec = TaskSpec(
            task_id=task,
            command=command,
            cwd=cwd,
            env={**BARE, **(env or {})},
            warm=parse_warm_command(command) if warm else None,
        )
        try:
            pid = attempt.spawn(spec, write_end)
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)

        def output():
            with open(read_end, "rb") as pipe:
                return pipe.read().decode()

        return pid, output

    def exit(self):
        return self.exits.get(timeout=PATIENCE_S)

    def emptied(self):
        return self.empties.get(timeout=PATIENCE_S)

    def left_behind(self):
        """Processes and cgroups of this node that should not be any more."""
        mark = self.node_key.encode()
        left = [
            pid
            for pid, row in read_table().items()
            if not row.dead and any(mark in v for v in process_environment(pid).values())
        ]
        return [*left, *cgroups.find_node_cgroups(self.node_key)]


def until(condition, what="a condition"):
    """Wait for something that other processes bring about."""
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.01)


def runs(pid):
    row = read_table().get(pid)
    return row is not None and not row.dead


def number_in(path):
    """The number in a file that a task writes its pid or count to; 0 while there is none."""
    with contextlib.suppress(FileNotFoundError, ValueError), open(path) as file:
        return int(file.read())
    return 0


__all__ = ["BARE", "MODES", "PATIENCE_S", "ContainmentKind", "Rig", "number_in", "runs", "until"]

"""One node of an MPI job: `python -I -m phalanx.node.mpi.launch_main`, started by the supervisor in place of a rank.

Node rank 0 runs the launcher (`mpirun`), and forwards what its launch agents ask for (`agent_main.py`); the other nodes run the launcher's
daemons. Both sides of each connection prove that they hold the gang's key. The job ends when the launcher ends, with its exit code.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

from phalanx.core.work.job_file.launchers import MPI_LAUNCHERS, find_launcher
from phalanx.node.gang.gang_host import GangHost, serve_gang_node
from phalanx.node.gang.job_link import JobLink, LinkClosed, NotInJob
from phalanx.node.gang.step_tasks import StepTasks, shell_exit_code
from phalanx.node.mpi.launch_order import (
    LAUNCH_STEP,
    LaunchOrder,
    launch_folder,
    read_launch_order,
    write_start_environment,
)

_OPEN_MPI_DAEMON: Final = re.compile(r"(^|[/;\s])(orted|prted)\s")
_VERSION_S: Final = 10.0  # milliseconds, unless the disk hangs
DAEMONS_END_S: Final = 2.0  # they end within milliseconds of the launcher
_USAGE: Final = 64
_UNAVAILABLE: Final = 69
_NOT_FOUND: Final = 127
_NOT_EXECUTABLE: Final = 126


def main() -> int:
    """Run this node's part; returns the launcher's exit code on node rank 0, else 0."""
    try:
        order = read_launch_order()
        write_start_environment(os.environ)
    except (NotInJob, OSError) as error:
        _complain(str(error))
        return _USAGE
    # The supervisor signals every process of the job; this one stays to report the others' ends. A handler, because ignored signals stay
    # ignored after exec.
    signal.signal(signal.SIGTERM, lambda *_: None)
    return _Launcher(order).run() if order.node_rank == 0 else _serve(order)


def _serve(order: LaunchOrder) -> int:
    """Other nodes: run what the agents ask for, until the launcher has ended."""
    try:
        return serve_gang_node(
            order.master,
            order.port,
            order.key,
            order.node_rank,
            handle=lambda tasks, message: _handle(tasks, message, order),
            name=LAUNCH_STEP,
        )
    except LinkClosed as error:
        _complain(f"this node cannot reach the launcher: {error}")
        return _UNAVAILABLE


def _handle(tasks: StepTasks, message: dict[str, Any], order: LaunchOrder) -> None:
    if "run" in message:
        asked = message["run"]
        cwd = asked["cwd"] if os.path.isdir(asked["cwd"]) else order.workdir
        # Open MPI repeats its settings in the daemon's command: the path of the agent is that of the asking node.
        command = asked["command"].replace(asked["folder"], launch_folder())
        # bash, as dash would unblock signals. This node's own variables, with its own devices and paths, and what the job's script exported.
        task = {
            "task": 0,
            "argv": ["bash", "-c", command],
            "env": {**os.environ, **asked["env"]},
            "cwd": cwd,
        }
        with _stop_signal_blocked(when=_OPEN_MPI_DAEMON.search(command) is not None):
            tasks.start(message["step"], [task])
    elif "signal" in message:
        tasks.signal(message["signal"], message["step"])
    elif "end" in message:
        tasks.end(message["end"])


@contextlib.contextmanager
def _stop_signal_blocked(*, when: bool) -> Iterator[None]:
    """Start processes with SIGTERM blocked.

    Open MPI's launcher and daemons would kill the ranks within 0.5 to 2 s of the supervisor's signal. So the signal is left to the ranks, for
    which Open MPI unblocks it. MPICH does not unblock, and gives its ranks the time that they need.
    """
    if not when:
        yield
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _is_open_mpi(argv: Sequence[str]) -> bool:
    """Whether the command's launcher is Open MPI's. A script's is not looked for: it may change PATH, and its other commands need the signal."""
    launcher = next((word for word in argv if os.path.basename(word) in MPI_LAUNCHERS), None)
    if launcher is None or find_launcher(argv) != os.path.basename(launcher):
        return False
    try:
        said = subprocess.run([launcher, "--version"], capture_output=True, timeout=_VERSION_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    return b"Open MPI" in said or b"PRRTE" in said


class _Launcher:
    """Node rank 0: the launcher, the other nodes, and the agents that the launcher starts."""

    def __init__(self, order: LaunchOrder) -> None:
        self._order = order
        self._environment = dict(os.environ)
        self._changed = threading.Condition()
        self._agents: dict[int, tuple[JobLink, int]] = {}  # by number of the request: the agent, and the node rank
        self._requests = 0
        self._tasks = StepTasks(self._forward, name=LAUNCH_STEP)  # a launcher may ask for its own node too
        self._gang = GangHost(
            order.master,
            order.port,
            order.key,
            len(order.names) - 1,
            on_message=self._forward,
            on_client=self._serve_agent,
            on_lost=self._end_agents_of,
        )

    def run(self) -> int:
        """Run the launcher to its end."""
        if why := self._gang.gather([aliases[0] for aliases in self._order.aliases]):
            _complain(why)
            return _UNAVAILABLE
        command = ["bash", "-c", self._order.script] if self._order.script else list(self._order.argv)
        try:
            with _stop_signal_blocked(when=_is_open_mpi(self._order.argv)):
                launcher = subprocess.Popen(command, env=self._environment, process_group=0)
        except OSError as error:
            _complain(f"{command[0]} cannot be executed: {error.strerror}")
            return _NOT_EXECUTABLE if isinstance(error, PermissionError) else _NOT_FOUND
        code = shell_exit_code(launcher.wait())
        self._end_daemons()
        return code

    def _end_daemons(self) -> None:
        """Let the launcher's daemons end by themselves, then end the other nodes' parts."""
        with self._changed:
            self._changed.wait_for(lambda: not self._agents, timeout=DAEMONS_END_S)
            left = list(self._agents)
        for number in left:  # an agent that outlives its launcher has nothing to wait for
            self._answer(number, {"exit": 0})
        self._gang.send_all({"bye": True})
        self._tasks.signal(signal.SIGKILL)

    def _end_agents_of(self, rank: int) -> None:
        """Tell the agents whose commands ran on a node that is gone."""
        with self._changed:
            lost = [number for number, (_, node) in self._agents.items() if node == rank]
        for number in lost:
            self._answer(number, {"error": f"the connection to {self._order.names[rank]} was lost"})

    def _serve_agent(self, link: JobLink) -> None:
        """Start the command of one agent, and forward its signals; its end ends the command."""
        asked = link.receive()
        rank = self._order.node_of(str(asked["host"]))
        if rank is None:
            link.send({"error": f"{asked['host']} is not a node of this job, which has {' '.join(self._order.names)}"})
            return
        with self._changed:
            self._requests += 1
            number = self._requests
            self._agents[number] = link, rank
        run = {
            "command": str(asked["command"]),
            "cwd": str(asked["cwd"]),
            "folder": str(asked["folder"]),
            "env": asked["env"],
        }
        self._send(rank, {"step": number, "run": run}, number)
        try:
            while True:
                message = link.receive()
                self._send(rank, {"step": number, "signal": int(message["signal"])}, number)
        except LinkClosed:
            with self._changed:
                running = self._agents.pop(number, None) is not None
                self._changed.notify_all()
            if running:
                self._send(rank, {"end": number}, number)

    def _send(self, rank: int, message: dict[str, Any], number: int) -> None:
        """Send to a node; if that fails, tell the agent."""
        if rank == 0:
            _handle(self._tasks, message, self._order)
            return
        try:
            self._gang.send(rank, message)
        except LinkClosed as error:
            self._answer(number, {"error": f"the connection to {self._order.names[rank]} was lost: {error}"})

    def _forward(self, message: dict[str, Any]) -> None:
        """Pass output and exit codes from a node to the agent."""
        self._answer(int(message["step"]), message)

    def _answer(self, number: int, message: dict[str, Any]) -> None:
        with self._changed:
            agent = self._agents.get(number)
            if "exit" in message or "error" in message:
                self._agents.pop(number, None)
                self._changed.notify_all()
        if agent is not None:
            with contextlib.suppress(LinkClosed):
                agent[0].send(message)


def _complain(text: str) -> None:
    sys.stderr.write(f"{LAUNCH_STEP}: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads may still hold pipes of processes that have not ended yet

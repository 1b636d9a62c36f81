"""One node of a batch job: `python -I -m phalanx.node.slurm_compat.batch_main`, started by the supervisor in place of a rank.

Node rank 0 runs the script and distributes each `srun` in it to the nodes; the others wait for tasks. The job ends when the script ends,
with its exit code. Layouts come from `logic.srun_options`, variables from `logic.slurm_variables`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any, Final

from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.hostlist import expand_hostlist
from phalanx.node.gang.gang_host import GangHost, serve_gang_node
from phalanx.node.gang.job_link import JobLink, LinkClosed, NotInJob, read_batch_order
from phalanx.node.gang.step_tasks import CHUNK_BYTES, StepTasks, shell_exit_code, start_process
from phalanx.node.logic.het_steps import (
    StepPart,
    joined_step,
    parse_sruns,
    part_variables,
    plan_parts,
    script_variables,
)
from phalanx.node.logic.srun_options import (
    SrunRequest,
    exported_environment,
    step_hostname,
)
from phalanx.node.logic.variables.rank_variables import RANK_VARIABLES
from phalanx.node.logic.variables.slurm_variables import (
    SlurmBatchJob,
    SlurmBatchNode,
    expand_file_pattern,
)
from phalanx.node.mpi.step_worlds import WORLD_VARIABLES, FenceCollector
from phalanx.node.slurm_compat.node_context import BatchNodeContext, handle_order

TASK_PID: Final = "SLURM_TASK_PID"
_USAGE: Final = 64
_UNAVAILABLE: Final = 69
_UMASK: Final = 0o022


def main() -> int:
    """Run this node's part; returns the script's exit code on node rank 0, else 0."""
    try:
        order = read_batch_order()
    except NotInJob as error:
        _complain(f"phalanx batch: {error}")
        return _USAGE
    # Script and tasks get the signal themselves; this process stays to report their exits. A handler: ignored signals stay ignored after exec.
    signal.signal(signal.SIGTERM, lambda *_: None)
    batch = decode_batch(order["batch"])
    return _Script(order, batch).run() if order["node_rank"] == 0 else _serve_tasks(order)


def decode_batch(values: dict[str, Any]) -> SlurmBatchJob:
    """The batch record from the supervisor's JSON."""
    nodes = tuple(SlurmBatchNode(**node) for node in values["nodes"])
    components = tuple(decode_batch(one) for one in values["components"])
    return SlurmBatchJob(**{**values, "nodes": nodes, "components": components})


def _serve_tasks(order: dict[str, Any]) -> int:
    """Other nodes: run tasks until the script has ended."""
    node = BatchNodeContext(order)
    try:
        return serve_gang_node(
            order["master"],
            order["port"],
            order["key"],
            order["node_rank"],
            handle=lambda tasks, message: handle_order(tasks, message, node),
            name="srun",
            pid_variable=TASK_PID,
        )
    except LinkClosed as error:
        _complain(f"phalanx batch: this node cannot reach the script's: {error}")
        return _UNAVAILABLE


class _Script:
    """Node rank 0: the script, and the steps it starts."""

    def __init__(self, order: dict[str, Any], batch: SlurmBatchJob) -> None:
        self._order, self._batch = order, batch
        self._lock = threading.Lock()
        self._clients: dict[int, JobLink] = {}
        self._unfinished: dict[int, int] = {}
        self._number = 0
        self._tasks = StepTasks(self._forward, name="srun", pid_variable=TASK_PID)
        self._node = BatchNodeContext(order)
        self._fences = FenceCollector()
        self._gang = GangHost(
            order["master"],
            order["port"],
            order["key"],
            len(batch.nodes) - 1,
            on_message=self._forward,
            on_client=self._serve_step,
        )

    def run(self) -> int:
        """Run the script to its end."""
        if why := self._gang.gather([node.name for node in self._batch.nodes]):
            _complain(f"phalanx batch: {why}")
            return _UNAVAILABLE
        try:
            script = self._start_script()
        except PhalanxError as error:
            _complain(f"phalanx: {error.message}" + (f" ({error.hint})" if error.hint else ""))
            return _USAGE
        except OSError as error:
            _complain(
                f"{self._order['script']}: {error.strerror}; check that its first line is the path of an interpreter"
            )
            return 126
        copies = self._copies(script)
        self._warn_before_end(script)
        code = script.wait()
        self._gang.send_all({"bye": True})
        self._tasks.signal(signal.SIGKILL)
        for copy in copies:
            copy.join(timeout=1.0)  # a background child may keep the output open; Slurm ends it with the job
        return shell_exit_code(code)

    def _start_script(self) -> subprocess.Popen[bytes]:
        """Start the script, with the environment that a script has under Slurm.

        Raises:
            BadRequest: its image cannot be run here.
            OSError: its interpreter cannot be started.
        """
        tools = self._order["bin"]
        environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        environment |= script_variables(self._batch) | self._node.devices()
        environment["PATH"] = f"{tools}{os.pathsep}{environment.get('PATH', os.defpath)}"
        container = json.loads(self._batch.options.get("container") or "{}")
        start = self._node.in_container(
            [self._order["script"], *self._order["args"]],
            {f"container-{name}": value for name, value in container.items()},
            task="script",
            cwd=os.getcwd(),
        )
        return start_process(
            start.argv,
            environment,
            os.getcwd(),
            pid_variable=TASK_PID,
            stderr=subprocess.PIPE if self._order["batch"]["options"].get("error") else subprocess.STDOUT,
        )

    # ---- the script's output and its signal -----------------------------------------------------------------------------

    def _copies(self, script: subprocess.Popen[bytes]) -> list[threading.Thread]:
        """Copy the output to the job's log, and to the files that Slurm would write."""
        options = self._batch.options
        assert script.stdout is not None
        pairs: list[tuple[IO[bytes], int, str]] = [(script.stdout, 1, options.get("output", ""))]
        if script.stderr is not None:
            pairs.append((script.stderr, 2, options.get("error", "")))
        copies = [threading.Thread(target=self._copy, args=pair, daemon=True) for pair in pairs]
        for copy in copies:
            copy.start()
        return copies

    def _copy(self, pipe: IO[bytes], to: int, pattern: str) -> None:
        file = self._file(pattern)
        while data := os.read(pipe.fileno(), CHUNK_BYTES):
            os.write(to, data)
            if file is not None:
                file.write(data)
                file.flush()
        if file is not None:
            file.close()

    def _file(self, pattern: str) -> IO[bytes] | None:
        if not pattern or pattern == "/dev/null":
            return None
        path = expand_file_pattern(pattern, self._batch)
        restarted = self._batch.restarts > 0  # keep the output from before the job resumed
        try:
            # closed by the copier
            return open(path, "ab" if restarted or self._batch.options.get("open_mode") == "append" else "wb")
        except OSError as error:
            _complain(f"phalanx: cannot write {path} ({error.strerror}); the output is only in phalanx logs")
            return None

    def _warn_before_end(self, script: subprocess.Popen[bytes]) -> None:
        setting = self._batch.options.get("signal", "")
        if not setting or self._batch.end_s is None:
            return
        target, number, ahead_s = setting.split(":")
        wait_s = max(0.0, self._batch.end_s - time.time() - float(ahead_s))

        def warn() -> None:
            if target == "batch":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(script.pid, int(number))
            else:
                self._tasks.signal(int(number))
                self._gang.send_all({"signal": int(number)})

        timer = threading.Timer(wait_s, warn)
        timer.daemon = True
        timer.start()

    # ---- steps ----------------------------------------------------------------------------------------------------------

    def _serve_step(self, link: JobLink) -> None:
        """Serve one srun: lay out its tasks, start them, and forward output and signals."""
        asked = link.receive()
        with self._lock:
            number, self._number = self._number, self._number + 1
        try:
            parts = plan_parts(parse_sruns(asked["argv"], len(self._batch.components)), self._batch, number)
        except PhalanxError as error:
            link.send({"error": error.message, "hint": str(error.hint)})
            return
        counts = [part.step.tasks for part in parts]
        with self._lock:
            self._clients[number], self._unfinished[number] = link, sum(counts)
        notes = list(dict.fromkeys(note for part in parts for note in part.srun.notes))
        link.send({"begun": number, "tasks": counts, "notes": notes})
        self._start(number, parts, asked["env"], asked["cwd"])
        try:
            while True:
                message = link.receive()
                if "signal" in message:
                    self._gang.send_all({"signal": int(message["signal"]), "step": number})
                    self._tasks.signal(int(message["signal"]), number)
        except LinkClosed:
            with self._lock:
                self._clients.pop(number, None)
            if self._unfinished.get(number):
                self._end_step(number)

    def _start(self, number: int, parts: Sequence[StepPart], env: dict[str, str], cwd: str) -> None:
        """Start the tasks of all parts of a step on their nodes."""
        outside = {name: value for name, value in env.items() if name not in WORLD_VARIABLES}
        mpi = mpi_order(number, parts, self._batch)
        orders: dict[int, list[dict[str, Any]]] = {}
        for part in parts:
            options = part.srun.options
            environment = exported_environment(options.get("export", ""), outside)
            for rank, one in self._tasks_of(parts, part, options.get("chdir") or cwd, environment):
                orders.setdefault(rank, []).append(one | {"mpi": mpi})
        for rank, tasks in orders.items():
            if rank == 0:
                handle_order(self._tasks, {"step": number, "run": tasks}, self._node)
                continue
            for one in tasks:  # one task in a message: environments may be large, and messages are bounded
                try:
                    self._gang.send(rank, {"step": number, "run": [one]})
                except LinkClosed:
                    self._tasks.refuse(number, one["task"], "the connection to its node was lost", _UNAVAILABLE)

    def _tasks_of(
        self, parts: Sequence[StepPart], part: StepPart, cwd: str, environment: dict[str, str]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield what each task of a part is, with the rank of its node."""
        srun, host = part.srun, self._batch.nodes[0].address
        share, umask = _gpus_per_task(srun, part.batch), _umask()
        container = {name: value for name, value in srun.options.items() if "container" in name}
        for task in range(part.step.tasks):
            place, local = part.step.node_of(task)
            variables = part_variables(
                self._batch, parts, part, task, host=host, label="label" in srun.options, umask=umask
            )
            one: dict[str, Any] = {
                "task": part.first_task + task,
                "argv": list(srun.command),
                "cwd": cwd,
                "first": self._node.workdir,
                "env": environment | variables,
                "container": container,
                "tools": self._order["bin"],
            }
            if share:  # GPUs per task
                one["places"] = list(range(local * share, (local + 1) * share))
            yield part.node_ranks[place], one

    def _forward(self, message: dict[str, Any]) -> None:
        """Handle what a node reports about a step: its output and exits go to its srun."""
        number = int(message["step"])
        if "fence" in message:
            for part in self._fences.add(message):
                for rank in message["nodes"]:
                    self._to_node(rank, part)
            return
        if "initialized" in message or "absent" in message:
            if (absent := self._fences.absent(message)) is None:
                return
            why = f"rank {absent} ended without MPI_Init, and others wait there for it (srun --mpi=none: no MPI world)"
            message = {"step": number, "abort": 1, "why": why}
        if "abort" in message:
            if self._fences.close(number):  # else these are ranks that were ended with the step
                text = f"srun: error: {message['why']}; the step ends\n" if message["why"] else ""
                self._to_srun({"step": number, "task": 0, "out": 2, "data": base64.b64encode(text.encode()).decode()})
                self._end_step(number)
            return
        self._to_srun(message)

    def _to_srun(self, message: dict[str, Any]) -> None:
        number = int(message["step"])
        with self._lock:
            link = self._clients.get(number)
            if "exit" in message:
                self._unfinished[number] -= 1
        if link is not None:
            with contextlib.suppress(LinkClosed):
                link.send(message)

    def _to_node(self, rank: int, message: dict[str, Any]) -> None:
        """Send an order to one node, also to this one."""
        if rank == 0:
            handle_order(self._tasks, message, self._node)
            return
        with contextlib.suppress(LinkClosed):  # the gang ends with its node
            self._gang.send(rank, message)

    def _end_step(self, number: int) -> None:
        self._fences.close(number)
        self._gang.send_all({"end": number})
        self._tasks.end(number)


def mpi_order(number: int, parts: Sequence[StepPart], batch: SlurmBatchJob) -> dict[str, Any]:
    """What each node needs to serve the world of a step; empty for a step without one.

    The namespace is like no other: Open MPI names its shared memory by it, and jobs of two heads may have the same number on one node.
    """
    asked = {part.step.mpi for part in parts}
    if "none" in asked:
        return {}
    name = f"{batch.job_number}.{number}"
    nodes, tasks = joined_step(parts)
    return {
        "inherited": "pmi2" in asked,  # Slurm's plugin of this name sets PMI_FD
        "name": name,
        "namespace": f"slurm.pmix.{name}.{secrets.token_hex(4)}",
        "nodes": nodes,
        "hosts": [batch.nodes[rank].name for rank in nodes],
        "ranks": tasks,
    }


def _gpus_per_task(srun: SrunRequest, batch: SlurmBatchJob) -> int:
    """The GPUs that each task sees; 0 for all of the job."""
    text = srun.options.get("gpus-per-task") or batch.options.get("gpus_per_task") or "0"
    number = text.rpartition(":")[2]
    return int(number) if number.isdecimal() else 0


def _umask() -> int:
    """This process's umask, from the kernel: the call that reads it would also set it, in all threads."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        return next((int(line.split()[1], 8) for line in status if line.startswith("Umask:")), _UMASK)


def show_hostnames(words: Sequence[str]) -> list[str]:
    """The host names that `scontrol show hostnames [LIST]` prints in the job: names that can be reached.

    Raises:
        NotInJob: not in a batch job.
        BadRequest: the list is malformed.
    """
    batch = decode_batch(read_batch_order()["batch"])
    ranks = {node.name: rank for rank, node in enumerate(batch.nodes)}
    listed = words[0] if words else os.environ.get("SLURM_JOB_NODELIST", "") if batch.components else ""
    names = expand_hostlist(listed) if listed else tuple(ranks)
    return [step_hostname(batch, ranks[name]) if name in ranks else name for name in names]


def _complain(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads may still hold pipes of processes that have not ended yet

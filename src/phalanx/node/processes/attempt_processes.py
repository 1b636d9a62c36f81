"""Processes of attempts: start tasks, receive their exits, and close an attempt so that no process is left.

The loop opens one AttemptProcesses per attempt generation. The spawner (`spawner_main.py`) forks, because this process has threads; one
thread here reads the messages of all keepers. `node.logic` decides what to start, stop or report.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import queue
import select
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from phalanx.core.work.failure import MemoryOveruse
from phalanx.node.head_link.channels import start_thread
from phalanx.node.logic.accounts import NodeAccount
from phalanx.node.logic.warm_start import WarmCommand
from phalanx.node.processes.attempt_limits import NO_LIMITS, AttemptLimits, JobLimits
from phalanx.node.processes.containment import (
    AttemptKey,
    Containment,
    ContainmentFactory,
    ContainmentKind,
)
from phalanx.node.processes.proctable import ProcessIdentity, identity, read_table
from phalanx.node.processes.spawner import (
    ANSWER_LIMIT_S,
    PACKET_BYTES_MAX,
    Spawner,
    SpawnerLost,
    send_request,
)
from phalanx.node.processes.sweeps import NODE_KEY_VARIABLE, TASK_KEY_VARIABLE, Table
from phalanx.wire.rank import boottime_ns

if TYPE_CHECKING:
    from phalanx.node.processes.zygote import Zygote

_IDLE_KEEPERS_MAX: Final = 32  # 2 MB each; as many jobs without GPUs, or with shares of them, may run at once
_BASH: Final = ("bash", "-c")
NOT_FOUND: Final = 127  # as in every shell
NOT_EXECUTABLE: Final = 126
_NOT_STARTED: Final = 125  # as in `env`, `timeout` and `docker run`: the starter failed, not the command
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One task to start. `env` is complete except for the marks that are added; a string as command is a line for bash.

    Attributes:
        account: the account it runs under for good; None for the supervisor's own.
        no_new_privileges: with an account, no program that it starts can gain privileges (setuid). False if a container runtime needs to.
    """

    task_id: str
    command: tuple[str, ...] | str
    cwd: str
    env: Mapping[str, str]
    warm: WarmCommand | None = None
    umask: int = 0o022
    account: NodeAccount | None = None
    no_new_privileges: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskProcessExit:
    """How a task ended: by code or by signal, or neither if its keeper was killed (`lost`). CPU time includes its children's."""

    key: AttemptKey
    task_id: str
    pid: int
    code: int | None
    signal: int | None
    lost: bool
    cpu_s: float
    max_rss_bytes: int
    ended_ns: int


class TaskNotStarted(Exception):
    """A task was not started; no instruction of it ran. The text is suitable for its user."""

    def __init__(self, *, task_id: str, stage: str, number: int, message: str) -> None:
        super().__init__(message)
        self.task_id = task_id
        self.stage = stage
        self.errno = number

    @property
    def user_error(self) -> bool:
        """True if the job asked for something that does not exist; another node would refuse it too."""
        return self.stage in {"exec", "cwd"} and self.errno not in {errno.ENOMEM, errno.EIO, errno.EMFILE, errno.ENFILE}

    @property
    def exit_code(self) -> int:
        """The code of a shell: 127 not found, 126 not executable; 125 if the command is not at fault."""
        if not self.user_error:
            return _NOT_STARTED
        return NOT_FOUND if self.stage == "exec" and self.errno == errno.ENOENT else NOT_EXECUTABLE


class _Keeper(NamedTuple):
    """A keeper process and the connection to it."""

    channel: socket.socket
    process: ProcessIdentity
    spawner: Spawner
    warm: bool


class ProcessesUnavailable(Exception):
    """No process can be started on this node now: no spawner, or no cgroup could be created. A retry may help."""


class AttemptProcesses:
    """The processes of one attempt generation. Calls may come from any thread; see ProcessHost for the callbacks."""

    def __init__(self, host: ProcessHost, containment: Containment, keeper: _Keeper) -> None:
        self.key = containment.key
        self.containment = containment
        self._host = host
        self._keeper = keeper
        self._channel = keeper.channel
        self._warm = keeper.warm
        self._lock = threading.Lock()  # one spawn at a time; also guards _ended
        self._ended = False
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._running: dict[str, int] = {}

    def spawn(self, spec: TaskSpec, output_fd: int) -> int:
        """Start a task with its output on a copy of `output_fd`; returns its pid once its program runs.

        Its end may be reported on the processes thread before this returns.

        Raises:
            TaskNotStarted: it does not run, and will not.
        """
        request = self._request(spec)
        with self._lock:
            if self._ended:
                raise self._not_started(spec, "keeper", errno.ESHUTDOWN)
            try:
                send_request(self._channel, request, [output_fd])
            except OSError as error:
                raise self._not_started(spec, "keeper", error.errno or errno.EPIPE) from error
            try:
                answer = self._answers.get(timeout=ANSWER_LIMIT_S)
            except queue.Empty:
                # The keeper is stopped, perhaps with the whole node. A task that it starts later would be untracked: end all.
                self._ended = True
                raise self._not_started(spec, "keeper", errno.ETIMEDOUT) from None
        if answer is None:
            raise self._not_started(spec, "keeper", errno.EPIPE)
        if answer["op"] == "refused":
            raise self._not_started(spec, answer["stage"], answer["errno"])
        pid: int = answer["pid"]
        return pid

    @property
    def keeper_pid(self) -> int | None:
        """The process below which all its processes are; None once they were killed, for then it may serve another attempt."""
        return None if self._ended else self._keeper.process.pid

    def running(self) -> dict[str, int]:
        """Pids by task id of the tasks whose exit was not reported yet."""
        return dict(self._running)

    def oom_kills(self) -> int | None:
        """See AttemptLimits."""
        return self.containment.limits.oom_kills()

    def memory_overuse(self, read: Callable[[], Table] = read_table) -> MemoryOveruse | None:
        """See Containment."""
        return self.containment.memory_overuse(read)

    def members(self, read: Callable[[], Table] = read_table) -> list[int]:
        """See Containment."""
        return self.containment.members(read)

    def empty(self) -> bool:
        """See Containment."""
        return self.containment.empty()

    def signal(self, number: int) -> int:
        """See Containment."""
        return self.containment.signal(number)

    def terminate(self) -> None:
        """See Containment."""
        self.containment.terminate()

    def continue_stopped(self) -> None:
        """See Containment."""
        self.containment.continue_stopped()

    def freeze(self, timeout_s: float = 2.0) -> bool:
        """See Containment."""
        return self.containment.freeze(timeout_s)

    def thaw(self) -> None:
        """See Containment."""
        self.containment.thaw()

    def frozen(self) -> bool:
        """See Containment."""
        return self.containment.frozen()

    def kill(self, timeout_s: float = 5.0) -> list[int]:
        """See Containment; afterwards no task can be started here."""
        with self._lock:
            self._ended = True
        return self.containment.kill(timeout_s)

    def close(self) -> list[int]:
        """Kill all processes, release the keeper, remove the cgroup; returns pids that did not die. May be called again."""
        leftover = self.kill()
        self.containment.close()
        self._host._release(self)  # noqa: SLF001  host and attempt are one unit
        return leftover

    def _request(self, spec: TaskSpec) -> dict[str, Any]:
        command = (*_BASH, spec.command) if isinstance(spec.command, str) else spec.command
        marks = {NODE_KEY_VARIABLE: self.key.node_key, TASK_KEY_VARIABLE: self.key.marker}
        return {
            "op": "spawn",
            "task": spec.task_id,
            "command": command,
            "cwd": spec.cwd,
            "env": {**spec.env, **marks},
            "umask": spec.umask,
            "warm": asdict(spec.warm) if self._warm and spec.warm is not None else None,
            "account": None if spec.account is None else _rights(spec.account, bound=spec.no_new_privileges),
        }

    def _not_started(self, spec: TaskSpec, stage: str, number: int) -> TaskNotStarted:
        what = spec.command if isinstance(spec.command, str) else " ".join(spec.command)
        reason = os.strerror(number)
        match stage:
            case "cwd":
                message = f"its working directory {spec.cwd} is not accessible on this node: {reason}"
            case "exec":
                program = "bash" if isinstance(spec.command, str) else spec.command[0]
                message = f"{program} cannot be executed: {reason}"
                if number == errno.ENOENT:
                    message += f"; searched the {path_text(spec.env.get('PATH', os.defpath))}"
            case "cgroup":
                message = f"it could not enter its cgroup: {reason}"
            case "account":
                message = f"it could not become {'' if spec.account is None else spec.account.name}: {reason}"
            case "keeper":
                message = f"the keeper of {self.key.marker} is gone or closed: {reason}"
            case _:
                message = f"no process could be created for it: {reason}"
        return TaskNotStarted(
            task_id=spec.task_id,
            stage=stage,
            number=number,
            message=f"task {spec.task_id} of job {self.key.job_id} did not start ({what[:80]}): {message}",
        )

    def _on_message(self, message: dict[str, Any]) -> None:
        """Handle a message of the keeper, on the processes thread and in order."""
        match message["op"]:
            case "spawned":
                self._running[message["task"]] = message["pid"]
                self.containment.task_started(message["pid"])
                self._answers.put(message)
            case "refused":
                self._answers.put(message)
            case "exit":
                self._running.pop(message["task"], None)
                self._host._on_exit(_exit_of(self.key, message))  # noqa: SLF001
            case "empty":
                self.containment.keeper_empty()
                self._host._on_empty(self.key)  # noqa: SLF001
            case other:
                raise AssertionError(f"unknown message {other!r} from a keeper")

    def _on_keeper_lost(self) -> None:
        """The keeper died: its tasks die with it (PDEATHSIG), and their exit codes are lost; kill the processes that are left."""
        self.containment.keeper_lost()
        self._ended = True
        self._answers.put(None)
        ended_ns = boottime_ns()
        running, self._running = self._running, {}
        for task_id, pid in running.items():
            self._host._on_exit(  # noqa: SLF001
                TaskProcessExit(
                    key=self.key,
                    task_id=task_id,
                    pid=pid,
                    code=None,
                    signal=None,
                    lost=True,
                    cpu_s=0.0,
                    max_rss_bytes=0,
                    ended_ns=ended_ns,
                )
            )
        threading.Thread(target=self._kill_orphans, name=f"phalanx-kill-orphans-{self.key.marker}", daemon=True).start()

    def _kill_orphans(self) -> None:
        if not self.containment.kill(ANSWER_LIMIT_S):
            self._host._on_empty(self.key)  # noqa: SLF001


def _rights(account: NodeAccount, *, bound: bool) -> dict[str, Any]:
    return {"uid": account.uid, "gid": account.gid, "groups": account.groups, "bound": bound}


def _exit_of(key: AttemptKey, message: Mapping[str, Any]) -> TaskProcessExit:
    return TaskProcessExit(
        key=key,
        task_id=message["task"],
        pid=message["pid"],
        code=message["code"],
        signal=message["signal"],
        lost=False,
        cpu_s=message["cpu_s"],
        max_rss_bytes=message["max_rss_bytes"],
        ended_ns=message["ended_ns"],
    )


class ProcessHost:
    """All processes of a supervisor's attempts.

    `on_exit` and `on_empty` are called in order on one thread of this host; they must not block and not call back.
    `on_empty(key)`: no process of that generation is left; it comes after the exits, and again if more tasks are started.
    """

    def __init__(
        self,
        *,
        node_key: str,
        on_exit: Callable[[TaskProcessExit], None],
        on_empty: Callable[[AttemptKey], None],
        containments: ContainmentFactory | None = None,
    ) -> None:
        """Start the spawner. `containments`: by default, what works here.

        Raises:
            ValueError: the requested containment or limits are not available.
            SpawnerLost: the spawner does not start.
        """
        self._node_key = node_key
        self._on_exit = on_exit
        self._on_empty = on_empty
        self._lock = threading.Lock()
        self._closed = False
        # Keepers without processes, kept for reuse: forking in a fresh one takes 3 ms longer.
        self._idle_keepers: list[_Keeper] = []
        self._attempts: dict[int, AttemptProcesses] = {}  # by the descriptor of the channel
        self._containments = containments or ContainmentFactory(node_key)
        self._spawner = Spawner.start_cold(node_key)
        self._epoll = select.epoll()
        self._stop_read, self._stop_write = os.pipe()
        self._epoll.register(self._stop_read, select.EPOLLIN)
        self._thread = start_thread("phalanx-processes", self._listen)

    @property
    def kind(self) -> ContainmentKind:
        """The kind of containment here."""
        return self._containments.kind

    def open(self, key: AttemptKey, *, limits: JobLimits = NO_LIMITS, zygote: Zygote | None = None) -> AttemptProcesses:
        """Open the processes of a generation: its keeper and, if possible, its cgroup.

        Args:
            key: not open yet.
            limits: of its job here.
            zygote: a ready one, whose keepers fork warm ranks; without it all tasks start cold.

        Raises:
            ProcessesUnavailable: the system refuses, or the zygote died (then open it cold).
        """
        own_limits: AttemptLimits | None = None
        try:
            cgroup, own_limits = self._containments.prepare(key, limits)
            keeper = self._keeper_for(own_limits.confinement(None if cgroup is None else cgroup.folder), zygote)
        except (OSError, SpawnerLost) as error:
            if own_limits is not None:
                own_limits.close()
            raise ProcessesUnavailable(f"no processes for {key.marker}: {error}") from error

        def strays(table: Table) -> set[int]:
            return keeper.spawner.orphans(table) if len(self._attempts) == 1 else set()

        containment = self._containments.open(
            key, keeper=keeper.process, cgroup=cgroup, limits=own_limits, strays=strays
        )
        attempt = AttemptProcesses(self, containment, keeper)
        with self._lock:
            self._attempts[keeper.channel.fileno()] = attempt
        self._epoll.register(keeper.channel.fileno(), select.EPOLLIN)
        return attempt

    def close(self, timeout_s: float = 5.0) -> list[int]:
        """End every open attempt, the spawner and the thread; returns pids that did not die."""
        if self._closed:
            return []
        leftover = [pid for attempt in list(self._attempts.values()) for pid in attempt.close()]
        self._closed = True
        for keeper in self._idle_keepers:
            keeper.channel.close()
        self._spawner.close(timeout_s)
        os.write(self._stop_write, b".")
        self._thread.join(timeout_s)
        self._containments.close()
        return leftover

    def _keeper_for(self, confinement: Mapping[str, Any], zygote: Zygote | None) -> _Keeper:
        """A keeper without processes: an idle one, else a new one."""
        while zygote is None:
            with self._lock:
                if not self._idle_keepers:
                    break
                keeper = self._idle_keepers.pop()
            with contextlib.suppress(OSError):  # it was killed: only it held the other end. Try the next one
                send_request(keeper.channel, {"op": "serve", "confinement": confinement}, [])
                return keeper
            keeper.channel.close()
        spawner = self._living_spawner() if zygote is None else zygote.spawner
        channel, pid = spawner.fork_keeper(confinement)
        return _Keeper(channel, identity(pid) or ProcessIdentity(pid, 0), spawner, zygote is not None)

    def _living_spawner(self) -> Spawner:
        """The spawner; a new one if it was killed. Its keepers survive it."""
        with self._lock:
            if not self._spawner.alive():
                self._spawner.close()
                self._spawner = Spawner.start_cold(self._node_key)
            return self._spawner

    def _listen(self) -> None:
        while True:
            for descriptor, _ in self._epoll.poll():
                if descriptor == self._stop_read:
                    self._epoll.close()
                    os.close(self._stop_read)
                    os.close(self._stop_write)
                    return
                with self._lock:
                    attempt = self._attempts.get(descriptor)
                if attempt is None:
                    continue
                try:
                    self._read(attempt, descriptor)
                except Exception:  # noqa: BLE001  a failure in one attempt must not stop the reader of all others
                    _log.exception("a message of the keeper of %s was not handled", attempt.key.marker)

    def _read(self, attempt: AttemptProcesses, descriptor: int) -> None:
        try:
            packet = attempt._channel.recv(PACKET_BYTES_MAX, socket.MSG_DONTWAIT)  # noqa: SLF001
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if packet:
            attempt._on_message(json.loads(packet))  # noqa: SLF001
            return
        with self._lock:
            if self._attempts.get(descriptor) is attempt:
                self._epoll.unregister(descriptor)
            else:
                return
        attempt._on_keeper_lost()  # noqa: SLF001

    def _release(self, attempt: AttemptProcesses) -> None:
        """Keep the keeper for the next attempt if it has no processes, else close its socket, and it exits."""
        with self._lock:
            descriptor = attempt._channel.fileno()  # noqa: SLF001
            if self._attempts.get(descriptor) is not attempt:
                return
            del self._attempts[descriptor]
            try:
                self._epoll.unregister(descriptor)
                lost = False
            except FileNotFoundError:
                lost = True
            keeper = attempt._keeper  # noqa: SLF001
            if not (lost or keeper.warm) and len(self._idle_keepers) < _IDLE_KEEPERS_MAX and attempt.empty():
                self._idle_keepers.append(keeper)
            else:
                keeper.channel.close()


def path_text(folders: str) -> str:
    """Describe a search path in a few words: `11 folders of its PATH (/usr/local/bin to /bin)`."""
    parts = folders.split(os.pathsep)
    if len(parts) == 1:
        return f"folder of its PATH ({folders})"
    return f"{len(parts)} folders of its PATH ({parts[0]} to {parts[-1]})"

"""Runs the tasks of steps on one node, and reports their output and exit codes."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Final

CHUNK_BYTES: Final = 1 << 16
KILL_AFTER_S: Final = 2.0  # from SIGTERM to SIGKILL of a step whose srun has exited
_NOT_FOUND: Final = 127
_NOT_EXECUTABLE: Final = 126
SendMessage = Callable[[dict[str, Any]], None]


def shell_exit_code(returncode: int) -> int:
    """The exit code as a shell gives it, from Popen's: 128 + signal for a process that a signal killed."""
    return returncode if returncode >= 0 else 128 - returncode


def start_process(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    *,
    stderr: int = subprocess.PIPE,
    pid_variable: str = "",
    descriptors: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a process in a process group of its own, with pipes for its output and, if asked, its own number in `pid_variable`.

    It inherits the `descriptors`.

    Raises:
        OSError, ValueError: it cannot be started.
    """

    def with_own_number() -> None:
        # In the child, which alone knows its number. If this fails, Popen tries the same and reports the error.
        with contextlib.suppress(OSError, ValueError):
            os.execvpe(argv[0], list(argv), {**env, pid_variable: str(os.getpid())})  # noqa: S606  # as Popen does

    return subprocess.Popen(
        list(argv),
        env=dict(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        process_group=0,
        pass_fds=tuple(descriptors),
        preexec_fn=with_own_number if pid_variable else None,  # noqa: PLW1509  # it takes no lock: a few system calls, then exec
    )


class StepTasks:
    """All tasks of this node.

    Args:
        send: receives {"step", "task", "out": 1 or 2, "data"} and finally {"step", "task", "exit"}; called from several threads.
        name: of the program that asked for the tasks, for its error messages.
        pid_variable: gets each task's own process number; "" for none.

    Attributes:
        report: `send`.
        on_exit: receives step, task and exit code after they were sent.
    """

    def __init__(self, send: SendMessage, *, name: str, pid_variable: str = "") -> None:
        self.report = send
        self.on_exit: Callable[[int, int, int], None] = lambda *_: None
        self._name = name
        self._pid_variable = pid_variable
        self._lock = threading.Lock()
        self._live: dict[tuple[int, int], subprocess.Popen[bytes]] = {}

    def start(self, step: int, tasks: list[dict[str, Any]]) -> None:
        """Start tasks of a step, each {"task", "argv", "env", "cwd"}.

        Perhaps with "descriptors" that it inherits, and "if_killed": a command that ends what outlives the process's SIGKILL.
        """
        for one in tasks:
            self._start(step, one)

    def signal(self, number: int, step: int | None = None) -> None:
        """Signal the process groups of a step, or of all steps."""
        with self._lock:
            live = [process for (of, _), process in self._live.items() if step in (None, of)]
        for process in live:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    def end(self, step: int) -> None:
        """Send SIGTERM, and SIGKILL after KILL_AFTER_S."""
        self.signal(signal.SIGTERM, step)
        timer = threading.Timer(KILL_AFTER_S, self.signal, (signal.SIGKILL, step))
        timer.daemon = True
        timer.start()

    def refuse(self, step: int, task: int, why: str, code: int) -> None:
        """Report a task that cannot be started."""
        self._report_output(step, task, 2, f"{self._name}: error: {os.uname().nodename}: task {task}: {why}\n".encode())
        self._report_exit(step, task, code)

    def _start(self, step: int, one: dict[str, Any]) -> None:
        task, argv = int(one["task"]), [str(word) for word in one["argv"]]
        host = os.uname().nodename
        if not os.path.isdir(one["cwd"]):
            self._report_output(
                step, task, 2, f"{self._name}: error: {host}: no folder {one['cwd']} here; using /tmp\n".encode()
            )
            one["cwd"] = "/tmp"  # noqa: S108  # as slurmd does; Phalanx writes nothing there
        try:
            process = start_process(
                argv,
                one["env"],
                one["cwd"],
                pid_variable=self._pid_variable,
                descriptors=one.get("descriptors", ()),
            )
        except (OSError, ValueError) as error:
            text = f"{self._name}: error: {host}: task {task}: {argv[0]}: {getattr(error, 'strerror', error)}\n"
            self._report_output(step, task, 2, text.encode())
            code = _NOT_EXECUTABLE if isinstance(error, PermissionError) else _NOT_FOUND
            self._report_exit(step, task, code)
            return
        with self._lock:
            self._live[step, task] = process
        threading.Thread(
            target=self._attend,
            args=(step, task, process, one.get("if_killed", ())),
            name=f"step-{step}.{task}",
            daemon=True,
        ).start()

    def _attend(self, step: int, task: int, process: subprocess.Popen[bytes], if_killed: Sequence[str]) -> None:
        copies = [
            threading.Thread(target=self._copy, args=(step, task, out, pipe), daemon=True)
            for out, pipe in ((1, process.stdout), (2, process.stderr))
        ]
        for copy in copies:
            copy.start()
        code = process.wait()
        if if_killed and code == -signal.SIGKILL:  # before the end of the output, which may still be open
            subprocess.run(list(if_killed), stdin=subprocess.DEVNULL, capture_output=True, check=False)
        for copy in copies:
            copy.join()
        with self._lock:
            self._live.pop((step, task), None)
        self._report_exit(step, task, shell_exit_code(code))

    def _copy(self, step: int, task: int, out: int, pipe: IO[bytes]) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(pipe.fileno(), CHUNK_BYTES):
                self._report_output(step, task, out, data)
        pipe.close()

    def _report_exit(self, step: int, task: int, code: int) -> None:
        self.report({"step": step, "task": task, "exit": code})
        self.on_exit(step, task, code)

    def _report_output(self, step: int, task: int, out: int, data: bytes) -> None:
        self.report({"step": step, "task": task, "out": out, "data": base64.b64encode(data).decode()})

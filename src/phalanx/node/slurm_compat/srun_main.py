"""`srun` for batch jobs of Phalanx, in their PATH: `python -I -m phalanx.node.slurm_compat.srun_main srun ...`.

srun asks the job's node rank 0 to start tasks, prints their output, and exits with the highest of their exit codes.
"""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final

from phalanx.core.errors import PhalanxError
from phalanx.node.gang.job_link import (
    JobLink,
    LinkClosed,
    open_link,
    read_batch_order,
)
from phalanx.node.logic.het_steps import parse_sruns
from phalanx.node.logic.srun_options import SrunRequest
from phalanx.node.logic.variables.secret_variables import without_secrets
from phalanx.node.logic.variables.slurm_variables import SlurmBatchJob, expand_file_pattern
from phalanx.node.slurm_compat.batch_main import decode_batch

_FAILED: Final = 1
_DIAL_S: Final = 10.0
_KILLED: Final = 128


def main(words: list[str]) -> int:
    """Run one command; returns its exit code."""
    name, rest = os.path.basename(words[0]), words[1:]
    try:
        order = read_batch_order()
        return _srun(rest, order, decode_batch(order["batch"]))
    except (LinkClosed, PhalanxError) as error:
        hint = f" ({error.hint})" if isinstance(error, PhalanxError) and error.hint else ""
        _complain(f"{name}: error: {error}{hint}")
        return _FAILED


def _srun(words: list[str], order: Mapping[str, Any], batch: SlurmBatchJob) -> int:
    asked = parse_sruns(words, len(batch.components))
    if any(srun.options.get("mpi") == "list" for _, srun in asked):
        sys.stdout.write("MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\n")
        return 0
    link = open_link(order["master"], order["port"], order["key"], {"step": True}, within_s=_DIAL_S)
    link.send({"argv": words, "env": without_secrets(os.environ), "cwd": os.getcwd()})
    begun = link.receive()
    if "error" in begun:
        _complain(f"srun: error: {begun['error']}" + (f" ({begun['hint']})" if begun.get("hint") else ""))
        return _FAILED
    for note in begun["notes"]:
        _complain(f"srun: {note}")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, lambda got, _: _send_signal(link, got))
    return _Output(asked, batch, begun["begun"], begun["tasks"]).follow(link)


def _send_signal(link: JobLink, number: int) -> None:
    with contextlib.suppress(LinkClosed):
        link.send({"signal": number})


class _Output:
    """The output of the tasks: to ours, with labels on request, or to the files of --output."""

    def __init__(
        self, asked: Sequence[tuple[int, SrunRequest]], batch: SlurmBatchJob, step: int, tasks: Sequence[int]
    ) -> None:
        """`asked`: what is started on each component, and `tasks` how many of each."""
        parts = [one for one, count in zip(asked, tasks, strict=True) for _ in range(count)]
        self._asked = [srun for _, srun in parts]  # by task
        self._batches = [batch.components[group] if batch.components else batch for group, _ in parts]
        self._step, self._tasks = step, sum(tasks)
        self._files: dict[str, IO[bytes]] = {}
        self._partial: dict[tuple[int, int], bytes] = {}

    def follow(self, link: JobLink) -> int:
        """Copy output until every task has ended; returns the highest exit code.

        Raises:
            LinkClosed: node rank 0 is gone.
        """
        worst, left = 0, self._tasks
        self._create_files()
        kill = any(srun.options.get("kill-on-bad-exit", "0") != "0" for srun in self._asked)
        while left:
            message = link.receive()
            if "data" in message:
                self._write(message["task"], message["out"], base64.b64decode(message["data"]))
                continue
            left -= 1
            code = int(message["exit"])
            if code:
                how = f"signal {code - _KILLED}" if code > _KILLED else f"exit code {code}"
                _complain(f"srun: error: task {message['task']}: Exited with {how}")
                if kill and not worst:
                    _send_signal(link, signal.SIGTERM)
            worst = max(worst, code)
        self._end()
        return worst

    def _create_files(self) -> None:
        """Create the files of --output and --error: a task that writes nothing leaves an empty one."""
        for out, option in ((1, "output"), (2, "error")):
            for task, srun in enumerate(self._asked):
                if srun.options.get(option):
                    self._sink(task, out)

    def _write(self, task: int, out: int, data: bytes) -> None:
        # By lines, as Slurm does: lines of different tasks must not mix.
        options = self._asked[task].options
        if "unbuffered" not in options or "label" in options:
            lines = (self._partial.pop((task, out), b"") + data).split(b"\n")
            if lines[-1]:
                self._partial[task, out] = lines[-1]
            data = b"".join(self._label(task) + line + b"\n" for line in lines[:-1])
        self._sink(task, out).write(data)
        self._sink(task, out).flush()

    def _label(self, task: int) -> bytes:
        return f"{task:>{len(str(self._tasks - 1))}}: ".encode() if self._has_labels(task) else b""

    def _has_labels(self, task: int) -> bool:
        return "label" in self._asked[task].options

    def _sink(self, task: int, out: int) -> IO[bytes]:
        options = self._asked[task].options
        pattern = options.get("output", "")
        if out == 2 and options.get("error"):
            pattern = options["error"]
        if not pattern or pattern == "all":
            return sys.stdout.buffer if out == 1 else sys.stderr.buffer
        path = (
            os.devnull
            if pattern == "none"
            else expand_file_pattern(pattern, self._batches[task], step=self._step, task=task)
        )
        if path not in self._files:
            self._files[path] = open(path, "wb")  # noqa: SIM115  # closed at the end
        return self._files[path]

    def _end(self) -> None:
        for (task, out), rest in self._partial.items():
            self._sink(task, out).write(self._label(task) + rest + (b"\n" if self._has_labels(task) else b""))
        sys.stdout.flush()
        for file in self._files.values():
            file.close()


def _complain(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Runs the examples of other frameworks as real jobs on two virtual nodes, each in a Python environment of its own, and kills each once."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from typing import Final

from tests.e2e.test_cli_head import Shell
from tests.examples.environments import FOLDER, environment_of, last_lines

_STEP_S: Final = 180.0  # to the first step: TensorFlow on a loaded machine takes most of a minute
_END_S: Final = 240.0


class ExampleFailed(AssertionError):
    """An example did not do what it should; the text has the job's last lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One example.

    Attributes:
        name: its folder.
        options: of `phalanx submit`.
        command: of the job; its programs are those of the example's environment.
        ends: a pattern for each line that the whole output must hold.
        victim: words of the command line of the processes, one of which is killed after the first step.
    """

    name: str
    options: tuple[str, ...]
    command: tuple[str, ...]
    ends: tuple[str, ...]
    victim: str


EXAMPLES: Final = (
    Example(
        name="mpi_pi",
        options=("--nodes", "2", "--gpus", "4"),
        command=("mpirun", "python", "pi.py"),
        ends=(r"rank 3 of 4", r"done: pi 3\.14159265"),
        victim="pi.py",
    ),
    Example(
        name="jax_line",
        options=("--gpus", "2x1"),
        command=("python", "train.py"),
        ends=(r"process 1 of 2, 1 devices here", r"\[rank 1\] done: weight 3\.000"),
        victim="train.py",
    ),
    Example(
        name="tensorflow_workers",
        options=("--gpus", "4", "-e", "TF_ROLES=chief,evaluator"),
        command=("python", "train.py"),
        ends=(
            r"chief 0: 3 replicas",
            r"worker 1: 3 replicas",
            r"resumed at step \d+",
            r"done: evaluated",
            r"done: weight 3\.0",
        ),
        victim="train.py",
    ),
    Example(
        name="torchrun_line",
        options=("--gpus", "2x2"),
        command=("torchrun", "train.py"),
        ends=(r"rank 3 of 4, local rank 1", r"done: weight 3\.000"),
        victim="train.py",
    ),
    Example(
        name="accelerate_line",
        options=("--gpus", "2x1"),
        command=("python", "train.py"),
        ends=(r"process 1 of 2", r"done: weight 3\.000"),
        victim="train.py",
    ),
    Example(
        name="lightning_line",
        options=("--gpus", "2x1"),
        command=("python", "train.py"),
        ends=(r"rank 1 of 2", r"done: weight 3\.000"),
        victim="train.py",
    ),
    Example(
        name="dask_in_a_job",
        options=("--gpus", "2x2"),
        command=("python", "count.py"),
        ends=(r"step 0: 3 workers", r"done: sum 70210"),
        victim="count.py",
    ),
    Example(
        name="ray_in_a_job",
        options=("--gpus", "2x2", "--tasks-per-node", "1"),
        command=("python", "count.py"),
        ends=(r"step 0: 2 Ray nodes", r"done: sum 70210 on 2 nodes"),
        victim="count.py",
    ),
    Example(
        name="deepspeed_line",
        options=("--gpus", "2x1"),
        command=("python", "train.py"),
        ends=(r"rank 1 of 2, ZeRO stage 1", r"done: weight 3\.00"),
        victim="train.py",
    ),
)


def run_example(example: Example, shell: Shell) -> str:
    """Run one example on a cluster that is up, kill one of its processes after the first step, and return its output.

    Raises:
        ExampleFailed: it did not end well, or printed something else.
        EnvironmentMissing: its packages cannot be installed.
    """
    path = f"{environment_of(example.name)}{os.pathsep}{os.environ['PATH']}"
    words = ("submit", "--quiet", "--retry", "1", "-e", f"PATH={path}", "--workdir", str(FOLDER / example.name))
    job = shell(*words, *example.options, "--", *example.command).stdout.strip()
    _await_step(shell, job)
    programs = shell.processes(example.victim, PHALANX_JOB_ID=job)
    if not programs:
        raise ExampleFailed(f"job {job} has no process that runs {example.victim}")
    os.kill(programs[-1], signal.SIGKILL)  # the youngest is a rank
    found = shell.until(job, "succeeded", "failed", "cancelled", "timeout", within_s=_END_S)
    said = str(shell("logs", job).stdout)
    if found["state"] != "succeeded":
        raise ExampleFailed(f"{example.name}: job {job} is {found['state']}\n{last_lines(said, 30)}")
    missing = [pattern for pattern in example.ends if not re.search(pattern, said)]
    if missing:
        raise ExampleFailed(f"{example.name}: the output lacks {missing}\n{last_lines(said, 30)}")
    return said


def _await_step(shell: Shell, job: str) -> None:
    until_s = time.monotonic() + _STEP_S
    while not re.search(r"step \d+", shell("logs", job).stdout):
        state = shell.json("show", job)["job"]["state"]
        if state not in {"pending", "running"} or time.monotonic() > until_s:
            raise ExampleFailed(f"job {job} is {state} and made no step\n{last_lines(shell('logs', job).stdout, 30)}")
        time.sleep(0.3)

"""Locate the demo's training script (in the checkout or the wheel's data files) and build its job."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

import phalanx
from phalanx.core.errors import BadFile

_SCRIPT: Final = "train.py"
CHECKPOINTS_PER_RUN: Final = 8  # checkpoints in one run: one is published before the kill at 40 %


def find_example(name: str = "train_gpt") -> str:
    """Return the folder of an example.

    Raises:
        BadFile: the example is in none of the searched places; the message lists them.
    """
    package = os.path.dirname(os.path.abspath(phalanx.__file__))
    places = [
        os.path.join(package, "..", "..", "examples", name),  # src/phalanx of a checkout
        os.path.join(sys.prefix, "share", "phalanx", "examples", name),  # a wheel's data files
        os.path.join("examples", name),
    ]
    for place in places:
        if os.path.isfile(os.path.join(place, _SCRIPT)):
            return os.path.realpath(place)
    tried = ", ".join(os.path.normpath(place) for place in places)
    raise BadFile(
        f"the demo's example {name}/{_SCRIPT} was not found in {tried}", hint="run the demo from a checkout: make demo"
    )


def check_torch() -> None:
    """Check for torch before anything starts.

    Raises:
        BadFile: torch is not installed in this Python.
    """
    if find_spec("torch") is None:
        raise BadFile("the demo needs torch, which is not installed", hint="make install in the checkout")


def build_demo_job(folder: str, *, shape: str, steps: int, name: str = "train-gpt") -> dict[str, object]:
    """Return the job that the demo submits: the unchanged example with `CHECKPOINTS_PER_RUN` checkpoints."""
    return {
        "name": name,
        "gpus": shape,
        "run": [sys.executable, _SCRIPT, "--steps", str(steps), "--save-every-steps", str(checkpoint_interval(steps))],
        "workdir": folder,
        "warm": True,
        "time": "10m",
    }


def checkpoint_interval(steps: int) -> int:
    """Return the number of steps between two checkpoints."""
    return max(5, steps // CHECKPOINTS_PER_RUN)


def kill_step(steps: int) -> int:
    """Return the kill step: after 40 % of the steps and between two checkpoints, so that some steps are repeated."""
    every = checkpoint_interval(steps)
    last = max(every, (2 * steps // 5) // every * every)
    return last + every * 3 // 5


def format_command(job: dict[str, object]) -> str:
    """Return the job's command for display."""
    run = job["run"]
    assert isinstance(run, Sequence)
    return " ".join(["python", *map(str, run[1:])])

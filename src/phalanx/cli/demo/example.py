"""Where the demo's training script lies: in the checkout this package runs from, or among the files that the wheel installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

import phalanx
from phalanx.core.errors import BadFile

_SCRIPT: Final = "train.py"
SAVES_A_RUN: Final = 8  # checkpoints in one run: often enough to see one published before the kill at 40 %


def find_example(name: str = "train_gpt") -> str:
    """The folder of an example.

    Raises:
        BadFile: it is in none of the places where it may be; names them.
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
        f"the demo's example {name}/{_SCRIPT} is nowhere; looked in {tried}", hint="run it from a checkout: make demo"
    )


def check_torch() -> None:
    """Refuse before anything starts.

    Raises:
        BadFile: torch is not installed beside this Phalanx.
    """
    if find_spec("torch") is None:
        raise BadFile("the demo trains with torch, and this Python has none", hint="make install in the checkout")


def job_of(folder: str, *, shape: str, steps: int, name: str = "train-gpt") -> dict[str, object]:
    """The job mapping that the demo submits: the example as it is, with a checkpoint every eighth of the run."""
    return {
        "name": name,
        "gpus": shape,
        "run": [sys.executable, _SCRIPT, "--steps", str(steps), "--save-every-steps", str(save_every(steps))],
        "workdir": folder,
        "warm": True,
        "time": "10m",
    }


def save_every(steps: int) -> int:
    """Steps between two checkpoints."""
    return max(5, steps // SAVES_A_RUN)


def kill_step(steps: int) -> int:
    """Past 40 % of the steps and past the middle between two checkpoints, so that some steps are made again."""
    every = save_every(steps)
    last = max(every, (2 * steps // 5) // every * every)
    return last + every * 3 // 5


def command_line(job: dict[str, object]) -> str:
    """What runs, for people."""
    run = job["run"]
    assert isinstance(run, Sequence)
    return " ".join(["python", *map(str, run[1:])])

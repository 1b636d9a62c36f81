"""What whole steps take beside what their measured parts promise: one factor for this fleet, from the short trainings of its profile."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from phalanx.core.performance.coefficients import Physics, Stack
from phalanx.core.performance.machine import Machine
from phalanx.core.performance.profile import Profile, RunFound, measured_of
from phalanx.core.performance.step import Task, step_time

CALIBRATION_STACK: Final = "fsdp2-eager"
"""The stack that the short trainings run: torch as it is, nothing compiled (`phalanx.torch.calibrate`)."""
NOISY: Final = 0.5
"""A run whose steps differ by half of their median was disturbed; it counts for nothing."""


def predicted_s(run: RunFound, profile: Profile, machine: Machine, physics: Physics, stack: Stack) -> float:
    """The step time that the measured parts promise for a run. `machine` gives the accelerator; nodes and devices are the run's."""
    measured = measured_of(profile, gpu=run.gpu)
    here = replace(machine, nodes=run.nodes, gpus_per_node=run.gpus_per_node, measured=measured)
    return step_time(Task(model=run.model, seq=run.seq), run.layout, here, physics, stack).total_s


def slowdown_of(profile: Profile, gpu: str, machine: Machine, physics: Physics, stack: Stack) -> float:
    """Measured over predicted step time, geometric mean over the runs on this accelerator that were not disturbed; 1 without any.

    `gpu` is its name as the nodes report it, `stack` the one of CALIBRATION_STACK.
    """
    logs = [
        math.log(run.step_s / predicted_s(run, profile, machine, physics, stack))
        for run in profile.runs
        if run.gpu == gpu and run.spread < NOISY
    ]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0

"""The slowdown factor of a fleet: measured over predicted step time, from the short trainings of its profile."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from phalanx.planner.calibration.profile import Profile, RunMeasurement, measured_rates
from phalanx.planner.cost.coefficients import Physics, Stack
from phalanx.planner.cost.machine import Machine
from phalanx.planner.cost.step_time import step_time
from phalanx.planner.cost.training_task import TrainingTask

CALIBRATION_STACK: Final = "fsdp2-eager"
"""The stack of the short trainings: plain torch without compilation (`phalanx.torch.calibrate`)."""
SPREAD_MAX: Final = 0.5
"""A run is ignored if its steps differ by this share of their median: something disturbed it."""


def predict_step_s(run: RunMeasurement, profile: Profile, machine: Machine, physics: Physics, stack: Stack) -> float:
    """Predict the step time of a run from the measured rates. `machine` gives the accelerator, the run its nodes and devices."""
    measured = measured_rates(profile, gpu=run.gpu)
    here = replace(machine, nodes=run.nodes, gpus_per_node=run.gpus_per_node, measured=measured)
    return step_time(TrainingTask(model=run.model, seq=run.seq), run.layout, here, physics, stack).total_s


def measure_slowdown(profile: Profile, gpu: str, machine: Machine, physics: Physics, stack: Stack) -> float:
    """Return measured over predicted step time: the geometric mean over undisturbed runs on this accelerator; 1 without runs, and at least 1.

    The short trainings keep no full-precision copy of their weights, and fixed costs are a large part of their steps. So they can be faster
    than the sum of the parts where a real training is not: on an H100 0.75 times, and a model of 1.2 billion parameters 1.07 times (docs/gpu.md).
    `gpu` is the name that the nodes report, `stack` the stack named CALIBRATION_STACK.
    """
    logs = [
        math.log(run.step_s / predict_step_s(run, profile, machine, physics, stack))
        for run in profile.runs
        if run.gpu == gpu and run.spread < SPREAD_MAX
    ]
    return max(1.0, math.exp(sum(logs) / len(logs))) if logs else 1.0

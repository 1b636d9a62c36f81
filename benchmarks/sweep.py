"""What a sweep saves: GPU time against the full grid, and quality against Optuna alone, on known test functions. Prints a table, or JSON.

Trials run in virtual time: the driver, Optuna and its pruner are those of `phalanx sweep`; only the cluster is a loop that adds steps. Each
function is minimised over its usual box, as the level to which the loss of a training falls: loss(step) = f(x) / scale + step ** -0.5.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna

from phalanx.sweep.definition import SweepDefinition
from phalanx.sweep.driver import SweepDriver, TrialJob, best_trial
from phalanx.sweep.space import SweepParameter
from phalanx.sweep.study import SweepStudy, TrialRecord

STEPS = 81
FIRST, ETA = 3, 3
SAMPLES, PARALLEL = 60, 4
GRID_POINTS = 9  # on each axis
_TURN_STEPS = 1  # that a running trial advances between two turns

Function = Callable[[float, float], float]


def branin(x: float, y: float) -> float:
    """Branin and Hoo; minimum 0.397887."""
    a = y - 5.1 * x * x / (4 * math.pi**2) + 5 * x / math.pi - 6
    return a * a + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10


def camel(x: float, y: float) -> float:
    """Six-hump camel; minimum -1.0316."""
    return (4 - 2.1 * x * x + x**4 / 3) * x * x + x * y + (4 * y * y - 4) * y * y


def rosenbrock(x: float, y: float) -> float:
    """Rosenbrock; minimum 0."""
    return (1 - x) ** 2 + 100 * (y - x * x) ** 2


def himmelblau(x: float, y: float) -> float:
    """Himmelblau; minimum 0."""
    return (x * x + y - 11) ** 2 + (x + y * y - 7) ** 2


def booth(x: float, y: float) -> float:
    """Booth; minimum 0."""
    return (x + 2 * y - 7) ** 2 + (2 * x + y - 5) ** 2


# function, box of x, box of y, minimum, scale
FUNCTIONS: dict[str, tuple[Function, tuple[float, float], tuple[float, float], float, float]] = {
    "branin": (branin, (-5.0, 10.0), (0.0, 15.0), 0.397887, 50.0),
    "camel": (camel, (-2.0, 2.0), (-1.0, 1.0), -1.031628, 2.0),
    "rosenbrock": (rosenbrock, (-2.0, 2.0), (-1.0, 3.0), 0.0, 400.0),
    "himmelblau": (himmelblau, (-5.0, 5.0), (-5.0, 5.0), 0.0, 100.0),
    "booth": (booth, (-10.0, 10.0), (-10.0, 10.0), 0.0, 300.0),
}


class VirtualTrialJobs:
    """A cluster in virtual time: each look advances every running trial; one device for each."""

    def __init__(self, loss: Callable[[Mapping[str, object], int], float | None], *, steps: int = STEPS) -> None:
        self._loss = loss
        self._steps = steps
        self.trials: dict[str, TrialRecord] = {}
        self.step: dict[str, int] = {}
        self.cancelled: set[str] = set()

    @property
    def device_steps(self) -> int:
        """Steps that all trials ran: device time."""
        return sum(self.step.values())

    def submit(self, trial: TrialRecord) -> str:
        """Start a trial; the same number again is the same job."""
        job_id = str(trial.number + 1)
        self.trials.setdefault(job_id, trial)
        self.step.setdefault(job_id, 0)
        return job_id

    def look(self, job_ids: Sequence[str]) -> Mapping[str, TrialJob]:
        """Advance the given jobs, and return them."""
        found = {}
        for job_id in job_ids:
            if job_id not in self.cancelled:
                self.step[job_id] = min(self._steps, self.step[job_id] + _TURN_STEPS)
            step = self.step[job_id]
            ended = step >= self._steps or job_id in self.cancelled
            state = "running" if not ended else "cancelled" if job_id in self.cancelled else "succeeded"
            found[job_id] = TrialJob(job_id=job_id, state=state, ended=ended, step=step, steps_total=self._steps)
        return found

    def curve(self, job_id: str) -> Sequence[tuple[int, float | None]]:
        """Return the loss of each step so far."""
        numbers = self.trials[job_id].numbers
        return [(step, self._loss(numbers, step)) for step in range(1, self.step[job_id] + 1)]

    def cancel(self, job_id: str, why: str) -> None:  # noqa: ARG002  # as on a cluster
        """Stop a job."""
        self.cancelled.add(job_id)


def definition_of(name: str, seed: int) -> SweepDefinition:
    """Return the sweep of one function."""
    _, box_x, box_y, _, _ = FUNCTIONS[name]
    parameters = tuple(SweepParameter(name=axis, low=box[0], high=box[1]) for axis, box in (("x", box_x), ("y", box_y)))
    return SweepDefinition(
        id="bench",
        name=name,
        parameters=parameters,
        job={"run": ["train"]},
        append=True,
        samples=SAMPLES,
        search="tpe",
        seed=seed,
        asha=True,
        min_steps=FIRST,
        eta=ETA,
        max_parallel=PARALLEL,
    )


def loss_of(name: str) -> Callable[[Mapping[str, object], int], float]:
    """Return the loss of a training with the given values after a step."""
    function, _, _, least, scale = FUNCTIONS[name]
    return lambda at, step: (function(float(str(at["x"])), float(str(at["y"]))) - least) / scale + step**-0.5


def grid_best(name: str) -> float:
    """Return the best final loss on the full grid."""
    _, box_x, box_y, _, _ = FUNCTIONS[name]
    loss = loss_of(name)
    spread = [number / (GRID_POINTS - 1) for number in range(GRID_POINTS)]
    points = [
        (box_x[0] + (box_x[1] - box_x[0]) * a, box_y[0] + (box_y[1] - box_y[0]) * b) for a in spread for b in spread
    ]
    return min(loss({"x": x, "y": y}, STEPS) for x, y in points)


def swept(name: str, seed: int) -> tuple[float, int]:
    """Run a sweep; return its best final loss and its device steps."""
    definition = definition_of(name, seed)
    jobs = VirtualTrialJobs(loss_of(name))
    study = SweepStudy(definition, None)
    driver = SweepDriver(definition, study, jobs)
    now_s = 0.0
    while not driver.done:
        driver.turn(now_s)
        now_s += 1.0
    best = best_trial(study.trials(), maximize=False)
    assert best is not None
    assert best.value is not None
    return best.value, jobs.device_steps


def optuna_alone(name: str, seed: int, parallel: int) -> tuple[float, int]:
    """Run as many trials with Optuna and nothing of ours, some at once, each a step a turn; return the same figures."""
    _, box_x, box_y, _, _ = FUNCTIONS[name]
    loss = loss_of(name)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=FIRST, reduction_factor=ETA)
    sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=parallel > 1)
    study = optuna.create_study(sampler=sampler, pruner=pruner)
    ran, begun = 0, 0
    running: list[tuple[optuna.Trial, int]] = []
    while running or begun < SAMPLES:
        while len(running) < parallel and begun < SAMPLES:
            begun += 1
            trial = study.ask()
            trial.suggest_float("x", *box_x)
            trial.suggest_float("y", *box_y)
            running.append((trial, 0))
        advanced = [(trial, step + 1) for trial, step in running]
        ran += len(advanced)
        running = []
        for trial, step in advanced:
            trial.report(loss(trial.params, step), step)
            if step == STEPS:
                study.tell(trial, loss(trial.params, step))
            elif trial.should_prune():
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            else:
                running.append((trial, step))
    return study.best_value, ran


def measure(seeds: int) -> dict[str, Any]:
    """Run all functions with all seeds; losses are above the least possible final one."""
    floor = STEPS**-0.5
    grid_steps = GRID_POINTS**2 * STEPS
    rows = []
    for name in FUNCTIONS:
        ours = [swept(name, seed) for seed in range(seeds)]
        alone = [optuna_alone(name, seed, PARALLEL) for seed in range(seeds)]
        serial = [optuna_alone(name, seed, 1) for seed in range(seeds)]
        rows.append(
            {
                "function": name,
                "grid_loss": grid_best(name) - floor,
                "sweep_loss": statistics.mean(loss for loss, _ in ours) - floor,
                "optuna_loss": statistics.mean(loss for loss, _ in alone) - floor,
                "optuna_serial_loss": statistics.mean(loss for loss, _ in serial) - floor,
                "grid_over_sweep": grid_steps / statistics.mean(steps for _, steps in ours),
                "grid_over_optuna": grid_steps / statistics.mean(steps for _, steps in alone),
            }
        )
    return {
        "seeds": seeds,
        "grid_over_sweep": min(row["grid_over_sweep"] for row in rows),
        "grid_loss": statistics.mean(row["grid_loss"] for row in rows),
        "sweep_loss": statistics.mean(row["sweep_loss"] for row in rows),
        "optuna_loss": statistics.mean(row["optuna_loss"] for row in rows),
        "optuna_serial_loss": statistics.mean(row["optuna_serial_loss"] for row in rows),
        "functions": rows,
    }


def main() -> int:
    """Parse the arguments, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = measure(given.seeds)
    if given.json:
        print(json.dumps(found))
        return 0
    print(f"{'function':<12}{'grid':>10}{'sweep':>10}{'Optuna':>10}   GPU time of the grid over the sweep's, Optuna's")
    for row in found["functions"]:
        losses = "".join(f"{row[key]:>10.4f}" for key in ("grid_loss", "sweep_loss", "optuna_loss"))
        print(f"{row['function']:<12}{losses}   {row['grid_over_sweep']:.1f}  {row['grid_over_optuna']:.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Fit the coefficients of the planner to measured runs: least squares of log step times, with the prior of each coefficient as an equation.

Levenberg-Marquardt on the logarithms. Residuals beyond 1.5 spreads have less weight (soft L1), so that a wrong row does not distort the
fit. The weight of a source is the square root of its number of rows (each residual has the inverse fourth root): 216 rows of one table
count five times as much as 8, not 27 times.
Sources: K. Levenberg, 1944; D. Marquardt, SIAM J. Appl. Math. 11(2), 1963; soft L1 after B. Triggs et al., "Bundle Adjustment", 2000.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.published_runs import PublishedRun
from phalanx.planner.cost.coefficients import Physics, Stack
from phalanx.planner.cost.step_time import StepTime, StepTimeCalculator
from phalanx.planner.facts.coefficient_table import (
    Coefficient,
    numbers_of,
    physics_from,
    stacks,
    stacks_from,
)
from phalanx.planner.search.sample_batches import UnevenStepTimeCalculator

NOISE: Final = 0.07
"""Spread of a measured step time around a perfect model: runs of one table repeat within a few per cent."""
SOFT: Final = 1.5  # spreads beyond which a residual counts linearly
ROUNDS: Final = 14
DONE: Final = 1e-4  # relative gain below which a round is the last
NUDGE: Final = 1e-4

Table = Sequence[Coefficient]
Vector = NDArray[np.float64]


def predicted(runs: Sequence[PublishedRun], table: Table) -> list[StepTime]:
    """Return the step times of the runs for the coefficients of a table."""
    physics, stacks = physics_from(table), stacks_from(table)
    return [predict(run, physics, stacks[run.stack]) for run in runs]


def predict(run: PublishedRun, physics: Physics, stack: Stack) -> StepTime:
    """Return the step time of one run."""
    costs = StepTimeCalculator(run.task, run.machine, physics, stack)
    return (costs if run.samples is None else UnevenStepTimeCalculator(costs, run.samples)).step_time(run.layout)


def fit(runs: Sequence[PublishedRun], table: Table, *, warm: bool = False) -> tuple[Coefficient, ...]:
    """Return the table with newly fitted values.

    The search starts at the priors, so that it does not depend on an earlier fit; if `warm`, at the values of the table, which takes a third of the
    rounds to the same optimum.
    """
    runs = [run for run in runs if run.step_s is not None]
    free = [place for place, one in enumerate(table) if one.spread]
    centre = np.array([math.log(table[place].prior or table[place].value) for place in free])
    spread = np.array([table[place].spread or 1.0 for place in free])
    counts = Counter(run.source for run in runs)
    weight = np.array([(10.0 / counts[run.source]) ** 0.25 / NOISE for run in runs])
    truth = np.log([run.step_s or math.nan for run in runs])

    touched = [_touched(runs, table[place].scope) for place in free]

    def residuals(vector: Vector) -> Vector:
        given = np.log([step.total_s for step in predicted(runs, _with(table, free, vector))])
        return np.concatenate([(given - truth) * weight, (vector - centre) / spread])

    def slopes(vector: Vector, current: Vector) -> NDArray[np.float64]:
        jacobian = np.zeros((len(current), len(vector)))
        for column, rows in enumerate(touched):
            moved = vector.copy()
            moved[column] += NUDGE
            given = np.log([step.total_s for step in predicted([runs[row] for row in rows], _with(table, free, moved))])
            jacobian[rows, column] = ((given - truth[rows]) * weight[rows] - current[rows]) / NUDGE
            jacobian[len(runs) + column, column] = 1.0 / spread[column]
        return jacobian

    start = np.array([math.log(table[place].value) for place in free]) if warm else centre
    vector = _search(residuals, slopes, start, soft=len(runs))
    return _with(table, free, vector)


def _touched(runs: Sequence[PublishedRun], scope: str) -> list[int]:
    """Return the places of the runs that a coefficient of this scope changes: all for "physics", else those of its stack or attention kernel."""
    used = stacks()
    return [
        place
        for place, run in enumerate(runs)
        if scope == "physics" or scope in {run.stack, numbers_of(run.stack), used[run.stack].attention}
    ]


def _search(
    residuals: Callable[[Vector], Vector],
    slopes: Callable[[Vector, Vector], NDArray[np.float64]],
    start: Vector,
    *,
    soft: int,
) -> Vector:
    vector, damping = start.copy(), 1e-2
    current = residuals(vector)
    cost = _cost(current, soft)
    for _ in range(ROUNDS):
        jacobian = slopes(vector, current)
        scale = _scale(current, soft)
        left, right = jacobian * scale[:, None], current * scale
        normal, gradient = left.T @ left, left.T @ right
        before = cost
        for _ in range(8):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
            next_ = residuals(vector + step)
            if _cost(next_, soft) < cost:
                vector, current, cost, damping = vector + step, next_, _cost(next_, soft), damping / 5.0
                break
            damping *= 4.0
        if before - cost < DONE * before:
            break
    return vector


def _scale(residual: Vector, soft: int) -> Vector:
    """Return the square root of the weight of each residual under soft L1; priors have weight 1."""
    scale = np.ones_like(residual)
    scale[:soft] = (1.0 + (residual[:soft] / SOFT) ** 2) ** -0.25
    return scale


def _cost(residual: Vector, soft: int) -> float:
    rough = 2.0 * SOFT**2 * (np.sqrt(1.0 + (residual[:soft] / SOFT) ** 2) - 1.0)
    return float(rough.sum() + (residual[soft:] ** 2).sum())


def _with(table: Table, free: Sequence[int], vector: Vector) -> tuple[Coefficient, ...]:
    values = dict(zip(free, np.exp(vector).tolist(), strict=True))
    return tuple(replace(one, value=values[place]) if place in values else one for place, one in enumerate(table))

"""Accuracy of the inference planner: throughput, time per output token and time to the first token compared with published rows.

python -m benchmarks.serving_plan [--json] [--fit] [--csv FILE]

Every source is predicted with coefficients fitted without it. A fit minimises the squares of log(predicted / measured), with the prior of
each coefficient as an equation, by Levenberg-Marquardt as in `benchmarks.fitting`. A fit without a source is one step from the fit to all
rows, with the derivatives there. `--csv` predicts another file with the shipped coefficients: nothing is fitted. `--fit` prints the table
to ship. Intervals hold 80 % of the rows if the planner's spreads are right.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.published_serving import MEASURED, METRICS, ServingRow, predict_row, read_serving_rows
from phalanx.planner.cost.uncertainty import Z_80
from phalanx.planner.facts.coefficient_table import Coefficient
from phalanx.planner.facts.serving_facts import serving_coefficients, serving_speeds

NOISE: Final[Mapping[str, float]] = {"throughput": 0.1, "tpot": 0.1, "ttft": 0.25}
"""Spread of measured around a perfect model: first tokens depend on how requests happen to arrive together."""
SOFT: Final = 1.5  # spreads beyond which a residual counts linearly
ROUNDS: Final = 8
NUDGE: Final = 0.02  # of a logarithm: small against the noise, large against steps of the simulation
MISSING: Final = math.log(2.0)  # residual of a row that the model says does not fit

Vector = NDArray[np.floating[Any]]
Table = tuple[Coefficient, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingScore:
    """One figure of one row. `error` is the logarithm of predicted over measured; None if the model is said not to fit."""

    row: ServingRow
    metric: str
    measured: float
    predicted: float | None

    @property
    def error(self) -> float | None:
        """The signed error."""
        return None if self.predicted is None else math.log(self.predicted / self.measured)


def main() -> None:
    """Print the scores."""
    options = _options()
    rows = read_serving_rows(Path(options.csv))
    table = serving_coefficients()
    if options.fit:
        print_table(fit(rows, table)[0])
        return
    fixed = score(rows, table)
    left = [] if options.csv != str(MEASURED) else score_left_out(rows, table)
    figures = summary(fixed, left)
    print(json.dumps(figures, indent=2) if options.json else format_figures(figures))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", default=str(MEASURED), help="rows with the columns of benchmarks/serving_measured.csv")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--fit", action="store_true", help="fit all rows and print the table of coefficients")
    return parser.parse_args()


def score(rows: Sequence[ServingRow], table: Sequence[Coefficient]) -> list[ServingScore]:
    """Return the scores of all figures of the rows."""
    speeds = serving_speeds(table)
    found = []
    for row in rows:
        predicted = predict_row(row, speeds[row.engine])
        found += [
            ServingScore(row=row, metric=metric, measured=row.measured[metric], predicted=predicted.get(metric))
            for metric in METRICS
            if metric in row.measured
        ]
    return found


def fit(rows: Sequence[ServingRow], table: Table) -> tuple[Table, Vector, Vector]:
    """Return the fitted table, and the residuals and their derivatives there (without the equations of the priors)."""
    free = _free(table)
    centre, spread = _priors(table, free)
    weight = _weights(rows)
    vector, damping = centre.copy(), 0.1
    current = _residuals(rows, _with(table, free, vector)) * weight
    slopes: Vector = np.zeros((len(current), len(free)))
    for _ in range(ROUNDS):
        slopes = _slopes(rows, table, free, vector, current, weight)
        cost = _cost(current, vector, centre, spread)
        for _ in range(6):
            moved = vector + _solve(current, slopes, vector, centre, spread, damping)
            after = _residuals(rows, _with(table, free, moved)) * weight
            if _cost(after, moved, centre, spread) < cost:
                vector, current, damping = moved, after, damping / 3.0
                break
            damping *= 4.0
        else:
            break
        if cost - _cost(current, vector, centre, spread) < 1e-3 * cost:
            break
    return _with(table, free, vector), current, slopes


def score_left_out(rows: Sequence[ServingRow], table: Table) -> list[ServingScore]:
    """Return the scores of every source with coefficients that were fitted without it.

    The step from the shipped fit is linear: its derivatives are taken once, there.
    """
    free = _free(table)
    centre, spread = _priors(table, free)
    shipped = np.array([math.log(table[place].value) for place in free])
    weight = _weights(rows)
    current = _residuals(rows, table) * weight
    slopes = _slopes(rows, table, free, shipped, current, weight)
    owners = np.array([row.source for row, _ in _figures(rows)])
    found: list[ServingScore] = []
    for source in dict.fromkeys(row.source for row in rows):
        keep = owners != source
        vector: Vector = shipped.copy()
        left = current[keep]
        for _ in range(5):  # the weights of distant rows change
            vector += _solve(left, slopes[keep], vector, centre, spread, 1e-6)
            left = current[keep] + slopes[keep] @ (vector - shipped)
        found += score([row for row in rows if row.source == source], _with(table, free, vector))
    return found


def _free(table: Sequence[Coefficient]) -> list[int]:
    return [place for place, one in enumerate(table) if one.spread]


def _priors(table: Sequence[Coefficient], free: Sequence[int]) -> tuple[Vector, Vector]:
    centre = np.array([math.log(table[place].prior or table[place].value) for place in free])
    return centre, np.array([table[place].spread or 1.0 for place in free])


def _with(table: Table, free: Sequence[int], vector: Vector) -> Table:
    found = list(table)
    for place, value in zip(free, vector, strict=True):
        found[place] = replace(found[place], value=math.exp(value))
    return tuple(found)


def _figures(rows: Sequence[ServingRow]) -> Iterator[tuple[ServingRow, str]]:
    for row in rows:
        for metric in METRICS:
            if metric in row.measured:
                yield row, metric


def _weights(rows: Sequence[ServingRow]) -> Vector:
    """A source counts as the square root of its number of figures, as in `benchmarks.fitting`."""
    counts = Counter(row.source for row, _ in _figures(rows))
    return np.array([(10.0 / counts[row.source]) ** 0.25 / NOISE[metric] for row, metric in _figures(rows)])


def _residuals(rows: Sequence[ServingRow], table: Table) -> Vector:
    return np.array([MISSING if one.error is None else one.error for one in score(rows, table)])


def _slopes(
    rows: Sequence[ServingRow], table: Table, free: Sequence[int], vector: Vector, current: Vector, weight: Vector
) -> Vector:
    slopes = np.empty((len(current), len(free)))
    for column in range(len(free)):
        moved = vector.copy()
        moved[column] += NUDGE
        slopes[:, column] = (_residuals(rows, _with(table, free, moved)) * weight - current) / NUDGE
    return slopes


def _solve(current: Vector, slopes: Vector, vector: Vector, centre: Vector, spread: Vector, damping: float) -> Vector:
    scale = 1.0 / np.sqrt(1.0 + (current / SOFT) ** 2)
    weighted = slopes * scale[:, None]
    normal = weighted.T @ slopes + np.diag(1.0 / spread**2)
    gradient = weighted.T @ current + (vector - centre) / spread**2
    step: Vector = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
    return step


def _cost(current: Vector, vector: Vector, centre: Vector, spread: Vector) -> float:
    soft = 2.0 * SOFT**2 * (np.sqrt(1.0 + (current / SOFT) ** 2) - 1.0)
    return float(soft.sum() + (((vector - centre) / spread) ** 2).sum())


def summary(fixed: Sequence[ServingScore], left: Sequence[ServingScore]) -> dict[str, Any]:
    """Return the figures of `--json`: errors by source and metric as shares, and the share of rows inside the 80 % interval."""
    figures: dict[str, Any] = {"rows": len({id(one.row) for one in fixed})}
    spreads = next(iter(serving_speeds().values())).spreads
    for name, scores in (("shipped", fixed), ("left_out", left)):
        if not scores:
            continue
        sources: dict[str, dict[str, Any]] = {}
        for source in dict.fromkeys(one.row.source for one in scores):
            sources[source] = _errors([one for one in scores if one.row.source == source], spreads)
        by_metric = {
            metric: statistics.fmean(one[metric]["mape"] for one in sources.values() if metric in one)
            for metric in METRICS
        }
        figures[name] = {"sources": sources, "mape_mean_of_sources": by_metric, "all": _errors(scores, spreads)}
    return figures


def _errors(scores: Sequence[ServingScore], spreads: Mapping[str, float]) -> dict[str, Any]:
    found: dict[str, Any] = {"refused_that_ran": sum(1 for one in scores if one.error is None)}
    grouped: dict[str, list[float]] = defaultdict(list)
    for one in scores:
        if one.error is not None:
            grouped[one.metric].append(one.error)
    for metric, errors in grouped.items():
        limit = Z_80 * spreads[metric]
        found[metric] = {
            "rows": len(errors),
            "mape": statistics.fmean(abs(math.expm1(error)) for error in errors),
            "median": statistics.median(abs(math.expm1(error)) for error in errors),
            "bias": math.expm1(statistics.fmean(errors)),
            "coverage_80": sum(abs(error) <= limit for error in errors) / len(errors),
            "spread": math.sqrt(statistics.fmean(error**2 for error in errors)),
        }
    return found


def format_figures(figures: Mapping[str, Any]) -> str:
    """Return the table for a terminal."""
    lines = [f"{figures['rows']} rows; error: mean of |predicted / measured - 1|; in 80 %: rows inside the interval"]
    for name in ("shipped", "left_out"):
        if name not in figures:
            continue
        lines += ["", f"{name.replace('_', ' '):<36}" + "".join(f"{one:>24}" for one in METRICS)]
        for source, one in [*figures[name]["sources"].items(), ("all rows", figures[name]["all"])]:
            lines.append(f"{source[:35]:<36}" + "".join(f"{_cell(one.get(metric)):>24}" for metric in METRICS))
        means = figures[name]["mape_mean_of_sources"]
        lines.append(f"{'mean of sources':<36}" + "".join(f"{means[one]:>23.1%} " for one in METRICS))
        lines.append(f"rows that ran and are said not to fit: {figures[name]['all']['refused_that_ran']}")
    return "\n".join(lines)


def _cell(one: Mapping[str, float] | None) -> str:
    return "" if one is None else f"{one['mape']:.1%} of {one['rows']}, in 80 % {one['coverage_80']:.0%}"


def print_table(table: Sequence[Coefficient]) -> None:
    """Print each fitted value: scope, name, value."""
    for one in table:
        if one.spread:
            sys.stdout.write(f"{one.scope},{one.name},{one.value:.4g}\n")


if __name__ == "__main__":
    main()

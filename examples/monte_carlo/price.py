"""Price an Asian option by Monte Carlo in the workers of a `phalanx.Executor`.

Each batch of paths has a seed of its own, so the result is the same to the last digit on any number of workers, also if some die. The
geometric average has an exact price: it checks the simulation, and as a control variate it makes the arithmetic one some twenty times sharper.
Source of the formula: A. G. Z. Kemna and A. C. F. Vorst, Journal of Banking and Finance 14 (1990).
"""

from __future__ import annotations

import argparse
import json
import math
import os
from concurrent.futures import as_completed
from pathlib import Path
from statistics import NormalDist

import matplotlib as mpl
import numpy as np

import phalanx

mpl.use("Agg")
import matplotlib.pyplot as plt

SPOT, STRIKE, RATE, VOLATILITY, YEARS, FIXINGS = 100.0, 100.0, 0.05, 0.3, 1.0, 50
SEED = 18


def batch_sums(batch: int, paths: int) -> list[float]:
    """Simulate one batch; return the sums of x, y, xx, yy, xy over its paths: x pays on the arithmetic average, y on the geometric one."""
    step_years = YEARS / FIXINGS
    normals_PT = np.random.default_rng([SEED, batch]).standard_normal((paths, FIXINGS))
    growth_PT = (RATE - VOLATILITY**2 / 2) * step_years + VOLATILITY * math.sqrt(step_years) * normals_PT
    logs_PT = math.log(SPOT) + np.cumsum(growth_PT, axis=1)
    discount = math.exp(-RATE * YEARS)
    x_P = discount * np.maximum(np.exp(logs_PT).mean(axis=1) - STRIKE, 0.0)
    y_P = discount * np.maximum(np.exp(logs_PT.mean(axis=1)) - STRIKE, 0.0)
    return [float(values.sum()) for values in (x_P, y_P, x_P * x_P, y_P * y_P, x_P * y_P)]


def exact_geometric() -> float:
    """Return the exact price on the geometric average, which is lognormal."""
    step_years = YEARS / FIXINGS
    mean = math.log(SPOT) + (RATE - VOLATILITY**2 / 2) * step_years * (FIXINGS + 1) / 2
    deviation = VOLATILITY * math.sqrt(step_years * (FIXINGS + 1) * (2 * FIXINGS + 1) / (6 * FIXINGS))
    above = (mean - math.log(STRIKE)) / deviation
    normal = NormalDist()
    forward = math.exp(mean + deviation**2 / 2)
    return math.exp(-RATE * YEARS) * (forward * normal.cdf(above + deviation) - STRIKE * normal.cdf(above))


def estimate(sums: list[float], paths: int) -> dict[str, float]:
    """Return prices and standard errors: geometric, arithmetic, and arithmetic with the control variate."""
    x, y, xx, yy, xy = (value / paths for value in sums)
    var_x, var_y, covariance = xx - x * x, yy - y * y, xy - x * y
    slope = covariance / var_y
    return {
        "geometric": y,
        "geometric_error": math.sqrt(var_y / paths),
        "arithmetic": x,
        "arithmetic_error": math.sqrt(var_x / paths),
        "controlled": x - slope * (y - exact_geometric()),
        "controlled_error": math.sqrt(max(var_x - covariance**2 / var_y, 0.0) / paths),
    }


def draw(history: list[dict[str, float]], paths_each: int, file: Path) -> None:
    """Draw the three estimates, with two standard errors, against the number of paths."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    paths = [paths_each * (place + 1) for place in range(len(history))]
    for name, colour, label in (
        ("arithmetic", "#b8860b", "arithmetic, plain"),
        ("controlled", "#00539c", "arithmetic, with control variate"),
        ("geometric", "#2e7d32", "geometric"),
    ):
        value = np.array([one[name] for one in history])
        error = 2 * np.array([one[f"{name}_error"] for one in history])
        axes.plot(paths, value, color=colour, label=label)
        axes.fill_between(paths, value - error, value + error, color=colour, alpha=0.2, linewidth=0)
    axes.axhline(exact_geometric(), color="black", linestyle="--", linewidth=1, label="geometric, exact")
    axes.set(
        xscale="log", xlabel="paths", ylabel="price", title="Asian option, strike 100: estimate and 2 standard errors"
    )
    axes.legend(loc="center right")
    figure.savefig(file, dpi=110)


def main() -> None:
    """Price, print, and write `result.json` and `picture.png`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=96)
    parser.add_argument("--paths", type=int, default=20_000, help="of each batch")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=1, help="of each worker; 0 for none")
    parser.add_argument("--output", type=Path, default=Path("output"))
    options = parser.parse_args()
    with phalanx.Executor(gpus=options.gpus, max_workers=options.workers, name="monte-carlo") as pool:
        futures = [pool.submit(batch_sums, batch, options.paths) for batch in range(options.batches)]
        for done, _ in enumerate(as_completed(futures), 1):
            print(f"job {pool.job_id}: {done} of {len(futures)} batches", flush=True)
        batches = [
            future.result() for future in futures
        ]  # in the order of batches: the sum must not depend on who was first
    history, sums = [], [0.0] * 5
    for place, batch in enumerate(batches, 1):
        sums = [total + part for total, part in zip(sums, batch, strict=True)]
        history.append(estimate(sums, place * options.paths))
    result = history[-1] | {"geometric_exact": exact_geometric(), "paths": options.batches * options.paths}
    os.makedirs(options.output, exist_ok=True)
    (options.output / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    draw(history, options.paths, options.output / "picture.png")
    for name in ("geometric", "arithmetic", "controlled"):
        print(f"{name:11} {result[name]:.5f} +- {result[f'{name}_error']:.5f}")
    print(f"exact       {result['geometric_exact']:.5f} (geometric)")


if __name__ == "__main__":
    main()

"""Draw energy and temperature of `melt`, and the isotherm: `python plot.py MELT_FOLDER ISOTHERM_FOLDER OUTPUT`."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt


def energies(folder: Path) -> dict[int, tuple[float, float]]:
    """Return energy and temperature by step; a step that was computed again after a restart counts once, as it was last."""
    rows = [line.split() for line in (folder / "energy.txt").read_text(encoding="utf-8").splitlines()]
    return {
        int(step): (float(energy), float(temperature))
        for step, energy, temperature in (row for row in rows if len(row) == 3)
    }


def isotherm(folder: Path) -> list[list[float]]:
    """Return density, pressure and energy of each element, by density."""
    return sorted(
        [float(value) for value in path.read_text(encoding="utf-8").split()] for path in folder.rglob("point.txt")
    )


def main(melt: Path, points: Path, output: Path) -> None:
    """Draw both, and print the isotherm."""
    rows = sorted(energies(melt).items())
    table = np.array(isotherm(points))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    steps = [step for step, _ in rows]
    first = rows[0][1][0]
    left.plot(steps, [1e4 * (values[0] - first) / abs(first) for _, values in rows], color="#00539c")
    left.set(
        xlabel="step", ylabel="energy per atom, change (1e-4)", title="melt: energy and temperature", ylim=(-10, 10)
    )
    other = left.twinx()
    other.plot(steps, [values[1] for _, values in rows], color="#b8860b", linewidth=0.8)
    other.set(ylabel="temperature", ylim=(0, 1.6))
    right.plot(table[:, 0], table[:, 1], "o-", color="#2e7d32", label="simulated")
    right.plot(table[:, 0], 2.0 * table[:, 0], "--", color="grey", label="ideal gas")
    right.set(xlabel="density", ylabel="pressure", title="isotherm, temperature 2")
    right.legend()
    output.mkdir(parents=True, exist_ok=True)
    figure.savefig(output / "picture.png", dpi=110)
    print("density pressure energy")
    for density, pressure, energy in table:
        print(f"{density:7.1f} {pressure:8.3f} {energy:6.3f}")


if __name__ == "__main__":
    main(*(Path(word) for word in sys.argv[1:4]))

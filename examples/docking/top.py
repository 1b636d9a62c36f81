"""Rank docked ligands: `python top.py POSES LIGANDS OUTPUT` prints the best ten and writes `top.csv` and `picture.png`."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt


def score(pose: Path) -> float:
    """Return the affinity of the best pose in kcal/mol; lower binds better."""
    found = re.search(r"VINA RESULT:\s+(-?[\d.]+)", pose.read_text(encoding="utf-8"))
    if found is None:
        raise SystemExit(f"{pose} holds no result of Vina")
    return float(found[1])


def ranked(poses: Path) -> list[tuple[float, int]]:
    """Return score and number of all ligands, the best first; equal scores by number."""
    return sorted((score(path), int(path.stem.partition("-")[2])) for path in poses.rglob("pose-*.pdbqt"))


def main(poses: Path, ligands: Path, output: Path) -> None:
    """Print the best, write all, draw both."""
    rows, names = ranked(poses), (ligands / "names.txt").read_text(encoding="utf-8").split()
    output.mkdir(parents=True, exist_ok=True)
    with (output / "top.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("rank", "ligand", "kcal_per_mol", "smiles"))
        writer.writerows((rank, number, value, names[number]) for rank, (value, number) in enumerate(rows, 1))
    best = rows[:10]
    for rank, (value, number) in enumerate(best, 1):
        print(f"{rank:2} {value:6.2f} kcal/mol  ligand {number:2}  {names[number]}")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), width_ratios=(2, 3), layout="constrained")
    left.hist([value for value, _ in rows], bins=20, color="#00539c")
    left.set(xlabel="kcal/mol", ylabel="ligands", title=f"scores of {len(rows)} ligands")
    right.barh([names[number] for _, number in reversed(best)], [value for value, _ in reversed(best)], color="#2e7d32")
    right.set(xlabel="kcal/mol", title="the best ten")
    figure.savefig(output / "picture.png", dpi=110)


if __name__ == "__main__":
    main(*(Path(word) for word in sys.argv[1:4]))

"""Uses by arrays of jobs: a node dies while elements run there; all elements end, and the result is that of undisturbed runs."""

from __future__ import annotations

import csv
import gzip
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops

from tests.examples.environments import last_lines
from tests.examples.use import Use, UseCluster, UseFailed


def kill_a_node_of(cluster: UseCluster, array: str, ended: int) -> list[str]:
    """Once so many elements of an array have ended, kill a node on which one runs; return the elements that ran there."""
    limit_s = time.monotonic() + 300.0
    while True:
        jobs = [job for job in cluster.shell.json("ps", "-a") if job["id"].startswith(f"{array}_")]
        done = sum(job["state"] == "succeeded" for job in jobs)
        there: dict[str, list[str]] = {}
        for job in jobs:
            if job["state"] == "running":
                there.setdefault(job["nodes"][0], []).append(job["id"])
        if done >= ended and there:
            victim = max(sorted(there), key=lambda node: len(there[node]))
            cluster.kill_node(victim)
            cluster.killed_at = f"{done} of {len(jobs)} elements ended"
            return there[victim]
        if time.monotonic() > limit_s or done == len(jobs):
            raise UseFailed(f"{done} of {len(jobs)} elements ended, and none runs: nothing was killed")
        time.sleep(0.1)


def all_ended(cluster: UseCluster, array: str, count: int) -> list[dict[str, Any]]:
    """Wait until all elements have succeeded, and return them.

    Raises:
        UseFailed: one did not.
    """
    limit_s = time.monotonic() + 480.0
    while True:
        jobs = [job for job in cluster.shell.json("ps", "-a") if job["id"].startswith(f"{array}_")]
        states = [job["state"] for job in jobs]
        if not {"pending", "running"} & set(states):
            break
        if time.monotonic() > limit_s:
            raise UseFailed(f"after 480 s the elements are {states}")
        time.sleep(1.0)
    if states != ["succeeded"] * count:
        raise UseFailed(f"the elements are {states}\n{last_lines(cluster.logs(array), 20)}")
    return jobs


def array_with_a_kill(
    cluster: UseCluster, words: tuple[str, ...], count: int, *, ended: int
) -> tuple[Path, list[str], int]:
    """Submit an array, kill a node; return the fetched folder, the elements that ran on the node, and how many ran again."""
    array = cluster.submit(*words)
    victims = kill_a_node_of(cluster, array, ended)
    again = {job["id"] for job in all_ended(cluster, array, count) if job["attempts"] > 1}
    if not again & set(victims):
        raise UseFailed(
            f"elements {victims} ran on the killed node, and those with a second attempt are {sorted(again)}"
        )
    return cluster.fetched(array), victims, len(again)


def rendering(cluster: UseCluster) -> str:
    """All frames are there, and a frame of the killed node equals one that is rendered here."""
    frames = 24
    folder, victims, again = array_with_a_kill(cluster, ("render.yaml",), frames, ended=6)
    found = {path.name: path for path in folder.rglob("frame-*.png")}
    if sorted(found) != [f"frame-{frame:03}.png" for frame in range(frames)]:
        raise UseFailed(f"the frames are {sorted(found)}")
    frame = int(victims[0].partition("_")[2])
    here = cluster.shell.work / "here.png"
    subprocess.run(
        [
            "povray",
            "+Iscene.pov",
            "+W320",
            "+H180",
            "+A0.2",
            "+Q9",
            "+WT1",
            "+FN",
            "-D",
            f"+K{frame / frames:.6g}",
            f"+O{here}",
        ],
        cwd=cluster.folder,
        capture_output=True,
        check=True,
        timeout=100,
    )
    pictures = [Image.open(path).convert("RGB") for path in (found[f"frame-{frame:03}.png"], here)]
    if ImageChops.difference(*pictures).getbbox() is not None:
        raise UseFailed(f"frame {frame} differs from the one that was rendered here")
    cluster.program("strip.py", str(folder), str(cluster.results))
    return (
        f"{frames} frames, film strip; a node killed: {again} frames rendered again, frame {frame} equal to a calm one"
    )


def docking(cluster: UseCluster) -> str:
    """All ligands are docked; the best ten and those of the killed node have the scores of dockings without Phalanx."""
    count, ligands, calm = 100, cluster.shell.work / "ligands", cluster.shell.work / "calm"
    cluster.program("library.py", str(ligands))
    with gzip.open("/usr/share/doc/autodock-vina/test-data/protein.pdbqt.gz") as file:
        (ligands / "receptor.pdbqt").write_bytes(file.read())
    words = ("dock.yaml", "-e", f"LIGANDS={ligands}")
    folder, victims, again = array_with_a_kill(cluster, words, count, ended=20)
    said = cluster.program("top.py", str(folder), str(ligands), str(cluster.results))
    with (cluster.results / "top.csv").open(encoding="utf-8", newline="") as file_csv:
        scores = {row["ligand"]: row["kcal_per_mol"] for row in csv.DictReader(file_csv)}
    if len(scores) != count:
        raise UseFailed(f"{len(scores)} of {count} ligands have a score")
    calm.mkdir()
    chosen = {*list(scores)[:10], *(victim.partition("_")[2] for victim in victims)}
    for ligand in chosen:
        environment = {"LIGANDS": str(ligands), "PHALANX_ARRAY_TASK_ID": ligand, "PHALANX_OUTPUT_DIR": str(calm)}
        _run(["bash", str(cluster.folder / "dock.sh")], cluster.folder, environment)
        pose = (calm / f"pose-{ligand}.pdbqt").read_bytes()
        if pose != next(folder.rglob(f"pose-{ligand}.pdbqt")).read_bytes():
            raise UseFailed(f"ligand {ligand} has another pose without Phalanx")
    print(said)
    best = next(iter(scores))
    return (
        f"{count} ligands, best {scores[best]} kcal/mol (ligand {best}); a node killed: {again} docked again; the poses of "
        f"{len(chosen)}, the ten best among them, are those of calm runs"
    )


def molecular_dynamics(cluster: UseCluster) -> str:
    """A rank of the MPI run dies; it goes on from a restart file, and energy is conserved throughout. The array gives the isotherm."""
    melt, steps = cluster.submit("melt.yaml"), 5_000
    cluster.when_logged(melt, "step 2000 saved")
    cluster.kill_process(melt, "melt.in")
    cluster.killed_at = "step 2000"
    cluster.succeeded(melt)
    said, folder = cluster.logs(melt), cluster.fetched(melt)
    if "Reading restart file" not in said or f"done at step {steps}" not in said:
        raise UseFailed(f"the run did not go on from a restart file to its end\n{last_lines(said, 30)}")
    rows = {
        row[0]: float(row[1])
        for row in map(str.split, (folder / "energy.txt").read_text().splitlines())
        if len(row) == 3
    }
    if sorted(map(int, rows)) != list(range(0, steps + 1, 100)):
        raise UseFailed(f"the energies are those of steps {sorted(map(int, rows))}")
    drift = (max(rows.values()) - min(rows.values())) / abs(rows["0"])
    if drift > 1e-3:
        raise UseFailed(f"the energy varies by {drift:.1e}")
    points = cluster.submit("isotherm.yaml")
    all_ended(cluster, points, 8)
    table = cluster.program("plot.py", str(folder), str(cluster.fetched(points)), str(cluster.results))
    (cluster.results / "isotherm.txt").write_text(table)
    pressures = [float(line.split()[1]) for line in table.splitlines()[1:]]
    if len(pressures) != 8 or not 0.169 < pressures[0] < 0.183:  # 0.2 (1 + B2 density + B3 density^2) is 0.177
        raise UseFailed(f"the pressures are {pressures}")
    return f"{steps} steps on 2 ranks, energy within {drift:.1e}; a rank killed: went on from a restart file; isotherm of 8 densities"


def _run(words: list[str], folder: Path, variables: dict[str, str]) -> None:
    done = subprocess.run(
        words, cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=200, check=False
    )
    if done.returncode != 0:
        raise UseFailed(f"{words} ended with {done.returncode}: {done.stderr[-500:]}")


ARRAYS = (
    Use(name="rendering", run=rendering, debian={"povray": "povray"}),
    Use(name="docking", run=docking, debian={"vina": "autodock-vina"}, packaged=True),
    Use(name="molecular_dynamics", run=molecular_dynamics, debian={"lmp": "lammps"}),
)

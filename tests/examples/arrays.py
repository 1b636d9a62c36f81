"""Uses by arrays of jobs: a node dies while elements run there; all elements end, and the result is that of undisturbed runs."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from PIL import Image, ImageChops

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


def all_succeeded(cluster: UseCluster, array: str, count: int, victims: list[str]) -> int:
    """Wait until all elements have succeeded; return how many of the victims needed a second attempt.

    Raises:
        UseFailed: one did not, or none of the victims did run again.
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
        raise UseFailed(f"the elements are {states}")
    again = [job["id"] for job in jobs if job["attempts"] > 1]
    if not set(again) & set(victims):
        raise UseFailed(f"elements {victims} ran on the killed node, and those with a second attempt are {again}")
    return len(again)


def array_with_a_kill(
    cluster: UseCluster, words: tuple[str, ...], count: int, *, ended: int
) -> tuple[Path, list[str], int]:
    """Submit an array, kill a node; return the fetched folder, the elements that ran on the node, and how many ran again."""
    array = cluster.submit(*words)
    victims = kill_a_node_of(cluster, array, ended)
    again = all_succeeded(cluster, array, count, victims)
    return cluster.fetched(array), victims, again


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


ARRAYS = (Use(name="rendering", run=rendering, debian={"povray": "povray"}),)

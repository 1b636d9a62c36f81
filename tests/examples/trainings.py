"""Uses by `phalanx.torch`: a node dies in mid-training; the job resumes from its checkpoint, and its losses are those of an undisturbed one."""

from __future__ import annotations

import json
import shutil

from tests.examples.use import Use, UseCluster, UseFailed


def vision(cluster: UseCluster) -> str:
    """A node dies after step 200; losses and accuracy are those of a training without a kill."""
    words = ("--gpus", "2x1", "--", "python", "train.py")
    calm = cluster.submit(*words)
    cluster.succeeded(calm)
    job = cluster.submit(*words)
    cluster.when_logged(job, "step 200 ")
    cluster.kill_node("n1")
    cluster.killed_at = "step 200"
    cluster.succeeded(job)
    folder = cluster.fetched(job)
    first, second = (json.loads((each / "result.json").read_text()) for each in (cluster.fetched(calm), folder))
    shutil.copy(folder / "picture.png", cluster.results / "picture.png")
    shutil.copy(folder / "result.json", cluster.results / "result.json")
    if second["resumed_from"] < 50 or first["resumed_from"] != 0:
        raise UseFailed(f"resumed from step {second['resumed_from']}, the calm one from {first['resumed_from']}")
    pairs = list(zip(first["losses"], second["losses"], strict=True))
    apart = max(abs(one - other) for one, other in pairs)
    if apart > 1e-4:
        raise UseFailed(f"the losses differ by up to {apart:.1e}")
    if second["accuracy"] < 0.97:
        raise UseFailed(f"accuracy {second['accuracy']:.3f}")
    return (
        f"accuracy {second['accuracy']:.1%} after {len(pairs)} steps; a node killed: resumed from step "
        f"{second['resumed_from']}, losses within {apart:.0e} of a calm training"
    )


TRAININGS = (Use(name="vision", run=vision, packaged=True),)

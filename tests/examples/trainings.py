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


def fine_tune(cluster: UseCluster) -> str:
    """A node dies after step 12; the losses are those of a training without a kill, and the model answers what it has not seen."""
    words, compared = ("--gpus", "2x1", "--", "python", "train.py", "--steps"), 15
    calm = cluster.submit(*words, str(compared))
    cluster.succeeded(calm)
    job = cluster.submit(*words, "30")
    cluster.when_logged(job, "step 12 ")
    cluster.kill_node("n1")
    cluster.killed_at = "step 12"
    cluster.succeeded(job)
    folder = cluster.fetched(job)
    first, second = (json.loads((each / "result.json").read_text()) for each in (cluster.fetched(calm), folder))
    for name in ("picture.png", "result.json"):
        shutil.copy(folder / name, cluster.results / name)
    if second["resumed_from"] not in {5, 10} or first["resumed_from"] != 0:
        raise UseFailed(f"resumed from step {second['resumed_from']}, the calm one from {first['resumed_from']}")
    losses = second["losses"]
    apart = max(abs(one - other) for one, other in zip(first["losses"], losses[:compared], strict=True))
    if apart > 1e-3:
        raise UseFailed(f"the losses differ by up to {apart:.1e}")
    if len(losses) != 30 or sum(losses[-5:]) > sum(losses[:5]) / 20:
        raise UseFailed(f"the loss does not fall: {losses}")
    if set(second["before"]) & set(second["commands"]) or second["right"] < 24:
        raise UseFailed(
            f"{second['right']} of {second['asked']} held-out wishes are answered; before: {second['before']}"
        )
    said = cluster.logs(job)
    if "before: " not in said or "after: " not in said:
        raise UseFailed(f"no sample before and after\n{said[-2000:]}")
    return (
        f"loss {losses[0]:.2f} to {losses[-1]:.3f}, {second['right']} of {second['asked']} held-out wishes answered, none before; "
        f"a node killed: resumed from step {second['resumed_from']}, losses within {apart:.0e} of a calm training"
    )


TRAININGS = (Use(name="vision", run=vision, packaged=True), Use(name="fine_tune", run=fine_tune, packaged=True))

"""What `--exclusive` and `--scale-down` make of a script once the nodes are known."""

import pytest

from phalanx.cli.jobs.request.sbatch_script import SlurmNames, too_large
from phalanx.core.errors import BadRequest
from phalanx.core.units import GIB
from phalanx.core.work.sbatch_scripts.fleet_fit import NodeShape, numbers_too_large, scale_down, take_whole_nodes
from phalanx.core.work.sbatch_scripts.sbatch_job import convert_script


def fleet(*kinds):
    """Nodes of `(count, GPUs, CPUs)`."""
    shapes = [(gpus, cpus) for count, gpus, cpus in kinds for _ in range(count)]
    return [
        NodeShape(id=f"n{at}", gpus=gpus, cpus=cpus, memory_bytes=64 * GIB, model="h100" if gpus else "")
        for at, (gpus, cpus) in enumerate(shapes)
    ]


def job(*lines):
    text = "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), "srun true", ""])
    return convert_script(text, name="job.sh", folder="/home/me").mapping


@pytest.mark.parametrize(
    ("lines", "nodes", "gpus", "each"),
    [
        (["-N 2"], 2, 16, (8, 64)),
        (["-N 1", "--gpus=1"], 1, 8, (8, 64)),
        (["-n 65"], 2, 16, (8, 64)),
        (["-N 2", "--gres=gpu:h100:4"], 2, "h100:16", (8, 64)),
        (["-N 1", "--nodelist=n3"], 1, None, (0, 128)),
    ],
)
def test_an_exclusive_job_gets_all_of_each_node(lines, nodes, gpus, each):
    found, line = take_whole_nodes(job("--exclusive", *lines), fleet((3, 8, 64), (1, 0, 128)))
    assert (found["nodes"], found.get("gpus") or None, found["cpus"]) == (nodes, gpus, each[1])
    assert (found.get("gpus_per_node") or 0) == each[0]
    assert f"{each[1]} CPUs each" in line


@pytest.mark.parametrize(
    ("lines", "why"), [(["--gres=gpu:16"], "no node has 16 GPUs"), (["--gres=shard:1"], "a part of a GPU")]
)
def test_an_exclusive_job_that_no_node_fits_is_refused(lines, why):
    with pytest.raises(BadRequest, match=why):
        take_whole_nodes(job(*lines), fleet((2, 8, 64)))


def test_too_small_a_cluster_for_whole_nodes_offers_to_lower_the_numbers():
    named = SlurmNames(script="job.sh", partition="", account="", exclusive=(0,))
    refused = too_large(job("--exclusive", "-N 4", "--gres=gpu:16"), fleet((2, 8, 64)), named)
    assert refused is not None
    assert "16 GPUs on a node (a node has at most 8)" in refused.message
    assert "--scale-down" in refused.hint
    assert too_large(job("--exclusive", "-N 2", "--gres=gpu:8"), fleet((2, 8, 64)), named) is None


def test_each_number_that_is_too_large_is_named_once():
    wanted = job("-N 4", "--gres=gpu:8", "-c 96", "--mem=128G")
    assert numbers_too_large(wanted, fleet((2, 4, 16))) == [
        "4 nodes (the cluster has 2)",
        "8 GPUs on a node (a node has at most 4)",
        "96 CPUs on a node (a node has at most 16)",
        "128 GiB of memory on a node (a node has at most 64 GiB)",
    ]
    assert numbers_too_large(wanted, fleet((4, 8, 96))) == ["128 GiB of memory on a node (a node has at most 64 GiB)"]


def test_a_scaled_down_script_keeps_a_task_for_each_gpu():
    found = scale_down(job("-N 4", "--ntasks-per-node=8", "--gres=gpu:8", "-c 12", "--mem=128G"), fleet((2, 4, 16)))
    assert (found["nodes"], found["gpus"], found["gpus_per_node"], found["cpus"]) == (2, 8, 4, 16)
    slurm = found["slurm"]
    assert isinstance(slurm, dict)
    assert (slurm["ntasks"], slurm["ntasks_per_node"], slurm["cpus_per_task"]) == ("8", "4", "4")
    assert numbers_too_large(found, fleet((2, 4, 16))) == []


def test_a_script_that_fits_is_not_changed():
    wanted = job("-N 2", "--gres=gpu:4", "-c 2")
    found = scale_down(wanted, fleet((2, 4, 16)))
    assert {**found, "slurm": None} == {**wanted, "slurm": None}
    assert numbers_too_large(wanted, fleet((2, 4, 16))) == []


def test_nodes_of_other_gpu_models_do_not_count():
    mixed = [
        NodeShape(id=name, gpus=gpus, cpus=64, memory_bytes=64 * GIB, model=model)
        for name, gpus, model in [("a0", 8, "a100"), ("a1", 8, "a100"), ("h0", 4, "h100"), ("c0", 0, "")]
    ]
    wanted = job("-N 3", "--gres=gpu:8")
    assert numbers_too_large(wanted, mixed) == ["3 nodes (the cluster has 2 of one GPU model)"]
    found = scale_down(wanted, mixed)
    assert (found["nodes"], found["gpus"], numbers_too_large(found, mixed)) == (2, 16, [])
    of_h100 = scale_down(job("-N 3", "--gres=gpu:h100:8"), mixed)
    assert (of_h100["nodes"], of_h100["gpus"], numbers_too_large(of_h100, mixed)) == (1, "h100:4", [])
    assert numbers_too_large(job("-N 4"), mixed) == []

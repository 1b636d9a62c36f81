"""Heterogeneous `#SBATCH` scripts: their components, the roles that they become, and the steps over them."""

import pytest

from phalanx.cli.jobs.request.sbatch_script import SlurmNames, too_large
from phalanx.core.errors import BadFile, BadRequest
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.sbatch_scripts.fleet_fit import NodeShape
from phalanx.core.work.sbatch_scripts.het_components import read_components, slurm_settings
from phalanx.core.work.sbatch_scripts.sbatch_job import convert_script
from phalanx.node.logic.het_steps import (
    components_of,
    het_variables,
    joined_step,
    parse_sruns,
    part_variables,
    plan_parts,
    script_variables,
)
from phalanx.node.logic.variables.slurm_variables import SlurmBatchJob, SlurmBatchNode


def read(*lines, given=()):
    """A script of these lines of options; a word alone is a separator."""
    text = "#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in lines) + "srun true\n"
    return convert_script(text, name="job.sh", folder="/work", given=given)


def roles(found):
    role = spec_from_mapping(found.mapping, workdir="/work").role
    return [(str(one.gpus), one.cpus, one.memory_bytes >> 20) for one in role.each]


# ---- components ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["hetjob", "packjob"])
def test_each_component_becomes_a_role(word):
    found = read("-N1 -n2 -c2 --gpus-per-node=2", word, "-N2 --ntasks-per-node=1 -c3 --gres=gpu:h100:1", word, "-n4")
    assert roles(found) == [("1x2", 4, 0), ("2xh100:1", 3, 0), ("1x0", 4, 0)]


def test_a_component_takes_over_what_does_not_describe_its_nodes():
    found = read("-N1 -J first --mem=100M -A acc -t 5", "hetjob", "-N2", "hetjob", "-J third --mem=7M")
    assert [memory for *_, memory in roles(found)] == [100, 100, 7]
    names = [slurm_settings(one).get("name") for one in read_components(found.mapping["slurm"]["components"])]
    assert (names, found.mapping["name"], found.notes) == (["first", "third"], "first", ())


def test_the_command_line_replaces_the_options_of_the_same_component_or_adds_one():
    assert roles(read("-N1", "hetjob", "-N2", given=["-N3", ":", "-c5"])) == [("3x0", 1, 0), ("2x0", 5, 0)]
    assert roles(read("-N1", given=["-c", "2", ":", "-N2"])) == [("1x0", 2, 0), ("2x0", 1, 0)]


def test_what_the_job_has_only_once_is_named_with_its_line():
    found = read("-N1 -t 5 -p cpu", "hetjob", "-N1 -t 9 -p gpu")
    assert [note.partition(" is not")[0] for note in found.notes] == [
        "line 4: --time=9 of component 1",
        "line 4: --partition=gpu of component 1",
    ]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["-N1 --array=0-1", "hetjob", "-N1"], "line 2: --array=0-1: not in a heterogeneous job"),
        (["-N1", "hetjob", "-N1 -w n3"], "line 4: --nodelist=n3: not in a heterogeneous job"),
        (["-N1 -x n1", "hetjob", "-N1 -x n2"], "line 4: --exclude=n2 of component 1"),
        (["-N1 --mem=1G", "hetjob", "-n1 --mem-per-gpu=1G"], "in component 1: Slurm refuses both together"),
        (["-N1", "hetjob", "--gres=gpu:1g.10gb:1"], "component 1 asks for a part of a GPU"),
        (["--gres=mps:50", "hetjob", "-N1"], "component 0 asks for a part of a GPU"),
        (["hetjob", "-N0"], "line 3: --nodes=0"),
        (["hetjob"] * 130, "at most 128 components"),
    ],
)
def test_what_a_heterogeneous_job_cannot_have_is_refused_with_its_line(lines, why):
    with pytest.raises(BadFile, match=why):
        read(*lines)


@pytest.mark.parametrize(
    ("more", "why"),
    [({"within": "rack"}, "a topology level"), ({"array": "0-3"}, "an array"), ({"gpus": "1/2"}, "a part of a GPU")],
)
def test_options_of_the_submit_that_roles_cannot_have_are_refused(more, why):
    with pytest.raises(BadRequest, match=why):
        spec_from_mapping({**read("-N1", "hetjob", "-N1").mapping, "nodes": None, **more}, workdir="/work")


@pytest.mark.parametrize(
    "text", ["{}", "[1]", "nonsense", '[{"run": "x"}]', '[{"slurm": {"ntasks": 1}}]', '[{"nodes": -1}]']
)
def test_components_that_no_command_of_ours_wrote_are_refused(text):
    with pytest.raises(BadFile):
        spec_from_mapping({"run": "true", "slurm": {"key": "k", "components": text}}, workdir="/work")


def test_the_numbers_of_every_component_are_compared_with_the_cluster():
    nodes = [NodeShape(id=f"n{one}", gpus=2, cpus=8, memory_bytes=1 << 36) for one in range(2)]
    named = SlurmNames(script="job.sh", partition="", account="")
    refused = too_large(read("-N1 -c4", "hetjob", "-N1 --gpus-per-node=4").mapping, nodes, named)
    assert refused is not None
    assert "4 GPUs on a node (a node has at most 2)" in refused.message


# ---- steps --------------------------------------------------------------------------------------------------------------


def het():
    """Two tasks on one node with two GPUs, and one on each of two nodes with one."""
    found = read(
        "-J het -N1 -n2 -c2 --gpus-per-node=2 --mem=100M", "hetjob", "-N2 --ntasks-per-node=1 -c3 --gpus-per-node=1"
    )
    nodes = tuple(
        SlurmBatchNode(name=f"n{rank}", address=f"10.0.0.{rank + 1}", devices=devices, cpus=cpus)
        for rank, (devices, cpus) in enumerate([(2, 4), (1, 3), (1, 3)])
    )
    slurm = slurm_settings(found.mapping)
    others = [slurm_settings(one) for one in read_components(slurm["components"])]
    whole = SlurmBatchJob(job_number="7", name="het", nodes=nodes, options=slurm, user="me", uid=1)
    return components_of(whole, [0, 1, 1], others)


def step(line, of=None):
    batch = het() if of is None else of
    return plan_parts(parse_sruns(line.split(), len(batch.components)), batch, 0)


def tasks(line):
    """Each task as `component:command on node rank`, by rank."""
    parts = step(line)
    nodes, numbers = joined_step(parts)
    found = {task: node for node, own in zip(nodes, numbers, strict=True) for task in own}
    commands = {part.first_task + one: part for part in parts for one in range(part.step.tasks)}
    return [f"{commands[one].group}:{commands[one].srun.command[0]} on {found[one]}" for one in sorted(found)]


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("a", ["0:a on 0", "0:a on 0"]),
        ("--het-group=1 a", ["1:a on 1", "1:a on 2"]),
        ("--pack-group=1 -n1 a", ["1:a on 1"]),
        ("--het-group=0,1 a", ["0:a on 0", "0:a on 0", "1:a on 1", "1:a on 2"]),
        ("--het-group=0-1 -n1 a", ["0:a on 0", "1:a on 1"]),
        ("-n1 a : -n2 b", ["0:a on 0", "1:b on 1", "1:b on 2"]),
        ("-n1 : -n1 b", ["0:b on 0", "1:b on 1"]),
        ("--het-group=1 b : --het-group=0 a x:y", ["0:a on 0", "0:a on 0", "1:b on 1", "1:b on 2"]),
    ],
)
def test_ranks_count_on_from_component_to_component(line, want):
    assert tasks(line) == want


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--het-group=2 a", "the components of this job are 0 to 1"),
        ("a : b : c", "the components of this job are 0 to 1"),
        ("--het-group=0 a : --het-group=0 b", "given twice"),
        ("--het-group=x a", "not a list of components"),
        ("a :", "no command"),
        ("--het-group=1 -w n0 a", "not a node of this job"),
    ],
)
def test_a_wrong_component_is_refused(line, why):
    with pytest.raises(BadRequest, match=why):
        step(line)


@pytest.mark.parametrize("line", ["--het-group=0 a", "a : b"])
def test_a_job_of_one_component_says_how_to_get_several(line):
    alone = SlurmBatchJob(job_number="7", name="x", nodes=het().nodes, options={}, user="me", uid=1)
    with pytest.raises(BadRequest) as refused:
        step(line, alone)
    assert "#SBATCH hetjob" in str(refused.value.hint)


def test_the_script_sees_component_0_and_a_word_of_each():
    seen = script_variables(het())
    assert (seen["SLURM_JOB_NODELIST"], seen["SLURM_NTASKS"], seen["SLURM_HET_SIZE"]) == ("n0", "2", "2")
    assert "SLURM_CPUS_PER_TASK" not in seen
    assert {name: value for name, value in seen.items() if name.endswith("_HET_GROUP_1")} == {
        "SLURM_CPUS_PER_TASK_HET_GROUP_1": "3",
        "SLURM_GPUS_PER_NODE_HET_GROUP_1": "1",
        "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "3(x2)",
        "SLURM_JOB_ID_HET_GROUP_1": "8",
        "SLURM_JOB_NAME_HET_GROUP_1": "het",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n[1-2]",
        "SLURM_JOB_NUM_NODES_HET_GROUP_1": "2",
        "SLURM_JOB_PARTITION_HET_GROUP_1": "phalanx",
        "SLURM_MEM_PER_NODE_HET_GROUP_1": "100",
        "SLURM_NPROCS_HET_GROUP_1": "2",
        "SLURM_NTASKS_HET_GROUP_1": "2",
        "SLURM_NTASKS_PER_NODE_HET_GROUP_1": "1",
        "SLURM_TASKS_PER_NODE_HET_GROUP_1": "1(x2)",
    }
    assert het_variables(het())["SLURM_JOB_ID_PACK_GROUP_0"] == "7"


def test_a_task_of_the_second_component_sees_one_world():
    batch = het()
    parts = step("--het-group=0,1 a", batch)
    seen = part_variables(batch, parts, parts[1], 1, host="10.0.0.1", label=False, umask=0o022)
    want = {
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "2",
        "SLURM_GTIDS": "3",
        "SLURM_NTASKS": "4",
        "SLURM_NNODES": "3",
        "SLURM_STEP_NODELIST": "n[0-2]",
        "SLURM_JOB_NODELIST": "n[0-2]",
        "SLURM_TASKS_PER_NODE": "2,1(x2)",
        "SLURM_JOB_CPUS_PER_NODE": "4,3(x2)",
        "SLURM_CPUS_ON_NODE": "3",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_JOB_GPUS": "0,1",
        "SLURM_DISTRIBUTION": "cyclic",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURMD_NODENAME": "n2",
    }
    assert {name: seen.get(name) for name in want} == want

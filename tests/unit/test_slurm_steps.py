"""What an srun line asks for, how its tasks are laid out, and the SLURM_* variables that scripts and tasks see."""

import pytest

from phalanx.core.errors import BadRequest
from phalanx.node.logic.slurm_variables import (
    SlurmBatchJob,
    SlurmBatchNode,
    SlurmStep,
    batch_variables,
    compress_counts,
    expand_file_pattern,
    step_variables,
    tasks_per_node,
)
from phalanx.node.logic.srun_options import (
    exported_environment,
    parse_srun,
    plan_step,
    step_hostname,
)


def batch(nodes=2, ntasks=4, devices=2, address="10.0.0.{}", **asked):
    found = tuple(
        SlurmBatchNode(name=f"gpu{n}", address=address.format(n + 1), devices=devices, cpus=8) for n in range(nodes)
    )
    return SlurmBatchJob(
        job_number="17", name="my", nodes=found, options={"ntasks": str(ntasks), **asked}, user="me", uid=1000
    )


def step(line, of=None):
    return plan_step(parse_srun(line.split()), of or batch(), 0)


# ---- layout -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "nodes", "counts"),
    [
        ("hostname", (0, 1), (2, 2)),
        ("-N1 -n1 hostname", (0,), (1,)),
        ("-n 3 hostname", (0, 1), (2, 1)),
        ("-n1 hostname", (0,), (1,)),
        ("--ntasks-per-node=1 hostname", (0, 1), (1, 1)),
        ("-n 8 --ntasks-per-node=4 hostname", (0, 1), (4, 4)),
        ("-w gpu1 -n2 hostname", (1,), (2,)),
        ("-x gpu0 -n2 hostname", (1,), (2,)),
        ("-N2 -l -u hostname -x y", (0, 1), (2, 2)),
        ("-w 10.0.0.2 -N1 -n1 hostname", (1,), (1,)),
    ],
)
def test_where_tasks_go(line, nodes, counts):
    found = step(line)
    assert (found.nodes, found.counts) == (nodes, counts)


def test_options_end_at_the_command():
    assert parse_srun(["-n2", "python", "-c", "'x'", "-n", "9"]).command == ("python", "-c", "'x'", "-n", "9")
    assert parse_srun(["-n2", "--", "-odd"]).command == ("-odd",)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("-N3 hostname", "the job has 2"),
        ("-w gpu7 hostname", "gpu7 is not a node of this job"),
        ("--pty bash", "--pty is not supported here"),
        ("--mpi=pmix ./a.out", "--mpi=pmix is not supported here"),
        ("--nodez=2 x", "no option --nodez"),
        ("-n x y", "must be a whole number"),
        ("-n2", "no command"),
        ("--multi-prog f", "--multi-prog is not supported"),
        ("-Z x", "no option -Z"),
        ("-n 9 --ntasks-per-node=4 -N 2 x", "9 tasks on 2 nodes"),
    ],
)
def test_what_cannot_be_done_is_refused(line, why):
    with pytest.raises(BadRequest, match=why):
        step(line)


def test_what_is_not_done_is_named():
    found = parse_srun(["--cpu-bind=cores", "--gres", "gpu:1", "-t", "5", "--mpi=none", "hostname"])
    assert [note.partition(" is ignored")[0] for note in found.notes] == [
        "--cpu-bind=cores",
        "--gres=gpu:1",
        "--time=5",
    ]


@pytest.mark.parametrize(
    ("tasks", "nodes", "per", "counts"),
    [(5, 2, None, (3, 2)), (5, 3, 2, (2, 2, 1)), (4, 2, 4, (3, 1)), (2, 2, 8, (1, 1))],
)
def test_tasks_spread(tasks, nodes, per, counts):
    assert tasks_per_node(tasks, nodes, per) == counts


# ---- variables ----------------------------------------------------------------------------------------------------------


def test_the_script_sees_its_job():
    seen = batch_variables(
        batch(ntasks_per_node="2", cpus_per_task="4", submit_dir="/home/me", partition="gpu", mem="64G")
    )
    wanted = {
        "SLURM_JOB_ID": "17",
        "SLURM_JOBID": "17",
        "SLURM_JOB_NAME": "my",
        "SLURM_JOB_NODELIST": "gpu[0-1]",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_TASKS_PER_NODE": "2(x2)",
        "SLURM_CPUS_PER_TASK": "4",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_GPUS_PER_NODE": "2",
        "SLURM_JOB_GPUS": "0,1",
        "SLURM_SUBMIT_DIR": "/home/me",
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_MEM_PER_NODE": "65536",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
    }
    assert wanted.items() <= seen.items()
    assert "SLURM_JOB_ACCOUNT" not in seen


def test_a_task_sees_its_place_in_the_step():
    seen = step_variables(batch(), SlurmStep(number=3, nodes=(0, 1), counts=(2, 1)), 2, host="10.0.0.1")
    wanted = {
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
        "SLURM_STEP_ID": "3",
        "SLURM_NTASKS": "3",
        "SLURM_GTIDS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
        "SLURMD_NODENAME": "gpu1",
        "SLURM_JOB_NUM_NODES": "2",
    }
    assert wanted.items() <= seen.items()


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("slurm-%j.out", "slurm-17.out"),
        ("%x.%5j", "my.00017"),
        ("a%%b", "a%b"),
        ("%u-%N", "me-gpu0"),
        ("%A_%a", "12_3"),
        ("%q", "%q"),
        ("x%", "x%"),
        ("%J", "17"),
    ],
)
def test_file_names(pattern, name):
    of = batch()
    element = SlurmBatchJob(
        job_number="17",
        name="my",
        nodes=of.nodes,
        options=of.options,
        user="me",
        uid=1,
        array={"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"},
    )
    assert expand_file_pattern(pattern, element) == name
    assert expand_file_pattern("%j.%s.%t", of, step=2, task=5) == "17.2.5"
    assert expand_file_pattern("%²j", of) == "%²j", "a digit to str.isdigit and none to int()"


def test_counts_are_folded_as_slurm_folds_them():
    assert compress_counts([4, 4, 3]) == "4(x2),3"


def test_virtual_nodes_are_shown_by_addresses_that_work_and_differ():
    of = batch(address="127.0.0.1")
    assert [step_hostname(of, rank) for rank in range(2)] == ["127.0.0.1", "127.0.0.2"]
    assert step_hostname(batch(), 1) == "gpu1"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("", {"A": "1", "B": "2", "PATH": "/bin"}),
        ("ALL", {"A": "1", "B": "2", "PATH": "/bin"}),
        ("NONE", {"PATH": "/bin"}),
        ("A,C=3", {"A": "1", "C": "3", "PATH": "/bin"}),
        ("ALL,A=9", {"A": "9", "B": "2", "PATH": "/bin"}),
    ],
)
def test_export(words, found):
    assert exported_environment(words, {"A": "1", "B": "2", "PATH": "/bin"}) == found

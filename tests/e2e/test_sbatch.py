"""Unchanged #SBATCH scripts on the local engine, as a user types them: a real head, virtual nodes, real srun steps over sockets."""

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.cluster import free_port
from tests.e2e.test_cli_head import Shell

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(240)]

TRAIN = """#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-node=2        # two on each
#SBATCH --time=00:10:00
#SBATCH --output=train-%j.out
#SBATCH --qos=high

echo "args $# $2; job $SLURM_JOB_ID $SLURM_JOB_NAME on $SLURM_JOB_NODELIST, $SLURM_NTASKS tasks, $SLURM_GPUS_PER_NODE GPUs; $FROM_HERE; RANK=$RANK"
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
echo "master $MASTER_ADDR"
srun --label bash -c 'echo "task $SLURM_PROCID is $SLURM_LOCALID on node $SLURM_NODEID of $SLURM_NNODES at $SLURMD_NODENAME: $PHALANX_DEVICES"'
"""
TRAINING = """#!/bin/bash
#SBATCH -N 2 --ntasks-per-node=1 --gpus-per-node=1 -t 5
export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) MASTER_PORT=$((20000 + SLURM_JOB_ID))
srun %s reduce.py
"""
REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo", rank=int(os.environ["SLURM_PROCID"]), world_size=int(os.environ["SLURM_NTASKS"]))
ones = torch.ones(1)
dist.all_reduce(ones)
print("sum", ones.item(), flush=True)
dist.destroy_process_group()
"""
# What MPICH's library says to find the other ranks: each puts a value, and reads that of the last rank after the barrier.
WORLD = """
import os, socket, sys
def connect():
    if "PMI_FD" in os.environ:
        return socket.socket(fileno=int(os.environ["PMI_FD"]))
    host, port = os.environ["PMI_PORT"].split(":")
    return socket.create_connection((host, int(port)))
with connect() as pmi, pmi.makefile("rw") as lines:
    def ask(words):
        lines.write(words + "\\n")
        lines.flush()
        return lines.readline().strip()
    if "PMI_FD" in os.environ:
        rank, size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
    else:
        ask("cmd=initack pmiid=" + os.environ["PMI_ID"])
        size, rank, _ = (int(lines.readline().split("=")[-1]) for _ in range(3))
    ask("cmd=init pmi_version=1 pmi_subversion=1")
    if sys.argv[1:] == [str(rank)]:
        sys.exit(3)
    ask(f"cmd=put kvsname=k key=card{rank} value=at-{os.environ['SLURMD_NODENAME']}")
    ask("cmd=barrier_in")
    print(rank, "of", size, ask(f"cmd=get kvsname=k key=card{size - 1}").split("value=")[1], flush=True)
    ask("cmd=finalize")
"""


@pytest.fixture(scope="module")
def phalanx(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("sbatch"))
    shell("up", "--virtual", "2x2", "--port", str(free_port()))
    yield shell
    shell("down", "--cancel-jobs")


def write(phalanx, name, text):
    (phalanx.work / name).write_text(text)
    return name


def script(phalanx, name, *directives, body):
    return write(phalanx, name, "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in directives), body, ""]))


def done(phalanx, name, *words, code=0):
    said = phalanx("submit", "--wait", name, *words, code=code)
    return re.findall(r"job (\d+) submitted", said.stdout)[0], said


def test_a_script_runs_once_and_its_srun_starts_the_ranks_on_every_node(phalanx):
    phalanx.env["FROM_HERE"] = "travels"
    job, said = done(phalanx, write(phalanx, "train.sh", TRAIN), "one", "two words")
    assert "train.sh: line 8: --qos=high is not honoured" in said.stderr
    lines = [line.removeprefix("[rank 0] ") for line in phalanx("logs", job).stdout.splitlines()]
    assert lines[0] == f"args 2 two words; job {job} train on n[0-1], 4 tasks, 2 GPUs; travels; RANK="
    assert lines[1] == "master 127.0.0.1"
    tasks = sorted(re.sub(r"VIRTUAL-(n\d)-[0-9a-f]+-", r"\1.", line) for line in lines[2:])
    assert tasks == [
        "0: task 0 is 0 on node 0 of 2 at n0: n0.0,n0.1",
        "1: task 1 is 1 on node 0 of 2 at n0: n0.0,n0.1",
        "2: task 2 is 0 on node 1 of 2 at n1: n1.0,n1.1",
        "3: task 3 is 1 on node 1 of 2 at n1: n1.0,n1.1",
    ]
    assert (phalanx.work / f"train-{job}.out").read_text().splitlines()[0] == lines[0], "as Slurm would have written it"


def test_the_scripts_exit_code_is_the_jobs_and_sruns_is_the_highest_of_its_tasks(phalanx):
    body = "srun bash -c 'exit $((3 * SLURM_PROCID))'; echo srun $?; exit 7"
    job, _ = done(phalanx, script(phalanx, "ends.sh", "-N 1", "--ntasks-per-node=2", body=body), code=7)
    assert "srun 3\n" in phalanx("logs", job).stdout
    assert "task 1: Exited with exit code 3" in phalanx("logs", job).stdout


def test_steps_take_some_of_the_nodes_files_per_task_and_each_its_own_gpu(phalanx):
    body = """srun -N1 -n1 -w $(scontrol show hostnames | tail -n1) bash -c 'echo on $SLURMD_NODENAME'
srun --gpus-per-task=1 --output=task-%t.txt bash -c 'echo ${PHALANX_DEVICES##*-}'
srun --mpi=cray_shasta true || echo refused
srun --cpu-bind=cores -n1 true"""
    job, _ = done(phalanx, script(phalanx, "steps.sh", "-N2", "--ntasks-per-node=2", "--gres=gpu:2", body=body))
    said = phalanx("logs", job).stdout
    assert "on n1\n" in said
    assert [(phalanx.work / f"task-{task}.txt").read_text() for task in range(4)] == ["0\n", "1\n", "0\n", "1\n"]
    assert "--mpi=cray_shasta is not supported here" in said
    assert "refused\n" in said
    assert "srun: --cpu-bind=cores is ignored" in said


def test_ranks_of_srun_are_one_world_over_both_nodes_and_one_that_fails_ends_it(phalanx):
    write(phalanx, "world.py", WORLD)
    body = """srun --mpi=pmi2 python world.py
srun sh -c 'eval exec python world.py' | sed 's/$/, hidden/'
srun --mpi=pmi2 python world.py 2; echo srun $?
srun sh -c 'test $SLURM_PROCID = 3 || exec python world.py'; echo absent $?
srun -n1 -N1 sh -c 'srun --mpi=none -n1 -N1 env' | grep -c -E '^(PMI_|PMIX_SERVER_URI|PMIX_NAMESPACE)'
srun --mpi=list"""
    job, _ = done(phalanx, script(phalanx, "world.sh", "-N2", "--ntasks-per-node=2", body=body))
    said = phalanx("logs", job).stdout.replace("[rank 0] ", "").splitlines()
    whole = [f"{rank} of 4 at-n1{how}" for rank in range(4) for how in ("", ", hidden")]
    assert sorted(line for line in said if " of 4 " in line) == whole
    assert "srun: error: rank 2 of an MPI world ended before MPI_Finalize; the step ends" in said
    assert "srun 143" in said, "the others waited for it"
    assert any("rank 3 ended without MPI_Init, and others wait there for it" in line for line in said)
    assert "absent 143" in said
    assert said[-5] == "0", "a step without MPI does not take the world of another one for its own"
    assert said[-3:] == ["\tnone", "\tpmi2", "\tpmix"]


def test_an_array_runs_each_element_with_slurms_variables_and_files(phalanx):
    name = script(
        phalanx,
        "array.sh",
        "--array=1,3,7%2",
        "-J arr",
        body="echo $SLURM_ARRAY_JOB_ID $SLURM_ARRAY_TASK_ID $SLURM_JOB_ID $SLURM_ARRAY_TASK_COUNT",
    )
    array, _ = done(phalanx, name)
    lines = [(phalanx.work / f"slurm-{array}_{index}.out").read_text() for index in (1, 3, 7)]
    assert lines == [f"{array} {index} {int(array) + place} 3\n" for place, index in enumerate((1, 3, 7))]


def test_slurms_commands_in_a_script_and_at_the_prompt_are_views(phalanx):
    body = """squeue --noheader --name $SLURM_JOB_NAME --format "%i %T %D"
next=$(sbatch --parsable --hold -J later --wrap 'echo never')
scontrol show job $next | grep -o 'Reason=[A-Za-z]*' ; scancel $next; sacct -nX -j $next -o state%-9"""
    job, _ = done(phalanx, script(phalanx, "views.sh", "-N2", "-J looks", body=body))
    said = phalanx("logs", job).stdout.replace("[rank 0] ", "").splitlines()
    assert [line.strip() for line in said if "view of Phalanx" not in line] == [
        f"{job} RUNNING 2",
        "Reason=JobHeldUser",
        "CANCELLED",
    ]
    assert sum("sbatch: this is a view of Phalanx" in line for line in said) == 1
    told = phalanx("slurm-env").stdout
    folder = re.findall(r"^export PATH=(\S+):", told)[0]
    assert [(Path(folder) / name).exists() for name in ("squeue", "srun")] == [True, False]
    shown = subprocess.run(
        ["bash", "-c", f"{told} sacct -X -n -o jobname -j {job}"],
        check=False,
        capture_output=True,
        text=True,
        env=phalanx.env,
    )
    assert (shown.stdout.split(), shown.returncode) == (["looks"], 0)


def test_a_dependency_and_a_signal_before_the_time_limit(phalanx):
    parent = phalanx("submit", "--quiet", "--hold", "--", "true").stdout.strip()
    body = "trap 'echo warned; exit 0' USR1\nfor n in $(seq 100); do sleep 0.1; done"
    name = script(
        phalanx, "warned.sh", f"--dependency=afterok:{parent}", "--signal=B:USR1@58", "-t 1", "-N1", body=body
    )
    child = phalanx("submit", "--quiet", name).stdout.strip()
    assert phalanx.json("show", child)["job"]["unmet"] == [f"afterok:{parent}"]
    phalanx("release", parent)
    phalanx.until(child, "succeeded")
    assert phalanx("logs", child).stdout == "warned\n"


def test_nodes_named_and_excluded_are_kept_to(phalanx):
    job, _ = done(phalanx, script(phalanx, "where.sh", "-w n1", body="echo $SLURM_JOB_NODELIST"))
    assert phalanx("logs", job).stdout == "n1\n"
    job, _ = done(phalanx, script(phalanx, "where.sh", "-x n[1-5]", body="echo $SLURM_JOB_NODELIST"))
    assert phalanx("logs", job).stdout == "n0\n"


def test_a_step_whose_srun_is_killed_ends_and_the_script_goes_on(phalanx):
    body = "srun -n2 sleep 6617 &\nsleep 1; kill $!; wait $!; echo over $?; pgrep -f 'sleep 661[7]' || echo none left"
    job, _ = done(phalanx, script(phalanx, "killed.sh", "-N2", body=body))
    assert "none left" in phalanx("logs", job).stdout


def test_a_cancelled_script_leaves_no_task(phalanx):
    name = script(phalanx, "long.sh", "-N2", body="srun sleep 6543")
    job = phalanx("submit", "--quiet", name).stdout.strip()
    phalanx.until(job, "running")
    phalanx("cancel", job)
    phalanx.until(job, "cancelled")


@pytest.mark.torch
def test_torch_reduces_over_the_tasks_of_a_step(phalanx):
    import sys

    write(phalanx, "reduce.py", REDUCE)
    job, _ = done(phalanx, write(phalanx, "training.sh", TRAINING % sys.executable))
    assert phalanx("logs", job).stdout.count("sum 2.0") == 2


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--gpu-per-node=4", "bad.sh: line 2: sbatch has no option --gpu-per-node"),
        ("--time=soon", "line 2: --time=soon: is not a time"),
    ],
)
def test_a_wrong_line_is_named(phalanx, line, why):
    assert why in phalanx("submit", script(phalanx, "bad.sh", line, body="true"), code=78).stderr

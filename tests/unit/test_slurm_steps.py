"""What an srun line asks for, how its tasks are laid out, and the SLURM_* variables that scripts and tasks see."""

import json
from dataclasses import asdict, replace

import pytest

from phalanx.core.errors import BadRequest
from phalanx.core.work.spec import JobSpec, Role
from phalanx.node.logic.images import ContainerSettings, InstalledRuntime, RuntimeKind, podman_run_options
from phalanx.node.logic.srun_options import (
    exported_environment,
    parse_srun,
    plan_step,
    step_hostname,
)
from phalanx.node.logic.step_containers import StepContainers, container_start, runs_images
from phalanx.node.logic.variables.slurm_variables import (
    SlurmBatchJob,
    SlurmBatchNode,
    SlurmStep,
    batch_variables,
    compress_counts,
    expand_file_pattern,
    step_variables,
    tasks_per_node,
)
from phalanx.node.slurm_compat.script_tools import with_tools_after_profile


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
        ("--jobid 17 --overlap --wait=60 -n1 hostname", (0,), (1,)),
        ("--tasks-per-node=1 hostname", (0, 1), (1, 1)),
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
        ("--jobid=18 hostname", "a step runs in the job that starts it, which is 17"),
        ("--container-save=x.sqsh hostname", "--container-save is not supported"),
        ("--pty bash", "--pty is not supported here"),
        ("--mpi=cray_shasta ./a.out", "--mpi=cray_shasta is not supported here"),
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
    assert parse_srun(["--input", "none", "hydra_pmi_proxy"]).notes == (), "tasks have no standard input anyway"
    assert parse_srun(["--input=all", "hostname"]).notes == ("--input=all is ignored: tasks have no standard input",)


@pytest.mark.parametrize(
    ("tasks", "nodes", "per", "counts"),
    [(5, 2, None, (3, 2)), (5, 3, 2, (2, 2, 1)), (4, 2, 4, (3, 1)), (2, 2, 8, (1, 1))],
)
def test_tasks_spread(tasks, nodes, per, counts):
    assert tasks_per_node(tasks, nodes, per) == counts


# ---- variables ----------------------------------------------------------------------------------------------------------


def test_the_script_sees_its_job():
    seen = batch_variables(
        batch(
            ntasks_per_node="2",
            cpus_per_task="4",
            submit_dir="/home/me",
            partition="gpu",
            mem="64G",
            gpus_per_node="h100:2",
        )
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
        "SLURM_GPUS_PER_NODE": "h100:2",
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
    ("asked", "there", "absent"),
    [
        ({"ntasks_given": "0"}, {"SLURM_TASKS_PER_NODE": "8(x2)"}, "SLURM_NTASKS"),
        ({"ntasks_given": "0", "cpus_per_task": "4"}, {"SLURM_TASKS_PER_NODE": "2(x2)"}, "SLURM_NPROCS"),
        ({"gpus_wanted": "0"}, {"SLURM_JOB_GPUS": "0,1"}, "SLURM_GPUS_ON_NODE"),
        ({"gpus_wanted": "1"}, {"SLURM_GPUS_ON_NODE": "2", "ROCR_VISIBLE_DEVICES": "0,1"}, "SLURM_GPUS"),
        (
            {"mem_per_gpu": "40G", "cpus_per_gpu": "8"},
            {"SLURM_MEM_PER_GPU": "40960", "SLURM_CPUS_PER_GPU": "8"},
            "SLURM_HINT",
        ),
        ({"dependency": "afterok:3"}, {"SLURM_JOB_DEPENDENCY": "afterok:3"}, "SLURM_EXPORT_ENV"),
        ({"export": "NONE"}, {"SLURM_EXPORT_ENV": "NONE", "SLURM_GET_USER_ENV": "1"}, "SLURM_RESTART_COUNT"),
        ({"hint": "nomultithread"}, {"SLURM_HINT": "nomultithread", "SLURM_THREADS_PER_CORE": "1"}, "SLURM_UMASK"),
    ],
)
def test_a_variable_is_there_when_slurm_sets_it(asked, there, absent):
    seen = batch_variables(batch(**asked))
    assert there.items() <= seen.items()
    assert absent not in seen


def test_a_task_sees_the_numbers_of_the_devices_that_the_job_has_on_its_node():
    nodes = tuple(
        SlurmBatchNode(name=f"gpu{n}", address=f"10.0.0.{n}", devices=2, cpus=8, indices=(2 * n, 2 * n + 1))
        for n in (0, 1)
    )
    of = SlurmBatchJob(job_number="17", name="my", nodes=nodes, options={"ntasks": "2"}, user="me", uid=1, gid=100)
    seen = step_variables(of, step("hostname", of), 1, host="10.0.0.0", label=True, umask=0o027)
    wanted = {
        "SLURM_STEP_GPUS": "2,3",
        "SLURM_JOB_GPUS": "2,3",
        "SLURM_JOB_GID": "100",
        "SLURM_LABELIO": "1",
        "SLURM_UMASK": "0027",
        "SLURM_DISTRIBUTION": "cyclic",
    }
    assert wanted.items() <= seen.items()


def test_cyclic_tasks_go_round_the_nodes():
    found = step("-n5 -m cyclic hostname")
    assert [found.node_of(task) for task in range(5)] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    assert found.tasks_on(0) == [0, 2, 4]
    assert (found.distribution, step("-n5 hostname").distribution) == ("cyclic", "block")


# ---- the machine's own commands, and containers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first", ["#!/bin/bash -l", "#!/bin/bash --login", "#!/usr/bin/env -S bash -el", "#!/bin/zsh -l"]
)
def test_in_a_login_shell_the_tools_come_back_into_path_after_the_profile(first):
    found = with_tools_after_profile(f"{first}\n#SBATCH -N1\nsrun x\n", "/scratch/my bin")
    assert found.splitlines() == [first, "export PATH='/scratch/my bin':\"$PATH\"; #SBATCH -N1", "srun x"]


@pytest.mark.parametrize(
    "first", ["#!/bin/bash", "#!/bin/bash -e", "#!/usr/bin/python3 -l", "#!/bin/sh", "#!/bin/csh -l"]
)
def test_no_other_script_is_changed(first):
    text = f"{first}\nsrun x\n"
    assert with_tools_after_profile(text, "/scratch") == text


SETTINGS = ContainerSettings(
    image="",
    name="phalanx-7.1.0.k",
    owner="boot/1/2/3",
    workdir="/work",
    uid=1000,
    gid=1000,
    mounts=("/scratch/7.1", "/work"),
    folder="/scratch/7.1",
    nofile=(1024, 4096),
    processes=(100, 100),
)


def started(image, runtimes=("apptainer", "podman"), gpus=(), cwd="/work", unavailable=(), **options):
    asked = {"container-image": image, **{name.replace("_", "-"): value for name, value in options.items()}}
    there = tuple(InstalledRuntime(kind=RuntimeKind(name), path=f"/usr/bin/{name}") for name in runtimes)
    offer = StepContainers(settings=SETTINGS, runtimes=there, unavailable=dict(unavailable))
    argv = ["python", "x.py"]
    offer = StepContainers.from_json(json.loads(json.dumps(asdict(offer))))  # as it comes to the batch process
    return container_start(asked, offer, argv, task="step-0.1", cwd=cwd, home="/home/me", gpus=gpus)


def in_image(image, **given):
    return " ".join(started(image, **given).argv)


OURS = "--bind /scratch/7.1:/scratch/7.1 --bind /work:/work"


def test_a_task_in_an_image_is_started_by_the_runtime_of_the_node():
    assert started("").argv == ("python", "x.py")
    assert (
        in_image("torch.sqsh") == f"/usr/bin/apptainer exec --no-home {OURS} --pwd /work /work/torch.sqsh python x.py"
    )
    assert in_image("/i/t.sqsh", gpus=["GPU-1"], container_mounts="/data,/a:/b:ro", container_workdir="/b") == (
        f"/usr/bin/apptainer exec --nv --no-home {OURS} --bind /data:/data --bind /a:/b:ro --pwd /b /i/t.sqsh python x.py"
    )
    assert "docker://nvcr.io/nvidia/pytorch:24.05 python" in in_image("nvcr.io#nvidia/pytorch:24.05")
    assert "--bind /home/me:/home/me" in in_image("a.sqsh", container_mount_home="")
    assert "--pwd" not in in_image("a.sqsh", cwd="/elsewhere"), "a folder that the image does not have"


def test_podman_contains_a_step_as_it_contains_a_job_with_an_image():
    podman = InstalledRuntime(kind=RuntimeKind.PODMAN, path="/usr/bin/podman")
    start = started(
        "docker://python:3.11", runtimes=("podman",), gpus=["GPU-1"], container_mounts="/work:/work:ro,/a:/b"
    )
    own = replace(SETTINGS, gpus=("GPU-1",), mounts=("/scratch/7.1",))  # the user's own mount of /work counts more
    contained = podman_run_options(podman, own, "step-0.1")
    assert {"--cgroups=disabled", "--security-opt=no-new-privileges", "--user=1000:1000"} < set(contained)
    assert start.argv == (
        *contained,
        "--env-host",
        "--volume=/work:/work:ro",
        "--volume=/a:/b",
        "--workdir=/work",
        "docker.io/python:3.11",
        "python",
        "x.py",
    )
    assert start.container == "phalanx-7.1.0.k-step-0.1"
    assert start.removal == ("/usr/bin/podman", "rm", "--force", "--time=0", "--ignore", start.container)
    assert "localhost/a:1" in started("localhost/a:1", runtimes=("podman",)).argv


def test_a_script_that_names_an_image_gets_what_rootless_podman_needs():
    def runs(script, **spec):
        return runs_images(JobSpec(name="x", workdir="/", role=Role(script=script), **spec))

    batch = (("key", "k"),)
    assert runs("srun --container-image=x true", slurm=batch)
    assert runs("true", slurm=(*batch, ("container", "{}")))
    assert runs("true", image="x")
    assert not runs("srun true", slurm=batch)
    assert not runs("echo --container-image"), "no batch script"


@pytest.mark.parametrize(
    ("image", "runtimes", "why"),
    [("a.sqsh", (), "has no apptainer"), ("a.sqsh", ("podman",), "podman runs images of a registry, not files")],
)
def test_a_node_that_cannot_run_the_image_says_so(image, runtimes, why):
    with pytest.raises(BadRequest, match=why):
        in_image(image, runtimes=runtimes)


def test_a_runtime_that_cannot_be_used_on_this_node_says_why():
    why = "podman has no CDI specification"
    with pytest.raises(BadRequest, match=why):
        in_image("a", runtimes=("podman",), unavailable={"podman": why})
    assert "apptainer" in in_image("a", unavailable={"podman": why})


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
    assert [step(f"-w {name} -n1 x", of).nodes for name in ("127.0.0.1", "127.0.0.2", "gpu1")] == [(0,), (1,), (1,)]


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

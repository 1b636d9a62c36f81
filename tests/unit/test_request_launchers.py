"""How often a command starts, and the two lines that say so."""

import pytest

from phalanx.core.work.gpus import parse_gpus
from phalanx.core.work.job_file.launchers import (
    find_launcher,
    known_task_count,
    launch_notes,
    tasks_on_node,
)
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.job_file.shape_note import shape_note
from phalanx.core.work.spec import LaunchMode, Role


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("torchrun train.py", "torchrun"),
        ("/opt/env/bin/torchrun --nproc-per-node 8 train.py", "torchrun"),
        ("accelerate launch train.py", "accelerate"),
        ("accelerate config", None),
        ("deepspeed train.py", "deepspeed"),
        ("mpirun -np 4 ./solver", "mpirun"),
        ("python -m torch.distributed.run train.py", "torch.distributed.run"),
        ("python3.11 -u -X dev -m torch.distributed.launch train.py", "torch.distributed.launch"),
        ("python -m train", None),
        ("python train.py -m torch.distributed.run", None),
        ("python -c torchrun", None),
        ("env A=1 OMP_NUM_THREADS=4 torchrun train.py", "torchrun"),
        ("nice -n 5 torchrun train.py", "torchrun"),
        ("numactl --cpunodebind 0 python train.py", None),
        ("uv run torchrun train.py", "torchrun"),
        ("mpiexec.hydra -n 4 ./solver", "mpiexec.hydra"),
        ("bash run.sh -c mpirun", None),
        ("echo torchrun", None),
        ("", None),
    ],
)
def test_launchers_are_known_by_the_command_itself(command, launcher):
    assert find_launcher(command.split()) == launcher


@pytest.mark.parametrize(
    ("script", "launcher"),
    [
        ("cd src && torchrun train.py", "torchrun"),
        ("export A=1; mpirun ./solver", "mpirun"),
        ("# torchrun\npython train.py", None),
        ("python train.py \\\n  --launcher torchrun", None),
        ("A=1 torchrun train.py | tee log", "torchrun"),
    ],
)
def test_launchers_are_found_in_shell_texts(script, launcher):
    assert find_launcher((), script) == launcher


def told(run, **keys):
    return launch_notes(spec_from_mapping({"run": run, **keys}, workdir="/w").role)


def test_shape_and_tasks_are_told_before_the_start():
    assert told("python train.py", gpus="2x8") == ["2 nodes x 8 = 16 GPUs", "16 tasks: 2 nodes x 8, one per GPU"]
    assert told("python train.py", gpus=1) == ["1 node x 1 = 1 GPU", "1 task: 1 node x 1, one per GPU"]
    assert told("python prepare.py") == ["0 GPUs: 1 task on CPUs"]
    assert told("python x.py", gpus="2x4", tasks_per_node=3) == [
        "2 nodes x 4 = 8 GPUs",
        "6 tasks: 2 nodes x 3, 3 per node as asked",
    ]
    assert (
        told("torchrun train.py", gpus="2x8")[1]
        == "2 tasks: 2 nodes x 1, one per node, because torchrun is a launcher and starts the rest"
    )


def test_an_open_shape_is_told_as_open():
    assert told("python train.py", gpus="h200:16") == [
        "16 H200 GPUs, on as few nodes as possible",
        "16 tasks, one per GPU",
    ]
    assert told("torchrun train.py", gpus=16)[1].startswith("one task on each node")


def test_placed_shapes_may_be_uneven():
    role = Role(argv=("x",), gpus=parse_gpus(4))
    assert launch_notes(role, [3, 1]) == ["2 nodes, 3 + 1 = 4 GPUs", "4 tasks: 3 + 1, one per GPU"]
    assert shape_note([0, 0]) == "0 GPUs: CPUs of 2 nodes"
    assert launch_notes(Role(argv=("x",)), [0, 0]) == ["0 GPUs: 2 tasks on CPUs of 2 nodes, one per node"]


def test_an_mpi_launcher_starts_once_and_gets_a_slot_for_each_task():
    assert told("mpirun ./solver", gpus="2x2")[1] == "4 tasks: 2 nodes x 2, started by mpirun, which runs once"
    assert told("mpirun ./solver", gpus=16)[1] == "16 tasks, started by mpirun, which runs once"
    assert told("mpirun ./solver", nodes=2, tasks_per_node=3) == [
        "0 GPUs: 6 tasks on CPUs of 2 nodes, started by mpirun, which runs once"
    ]
    assert told("cd src\nmpiexec ./solver", gpus="2x2")[1].endswith("started by mpiexec, which runs once")
    assert told(["bash", "-lc", "module load mpi; mpirun ./solver"], gpus="2x2")[1].endswith(
        "started by mpirun, which runs once"
    )
    assert tasks_on_node(Role(launch=LaunchMode.ONCE, tasks_per_node=4), 8) == 1


def test_task_counts():
    assert [tasks_on_node(Role(launch=LaunchMode.PER_DEVICE), devices) for devices in (0, 1, 8)] == [1, 1, 8]
    assert tasks_on_node(Role(launch=LaunchMode.PER_NODE), 8) == 1
    assert tasks_on_node(Role(launch=LaunchMode.FIXED, tasks_per_node=3), 8) == 3
    assert known_task_count(Role(gpus=parse_gpus(16))) == 16
    assert known_task_count(Role(gpus=parse_gpus(16), launch=LaunchMode.PER_NODE)) is None
    assert known_task_count(Role(gpus=parse_gpus("2x8"), launch=LaunchMode.PER_NODE)) == 2
    assert known_task_count(Role()) == 1

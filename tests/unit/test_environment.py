"""The environment of a rank: complete, the same for every framework, and free of what it must not see."""

from dataclasses import replace

from phalanx.core.ids import Epoch, Generation, JobId, NodeId
from phalanx.core.state.commands import PrepareTasks, StartTasks
from phalanx.core.units import GIB
from phalanx.core.work.allocation import Allocation, NodeGrant
from phalanx.core.work.dependency import ArrayPosition
from phalanx.core.work.job import PublishedCheckpoint
from phalanx.core.work.share import DeviceShare, GrantedSlice, ShareKind
from phalanx.core.work.spec import JobSpec, LaunchMode, Role
from phalanx.node.logic.variables.environment import (
    MemberFolders,
    NodeContext,
    inheritable_environment,
    rank_environment,
    setup_environment,
)
from phalanx.node.logic.variables.mpi_variables import slots_hostfile

FOLDERS = MemberFolders(hostfile="/s/hostfile", page="/s/page", reports="/s/reports")
BASE = {"PATH": "/bin", "HOME": "/root"}


def job(nodes=2, per_node=2, *, launch=LaunchMode.PER_DEVICE, env=(), tasks=None, addresses=None):
    tasks = tasks or per_node
    grants = tuple(
        NodeGrant(
            node_id=NodeId(f"n{rank}"),
            node_rank=rank,
            devices=tuple(range(per_node)),
            cpus=1,
            memory_bytes=0,
            tasks=tasks,
            first_rank=rank * tasks,
        )
        for rank in range(nodes)
    )
    return PrepareTasks(
        node_id=NodeId("n1"),
        job_id=JobId("7"),
        epoch=Epoch(3),
        generation=Generation(1),
        spec=JobSpec(
            name="j", role=Role(argv=("t",), launch=launch), workdir="/w", env=tuple(env), collective_timeout_s=90.0
        ),
        allocation=Allocation(grants=grants),
        addresses=addresses or tuple(f"10.0.0.{rank + 1}" for rank in range(nodes)),
        candidates=(),
        checkpoint_dir="/c/7/epoch-3",
        output_dir="/o/7",
        deadline_s=1234.5,
        restarts=4,
        mtbf_s=86400.0,
    )


def env_of(order, *, node_rank=1, local_rank=1, base=BASE, virtual=False, resume=None):
    start = StartTasks(
        node_id=order.node_id,
        job_id=order.job_id,
        epoch=order.epoch,
        generation=order.generation,
        port=29500,
        resume=resume,
    )
    grant = order.allocation.grants[node_rank]
    devices = tuple(f"GPU-{index}" for index in grant.devices)
    view = NodeContext(base=base, devices=devices, virtual=virtual, folders=FOLDERS)
    return rank_environment(order, start, grant, local_rank, view)


def test_torch_finds_its_rendezvous():
    env, _ = env_of(job())
    names = (
        "MASTER_ADDR",
        "MASTER_PORT",
        "WORLD_SIZE",
        "RANK",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
    )
    assert [env[name] for name in names] == ["10.0.0.1", "29500", "4", "3", "1", "2", "1", "1"]


def test_job_finds_its_place_and_folders():
    env, _ = env_of(
        job(), resume=PublishedCheckpoint(epoch=Epoch(2), step=10, path="/c/7/epoch-2/step-00000010", digest="d")
    )
    expected = {
        "JOB_ID": "7",
        "NODE_RANK": "1",
        "NNODES": "2",
        "NODE_IPS": "10.0.0.1\n10.0.0.2",
        "GPUS_PER_NODE": "2",
        "NUM_GPUS": "4",
        "HOSTFILE": "/s/hostfile",
        "CHECKPOINT_DIR": "/c/7/epoch-3",
        "RESUME_FROM": "/c/7/epoch-2/step-00000010",
        "OUTPUT_DIR": "/o/7",
        "RESTART_COUNT": "4",
        "DEADLINE": "1234.500",
        "EPOCH": "3",
        "GENERATION": "1",
        "LEASE_PAGE": "/s/page",
        "REPORT_PIPE": "/s/reports",
        "MTBF_S": "86400",
        "COLLECTIVE_TIMEOUT_S": "90",
        "VIRTUAL": "0",
        "DEVICES": "GPU-0,GPU-1",
    }
    assert {
        name.removeprefix("PHALANX_"): value for name, value in env.items() if name.startswith("PHALANX_")
    } == expected


def test_without_a_checkpoint_nothing_is_resumed():
    assert "PHALANX_RESUME_FROM" not in env_of(job())[0]


def test_devices_are_those_of_the_grant_by_uuid():
    assert env_of(job())[0]["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"
    assert env_of(job(), virtual=True)[0]["CUDA_VISIBLE_DEVICES"] == ""


def test_cuda_gets_numbers_in_the_order_of_the_bus_where_they_are_certain():
    order = job()
    start = StartTasks(
        node_id=order.node_id,
        job_id=order.job_id,
        epoch=order.epoch,
        generation=order.generation,
        port=1,
        resume=None,
    )
    view = NodeContext(base=BASE, devices=("GPU-a", "GPU-b"), cuda_numbers=(5, 2), virtual=False, folders=FOLDERS)
    env, _ = rank_environment(order, start, order.allocation.grants[1], 1, view)
    assert (env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"]) == ("5,2", "PCI_BUS_ID")
    assert env["PHALANX_DEVICES"] == "GPU-a,GPU-b"


def test_supervisors_secrets_and_foreign_gangs_stay_behind():
    base = BASE | {
        "PHALANX_NODE_TOKEN": "s",
        "PHALANX_HEAD_URL": "u",
        "PHALANX_TOKEN": "t",
        "SLURM_PROCID": "5",
        "OMPI_COMM_WORLD_RANK": "2",
        "PET_NNODES": "9",
        "TORCHELASTIC_RUN_ID": "x",
        "I_MPI_HYDRA_BOOTSTRAP": "slurm",
        "HYDRA_LAUNCHER_EXEC": "/usr/bin/srun",
        "NOTIFY_SOCKET": "/n",
    }
    env, _ = env_of(job(), base=base | {"HYDRA_FULL_ERROR": "1"})
    assert (base.keys() - BASE.keys()) & env.keys() == set()
    assert env["HYDRA_FULL_ERROR"] == "1", "it is of another Hydra, which reads configurations"
    assert env["PATH"] == "/bin"
    foreign_jax = {"JAX_PROCESS_ID": "3", "JAX_NUM_PROCESSES": "4", "JAX_LOCAL_DEVICE_IDS": "1"}
    assert inheritable_environment(foreign_jax | {"JAX_PLATFORMS": "cpu"}) == {"JAX_PLATFORMS": "cpu"}


def test_jobs_own_variables_win_over_defaults_and_yield_to_the_gang():
    env, notes = env_of(
        job(env=(("OMP_NUM_THREADS", "8"), ("PATH", "/mine"), ("RANK", "0"), ("PHALANX_X", "1"), ("A", "b")))
    )
    assert (env["OMP_NUM_THREADS"], env["PATH"], env["A"]) == ("8", "/mine", "b")
    assert env["RANK"] == "3"
    assert "PHALANX_X" not in env
    assert len(notes) == 2
    assert "RANK is set by Phalanx" in notes[1]


def test_threads_are_bounded_only_where_ranks_share_a_node():
    assert env_of(job())[0]["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in env_of(job(per_node=1), local_rank=0)[0]


def test_output_is_unbuffered_unless_the_job_wants_it_so():
    assert env_of(job())[0]["PYTHONUNBUFFERED"] == "1"
    assert env_of(job(env=(("PYTHONUNBUFFERED", ""),)))[0]["PYTHONUNBUFFERED"] == ""


def test_bare_torchrun_is_right():
    env, _ = env_of(job(per_node=4, tasks=1, launch=LaunchMode.PER_NODE), local_rank=0)
    assert {name: env[name] for name in env if name.startswith("PET_")} == {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "4",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "10.0.0.1",
        "PET_MASTER_PORT": "29500",
        "PET_RDZV_BACKEND": "static",
        "PET_RDZV_ENDPOINT": "10.0.0.1:29500",
        "PET_RDZV_ID": "7.3.1",
        "PET_MAX_RESTARTS": "0",
        "PET_LOCAL_ADDR": "10.0.0.2",
    }
    assert not [name for name in env_of(job())[0] if name.startswith("PET_")]


def test_loopback_gangs_need_no_resolvable_hostname():
    assert env_of(job(addresses=("127.0.0.1", "127.0.0.1")))[0]["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in env_of(job())[0]


def test_hostfile_names_every_node_with_its_slots():
    assert slots_hostfile(job()) == "10.0.0.1 slots=2\n10.0.0.2 slots=2\n"
    assert (
        slots_hostfile(job(per_node=8, tasks=1, launch=LaunchMode.PER_NODE)) == "10.0.0.1 slots=8\n10.0.0.2 slots=8\n"
    )


def test_every_launcher_started_here_has_one_thread_for_each_of_its_several_ranks():
    assert env_of(job(tasks=1, launch=LaunchMode.PER_NODE), local_rank=0)[0]["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in env_of(job(per_node=1, tasks=1, launch=LaunchMode.PER_NODE), local_rank=0)[0]


def test_setup_knows_its_node_and_no_rendezvous():
    order = replace(job(), spec=replace(job().spec, env=(("A", "b"),)))
    view = NodeContext(base=BASE, devices=("GPU-0",), virtual=False, folders=FOLDERS)
    env = setup_environment(order, order.allocation.grants[1], view)
    assert (env["A"], env["PHALANX_NODE_RANK"]) == ("b", "1")
    assert "MASTER_PORT" not in env


def test_a_job_with_a_part_of_a_device_finds_its_daemon_and_its_limits():
    share = DeviceShare(milli=250, memory_bytes=20 * GIB, kind=ShareKind.MPS, group="mps:gpt")
    grant = replace(job().allocation.grants[0], devices=(3,), share=share, tasks=1)
    view = NodeContext(base=BASE, devices=("GPU-3",), virtual=False, folders=FOLDERS, mps="/run/mps/1f")
    env = setup_environment(job(), grant, view)
    assert {
        name: env[name] for name in env if "MPS" in name or name in ("PHALANX_GPU_SHARE", "CUDA_VISIBLE_DEVICES")
    } == {
        "PHALANX_GPU_SHARE": "0.25",
        "CUDA_VISIBLE_DEVICES": "GPU-3",
        "CUDA_MPS_PIPE_DIRECTORY": "/run/mps/1f",
        "CUDA_MPS_LOG_DIRECTORY": "/run/mps/1f",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=20480M",
    }
    assert not [name for name in setup_environment(job(), grant, replace(view, mps="")) if "MPS" in name]


def test_each_task_sees_its_own_mig_slice_and_a_batch_script_sees_all():
    slices = tuple(GrantedSlice(device=3, profile="1g.10gb", start=at, memory_slices=1, milli=125) for at in (5, 6))
    share = DeviceShare(milli=250, memory_bytes=10 * GIB, kind=ShareKind.MIG, group="mig", slices=slices)
    grant = replace(job().allocation.grants[0], devices=(3,), share=share, tasks=2)
    order = replace(job(nodes=1), allocation=Allocation(grants=(grant,)))
    view = NodeContext(base=BASE, devices=("MIG-a", "MIG-b"), virtual=False, folders=FOLDERS)
    start = StartTasks(
        node_id=NodeId("n0"), job_id=JobId("7"), epoch=Epoch(3), generation=Generation(1), port=29500, resume=None
    )
    seen = [rank_environment(order, start, grant, rank, view)[0] for rank in range(2)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in seen] == ["MIG-a", "MIG-b"]
    assert [one["PHALANX_MIG_PROFILE"] for one in seen] == ["1g.10gb", "1g.10gb"]
    assert seen[0]["PHALANX_GPUS_PER_NODE"] == "2"
    script = replace(grant, tasks=1)
    assert rank_environment(order, start, script, 0, view)[0]["CUDA_VISIBLE_DEVICES"] == "MIG-a,MIG-b"


def test_an_element_learns_its_place_in_the_array_and_cannot_pretend_another():
    place = ArrayPosition(array_id=JobId("17"), index=5, size=3, lowest=3, highest=7)
    order = replace(job(env=[("PHALANX_ARRAY_TASK_ID", "99")]), job_id=JobId("17_5"), array=place)
    env, notes = env_of(order)
    of_array = {
        name.removeprefix("PHALANX_"): value
        for name, value in env.items()
        if "ARRAY" in name or name == "PHALANX_JOB_ID"
    }
    assert of_array == {
        "JOB_ID": "17_5",
        "ARRAY_JOB_ID": "17",
        "ARRAY_TASK_ID": "5",
        "ARRAY_TASK_COUNT": "3",
        "ARRAY_TASK_MIN": "3",
        "ARRAY_TASK_MAX": "7",
    }
    assert notes == ["env: PHALANX_ARRAY_TASK_ID is set by Phalanx; the job's value is not used"]
    assert (
        setup_environment(
            order, order.allocation.grants[1], NodeContext(base=BASE, devices=(), virtual=True, folders=FOLDERS)
        )["PHALANX_ARRAY_TASK_ID"]
        == "5"
    )


def test_a_job_of_its_own_has_no_array_variables():
    env, _ = env_of(job())
    assert not [name for name in env if "ARRAY" in name]


def test_what_opens_the_heads_database_never_reaches_a_rank_unless_the_job_names_its_own():
    base = {
        **BASE,
        "PGPASSWORD": "head's",
        "PGPASSFILE": "/root/.pgpass",
        "CREDENTIALS_DIRECTORY": "/run/c",
        "PGDATABASE": "mine",
    }
    env, _ = env_of(job(), base=base)
    assert {name for name in env if name.startswith(("PG", "CRED"))} == {"PGDATABASE"}
    env, _ = env_of(job(env=[("PGPASSWORD", "job's")]), base=base)
    assert env["PGPASSWORD"] == "job's"


def test_no_variable_of_the_supervisors_own_kind_passes_through_a_rank():
    """Whatever a launcher, another scheduler or the head left in the supervisor's environment."""
    planted = dict.fromkeys(
        (
            "PHALANX_TOKEN",
            "PHALANX_NODE_TOKEN",
            "PHALANX_HEAD_URL",
            "SLURM_JOB_ID",
            "SLURMD_NODENAME",
            "PMI_RANK",
            "OMPI_COMM_WORLD_RANK",
            "PET_NNODES",
            "RANK",
            "WORLD_SIZE",
            "MASTER_ADDR",
            "CUDA_VISIBLE_DEVICES",
            "NOTIFY_SOCKET",
            "LISTEN_FDS",
        ),
        "planted",
    )
    env, _ = env_of(job(), base={**BASE, **planted})
    assert "planted" not in env.values()


def test_a_task_reads_what_its_node_and_its_job_were_granted():
    order = job()
    assert "PHALANX_RESOURCES" not in env_of(order)[0]
    grants = tuple(replace(grant, extras=(("scratch", 1 << 30),)) for grant in order.allocation.grants)
    granted = replace(order, allocation=Allocation(grants=grants, licences=(("matlab", 2),)))
    env, _ = env_of(granted)
    assert env["PHALANX_RESOURCES"] == "matlab=2,scratch=1073741824"

"""MPI over several nodes: what mpirun finds in its environment, and the channel by which its daemons start on the other nodes."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.cluster import free_port
from phalanx.core.state.commands import StartTasks
from phalanx.core.work.spec import LaunchMode
from phalanx.node.gang.job_link import NotInJob
from phalanx.node.logic.variables.environment import MemberFolders, NodeContext, rank_environment
from phalanx.node.logic.variables.mpi_variables import (
    changed_variables,
    colon_hostfile,
    node_names,
    script_defaults,
    slots_hostfile,
)
from phalanx.node.logic.variables.rendezvous import port_was_in_use, side_port
from phalanx.node.mpi.agent_main import split_words
from phalanx.node.mpi.launch_order import LAUNCH_VARIABLE, LaunchOrder, order_to_json, read_launch_order
from tests.unit.test_environment import job

LOOPBACK = ("127.0.0.1", "127.0.0.1")
FOLDERS = MemberFolders(
    hostfile="/s/hostfile", page="/s/page", reports="/s/reports", colon_hostfile="/s/hostfile.mpich", agent="/s/agent"
)


def mpi_job(*, slots=None, **keys):
    order = job(launch=LaunchMode.ONCE, tasks=1, **keys)
    role = replace(order.spec.role, tasks_per_node=slots)
    return replace(order, spec=replace(order.spec, role=role))


def env_of(order, *, node_rank=1, folders=FOLDERS, root=False):
    start = StartTasks(
        node_id=order.node_id,
        job_id=order.job_id,
        epoch=order.epoch,
        generation=order.generation,
        port=29500,
        resume=None,
    )
    node = NodeContext(base={"PATH": "/bin"}, devices=("GPU-a", "GPU-b"), virtual=False, folders=folders, root=root)
    return rank_environment(order, start, order.allocation.grants[node_rank], 0, node)[0]


# ------------------------------------------------------------------------------------------------------ the environment


def test_launcher_finds_the_agent_the_hosts_and_no_rank():
    env = env_of(mpi_job())
    agents = ("OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER_EXEC", "I_MPI_HYDRA_BOOTSTRAP_EXEC")
    assert {env[name] for name in agents} == {"/s/agent"}
    slots = ("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile", "PHALANX_HOSTFILE")
    assert {env[name] for name in slots} == {"/s/hostfile"}
    assert env["HYDRA_HOST_FILE"] == "/s/hostfile.mpich"
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b", (
        "all of the job's devices on this node; ranks select by local rank"
    )
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "TF_CONFIG", "JAX_COORDINATOR_ADDRESS"} & set(env)
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.1", "29500"), "for torch programs under mpirun"


def test_launcher_on_one_node_needs_no_agent():
    env = env_of(mpi_job(nodes=1), node_rank=0, folders=replace(FOLDERS, agent=""))
    assert "OMPI_MCA_plm_rsh_agent" not in env
    assert env["OMPI_MCA_orte_default_hostfile"] == "/s/hostfile"
    assert slots_hostfile(mpi_job(nodes=1)) == "localhost slots=2\n"


def test_job_may_choose_its_own_agent_and_only_root_is_allowed_to_run_as_root():
    env = env_of(mpi_job(env=[("OMPI_MCA_plm_rsh_agent", "/own"), ("OMP_NUM_THREADS", "4")]))
    assert (env["OMPI_MCA_plm_rsh_agent"], env["OMP_NUM_THREADS"]) == ("/own", "4")
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in env
    assert env_of(mpi_job(), root=True)["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"


def test_host_files_hold_a_slot_for_each_task_in_both_dialects():
    assert slots_hostfile(mpi_job()) == "10.0.0.1 slots=2\n10.0.0.2 slots=2\n"
    assert colon_hostfile(mpi_job(slots=3)) == "10.0.0.1:3\n10.0.0.2:3\n"
    assert slots_hostfile(mpi_job(per_node=0)) == "10.0.0.1 slots=1\n10.0.0.2 slots=1\n"


def test_a_program_that_starts_once_per_node_finds_a_slot_for_each_of_its_devices():
    """A multi-line script states tasks_per_node: 1, a batch script always has it: deepspeed and mpirun in it read the host file."""
    script = job(per_node=8, tasks=1, launch=LaunchMode.FIXED)
    script = replace(script, spec=replace(script.spec, role=replace(script.spec.role, tasks_per_node=1)))
    assert slots_hostfile(script) == "10.0.0.1 slots=8\n10.0.0.2 slots=8\n"
    batch = replace(script, spec=replace(script.spec, slurm=(("tasks_per_node", "4"),)))
    assert slots_hostfile(batch) == "10.0.0.1 slots=4\n10.0.0.2 slots=4\n"


def test_virtual_nodes_have_names_that_resolve_and_differ():
    assert node_names(mpi_job(addresses=LOOPBACK)) == ("127.0.0.1", "127.0.0.2")
    assert node_names(mpi_job(addresses=("10.0.0.9", "10.0.0.9"))) == ("n0", "n1"), "two nodes behind one address"
    assert env_of(mpi_job(addresses=LOOPBACK))["HYDRA_IFACE"] == "lo"
    assert "HYDRA_IFACE" not in env_of(mpi_job())


def test_only_what_the_script_exported_travels_to_other_nodes():
    given = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "GPU-a", "HOME": "/h"}
    now = given | {"LR": "0.1", "PATH": "/mpi/bin:/bin", "PMIX_RANK": "0", "_": "/usr/bin/mpirun"}
    assert changed_variables(given, now) == {"LR": "0.1", "PATH": "/mpi/bin:/bin"}


def test_side_port_in_use_restarts_the_gang_like_the_rendezvous_port():
    assert port_was_in_use(b"phalanx-launch: cannot listen on port 29499: Address already in use", 29500)
    assert not port_was_in_use(b"cannot listen on port 29498: Address already in use", 29500)
    assert side_port(29500) == 29499


# ---------------------------------------------------------------------------------------------------------- the channel


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["n1", "orted", "-mca", "x"], ("n1", "orted -mca x")),
        (["-x", "n1", '"/opt/proxy"', "--id", "1"], ("n1", '"/opt/proxy" --id 1')),
        (["-o", "StrictHostKeyChecking=no", "-p", "22", "--", "me@n1", "true"], ("me@n1", "true")),
        (["-q"], ("", "")),
        ([], ("", "")),
    ],
)
def test_agent_reads_a_command_line_of_ssh(words, found):
    assert split_words(words) == found


LAUNCHER = """
agent() { %s -I -m phalanx.node.mpi.agent_main "$@"; }
export EXPORTED=yes CUDA_VISIBLE_DEVICES
agent -x 127.0.0.2 'echo "on $WHERE: $EXPORTED"; echo oops >&2; exit 7' && echo wrong
echo "code $?"
agent n0 'echo "on $WHERE"'
agent stranger true; echo "code $?"
exit 5
"""


class Gang:
    """Two nodes of one job, as processes."""

    def __init__(self, folder, script, argv=()):
        port = free_port()
        orders = [
            LaunchOrder(
                node_rank=rank,
                names=("127.0.0.1", "127.0.0.2"),
                aliases=(("n0",), ("n1",)),
                master="127.0.0.1",
                port=port,
                key="k" * 32,
                argv=argv,
                script=script,
                workdir=str(folder),
            )
            for rank in (0, 1)
        ]
        self.files = [folder / f"node-{order.node_rank}" / "launch.json" for order in orders]
        for file, order in zip(self.files, orders, strict=True):
            file.parent.mkdir()
            file.write_text(order_to_json(order))

    def start(self, rank):
        own = {LAUNCH_VARIABLE: str(self.files[rank]), "WHERE": f"node {rank}", "CUDA_VISIBLE_DEVICES": f"GPU-{rank}"}
        env = os.environ | own
        return subprocess.Popen(
            [sys.executable, "-I", "-m", "phalanx.node.mpi.launch_main"],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.mark.slow
@pytest.mark.serial
def test_launcher_starts_its_daemons_on_the_other_node_and_gets_their_output_and_codes(tmp_path):
    gang = Gang(tmp_path, LAUNCHER % sys.executable)
    second, first = gang.start(1), gang.start(0)
    said, errors = first.communicate(timeout=60)
    assert second.wait(timeout=60) == 0, "the other node's part ends with the launcher"
    second.communicate()
    assert (first.returncode, said.splitlines()) == (5, ["on node 1: yes", "code 7", "on node 0", "code 255"])
    assert "oops" in errors
    assert "stranger is not a node of this job, which has 127.0.0.1 127.0.0.2" in errors


@pytest.mark.slow
@pytest.mark.serial
def test_a_daemon_that_starts_further_ones_passes_on_exports_but_not_its_own_devices_or_folder(tmp_path):
    agent = f"{sys.executable} -I -m phalanx.node.mpi.agent_main"
    # Found live: Open MPI names its agent in the daemon's command, by a path that the other server does not have.
    show = f"echo $EXPORTED $CUDA_VISIBLE_DEVICES {tmp_path}/node-0/agent"
    script = (
        f"export EXPORTED=yes; {agent} n1 '{show}; {agent} n0 \"echo from n1: \\$EXPORTED \\$CUDA_VISIBLE_DEVICES\"'"
    )
    gang = Gang(tmp_path, script)
    second, first = gang.start(1), gang.start(0)
    said, errors = first.communicate(timeout=60)
    second.communicate(timeout=60)
    assert said.splitlines() == [f"yes GPU-1 {tmp_path}/node-1/agent", "from n1: yes GPU-0"], errors


@pytest.mark.slow
@pytest.mark.serial
def test_launcher_learns_of_a_node_that_died_and_what_ran_there_is_over(tmp_path):
    mark = tmp_path / "runs"
    gang = Gang(
        tmp_path, f"{sys.executable} -I -m phalanx.node.mpi.agent_main n1 'touch {mark}; exec sleep 5'; echo code $?"
    )
    second, first = gang.start(1), gang.start(0)
    while not mark.exists():
        assert first.poll() is None
    second.kill()
    second.communicate()
    said, errors = first.communicate(timeout=60)
    assert said == "code 255\n"
    assert "the connection to 127.0.0.2 was lost" in errors


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize(
    ("version", "blocked"), [("mpirun (Open MPI) 5.0.11", "4000"), ("HYDRA build details:", "0000")]
)
def test_stop_signal_is_left_to_the_ranks_of_open_mpi(tmp_path, version, blocked):
    """Its launcher and daemons would kill them at once; MPICH's do not, and would block the signal for their ranks too."""
    daemon = tmp_path / ("orted" if blocked == "4000" else "hydra_pmi_proxy")
    daemon.write_text("#!/bin/bash\ngrep ^SigBlk /proc/self/status\n")
    launcher = tmp_path / "mpirun"
    agent = f"{sys.executable} -I -m phalanx.node.mpi.agent_main"
    launcher.write_text(
        f'#!/bin/bash\n[ "$1" = --version ] && echo "{version}" && exit\n{daemon}\n{agent} n1 "{daemon} --id 1"\n'
    )
    for file in (daemon, launcher):
        file.chmod(0o755)
    gang = Gang(tmp_path, "", argv=(str(launcher), "./solver"))
    second, first = gang.start(1), gang.start(0)
    assert [line[-4:] for line in first.communicate(timeout=60)[0].splitlines()] == [blocked, blocked]
    second.communicate(timeout=60)


def test_order_of_another_program_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.delenv(LAUNCH_VARIABLE, raising=False)
    with pytest.raises(NotInJob, match="not in an MPI job of Phalanx"):
        read_launch_order()
    (tmp_path / "order").write_text(json.dumps({"names": 3}))
    monkeypatch.setenv(LAUNCH_VARIABLE, str(tmp_path / "order"))
    with pytest.raises(NotInJob, match="not in an MPI job of Phalanx"):
        read_launch_order()


def test_launchers_in_a_batch_script_give_each_node_its_own_devices(tmp_path):
    """Found live: Hydra gave the ranks of the second node the first one's devices, and Open MPI's ranks of two virtual nodes crashed."""
    assert script_defaults(["10.0.0.1"]) == {}
    assert script_defaults(["10.0.0.1", "10.0.0.2"]) == {"HYDRA_ENV": "none", "I_MPI_HYDRA_ENV": "none"}
    assert (
        script_defaults(["127.0.0.1", "127.0.0.1"]).items() >= {"HYDRA_ENV": "none", "OMPI_MCA_btl": "self,tcp"}.items()
    )
    job = mpi_job()
    script = replace(
        job,
        spec=replace(
            job.spec, slurm=(("tasks_per_node", "2"),), role=replace(job.spec.role, launch=LaunchMode.PER_NODE)
        ),
    )
    assert env_of(script)["HYDRA_ENV"] == "none"

"""MPI worlds that srun starts: what each node exchanges, the wire protocol of PMI-1, and what a rank gets."""

import queue
import re
import socket
from dataclasses import replace

import pytest

from phalanx.node.logic.het_steps import StepPart
from phalanx.node.logic.srun_options import SrunRequest
from phalanx.node.logic.variables.slurm_variables import SlurmBatchJob, SlurmBatchNode, SlurmStep
from phalanx.node.mpi import pmix_process
from phalanx.node.mpi.pmi_server import PMI_FENCE, PmiServer
from phalanx.node.mpi.step_worlds import FenceCollector, StepWorlds
from phalanx.node.mpi.world import MpiWorld, process_mapping
from phalanx.node.slurm_compat.batch_main import mpi_order


def world(*ranks, place=0):
    return MpiWorld(
        name="17.0",
        namespace="pmix.17.0",
        hosts=tuple(f"n{n}" for n in range(len(ranks))),
        ranks=ranks,
        place=place,
        uid=0,
        gid=0,
    )


# ---- layout -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "mapping"),
    [
        (((0, 1), (2, 3)), "(vector,(0,2,2))"),
        (((0, 1, 2), (3,)), "(vector,(0,1,3),(1,1,1))"),
        (((0, 2), (1, 3)), "(vector,(0,1,1),(1,1,1),(0,1,1),(1,1,1))"),
    ],
    ids=["block", "uneven", "cyclic"],
)
def test_mapping_says_which_node_has_which_ranks(ranks, mapping):
    assert process_mapping(world(*ranks)) == mapping


def test_mapping_that_a_value_of_pmi_cannot_hold_is_left_out():
    cyclic = world(tuple(range(0, 400, 2)), tuple(range(1, 400, 2)))
    assert process_mapping(cyclic) == ""


def test_fence_of_some_ranks_concerns_their_nodes_only():
    found = world((0, 1), (2, 3), (4, 5))
    assert found.places([1, 4]) == [0, 2]
    assert found.places(()) == [0, 1, 2]


def test_fence_ends_with_the_part_of_its_last_node_and_the_next_one_begins_anew():
    fences = FenceCollector()

    def give(node, data):
        return fences.add({"step": 3, "fence": "all", "node": node, "nodes": [0, 4], "data": data})

    for first, second in (("a", "b"), ("c", "d")):
        assert give(4, second) == []
        messages = give(0, first)
        assert [(one["part"], one["of"]) for one in messages] == [(first, 2), (second, 2)]


# ---- PMI-1 --------------------------------------------------------------------------------------------------------------


class Rank:
    """One process as MPICH's library speaks."""

    def __init__(self, server, rank):
        self.variables, (self.sock,) = server.connect(rank)
        self.sock.settimeout(60)
        self.lines = self.sock.makefile("rb")

    def say(self, line):
        self.sock.sendall(f"{line}\n".encode())

    def ask(self, line):
        self.say(line)
        return self.lines.readline().decode().strip()


@pytest.fixture
def two_nodes():
    """Two servers of a world of 2 + 1 ranks whose fences a collector ends, and what they report."""
    told: queue.Queue = queue.Queue()
    fences = FenceCollector()
    servers: list[PmiServer] = []

    def send_from(node):
        def send(message):
            if "fence" not in message:
                told.put(message)
                return
            parts = fences.add({**message, "step": 0, "node": node, "nodes": message["places"]})
            for server in servers if parts else ():
                server.exchanged(PMI_FENCE, [part["part"] for part in parts])

        return send

    servers += [PmiServer(world((0, 1), (2,), place=place), send_from(place)) for place in (0, 1)]
    yield servers, told
    for server in servers:
        server.close()


def test_values_that_ranks_put_are_known_on_every_node_after_the_barrier(two_nodes):
    servers, told = two_nodes
    ranks = [Rank(servers[0], 0), Rank(servers[0], 1), Rank(servers[1], 2)]
    assert [one.variables["PMI_RANK"] for one in ranks] == ["0", "1", "2"]
    assert {one.variables["PMI_SIZE"] for one in ranks} == {"3"}
    for number, one in enumerate(ranks):
        assert one.ask("cmd=init pmi_version=1 pmi_subversion=1").startswith("cmd=response_to_init")
        assert one.ask("cmd=get_universe_size") == "cmd=universe_size size=3 rc=0"
        space = one.ask("cmd=get_my_kvsname").split("kvsname=")[1].split()[0]
        assert "rc=0" in one.ask(f"cmd=put kvsname={space} key=card{number} value=a b={number}")
    assert "rc=-1" in ranks[0].ask("cmd=get kvsname=x key=card2"), "not before the barrier"
    for one in ranks:
        one.say("cmd=barrier_in")
    assert [one.lines.readline() for one in ranks] == [b"cmd=barrier_out rc=0\n"] * 3
    assert ranks[0].ask("cmd=get kvsname=x key=card2").endswith("value=a b=2")
    assert "value=(vector" in ranks[2].ask("cmd=get kvsname=x key=PMI_process_mapping")
    assert ranks[1].ask("cmd=finalize") == "cmd=finalize_ack rc=0"
    assert [told.get(timeout=60) for _ in range(4)] == [
        {"initialized": 0},
        {"initialized": 1},
        {"initialized": 2},
        {"finalized": 1},
    ]


@pytest.mark.parametrize(
    ("line", "report"),
    [("cmd=abort exitcode=7", {"abort": 7}), ("     9cmd=fullinit;", {"abort": 1})],
    ids=["MPI_Abort", "PMI-2"],
)
def test_abort_and_another_protocol_end_the_step(two_nodes, line, report):
    servers, told = two_nodes
    Rank(servers[0], 0).say(line)
    said = told.get(timeout=60)
    assert {**said, **report} == said


def test_name_service_and_spawn_are_refused_and_not_left_without_an_answer(two_nodes):
    rank = Rank(two_nodes[0][0], 0)
    assert rank.ask("cmd=lookup_name service=x") == "cmd=lookup_result rc=-1 msg=not_supported"
    assert rank.ask("mcmd=spawn\nnprocs=1\nendcmd") == "cmd=spawn_result rc=-1"


# ---- a step -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("says", "ended"), [("cmd=init", True), ("", False)], ids=["in MPI", "not in MPI"])
def test_rank_that_fails_inside_mpi_ends_the_step(tmp_path, says, ended):
    told: queue.Queue = queue.Queue()
    worlds = StepWorlds(told.put, str(tmp_path))
    for rank in (0, 1):
        _, (sock,) = worlds.connect(5, order(0, 1, inherited=True), rank, {})
        if says:
            sock.sendall(f"{says}\n".encode())
            sock.recv(100)
        sock.close()
    worlds.ended(5, 1, 3)
    worlds.ended(5, 0, 0)
    said = [told.get(timeout=60) for _ in range(told.qsize())]
    assert [one["abort"] for one in said if "abort" in one] == ([3] if ended else [])


def test_without_libpmix_a_rank_that_asks_for_pmix_ends_the_step_which_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(pmix_process, "_libraries", lambda env: ["libnone.so.2", "libc.so.6"])
    told: queue.Queue = queue.Queue()
    worlds = StepWorlds(told.put, str(tmp_path))
    variables = worlds.connect(5, order(0, 1), 0, {})[0]
    with connect({"PMI_PORT": variables["PMIX_SERVER_URI4"].split("//")[1]}) as rank:
        assert rank.recv(1) == b"", "it does not wait"
    said = told.get(timeout=60)
    assert said["abort"] == 1
    assert re.search(r"n0: PMIx: libnone.so.2: cannot open .* or start the program by mpirun", said["why"])
    for rank in (0, 1):
        worlds.ended(5, rank, 0)


# ---- which server -------------------------------------------------------------------------------------------------------


def order(*ranks, inherited=False):
    return {
        "inherited": inherited,
        "name": "17.0",
        "namespace": "pmix.17.0",
        "nodes": [0],
        "hosts": ["n0"],
        "ranks": [list(ranks)],
    }


def connect(variables):
    host, port = variables["PMI_PORT"].split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def test_a_rank_finds_both_servers_and_nothing_by_which_a_program_without_mpi_would_take_itself_for_a_rank(tmp_path):
    worlds = StepWorlds(lambda message: None, str(tmp_path))
    variables, sockets = worlds.connect(5, order(0, 1), 1, {})
    assert sockets == []
    assert {"PMI_PORT", "PMI_ID", "PMIX_NAMESPACE", "PMIX_RANK", "PMIX_SERVER_URI41"} < set(variables)
    assert not {"PMI_RANK", "PMI_SIZE", "PMI_FD", "RANK", "WORLD_SIZE"} & set(variables)
    assert variables["MPIR_CVAR_PMI_VERSION"] == "1", "MPICH 5 would refuse to start"
    assert list(tmp_path.joinpath("mpi-5").iterdir()) == [], "no server of PMIx runs until a rank asks for it"
    variables, (sock,) = worlds.connect(6, order(0, inherited=True), 0, {})
    assert {"PMI_FD", "PMI_RANK", "PMI_SIZE"} < set(variables), "as Slurm's --mpi=pmi2"
    sock.close()
    for step, rank in ((5, 0), (5, 1), (6, 0)):
        worlds.ended(step, rank, 0)
    with pytest.raises(OSError, match="refused"):
        connect(worlds.connect(7, order(0), 0, {})[0] | {"PMI_PORT": variables["PMIX_SERVER_URI2"].split("//")[1]})


def test_jobs_of_two_heads_with_the_same_number_have_worlds_of_different_names():
    node = SlurmBatchNode(name="n0", address="10.0.0.1", devices=0, cpus=2)
    batch = SlurmBatchJob(job_number="17", name="a", nodes=(node,), options={}, user="me", uid=1)
    step = SlurmStep(number=0, nodes=(0,), counts=(2,))
    parts = [StepPart(group=0, batch=batch, step=step, srun=SrunRequest(options={}, command=("true",), notes=()))]
    made = [mpi_order(0, parts, batch) for _ in range(2)]
    assert made[0]["name"] == made[1]["name"] == "17.0"
    assert made[0]["namespace"] != made[1]["namespace"], "Open MPI names its shared memory by it"
    assert mpi_order(0, [replace(parts[0], step=replace(step, mpi="none"))], batch) == {}


def test_a_rank_proves_itself_by_its_number(tmp_path):
    worlds = StepWorlds(lambda message: None, str(tmp_path))
    variables = worlds.connect(5, order(0, 1), 1, {})[0]
    with connect(variables) as other:
        other.sendall(b"cmd=initack pmiid=1\n")
        assert other.recv(100) == b""
    with connect(variables) as sock, sock.makefile("rb") as lines:
        sock.sendall(f"cmd=initack pmiid={variables['PMI_ID']}\n".encode())
        assert [lines.readline() for _ in range(4)] == [
            b"cmd=initack\n",
            b"cmd=set size=2\n",
            b"cmd=set rank=1\n",
            b"cmd=set debug=0\n",
        ]
        for rank in (0, 1):
            worlds.ended(5, rank, 0)
        assert lines.readline() == b"", "the connections end with the step"


@pytest.mark.parametrize("first", ["init", "end"])
def test_a_rank_that_ends_without_mpi_is_reported_once_others_wait_for_it(tmp_path, first):
    fences = FenceCollector()
    told: queue.Queue = queue.Queue()
    worlds = StepWorlds(told.put, str(tmp_path))
    ranks = [worlds.connect(5, order(0, 1, 2, inherited=True), rank, {})[1][0] for rank in range(3)]

    def begin():
        ranks[0].sendall(b"cmd=init\n")
        ranks[0].recv(100)

    steps = (begin, lambda: worlds.ended(5, 2, 0))
    for step in steps if first == "init" else reversed(steps):
        step()
    assert [fences.absent(told.get(timeout=60)) for _ in range(2)] == [None, 2]
    for sock in ranks:
        sock.close()


def test_sockets_of_other_ranks_are_not_inherited():
    server = PmiServer(world((0, 1)), lambda message: None)
    sockets: list[socket.socket] = [server.connect(rank)[1][0] for rank in (0, 1)]
    assert not any(one.get_inheritable() for one in sockets)
    for one in sockets:
        one.close()
    server.close()

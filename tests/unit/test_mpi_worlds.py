"""MPI worlds that srun starts: what each node exchanges, the wire protocol of PMI-1, and which server a program needs."""

import queue
import socket
import stat
import sys

import pytest

from phalanx.node.mpi import program_server, step_worlds
from phalanx.node.mpi.pmi_server import PmiServer
from phalanx.node.mpi.program_server import PMI, PMIX, wanted_server
from phalanx.node.mpi.step_worlds import FenceCollector, StepWorlds, WorldFailed
from phalanx.node.mpi.world import MpiWorld, process_mapping


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
                server.exchanged("all", [part["part"] for part in parts])

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
    order = {"server": PMI, "name": "17.0", "namespace": "pmix.17.0", "nodes": [0], "hosts": ["n0"], "ranks": [[0, 1]]}
    for rank in (0, 1):
        _, (sock,) = worlds.connect(5, order, rank, {})
        if says:
            sock.sendall(f"{says}\n".encode())
            sock.recv(100)
        sock.close()
    worlds.ended(5, 1, 3)
    worlds.ended(5, 0, 0)
    said = [told.get(timeout=60) for _ in range(told.qsize())]
    assert [one["abort"] for one in said if "abort" in one] == ([3] if ended else [])


def test_without_libpmix_the_step_fails_and_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(step_worlds, "_libraries", lambda env: ["libnone.so.2", "libc.so.6"])
    order = {"server": PMIX, "name": "17.0", "namespace": "p", "nodes": [0], "hosts": ["n0"], "ranks": [[0, 1]]}
    with pytest.raises(WorldFailed, match=r"libnone.so.2: cannot open .* or start the program by mpirun"):
        StepWorlds(lambda message: None, str(tmp_path)).connect(5, order, 0, {})


# ---- which server -------------------------------------------------------------------------------------------------------


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Programs of which the first line says the library that they are linked with."""
    for name, library in (("open", "libmpi.so.40"), ("mpich", "libmpi.so.12"), ("plain", "libc.so.6")):
        path = tmp_path / name
        path.write_text(f"{library}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def linked(read):
        word = read(0, 100).decode("ascii", "replace").strip()
        return word if word.startswith("libmpi") else None

    monkeypatch.setattr(program_server, "mpi_library", linked)
    (tmp_path / "run.sh").write_text("#!/bin/bash\nset -e\necho 'two\nlines'\nexec ./mpich --fast\n")
    (tmp_path / "hello.py").write_text("from mpi4py import MPI\n")
    (tmp_path / "other.py").write_text("import json\n")
    (tmp_path / "mpi4py.py").write_text("class rc: pass\nclass MPI:\n    Get_library_version = lambda: 'Open MPI v5'\n")
    return tmp_path


@pytest.mark.parametrize(
    ("option", "command", "server"),
    [
        ("", "./open", PMIX),
        ("", "./mpich -x", PMI),
        ("", "./plain", ""),
        ("pmi2", "./plain", PMI),
        ("pmix_v4", "./plain", PMIX),
        ("pmi2", "./open", PMIX),
        ("pmix", "./mpich", PMI),
        ("none", "./open", ""),
        ("", "bash run.sh", PMI),
        ("", "env A=1 nice -n 5 ./open", PMIX),
        ("", "PYTHON hello.py", PMIX),
        ("", "PYTHON other.py", ""),
        ("", "./absent", ""),
    ],
)
def test_a_program_gets_the_server_that_it_speaks(programs, option, command, server):
    words = command.replace("PYTHON", sys.executable).split()
    assert wanted_server(option, words, str(programs), {"PATH": "/usr/bin:/bin"}) == server


def test_a_command_in_a_shell_text_is_found(programs):
    words = ["bash", "-c", "cd . && exec ./open | tee log"]
    assert wanted_server("", words, str(programs), {"PATH": "/usr/bin:/bin"}) == PMIX


def test_sockets_of_other_ranks_are_not_inherited():
    server = PmiServer(world((0, 1)), lambda message: None)
    sockets: list[socket.socket] = [server.connect(rank)[1][0] for rank in (0, 1)]
    assert not any(one.get_inheritable() for one in sockets)
    for one in sockets:
        one.close()
    server.close()

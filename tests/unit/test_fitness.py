"""Whether a node does for a gang: the judge's tables, the exchange over a real socket, the checks on a real disk."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, dict-item, union-attr, assignment"

import contextlib
import errno
import os
import socket
import sys
import threading
from types import SimpleNamespace

import pytest

from phalanx.core.fleet.fitness import DISK_FREE_BYTES, BadLink, automatic_cordons_left, find_faulty_nodes
from phalanx.core.fleet.node import NodeState
from phalanx.core.state.commands import PrepareTasks
from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.logic import preflight_checks as bounds
from phalanx.node.logic.preflight_checks import (
    DiskSpace,
    LinkProbe,
    MatmulProbe,
    WriteProbe,
)
from phalanx.node.prepare import member_preparation
from phalanx.node.probes import link_probe, preflight_checks
from phalanx.node.probes.devices import DeviceReading
from phalanx.node.probes.link_probe import LinkProbeListener, probe_peer
from phalanx.node.probes.preflight_checks import PreflightChecks
from tests.builders import allocation, make_fleet, spec

GANG = ("n0", "n1", "n2", "n3")


def links(text):
    """Bad links as "n0-n1 n0-n2": who found it first."""
    found: dict[str, list[BadLink]] = {}
    for pair in text.split():
        finder, peer = pair.split("-")
        found.setdefault(finder, []).append(BadLink(peer=peer, why="silent"))
    return found


@pytest.mark.parametrize(
    ("found", "swapped", "kept_out"),
    [
        ("", [], []),
        ("n0-n1", ["n1"], []),  # nobody can tell which end
        ("n1-n0", ["n1"], []),  # whoever said it
        ("n0-n1 n1-n0", ["n1"], []),
        ("n0-n2 n1-n2", ["n2"], ["n2"]),
        ("n2-n0 n2-n1 n2-n3", ["n2"], ["n2"]),  # also when it alone says so
        ("n0-n1 n0-n2 n0-n3", ["n0"], ["n0"]),  # rank 0 too
        ("n0-n1 n2-n3", ["n3", "n1"], []),
        ("n0-n2 n0-n3 n1-n2 n1-n3", ["n3", "n2"], []),  # two halves: the later one goes, nobody is to blame
        ("n0-n3 n1-n3 n2-n3 n0-n1", ["n3", "n1"], ["n3"]),
        ("n2-n0 n2-n1 n2-n3 n3-n0 n3-n1", ["n3", "n2"], ["n3", "n2"]),  # two that reach nobody
        ("n0-n1 n1-n2 n2-n3", ["n2", "n1"], []),  # a chain: links fail here and there
        ("n0-n9", [], []),  # n9 is not of this gang
        ("n0-n0", [], []),  # nor is a node its own peer
    ],
)
def test_who_is_at_fault_for_bad_links(found, swapped, kept_out):
    faults = find_faulty_nodes(GANG, links(found))
    assert [fault.node_id for fault in faults] == swapped
    assert [fault.node_id for fault in faults if fault.cordon] == kept_out


def test_the_evidence_names_the_partners_and_what_was_found():
    (fault,) = find_faulty_nodes(GANG, links("n0-n2 n1-n2"))
    assert fault.why == "link n2 - n0, n1: silent"
    (pair,) = find_faulty_nodes(GANG, links("n0-n2"))
    assert pair.why == "link n2 - n0: silent; either end may be at fault"
    many = [f"n{number}" for number in range(9)]
    (fault,) = find_faulty_nodes(many, links(" ".join(f"n8-n{number}" for number in range(8))))
    assert fault.why == "link n8 - n0, n1, n2, n3, n4 and 3 more: silent"


def test_what_others_say_of_a_node_goes_before_its_own_words():
    own, others = BadLink(peer="n0", why="it hung up"), [BadLink(peer="n1", why="silent")]
    (fault,) = find_faulty_nodes(GANG, {"n1": [own], "n0": others, "n2": others})
    assert (fault.node_id, fault.why) == ("n1", "link n1 - n0, n2: silent")


def test_of_a_pair_the_other_goes_when_the_first_swap_did_not_help():
    (fault,) = find_faulty_nodes(GANG, links("n0-n2"), spare_later=True)
    assert (fault.node_id, fault.cordon) == ("n0", False)


@pytest.mark.parametrize(("nodes", "room"), [(0, 0), (1, 0), (2, 1), (3, 1), (5, 2), (6, 2), (25, 10)])
def test_no_more_than_a_share_of_the_fleet_is_kept_out(nodes, room):
    fleet = make_fleet(" ".join(f"n{number}=1" for number in range(nodes))) if nodes else None
    assert automatic_cordons_left(fleet.nodes.values() if fleet else ()) == room


def test_nodes_that_are_down_are_no_part_of_the_share():
    nodes = make_fleet("n0=1 n1=1 n2=1 n3=1 n4=1").down("n3", "n4").nodes.values()
    assert sum(node.state is NodeState.UP for node in nodes) == 3
    assert automatic_cordons_left(nodes) == 1


@pytest.mark.parametrize(
    ("places", "written", "evidence"),
    [
        ([("/d", 100 << 20)], None, ""),
        ([("/d", 1 << 20)], None, "/d: 1 MiB free, 64 MiB needed"),
        ([("/d", 1 << 30)], WriteProbe(path="/d", seconds=0.1), ""),
        (
            [("/d", 1 << 30)],
            WriteProbe(path="/d", error="Input/output error"),
            "/d: a write of 4 MiB failed: Input/output error",
        ),
        ([("/d", 1 << 30)], WriteProbe(path="/d", seconds=41.0), "/d: a synced write of 4 MiB took 41 s"),
    ],
)
def test_a_disk_is_judged_by_its_room_and_a_synced_write(places, written, evidence):
    storage = [DiskSpace(path=path, free_bytes=free, need_bytes=DISK_FREE_BYTES) for path, free in places]
    assert bounds.storage_problem(storage, written) == evidence


@pytest.mark.parametrize(
    ("products", "evidence"),
    [
        ([], ""),
        ([(600, 33), (610, 33), (590, 33)], ""),
        ([(600, 33), (250, 33), (590, 33)], "GPU 1: matrix products at 250.0 TFLOP/s; the node's median is 590.0"),
        ([(20, 33)], "GPU 0: matrix products at 20.0 TFLOP/s; a sound device of this model gives at least 33.0"),
        (
            [(600, 33), ("CUDA error: uncorrectable ECC", 0)],
            "GPU 1: a matrix product failed: CUDA error: uncorrectable ECC",
        ),
    ],
)
def test_devices_are_judged_by_their_siblings_and_by_the_least_of_their_make(products, evidence):
    found = [
        MatmulProbe(device=number, error=rate)
        if isinstance(rate, str)
        else MatmulProbe(device=number, flops=rate * 1e12, least_flops=least * 1e12)
        for number, (rate, least) in enumerate(products)
    ]
    assert bounds.device_problem(found) == evidence


@pytest.mark.parametrize(
    ("found", "evidence"),
    [
        (LinkProbe(peer="n1", connected=True, answered="n1", returned_bytes=4 << 20), ""),
        (LinkProbe(peer="n1", connected=True, answered="n1", returned_bytes=64 << 10), ""),
        (LinkProbe(peer="n1"), "no connection in 5 s"),
        (LinkProbe(peer="n1", error="10.0.0.2 port 20007: no route to host"), "10.0.0.2 port 20007: no route to host"),
        (LinkProbe(peer="n1", connected=True, answered="n7", returned_bytes=64 << 10), "n7 answers at its address"),
        (
            LinkProbe(peer="n1", connected=True, answered="n1", broken=True),
            "it connects, but 64 KiB do not come back (not in 5 s): is the MTU too large for the path?",
        ),
        (
            LinkProbe(peer="n1", connected=True, answered="n1", returned_bytes=192 << 10, broken=True),
            "it connects, but nothing comes back after 192 KiB (not in 5 s)",
        ),
    ],
)
def test_a_link_is_judged_by_who_answers_and_what_comes_back(found, evidence):
    assert bounds.link_problem(found) == evidence


def test_in_a_small_gang_all_probe_all_and_in_a_large_one_few_probe_each():
    assert bounds.probed_node_ranks(1, 3) == (0, 2)
    assert bounds.probed_node_ranks(0, 17) == tuple(range(1, 17))
    assert bounds.probed_node_ranks(99, 100) == (0, 1, 3, 7, 15, 31, 63)
    assert len(bounds.probed_node_ranks(5, 12_500)) == 14
    probed = [other for rank in range(100) for other in bounds.probed_node_ranks(rank, 100)]
    assert {probed.count(rank) for rank in range(100)} == {7}


# ---- over real sockets ------------------------------------------------------------------------------------------------


@pytest.fixture
def listener():
    made = LinkProbeListener("n1", "0.0.0.0")
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    yield made
    made.close()
    thread.join(100)
    assert not thread.is_alive()


def test_what_is_sent_to_a_listener_comes_back(listener):
    found = probe_peer("n1", "127.0.0.1", listener.port, bulk=False)
    assert (found.connected, found.answered, found.returned_bytes) == (True, "n1", bounds.PIECE_BYTES)
    assert bounds.link_problem(found) == ""
    bulk = probe_peer("n1", "127.0.0.1", listener.port, bulk=True)
    assert bounds.PIECE_BYTES < bulk.returned_bytes <= bounds.BULK_BYTES


def test_a_peer_is_asked_to_reach_back(listener):
    with socket.create_server(("127.0.0.1", 0)) as own:
        port = own.getsockname()[1]
        assert bounds.link_problem(probe_peer("n1", "127.0.0.1", listener.port, bulk=False, own_port=port)) == ""
    found = probe_peer("n1", "127.0.0.1", listener.port, bulk=False, own_port=port)
    assert bounds.link_problem(found) == "it accepts connections, but cannot connect back: connection refused"


def test_another_node_at_the_address_is_named(listener):
    assert bounds.link_problem(probe_peer("n5", "127.0.0.1", listener.port, bulk=False)) == "n1 answers at its address"


def test_a_node_that_nobody_elsewhere_can_reach_has_no_listener():
    assert LinkProbeListener("n0", "127.0.0.1").port == 0


def test_a_listener_serves_many_at_once_and_hangs_up_on_whoever_talks_otherwise(listener):
    with socket.create_connection(("127.0.0.1", listener.port)) as odd:
        odd.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):  # it had more to say than was read
            assert odd.recv(100) == b""
    found = {}
    threads = [
        threading.Thread(
            target=lambda n=number: found.update({n: probe_peer("n1", "127.0.0.1", listener.port, bulk=False)})
        )
        for number in range(48)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [bounds.link_problem(one) for one in found.values()] == [""] * 48


def test_whoever_sends_a_byte_now_and_then_does_not_hold_a_listener(listener, monkeypatch):
    monkeypatch.setattr(link_probe, "_SERVE_S", 0.5)
    with socket.create_connection(("127.0.0.1", listener.port)) as slow:
        slow.sendall(b"phalanx-link 1 n1 0\n")
        assert slow.recv(100) == b"n1\n"
        slow.settimeout(0.1)
        for _ in range(100):
            with contextlib.suppress(TimeoutError):
                slow.sendall(b"x")
                assert slow.recv(1) == b""  # it hung up
                return
        pytest.fail("still served after 10 s")


def test_a_listener_that_could_not_take_a_probe_takes_the_next(monkeypatch):
    made = LinkProbeListener("n1", "0.0.0.0")
    true, failures = made._socket, [OSError(errno.EMFILE, "Too many open files"), OSError(errno.ECONNABORTED, "gone")]

    class Short:
        def accept(self):
            if failures:
                raise failures.pop()
            return true.accept()

        def __getattr__(self, name):
            return getattr(true, name)

    made._socket = Short()
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    monkeypatch.setattr(link_probe, "LINK_PROBE_S", 2.0)
    assert bounds.link_problem(probe_peer("n1", "127.0.0.1", made.port, bulk=False)) == ""
    made.close()
    thread.join(100)
    assert not thread.is_alive()


def test_a_refusal_and_a_silence_are_told_apart(monkeypatch):
    monkeypatch.setattr(link_probe, "LINK_PROBE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
        silent = probe_peer("n1", "127.0.0.1", port, bulk=False)  # the kernel connects, nobody answers
    assert (silent.connected, silent.returned_bytes) == (True, 0)
    refused = probe_peer("n1", "127.0.0.1", port, bulk=False)
    assert "connection refused" in bounds.link_problem(refused)


# ---- the checks of a node ---------------------------------------------------------------------------------------------


def order(on="n0:0 n1:0", *, restarts=0, ports=(0, 0), addresses=("10.0.0.1", "10.0.0.2"), env=()):
    return PrepareTasks(
        node_id="n0",
        job_id="1",
        epoch=1,
        generation=0,
        spec=spec(env=env),
        allocation=allocation(on),
        addresses=addresses,
        candidates=(),
        checkpoint_dir="",
        output_dir="",
        deadline_s=None,
        restarts=restarts,
        mtbf_s=1e6,
        probe_ports=ports,
    )


def counted(monkeypatch, name):
    """How often a measurement is made."""
    calls = []
    true = getattr(preflight_checks, name)

    def counting(*given, **more):
        calls.append(given)
        return true(*given, **more)

    monkeypatch.setattr(preflight_checks, name, counting)
    return calls


def test_a_disk_is_written_once_an_hour_and_again_after_a_failure(tmp_path, monkeypatch):
    writes = counted(monkeypatch, "_written")
    node = PreflightChecks(folder=str(tmp_path), base={}, devices=())
    grant = order().allocation.grants[0]
    assert [node.node_fault(order(), grant) for _ in range(3)] == ["", "", ""]
    assert len(writes) == 1
    assert node.node_fault(order(restarts=1), grant) == ""
    assert len(writes) == 2
    assert os.listdir(tmp_path) == []


def test_a_disk_that_cannot_be_written_is_a_flaw_each_time(tmp_path, monkeypatch):
    writes = counted(monkeypatch, "_written")
    folder = tmp_path / "gone"
    monkeypatch.setattr(preflight_checks, "_free_bytes", lambda _: 1 << 40)
    node = PreflightChecks(folder=str(folder), base={}, devices=())
    grant = order().allocation.grants[0]
    for _ in range(2):
        assert "No such file or directory" in node.node_fault(order(), grant)
    assert len(writes) == 2


def test_a_job_may_skip_its_preflight(tmp_path):
    node = PreflightChecks(folder=str(tmp_path / "gone"), base={}, devices=())
    assert node.node_fault(order(env=(("PHALANX_PREFLIGHT", "off"),)), order().allocation.grants[0]) == ""


def test_nodes_of_one_machine_have_no_link_to_try(tmp_path, monkeypatch):
    probes = counted(monkeypatch, "probe_peer")
    node = PreflightChecks(folder=str(tmp_path), base={}, devices=())
    here = order(addresses=("10.0.0.1", "10.0.0.1"), ports=(20_001, 20_002))
    loopback = order(addresses=("127.0.0.1", "127.0.0.2"), ports=(20_001, 20_002))
    unknown = order(ports=(20_001, 0))
    older_head = order(ports=())
    for one in (here, loopback, unknown, older_head):
        assert node.bad_links(one, one.allocation.grants[0]) == ()
    assert probes == []


def test_the_child_that_multiplies_is_asked_for_the_devices_granted(tmp_path, monkeypatch):
    program = tmp_path / "stand_in.py"
    program.write_text(
        "import json, os\nprint('Warning: a library speaks')\n"
        "for number, uuid in enumerate(os.environ['CUDA_VISIBLE_DEVICES'].split(',')):\n"
        "    print(json.dumps({'device': number, 'flops': 2e12 if uuid == 'GPU-b' else 9e14, 'least_flops': 1e13}))\n"
    )
    monkeypatch.setattr(preflight_checks, "find_spec", lambda _: True)
    base = {"PYTHONPATH": str(tmp_path), **os.environ}
    node = PreflightChecks(folder=str(tmp_path), base=base, devices=("GPU-a", "GPU-b", "GPU-c"), program="stand_in")
    both, sound = order("n0:0,1 n1:0"), order("n0:0,2 n1:0")
    assert node.node_fault(both, both.allocation.grants[0]).startswith("GPU 1: matrix products at 2.0 TFLOP/s")
    assert node.node_fault(sound, sound.allocation.grants[0]) == ""


def test_a_node_whose_python_has_no_torch_is_not_asked_to_multiply(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight_checks, "find_spec", lambda _: None)
    node = PreflightChecks(folder=str(tmp_path), base={}, devices=("GPU-a",), program="no_such_module")
    one = order("n0:0 n1:0")
    assert node.node_fault(one, one.allocation.grants[0]) == ""


@pytest.mark.slow
def test_the_program_that_multiplies_says_nothing_where_there_is_no_gpu(tmp_path):
    import subprocess

    argv = [sys.executable, "-P", "-m", preflight_checks.PRODUCT_PROGRAM]
    done = subprocess.run(
        argv, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, preflight_checks.read_products(done.stdout, (0,))) == (0, [])


@pytest.mark.parametrize(
    ("sample", "flaw", "words"),
    [
        (None, True, "GPU 0 does not answer"),  # it fell off the bus: any job would fail here
        (
            (70 << 30, 80 << 30),
            False,
            "in use by other processes",
        ),  # somebody's work: this job goes elsewhere, the node stays
    ],
    ids=["gone", "busy"],
)
def test_a_gpu_that_is_gone_is_the_nodes_flaw_and_one_that_is_busy_is_not(monkeypatch, sample, flaw, words):
    monkeypatch.setattr(member_preparation, "_FREE_WAIT_S", 0.0)
    found = {} if sample is None else {0: _sample(*sample)}
    shop = SimpleNamespace(devices=("GPU-a",), virtual=False, fresh_samples=lambda _: found)
    present = SimpleNamespace(grant=order("n0:0").allocation.grants[0], cancelled=threading.Event())
    with pytest.raises(PreparationFailed, match=words) as caught:
        member_preparation._prove_devices(present, shop)
    assert (caught.value.node_fault, caught.value.charge) == (flaw, False)


def _sample(used_bytes, total_bytes):
    return DeviceReading(
        index=0,
        uuid="GPU-a",
        utilization=0.0,
        counter="nvml_gpu",
        memory_used_bytes=used_bytes,
        memory_total_bytes=total_bytes,
    )


def test_too_little_room_on_the_disk_is_said_as_such_unless_the_job_skips_the_checks(tmp_path, monkeypatch):
    checks = PreflightChecks(folder=str(tmp_path), base={}, devices=())
    monkeypatch.setattr(preflight_checks, "_free_bytes", lambda _: DISK_FREE_BYTES - 1)
    shop = SimpleNamespace(preflight_checks=checks)
    prepare = order("n0:0")
    present = SimpleNamespace(prepare=prepare, grant=prepare.allocation.grants[0])
    with pytest.raises(PreparationFailed, match="free, 64 MiB needed") as caught:
        member_preparation._check_node(present, shop)
    assert (caught.value.node_fault, caught.value.disk_full, caught.value.charge) == (True, True, False)
    monkeypatch.setattr(preflight_checks, "skipped", lambda _: True)
    monkeypatch.setattr(member_preparation, "skipped", lambda _: True)
    member_preparation._check_node(present, shop)

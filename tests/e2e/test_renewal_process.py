"""Renewals that another process answers, with real heads and their processes over TLS, and real channels of supervisors without ranks."""

import os
import signal
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from benchmarks import renewals
from benchmarks.cluster import ROOT, BenchmarkCluster, command_words, free_port, wait_until
from benchmarks.heads import heads
from phalanx.controller import leadership
from phalanx.core.ids import NodeId
from phalanx.node.head_link.head_address import HeadAddress
from phalanx.node.head_link.head_connection import HeadAccess, HeadConnection, HeadUnavailable, RegistrationRequired
from phalanx.node.processes.proctable import read_table
from phalanx.wire import supervisor as wire
from phalanx.wire.join import JoinReply, JoinRequest
from tests import postgres_here

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(120)]
LEASE_S = 4.0
NODES = 6  # with the node of the head itself, too many for 5 renewals a second


CROWDED_HEAD = """
import sys
from phalanx.controller import leases
leases.RENEWALS_PER_S_MAX = 5.0
from phalanx.app import head
sys.exit(head.main(sys.argv[1:]))
"""


class CrowdedCluster(BenchmarkCluster):
    """A cluster whose head is crowded by a few nodes."""

    def start(self, *, wait_nodes=True):
        """Start the head, and wait until its node is up."""
        options = {"--home": self.home, "--port": str(self.port), "--lease": str(self.lease_s), "--virtual": "1x1"}
        words = [word for pair in options.items() for word in pair]
        own = {"PHALANX_HOME": self.home, "PYTHONPATH": os.path.join(ROOT, "src")}
        with open(os.path.join(self.home, "head.out"), "ab") as output:
            self.head = subprocess.Popen(
                [sys.executable, "-c", CROWDED_HEAD, *words, "--listen", renewals.own_address()],
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **own},
            )
        wait_until(self.answers, "the head serves")
        self.wait_for_nodes(1)


@pytest.fixture
def head(tmp_path):
    made = CrowdedCluster(home=str(tmp_path / "home"), port=free_port(), virtual="1x1", lease_s=LEASE_S)
    (tmp_path / "home").mkdir(mode=0o700)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def joined(head, names):
    return join(head.call("GET", "/v1/join"), os.path.join(head.home, "tls", "ca.pem"), names)


def join(line, ca_file, names):
    url = f"https://{line['address']}"
    first = HeadConnection(HeadAccess(address=HeadAddress(url, None), token=line["token"], ca_file=ca_file))
    fleet = []
    for name in names:
        request = JoinRequest(node_id=NodeId(name), hostname=name, address="127.0.0.1", devices=0, virtual=True)
        given = wire.decode(first.call("POST", "/v1/join", wire.encode(request), timeout_s=10.0), JoinReply)
        access = HeadAccess(address=HeadAddress(url, None), token=given.token, ca_file=ca_file)
        fleet.append(renewals.SimulatedSupervisor(NodeId(name), access))
        fleet[-1].register(handed=True)
    return fleet


def process_of(head):
    return process_below(head.head.pid)


def process_below(head_pid):
    return next(
        (
            pid
            for pid, row in read_table().items()
            if row.parent == head_pid and not row.dead and "phalanx.app.renewal_process" in command_words(pid)
        ),
        None,
    )


def renew_for(head, fleet, seconds, *, without=()):
    """Renew all leases at their pace, as supervisors do: registered again where the head asks for it, and again where it does not answer."""
    end_s, registered = time.monotonic() + seconds, 0
    while time.monotonic() < end_s:
        for one in fleet:
            if one in without or one.due_s > time.monotonic():
                continue
            try:
                one.renew(handed=True)
            except RegistrationRequired:
                registered += 1
                one.register(handed=True)
            except HeadUnavailable:
                pass
        time.sleep(0.02)
    return registered


def up(head):
    return {node["id"] for node in head.nodes() if node["state"] == "up"}


def test_a_crowded_head_hands_renewals_over_and_knows_what_was_answered(head):
    fleet = joined(head, [f"s{number}" for number in range(NODES)])
    assert renew_for(head, fleet, 2 * LEASE_S) == 0
    assert process_of(head) is not None
    before = renewals.processor_s(head)[1]
    assert renew_for(head, fleet, 2 * LEASE_S) == 0, "no lease was lost"
    assert renewals.processor_s(head)[1] >= before
    assert up(head) == {one.name for one in fleet} | {"n0"}
    silent = fleet[0]
    renew_for(head, fleet, 2 * LEASE_S + 4.0, without=(silent,))
    assert up(head) == {one.name for one in fleet[1:]} | {"n0"}, "a silent node is lost, and no other"
    with pytest.raises(RegistrationRequired):
        silent.renew(handed=True)


def test_a_process_that_dies_or_hangs_costs_no_lease(head):
    fleet = joined(head, [f"s{number}" for number in range(NODES)])
    assert renew_for(head, fleet, 2 * LEASE_S) == 0
    first = process_of(head)
    os.kill(first, signal.SIGKILL)
    assert renew_for(head, fleet, 2 * LEASE_S) == 0
    second = process_of(head)
    assert second not in (None, first), "another one took its place"
    os.kill(second, signal.SIGSTOP)
    renew_for(head, fleet, LEASE_S + 6.0)
    assert up(head) == {one.name for one in fleet} | {"n0"}
    wait_until(lambda: process_of(head) != second, "the one that hung is ended")


def test_the_process_ends_with_its_head(head):
    fleet = joined(head, [f"s{number}" for number in range(NODES)])
    renew_for(head, fleet, LEASE_S)
    process = process_of(head)
    assert process is not None
    head.kill_head()
    wait_until(lambda: process not in read_table() or read_table()[process].dead, "it has ended")
    with pytest.raises(HeadUnavailable):
        fleet[0].renew(handed=True)


@pytest.mark.skipif(bool(postgres_here.why_not()), reason=postgres_here.why_not() or "it is here")
def test_of_several_heads_the_process_of_one_that_hangs_answers_nothing_after_its_term():
    words, program = ("--lease", str(LEASE_S)), ("-P", "-c", CROWDED_HEAD)
    with heads(
        postgres_here.server().empty(), "1x1", "1x1", words=words, listen=("127.0.0.2", "127.0.0.3"), program=program
    ) as cluster:
        first = cluster.wait_for_leader()
        with cluster.client() as client:
            line = client.transport.json("GET", "/v1/join")
        fleet = join(msgspec.json.decode(line), os.path.join(first.home, "tls", "ca.pem"), ["s0", "s1", "s2", "s3"])
        assert renew_for(first, fleet, 2 * LEASE_S) == 0
        assert first.process is not None
        process = process_below(first.process.pid)
        assert process is not None, "beside another head, too, renewals are handed over"
        assert renew_for(first, fleet, 3 * LEASE_S / 2) == 0, "it goes on answering, term after term"

        first.send(signal.SIGSTOP)
        stopped_s, answered_s = time.monotonic(), 0.0
        watch = threading.Thread(target=lambda: cluster.wait_for_leader(but=first))
        watch.start()
        while watch.is_alive():
            try:
                fleet[0].renew(handed=True)
            except HeadUnavailable:
                continue
            answered_s = time.monotonic()
        assert stopped_s < answered_s < stopped_s + leadership.LEASE_S, "for the rest of the term, and no longer"
        assert process in read_table()

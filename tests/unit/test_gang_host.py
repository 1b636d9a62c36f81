"""The first node of a gang and the others: who joined, who is missing, and what a lost connection does."""

import queue
import sys
import threading
from typing import Any

import pytest

from benchmarks.cluster import free_port
from phalanx.node.gang.gang_host import GangHost, serve_gang_node
from phalanx.node.gang.job_link import LinkClosed, open_link

KEY, WAIT_S = "k" * 32, 100.0


@pytest.fixture
def gang():
    """A host that expects two other nodes; `said` receives what they report, `lost` their ranks when they are gone."""
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    lost: queue.SimpleQueue[int] = queue.SimpleQueue()
    port = free_port()
    host = GangHost(
        "127.0.0.1",
        port,
        KEY,
        2,
        on_message=said.put,
        on_client=lambda link: link.send({"welcome": 1}),
        on_lost=lost.put,
    )
    host.open()
    return host, port, said, lost


def joined(port, rank):
    """A node's part in a thread; its exit code comes in the queue."""
    codes: queue.SimpleQueue[int] = queue.SimpleQueue()

    def serve():
        codes.put(
            serve_gang_node(
                "127.0.0.1",
                port,
                KEY,
                rank,
                handle=lambda tasks, message: tasks.start(message["step"], message["run"]),
                name="srun",
                pid_variable="OWN_PID",
            )
        )

    threading.Thread(target=serve, daemon=True).start()
    return codes


def test_nodes_join_run_and_end(gang):
    host, port, said, _ = gang
    codes = [joined(port, rank) for rank in (1, 2)]
    assert host.await_nodes(WAIT_S) == []
    program = "import os; raise SystemExit(int(os.environ['OWN_PID']) != os.getpid())"
    task = {"task": 3, "argv": [sys.executable, "-c", program], "env": {}, "cwd": "/"}
    host.send(2, {"step": 7, "run": [task]})
    assert said.get(timeout=WAIT_S) == {"step": 7, "task": 3, "exit": 0}
    host.send_all({"bye": True})
    assert [code.get(timeout=WAIT_S) for code in codes] == [0, 0]


def test_nodes_that_do_not_come_are_named_and_get_nothing(gang):
    host, port, _, _ = gang
    joined(port, 2)
    host.await_nodes(0.1)
    assert 1 in host.await_nodes(0.0)
    with pytest.raises(LinkClosed):
        host.send(1, {"step": 0, "run": []})


def test_what_is_missing_is_said_by_name(monkeypatch):
    monkeypatch.setattr("phalanx.node.gang.gang_host.JOIN_S", 0.1)
    port = free_port()
    parts = {"on_message": lambda _: None, "on_client": lambda _: None}
    host = GangHost("127.0.0.1", port, KEY, 1, **parts)
    assert host.gather(["n0", "n1"]) == "node n1 did not connect within 0.1 s"
    second = GangHost("127.0.0.1", port, KEY, 0, **parts)
    assert second.gather(["n0"]) == f"cannot listen on port {port}: Address already in use"


def test_a_node_that_is_lost_is_reported_and_gets_nothing_more(gang):
    host, port, _, lost = gang
    link = open_link("127.0.0.1", port, KEY, {"node": 1}, within_s=WAIT_S)
    joined(port, 2)
    assert host.await_nodes(WAIT_S) == []
    link.close()
    assert lost.get(timeout=WAIT_S) == 1
    with pytest.raises(LinkClosed):
        host.send(1, {"step": 0, "run": []})


def test_a_client_is_served_and_one_without_the_key_is_not(gang):
    _, port, _, _ = gang
    assert open_link("127.0.0.1", port, KEY, {"agent": 1}, within_s=WAIT_S).receive() == {"welcome": 1}
    with pytest.raises(LinkClosed):
        open_link("127.0.0.1", port, "x" * 32, {"agent": 1}, within_s=WAIT_S).receive()


def test_a_host_that_is_not_there_is_an_error_and_no_traceback(monkeypatch):
    monkeypatch.setattr("phalanx.node.gang.gang_host.JOIN_S", 0.1)
    with pytest.raises(LinkClosed):
        serve_gang_node("127.0.0.1", free_port(), KEY, 1, handle=lambda *_: None, name="srun")

"""Sessions in a job: its ports on this machine, and what becomes of connections when a part dies."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, var-annotated"

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from benchmarks.cluster import ROOT, cluster, wait_until
from phalanx.client import Client
from phalanx.client.port_forward import ForwardedPort, PortForward
from phalanx.core.errors import BadRequest, Conflict, PhalanxError

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(120)]

# Answers the digest of all that it read, once the other side has ended: a half-closed connection must pass both.
SERVER = """
import hashlib, os, socket, threading
listener = socket.create_server(("127.0.0.1", 0), backlog=64)
open("port.new", "w").write(str(listener.getsockname()[1]))
os.rename("port.new", "port")
def serve(connection):
    digest = hashlib.sha256()
    while data := connection.recv(1 << 16):
        digest.update(data)
    connection.sendall(digest.hexdigest().encode() * 1000)
    connection.close()
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


@pytest.fixture(scope="module")
def head():
    with cluster("1x2", revive_s=0.5) as made:
        yield made


@pytest.fixture(scope="module")
def job(head, tmp_path_factory):
    """A job whose program serves a port: its id, and the port."""
    folder = tmp_path_factory.mktemp("job")
    job_id = head.submit(name="serves", run=[sys.executable, "-c", SERVER], gpus=1, workdir=str(folder))
    wait_until((folder / "port").exists, "the job serves")
    return job_id, int((folder / "port").read_text())


@contextlib.contextmanager
def forwarded(head, job_id, *remote, **more):
    forward = PortForward(
        Client(home=head.home), job_id, [ForwardedPort(local=0, remote=one) for one in remote], **more
    )
    ready, ends = threading.Event(), []

    def run():
        try:
            forward.run(ready.set)
        except PhalanxError as error:
            ends.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(30), ends
        yield [here for here, _ in forward.bound()]
    finally:
        forward.close()
        thread.join(30)
        assert not thread.is_alive()


def ask(port, data, pause_s=0.0):
    """What the server answers once this side has ended."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as line:
        time.sleep(pause_s)
        line.sendall(data)
        line.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := line.recv(1 << 16):
            answer += piece
    return answer


def test_many_connections_at_once_carry_their_own_bytes_and_ends(head, job):
    job_id, port = job
    bodies = [os.urandom(size) for size in (0, 1, 70_000, 3_000_000)] * 5
    answers = [b""] * len(bodies)
    with forwarded(head, job_id, port) as (here,):

        def run(index):
            answers[index] = ask(here, bodies[index])

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [hashlib.sha256(body).hexdigest().encode() * 1000 for body in bodies]


def test_a_connection_that_nobody_reads_stops_no_other(head, job, tmp_path):
    flood = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); open('flood.new', 'w').write(str(s.getsockname()[1]));"
        "import os; os.rename('flood.new', 'flood'); c = s.accept()[0]\nwhile True: c.sendall(bytes(1 << 16))"
    )
    flood_job = head.submit(name="flood", run=[sys.executable, "-c", flood], gpus=1, workdir=str(tmp_path))
    wait_until((tmp_path / "flood").exists, "the job floods")
    try:
        _, port = job  # the same node
        with (
            forwarded(head, flood_job, int((tmp_path / "flood").read_text()), port) as (flooded, here),
            socket.create_connection(("127.0.0.1", flooded)) as unread,
        ):
            time.sleep(0.3)
            assert ask(here, b"x") == hashlib.sha256(b"x").hexdigest().encode() * 1000
            assert unread.recv(1)
    finally:
        head.call("POST", f"/v1/jobs/{flood_job}/cancel", {})


def test_a_port_on_which_nothing_listens_is_told_and_its_connection_reset(head, job):
    told = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    with (
        forwarded(head, job[0], free, on_refused=told.append) as (here,),
        pytest.raises(ConnectionResetError),
        socket.create_connection(("127.0.0.1", here)) as line,
    ):
        line.recv(1)
    assert told == [free]


def test_a_local_port_that_is_taken_is_refused_in_words(head, job):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadRequest, match=f"port {port} of this machine"):
            PortForward(Client(home=head.home), job[0], [ForwardedPort(local=port, remote=1)])


def test_the_command_prints_where_the_port_is_and_leaves_nothing(head, job):
    job_id, port = job
    command = [sys.executable, "-m", "phalanx.app.cli", "port-forward", f"{job_id}.0", f"0:{port}"]
    environment = {**os.environ, "PHALANX_HOME": head.home, "PYTHONPATH": os.path.join(ROOT, "src")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout
        line = run.stdout.readline()
        assert line.endswith(f"-> job {job_id}, port {port}\n")
        here = int(line.split()[0].rpartition(":")[2])
        assert ask(here, b"abc") == hashlib.sha256(b"abc").hexdigest().encode() * 1000
        run.kill()
    wait_until(lambda: not _relays(), "the relay has ended")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", here))


def test_connections_are_possible_again_after_a_restart_of_the_head(head, job):
    job_id, port = job
    broken = []
    with forwarded(head, job_id, port, on_broken=broken.append) as (here,):
        with socket.create_connection(("127.0.0.1", here), timeout=60) as line:
            head.kill_head()
            with pytest.raises(ConnectionResetError):
                line.recv(1)
        head.start()
        assert ask(here, b"again") == hashlib.sha256(b"again").hexdigest().encode() * 1000
        assert len(broken) == 1


def test_it_ends_in_words_when_the_job_does(head, tmp_path):
    job_id = head.submit(name="ends", run=["sleep", "600"], gpus=1, workdir=str(tmp_path))
    head.wait_for_state(job_id, "running")
    forward = PortForward(Client(home=head.home), job_id, [ForwardedPort(local=0, remote=9)])
    cancel = lambda: head.call("POST", f"/v1/jobs/{job_id}/cancel", {})  # noqa: E731  # one line
    with pytest.raises(Conflict, match=f"job {job_id} is .*; its ports are gone with it") as caught:
        forward.run(cancel)
    assert job_id in caught.value.hint, "the next step"


def _relays():
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read()
            if b"phalanx-relay-1" in words:
                found.append(pid)
    return found

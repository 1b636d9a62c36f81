"""A replica that sleeps, as a user types it: on a cluster of one device, a job runs on it meanwhile."""

import sys
import time
import urllib.request

import pytest

from benchmarks.cluster import free_port
from phalanx.client import Client
from tests.e2e.test_cli_head import Shell

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(300)]

FILE = """
type: service
name: chat
run: exec {python} serve.py
gpus: 1
ready: /health
sleep: /sleep?level=1
wake: /wake_up
grace: 1s
"""
PROGRAM = """
import http.server, os

class Server(http.server.BaseHTTPRequestHandler):
    asleep = False

    def do_GET(self):
        self.answer(503 if Server.asleep else 200)

    def do_POST(self):
        Server.asleep = {"/sleep?level=1": True, "/wake_up": False}[self.path]
        self.answer(200)

    def answer(self, status):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())

http.server.ThreadingHTTPServer(("", int(os.environ["PORT"])), Server).serve_forever()
"""


@pytest.fixture(scope="module")
def phalanx(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("sleep"))
    (shell.work / "serve.py").write_text(PROGRAM)
    (shell.work / "chat.yaml").write_text(FILE.format(python=sys.executable))
    shell("up", "--virtual", "1x1", "--port", str(free_port()))
    yield shell
    shell("down", "--cancel-jobs")


def test_job_runs_on_the_device_of_a_sleeping_replica_and_the_same_process_wakes_after_it(phalanx):
    client = Client(home=str(phalanx.home))

    def until(holds):
        for _ in range(600):
            if holds():
                return
            time.sleep(0.1)
        raise AssertionError(client.service("chat"))

    def replica():
        return client.service("chat").replicas[0]

    def process():
        (end,) = client.service("chat").service.endpoints
        return urllib.request.urlopen(f"http://{end.address}:{end.port}/", timeout=60).read()

    phalanx("submit", "chat.yaml")
    until(lambda: client.service("chat").service.ready == 1)
    before = process()
    assert phalanx("sleep", "chat").stdout == "service chat: 1 of 1 replicas shall sleep\n"
    until(lambda: replica().sleep == "asleep")
    assert "chat     sleeping  0/0 1 asleep" in phalanx("ps").stdout
    job = phalanx(
        "submit", "--gpus", "1", "--quiet", "--", "sh", "-c", "until [ -e done ]; do sleep 0.1; done"
    ).stdout.strip()
    until(lambda: phalanx.json("show", job)["job"]["state"] == "running")
    assert phalanx("wake", "chat").stdout == "service chat: 0 of 1 replicas shall sleep\n"
    until(lambda: replica().sleep_why == f"device 0 of n0 is in use by job {job}")
    said = phalanx("why", replica().id).stdout
    assert said.startswith(
        f"job {replica().id} is waiting to wake: device 0 of n0 is in use by job {job}; has run for "
    )
    (phalanx.work / "done").touch()
    until(lambda: client.service("chat").service.ready == 1)
    assert process() == before

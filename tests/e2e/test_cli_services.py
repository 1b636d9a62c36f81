"""A service as a user types it: real servers on virtual nodes, of which one always answers, whatever dies or is replaced."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import urllib.request

import pytest

from benchmarks.cluster import free_port
from phalanx.client import Client
from tests.e2e.test_cli_head import Shell

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(300)]

FILE = """
type: service
name: web
run: exec {python} -m http.server -d {folder} $PORT
gpus: 1
replicas: 2..3
ready: /said
grace: 1s
"""


@pytest.fixture(scope="module")
def phalanx(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("services"))
    for number in (1, 2):
        (shell.work / f"v{number}").mkdir()
        (shell.work / f"v{number}" / "said").write_text(f"version {number}")
        (shell.work / f"v{number}.yaml").write_text(FILE.format(python=sys.executable, folder=f"v{number}"))
    shell("up", "--virtual", "3x2", "--port", str(free_port()))
    yield shell
    shell("down", "--cancel-jobs")


class Visitor:
    """Asks every ready endpoint again and again; `fewest`: how few answered in any round, once the first did."""

    def __init__(self, home):
        self.client = Client(home=str(home))
        self.fewest, self.answers, self.ended = 99, [], threading.Event()
        self.thread = threading.Thread(target=self.run)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()

    def run(self):
        while not self.ended.wait(0.1):
            answers = []
            for end in self.client.service("web").service.endpoints:
                with contextlib.suppress(OSError):
                    if end.ready:
                        answers.append(
                            urllib.request.urlopen(f"http://{end.address}:{end.port}/said", timeout=5).read()
                        )
            self.answers = answers
            if answers or self.fewest < 99:
                self.fewest = min(self.fewest, len(answers))

    def until(self, holds, what):
        for _ in range(600):
            if holds(self.answers):
                return
            time.sleep(0.1)
        raise AssertionError(f"{what}: {self.answers} {self.client.service('web').service}")


def test_service_keeps_two_replicas_through_a_nodes_death_and_a_rollout(phalanx):
    said = phalanx("submit", "v1.yaml").stdout
    assert said == "service web submitted: revision 1, replicas 2..3\nnext: phalanx show web\n"
    with Visitor(phalanx.home) as visitor:
        visitor.until(lambda answers: answers == [b"version 1"] * 2, "two replicas serve")

        victim = visitor.client.service("web").service.endpoints[0].node_id
        record = json.loads((phalanx.home / "nodes" / victim / "engine.json").read_text())
        os.kill(record["pid"], signal.SIGKILL)
        visitor.until(lambda answers: len(answers) == 1, "the node's replica is gone")
        visitor.until(lambda answers: len(answers) == 2, "it serves elsewhere")
        assert victim not in {end.node_id for end in visitor.client.service("web").service.endpoints}

        done = phalanx("serve", "up", "v2.yaml")
        assert done.stdout == "service web: revision 1 -> 2, replicas 2..3\nnext: phalanx serve ps web\n"
        assert "service web serves revision 2: 2 of 2 replicas ready" in done.stderr
        assert phalanx("serve", "up", "v2.yaml").stdout.startswith("service web is unchanged: revision 2,")
        visitor.until(lambda answers: answers == [b"version 2"] * 2, "the rollout is done")
        visitor.until(lambda _: visitor.client.service("web").service.state == "ready", "all of it")
        assert visitor.fewest >= 1

        done = phalanx("serve", "rollback", "web")
        assert "service web: revision 2 -> 1, " in done.stdout
        visitor.until(lambda answers: answers == [b"version 1"] * 2, "the rollout back is done")
        assert visitor.fewest >= 1
    assert "no revision of service web served before revision 1" in phalanx("serve", "rollback", "web", code=64).stderr
    newest = phalanx.json("serve", "ps", "web")["revisions"][0]
    assert [one["key"] for one in newest["changes"]] == ["run"]
    assert "(did you mean web?)" in phalanx("serve", "ps", "wbe", code=64).stderr
    rows = phalanx("ps").stdout
    assert "web      ready  2/2           1" in rows
    logs = phalanx("logs", "web", "-n", "2").stdout
    assert logs.count("==> replica ") == 2
    assert logs.count("GET /said") == 4
    assert "outside" in phalanx("scale", "web", "7", code=64).stderr


def test_stopped_service_leaves_no_process(phalanx):
    assert phalanx.processes(PHALANX_SERVICE="web")
    phalanx("cancel", "web")
    assert phalanx("serve", "down", "web").stdout == "service web had been stopped\n", "its replicas have ended"
    assert phalanx.json("show", "web")["service"]["state"] == "stopped"
    assert not phalanx.json("ps", "-s", "running", "-s", "pending")
    assert not phalanx.processes(PHALANX_SERVICE="web")
    assert "run cannot follow a service" in phalanx("run", "v1.yaml", code=64).stderr

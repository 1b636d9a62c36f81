"""A service as a user types it: real servers on virtual nodes, of which one always answers, whatever dies or is replaced."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from phalanx.client import Client
from tests.e2e.test_cli_head import Shell, free_port
from tests.e2e.test_gateway import Gateway
from tests.pty_client import PtyClient

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
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


ENGINE = """#!/bin/sh
# Stands in for an inference engine: serves files, and shows the words and variables that it was given.
[ "$1 $3" = "serve --served-model-name" ] || exit 3
echo "engine $*, offline $HF_HUB_OFFLINE"
while [ "$1" != --port ]; do shift; done
exec {python} -m http.server -d {folder} "$2"
"""


def test_model_is_served_without_a_file_by_the_engine_that_the_nodes_have(phalanx):
    model, tools = phalanx.work / "my model", phalanx.work / "tools"
    for one in (model, tools / "bin"):
        one.mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 8}')
    (model / "model.safetensors").write_bytes(b"weights")
    (tools / "health").write_text("")
    (tools / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (tools / "bin" / "python").symlink_to(sys.executable)
    engine = tools / "bin" / "vllm"
    engine.write_text(ENGINE.format(python=sys.executable, folder=tools))
    asked = phalanx("serve", "model", "my model", "--print", code=64)
    assert "has no engine for safetensors weights: neither vllm nor sglang" in asked.stderr
    engine.chmod(0o755)
    words = ("serve", "model", "my model", "--gpus", "2", "--venv", "tools")
    done = phalanx(*words, "--", "--max-model-len", "99")
    assert "vllm is installed on node n" in done.stderr
    assert "service my-model serves revision 1" in done.stderr
    found = phalanx.json("serve", "ps", "my-model")["service"]
    assert (found["gpus"], found["ready_check"]) == ("1x2", "/health")
    said = phalanx("serve", "logs", "my-model").stdout
    assert f"engine serve {model} --served-model-name my-model --host 0.0.0.0 --port" in said
    assert "--tensor-parallel-size 2 --max-model-len 99, offline 1" in said
    (phalanx.work / "file.yaml").write_text(phalanx(*words, "--print", "--", "--max-model-len", "99").stdout)
    assert "is unchanged: revision 1" in phalanx("serve", "up", "file.yaml").stdout, "the file says the same"
    phalanx("serve", "down", "my-model")


CHAT = f"""
type: service
name: talk
run: exec {sys.executable} -m tests.fake_engine --port $PORT --chunks 400 --pause 0.02
env: {{PYTHONPATH: "{ROOT}"}}
replicas: 0..1
ready: /health
grace: 1s
"""


def test_chat_starts_the_first_replica_and_talks_with_it_or_through_the_gateway(phalanx):
    (phalanx.work / "talk.yaml").write_text(CHAT)
    assert "has no replica, as wanted" in phalanx("serve", "up", "talk.yaml").stderr
    said = phalanx("chat", "talk", "--max-tokens", "3", "--stats", stdin="hello\n")
    pid, *words = said.stdout.split()
    assert words == ["1", "2"]
    assert "waiting for a replica of talk" in said.stderr
    assert "3 tokens in" in said.stderr
    assert "(did you mean talk?)" in phalanx("chat", "tlak", "-m", "x", code=64).stderr
    gateway, url = Gateway(phalanx), phalanx.home / "gateway-url"
    try:
        assert url.read_text() == gateway.url
        found = phalanx.json("chat", "talk", "-m", "hello", "--max-tokens", "2")
        assert (found["text"].split(), found["tokens"]) == ([pid, "1"], 2)
        talk = PtyClient(*phalanx.argv("chat", "talk", "--stats"), env=phalanx.env)
        talk.until("Ctrl-D leaves")
        talk.until("> ")
        talk.type("tell me more\n")
        talk.until(f"{pid} 1 2 3 ")
        talk.type("\x03")  # long before its 400 words
        talk.until("(stopped)")
        talk.until("tokens/s")
        talk.type("again\n")
        talk.until(f"{pid} 1 2 ")
        talk.type("\x03")
        talk.until("> ")
        talk.type("\x04")
        assert talk.end() == 0
        port = phalanx.json("serve", "ps", "talk")["service"]["endpoints"][0]["port"]
        seen = json.loads(urllib.request.urlopen(f"http://127.0.0.1:{port}/seen", timeout=30).read())
        assert seen["cancelled"] == 2, "Ctrl-C reaches the engine"
        token = (phalanx.home / "token").read_text().strip()
        assert token not in json.dumps(seen), "no replica gets a key"
    finally:
        assert gateway.stop() == 0
    assert not url.exists()
    phalanx("serve", "down", "talk")
    assert "was stopped" in phalanx("chat", "talk", "-m", "x", code=64).stderr


def test_stopped_service_leaves_no_process(phalanx):
    assert phalanx.processes(PHALANX_SERVICE="web")
    phalanx("cancel", "web")
    assert phalanx("serve", "down", "web").stdout == "service web had been stopped\n", "its replicas have ended"
    assert phalanx.json("show", "web")["service"]["state"] == "stopped"
    assert not phalanx.json("ps", "-s", "running", "-s", "pending")
    assert not phalanx.processes(PHALANX_SERVICE="web")
    assert "run cannot follow a service" in phalanx("run", "v1.yaml", code=64).stderr

"""Models served without a job file and talked with, by stand-in engines on virtual nodes."""

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from benchmarks.cluster import free_port
from tests.e2e.test_cli_head import Shell
from tests.e2e.test_gateway import Gateway
from tests.pty_client import PtyClient

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def phalanx(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("serving"))
    shell("up", "--virtual", "3x2", "--port", str(free_port()))
    yield shell
    shell("down", "--cancel-jobs")


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

    copy = 'for step in 50 200; do cp -r "my model" "$PHALANX_OUTPUT_DIR/step-$step"; done'
    phalanx("run", "--name", "tune", "--", "sh", "-c", copy)
    job_id = phalanx.json("ps", "-a", "--name", "tune")[0]["id"]
    digest = hashlib.sha256()
    for one in ("config.json", "model.safetensors"):
        digest.update(f"{hashlib.sha256((model / one).read_bytes()).hexdigest()}  {one}\n".encode())
    phalanx("serve", "model", "--from-job", "tune", "--venv", "tools", "-d")
    found = phalanx.json("serve", "ps", "tune")
    assert "/step-200 " in found["service"]["command"]
    assert found["revisions"][0]["labels"] == {
        "phalanx-model-job": job_id,
        "phalanx-model-step": "200",
        "phalanx-model-sha256": digest.hexdigest(),
    }
    assert f"of job {job_id}, step 200, sha256 {digest.hexdigest()}" in phalanx("show", "tune").stdout
    phalanx("serve", "down", "tune")


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


TWO_NODES = """#!{python}
# Stands in for an engine of several nodes: the first waits for the others at the address of its options, then serves; if one goes, all end.
import argparse, http.server, json, os, socket, sys, threading, time

options = argparse.ArgumentParser()
for word in ("verb", "model"):
    options.add_argument(word)
for name in ("served-model-name", "host", "port", "tensor-parallel-size", "pipeline-parallel-size", "nnodes", "node-rank", "master-addr"):
    options.add_argument("--" + name, required=True)
for name in ("master-port", "distributed-executor-backend"):
    options.add_argument("--" + name, required=True)
options.add_argument("--headless", action="store_true")
given = options.parse_args()
world = {{name: os.environ[name] for name in ("PHALANX_NNODES", "RANK", "WORLD_SIZE", "PHALANX_GPUS_PER_NODE", "PORT")}}
me = {{"pid": os.getpid(), **world, **vars(given)}}
place = (given.master_addr, int(given.master_port))
if given.headless:
    for _ in range(300):
        try:
            first = socket.create_connection(place)
            break
        except OSError:
            time.sleep(0.1)
    first.sendall(json.dumps(me).encode() + b"\\n")
    first.recv(1)
    sys.exit("the first node is gone")
listener = socket.create_server(place)
others = [listener.accept()[0] for _ in range(int(given.nnodes) - 1)]
gang = json.dumps([me, *(json.loads(one.makefile().readline()) for one in others)]).encode()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(gang)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer((given.host, int(given.port)), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
others[0].recv(1)
sys.exit("another node is gone")
"""


def test_replica_over_two_nodes_is_one_gang_which_starts_again_as_one(phalanx):
    model, tools = phalanx.work / "large", phalanx.work / "two"
    for one in (model, tools / "bin"):
        one.mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 8}')
    (model / "model.safetensors").write_bytes(b"weights")
    (tools / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (tools / "bin" / "python").symlink_to(sys.executable)
    engine = tools / "bin" / "vllm"
    engine.write_text(TWO_NODES.format(python=sys.executable))
    engine.chmod(0o755)
    done = phalanx("serve", "model", "large", "--gpus", "2x2", "--venv", "two")
    assert "service large serves revision 1: 1 of 1 replicas ready" in done.stderr
    found = phalanx.json("serve", "ps", "large")
    (replica,), (end,) = found["replicas"], found["service"]["endpoints"]
    assert len(set(replica["nodes"])) == 2
    assert end["node_id"] == replica["nodes"][0]

    def gang():
        with contextlib.suppress(OSError):
            return json.loads(urllib.request.urlopen(f"http://{end['address']}:{end['port']}/health", timeout=5).read())
        return []

    first, second = gang()
    for rank, one in enumerate((first, second)):
        assert (one["node_rank"], one["nnodes"], one["RANK"], one["WORLD_SIZE"]) == (str(rank), "2", str(rank), "2")
        assert (one["tensor_parallel_size"], one["pipeline_parallel_size"], one["PHALANX_GPUS_PER_NODE"]) == (
            "2",
            "2",
            "2",
        )
        assert one["headless"] == bool(rank)
        assert one["PORT"] == str(end["port"])
    os.kill(second["pid"], signal.SIGKILL)
    limit_s = time.monotonic() + 120
    while not (again := gang()) or again[0]["pid"] == first["pid"]:
        assert time.monotonic() < limit_s, phalanx("serve", "ps", "large").stdout
        end = (phalanx.json("serve", "ps", "large")["service"]["endpoints"] or [end])[0]
        time.sleep(0.2)
    assert not {one["pid"] for one in again} & {first["pid"], second["pid"]}, "both started again"
    phalanx("serve", "down", "large")
    assert not phalanx.processes(PHALANX_SERVICE="large")

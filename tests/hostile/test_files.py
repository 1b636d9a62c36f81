"""Every file that the command line reads, spoilt in every way: one clear line and an exit code, soon."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import itertools
import json
import os
import random

import pytest

from tests.hostile.spoilt import at_edges, contents, places
from tests.hostile.words import ended, judged

JOB = b"""# a job
name: train
run: [python, train.py]
gpus: 8
nodes: 1
time: 2h
env: {A: b, C: "1"}
labels:
  team: x
retry: 2
depends_on: afterok:1
array: 0-3
"""
BATCH = b"""#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2 --gpus-per-node=8
#SBATCH -t 2:00:00 --array=0-3%2
srun python train.py
"""
QUEUES = b"""research:
  quota: 16
  vision: {quota: 8, borrow: 4, weight: 2}
  speech: {quota: 8, lend: 0}
default: {}
"""
TREE = b"""leaf l0:
  rack r0: n[0-1]
  rack r1: n[2-3]
leaf l1:
  rack r0: n[4-5]
"""
TRACE = b"""job_id,submit_s,duration_s,num_gpus,vc
long,0,7200,8,vision
a,60,600,4,speech
b,90,300,4,speech
"""
SWF = b"; UnixStartTime: 0\n1 9 5 100 4 -1 -1 4 200 -1 1 1 1 1 1 1 -1 -1\n"  # one job: a second has the same fields
FLEET = b"node,gpus,gpu_type,vc\nn0,8,h100,vision\nn1,8,h100,speech\n"
MODEL = json.dumps(
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    indent=1,
).encode()
RULES = b"""rules:
  - name: spot
    codes: [117]
    xids: [79]
    weight: 2
    blame: preempted
    remedy: elsewhere
"""
PRICES = b"offer,gpu,kind,usd_per_gpu_hour,region,note,source,date\np5.48xlarge,h100,on-demand,6.88,us-east-1,,x,2026-11-01\n"
LAYOUT = b'{"layouts": [{"layout": {"tensor": 2, "shard": 4}}]}'

READERS = {
    "a job file": (JOB, ["submit", "{}"]),
    "a job file of run": (JOB, ["run", "--dry-run", "{}"]),
    "a batch script": (BATCH, ["submit", "{}"]),
    "a queue file": (QUEUES, ["queues", "apply", "{}", "--dry-run"]),
    "failure rules": (RULES, ["rules", "check", "{}"]),
    "a tree of hosts": (TREE, ["topology", "set", "{}"]),
    "a trace": (TRACE, ["simulate", "--trace", "{}", "--nodes", "2", "--gpus-per-node", "8"]),
    "a trace in SWF": (SWF, ["simulate", "--trace", "{}", "--nodes", "2", "--gpus-per-node", "8", "--json"]),
    "a fleet": (FLEET, ["simulate", "--trace", "{good_trace}", "--fleet", "{}"]),
    "a trace of whatif": (
        TRACE,
        ["whatif", "--trace", "{}", "--nodes", "2", "--gpus-per-node", "8", "--policy", "fifo"],
    ),
    "a model": (MODEL, ["plan", "{}", "--gpus", "h100:8", "--top", "1"]),
    "a price list": (PRICES, ["plan", "qwen3-0.6b", "--gpus", "h100:8", "--prices", "{}"]),
    "a saved plan": (LAYOUT, ["submit", "--plan", "{}", "--gpus", "8", "--", "true"]),
}
ENDS_WITH = {"a model": ".json", "a saved plan": ".json", "a trace": ".csv", "a batch script": ".sh"}


@pytest.fixture(autouse=True)
def nobody_home(tmp_path, monkeypatch):
    """No head: what is read is read before one is looked for."""
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path / "home"))
    for name in ("PHALANX_URL", "PHALANX_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def lines(good, words, tmp_path, ending, rng):
    trace = tmp_path / "good.csv"
    trace.write_bytes(TRACE)
    for number, (_, content) in enumerate(itertools.chain(contents(good, rng), at_edges(good))):
        path = tmp_path / f"{number}{ending}"
        path.write_bytes(content)
        yield tuple(word.format(str(path), good_trace=str(trace)) for word in words)
    for _, path in places(good, tmp_path / "places"):
        yield tuple(word.format(path, good_trace=str(trace)) for word in words)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("reader", READERS)
def test_spoilt_file_ends_in_one_clear_line(reader, tmp_path):
    good, words = READERS[reader]
    count, wrong = judged(lines(good, words, tmp_path, ENDS_WITH.get(reader, ""), random.Random(reader)))
    assert count > 50
    assert wrong == []


def test_good_files_are_read(tmp_path):
    """Else spoiling them would show nothing: each gets as far as looking for a head (69), or to its end."""
    trace = tmp_path / "good.csv"
    trace.write_bytes(TRACE)
    found = {}
    for reader, (good, words) in READERS.items():
        path = tmp_path / f"good{ENDS_WITH.get(reader, '')}"
        path.write_bytes(good)
        found[reader] = ended(*(word.format(str(path), good_trace=str(trace)) for word in words))
    assert {reader: (end.code, end.said) for reader, end in found.items() if end.code not in (0, 69)} == {}


HEAD = {
    "head.json": b'{"url": "http://127.0.0.1:1", "pid": 1, "head_id": "x", "version": "0.1.0", "started_s": 1.0, "listen": ""}',
    "token": b"phx_0123456789abcdef",
    "head.lock": b'{"pid": 1, "url": "http://127.0.0.1:1"}',
    "cluster.json": b'{"port": 7600, "listen": "off", "virtual": null, "lease_s": 6.0, "nodes": ["n0"], "engine": "local"}',
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", HEAD)
@pytest.mark.parametrize("words", [("ps",), ("down",), ("doctor", "--json")])
def test_spoilt_state_folder_ends_in_one_clear_line(name, words, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "phalanx.cli.connection.PATIENCE_S", 0.1
    )  # nobody listens on port 1; a person would be waited for
    rng = random.Random(name)

    def homes():
        spoilt: list[bytes | str] = [content for _, content in contents(HEAD[name], rng, flips=6)]
        spoilt += [path for _, path in places(HEAD[name], tmp_path / "places")]
        for number, what in enumerate(spoilt):
            home = tmp_path / f"home{number}"
            home.mkdir()
            for other, good in HEAD.items():
                (home / other).write_bytes(good)
            (home / name).unlink()
            if isinstance(what, bytes):
                (home / name).write_bytes(what)
            elif "\x00" in what or not what:
                continue
            else:
                os.symlink(what[:4000], home / name)
            monkeypatch.setenv("PHALANX_HOME", str(home))
            yield words

    count, wrong = judged(homes())
    assert count > 40
    assert [line for line in wrong if not (words[0] == "doctor" and "exit code 1" in line)] == []

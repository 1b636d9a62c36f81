"""What a look at the script can tell before anything starts, and what it must leave alone."""

import ast
import subprocess
import sys
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from phalanx.node.logic import script_check
from phalanx.node.logic.script_check import (
    SCRIPT_BYTES_MAX,
    ScriptContext,
    find_script_error,
    script_path,
)
from phalanx.node.prepare import command_check

VIRTUAL = ScriptContext(nodes=2, world_size=4, cuda=False)
GPUS = ScriptContext(nodes=2, world_size=4, cuda=True)
ONE_NODE = ScriptContext(nodes=1, world_size=4, cuda=True)


@pytest.mark.parametrize(
    ("argv", "script"),
    [
        (("python", "train.py", "--x"), "train.py"),
        (("/venv/bin/python3.11", "-u", "-X", "dev", "train.py"), "train.py"),
        (("python", "-m", "pkg"), None),
        (("python", "-um", "pkg"), None),
        (("python", "-c", "print(1)"), None),
        (("torchrun", "--nnodes", "2", "train.py"), "train.py"),
        (("bash", "run.sh"), "run.sh"),
        (("bash", "-c", "x.sh"), None),
        (("./train.py",), "./train.py"),
        (("true",), None),
        ((), None),
    ],
)
def test_script_is_found_in_the_command(argv, script):
    assert script_path(argv) == script


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('import os\nos.environ["MASTER_ADDR"] = "10.0.0.9"\n', "t.py, line 2: MASTER_ADDR is fixed to '10.0.0.9'"),
        ('from os import environ\nenviron["MASTER_ADDR"] = "localhost"\n', "line 2: MASTER_ADDR"),
        ('os.environ.update(MASTER_ADDR="10.0.0.9")\n', "line 1: MASTER_ADDR"),
        ('os.putenv("MASTER_ADDR", "10.0.0.9")\n', "line 1: MASTER_ADDR"),
        (
            'dist.init_process_group("gloo", init_method="tcp://10.0.0.9:23456")\n',
            "line 1: init_method is fixed to '10.0.0.9:23456'",
        ),
        ('\n\ndist.init_process_group(backend="nccl")\n', 'line 3: backend "nccl" needs GPUs'),
        ('def main():\n    init_process_group("NCCL")\n', "line 2: backend"),
    ],
)
def test_what_cannot_work_is_named_by_line(text, words):
    assert words in (find_script_error("/w/t.py", text.encode(), VIRTUAL) or "")


@pytest.mark.parametrize(
    "text",
    [
        'os.environ.setdefault("MASTER_ADDR", "localhost")\n',
        'if "MASTER_ADDR" not in os.environ:\n    os.environ["MASTER_ADDR"] = "localhost"\n',
        'os.environ["MASTER_ADDR"] = sys.argv[1]\n',
        'dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")\n',
        'if torch.cuda.is_available():\n    dist.init_process_group("nccl")\nelse:\n    dist.init_process_group("gloo")\n',
        'dist.init_process_group(init_method="env://")\n',
        "dist.init_process_group(backend=args.backend)\n",
        "def broken(:\n",
        "match x:\n    case _: pass\n",
        "",
    ],
)
def test_what_may_work_is_left_alone(text):
    assert find_script_error("t.py", text.encode(), VIRTUAL) is None


def test_nccl_is_fine_where_there_are_gpus():
    assert find_script_error("t.py", b'dist.init_process_group("nccl")\n', GPUS) is None


def test_loopback_is_fine_on_a_single_node_only():
    text = b'os.environ["MASTER_ADDR"] = "localhost"\n'
    assert find_script_error("t.py", text, ONE_NODE) is None
    assert find_script_error("t.py", text, GPUS) is not None


def test_wrong_encoding_is_named_by_line_unless_declared():
    assert "t.py, line 2: byte 0xe9 is not UTF-8" in (find_script_error("t.py", b"x = 1\ny = '\xe9'\n", GPUS) or "")
    assert find_script_error("t.py", b"# -*- coding: latin-1 -*-\ny = '\xe9'\n", GPUS) is None


FIXED = b'os.environ["MASTER_ADDR"] = "10.0.0.9"\n'


MOST = """
import sys, tracemalloc
from phalanx.node.logic.script_check import SCRIPT_BYTES_MAX, ScriptContext, find_script_error
line = sys.argv[1].encode()
tracemalloc.start()
around = ScriptContext(nodes=2, world_size=4, cuda=False)
assert find_script_error("t.py", line * (SCRIPT_BYTES_MAX // len(line)), around) is None
print(tracemalloc.get_traced_memory()[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("line", ["a\n", "a;", "{}\n", "()\n", "a[:]\n", "~~~~~~a\n", "0,"])
def test_no_text_costs_the_supervisor_much_memory(line):
    """In a process of its own: what other tests left running here allocates too."""
    told = subprocess.run([sys.executable, "-c", MOST, line], capture_output=True, text=True, check=True, timeout=300)
    assert int(told.stdout) < 100 << 20  # 57 MiB on Python 3.11; at most one script is judged at a time


def test_script_that_is_too_long_to_judge_runs():
    assert find_script_error("t.py", FIXED, VIRTUAL) is not None
    assert find_script_error("t.py", FIXED + b"#" * SCRIPT_BYTES_MAX, VIRTUAL) is None


@pytest.mark.parametrize(
    "text",
    [b"x = " + b"-" * 499 + b"y", b"x = " + b"y + " * 499 + b"y", b"if " + b"y + " * 400 + b"y: pass", b"(" * 4000],
)
def test_script_that_is_nested_deeper_than_we_can_follow_runs(text):
    assert find_script_error("t.py", text + b"\n", VIRTUAL) is None


def test_question_within_a_question_is_read_once(monkeypatch):
    read = Mock(wraps=ast.unparse)
    monkeypatch.setattr(ast, "unparse", read)
    text = b"x = 1 if " + b"(0 if " * 20 + b"y" + b" else 0)" * 20 + b" else 0\n"
    assert find_script_error("t.py", text, VIRTUAL) is None
    assert read.call_count == 1


def test_one_script_is_judged_at_a_time_on_a_node(tmp_path, monkeypatch):
    (tmp_path / "t.py").write_text("pass\n")
    present = SimpleNamespace(
        workdir=str(tmp_path),
        environment={"PHALANX_VIRTUAL": "1"},
        grant=SimpleNamespace(devices=()),
        prepare=SimpleNamespace(
            allocation=SimpleNamespace(grants=(1,), world_size=1, gpus=0),
            spec=SimpleNamespace(role=SimpleNamespace(launch=None)),
        ),
    )
    at_once, most = [], []
    second = threading.Event()

    def judge(*_):
        at_once.append(1)
        most.append(len(at_once))
        second.wait(0.2)  # were there no lock, the other thread would come in meanwhile
        at_once.pop()

    monkeypatch.setattr(script_check, "find_script_error", judge)
    threads = [
        threading.Thread(target=command_check.judge_script, args=("t.py", present), kwargs={"must_exist": True})
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]

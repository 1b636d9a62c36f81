"""What a user types, against canned answers: words sent, words shown, exit codes. Nothing is ever a traceback."""

import dataclasses
import fcntl
import importlib.metadata
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import click
import msgspec
import pytest

from phalanx.cli import connection
from phalanx.cli.cluster import up
from phalanx.cli.cluster.doctor import _fix_for_silence, _node_versions, _nodes
from phalanx.cli.cluster.machine_checks import check_accounts, check_hooks, check_packages, check_permissions
from phalanx.cli.cluster.state_folder import RecordedHead, own_node_names
from phalanx.cli.jobs import job_follower
from phalanx.cli.jobs.ps import _where_or_why
from phalanx.cli.jobs.show import _facts
from phalanx.cli.jobs.show import _usage_lines as usage_lines
from phalanx.cli.option_types import _is_small_number
from phalanx.cli.root import COMMANDS, main
from phalanx.cli.root import phalanx as root
from phalanx.cli.sessions import exec as exec_module
from phalanx.cli.terminal import terminal
from phalanx.cli.top.rendering import job_line
from phalanx.core.accounting.usage_summary import UsageSummary
from phalanx.core.fleet.node import NodeState
from phalanx.core.ids import NodeId
from phalanx.core.work.gpus import parse_gpus, parse_nodes
from phalanx.core.work.job_file import request
from phalanx.wire.api.nodes import CordonView, NodeView
from tests.golden.cli import views
from tests.golden.cli.fake_head import TOKEN, FakeHead


@pytest.fixture
def head(monkeypatch, tmp_path):
    fake = FakeHead()
    monkeypatch.setenv("PHALANX_URL", fake.url)
    monkeypatch.setenv("PHALANX_TOKEN", TOKEN)
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PHALANX_DEBUG", raising=False)
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text("")
    monkeypatch.chdir(folder)
    yield fake
    fake.close()


@pytest.fixture
def typed(capsys):
    def run(*words):
        code = main(list(words))
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return code, shown.out, shown.err

    return run


# ------------------------------------------------------------------------------------------------------------ asking


def test_submit_sends_what_was_asked_and_prints_both_shapes(head, typed):
    code, out, _ = typed(
        "submit",
        "--gpus",
        "2x8",
        "--name",
        "gpt",
        "--env",
        "A=1",
        "--time",
        "2h",
        "--retry",
        "2",
        "--warm",
        "--",
        "python",
        "train.py",
        "--lr",
        "1",
    )
    assert code == 0
    assert head.sent("POST", "/v1/jobs")[0]["body"] == {
        "run": ["python", "train.py", "--lr", "1"],
        "gpus": "2x8",
        "name": "gpt",
        "env": {"A": "1"},
        "time": "2h",
        "retry": 2,
        "warm": True,
        "workdir": os.getcwd(),
    }
    assert "2 nodes x 8 = 16 GPUs" in out
    assert "16 tasks: 2 nodes x 8, one per GPU" in out
    assert out.splitlines()[-1] == "next: phalanx attach 21"


def test_every_submit_has_a_key_of_its_own(head, typed):
    for _ in range(2):
        typed("submit", "--", "true")
    keys = [request["key"] for request in head.sent("POST", "/v1/jobs")]
    assert len(set(keys)) == 2
    assert all(len(key) >= 32 for key in keys)


def test_options_go_over_the_job_file(head, typed, tmp_path):
    (tmp_path / "work/job.yaml").write_text("name: a\nrun: python train.py\ngpus: 2x2\nenv: {A: 1, B: 2}\n")
    assert typed("submit", "job.yaml", "--name", "b", "-e", "B=3", "--quiet") == (0, "21\n", "")
    assert head.sent("POST", "/v1/jobs")[0]["body"] == {
        "name": "b",
        "run": "python train.py",
        "gpus": "2x2",
        "env": {"A": "1", "B": "3"},
        "workdir": os.getcwd(),
    }


def test_the_value_of_an_option_is_not_taken_for_the_script(head, typed, tmp_path):
    """A folder may hold a script by the name that an option gives."""
    for name in ("x", "job.sh"):
        (tmp_path / "work" / name).write_text(f"#!/bin/bash\n#SBATCH -N 1\necho {name}\n")
    assert typed("submit", "--name", "x", "--quiet", "job.sh", "--lr", "1")[0] == 0
    sent = head.sent("POST", "/v1/jobs")[0]["body"]
    assert (sent["name"], "echo job.sh" in str(sent), "--lr" in str(sent)) == ("x", True, True)


def test_options_of_the_job_are_not_ours(head, typed):
    typed("submit", "--", "python", "train.py", "--gpus", "4", "--help", "--debug", "--", "x")
    assert head.sent("POST", "/v1/jobs")[0]["body"]["run"] == [
        "python",
        "train.py",
        "--gpus",
        "4",
        "--help",
        "--debug",
        "--",
        "x",
    ]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["sumbit"], 64, "did you mean submit?"),
        (["frobnicate"], 64, "phalanx --help lists all commands"),
        (["submit", "--gpuz", "2", "--", "true"], 64, "did you mean --gpus?"),
        (["submit", "--gpus", "two", "--", "true"], 64, "--gpus: 'two' is not a number of GPUs"),
        (["submit", "--gpus", "2x8", "--nodes", "3", "--", "true"], 64, "conflicts with"),
        (["submit", "--time", "90", "--", "true"], 64, "90m for minutes"),
        (["submit", "--nodes", "x", "--", "true"], 64, "--nodes"),
        (["submit"], 64, "nothing to run"),
        (["submit", "--"], 64, "no command after --"),
        (["submit", "job.yaml", "--", "true"], 64, "give one of the two"),
        (["submit", "train.py"], 64, "phalanx submit -- python train.py"),
        (["submit", "python", "train.py"], 64, "phalanx submit -- python train.py"),
        (["submit", "missing.yaml"], 78, "missing.yaml: no such file"),
        (["submit", "."], 78, "is a folder"),
        (["run", "--", "python", "trian.py"], 78, "trian.py: no such file in"),
        (["run", "--", "./missing"], 78, "./missing: no such file in"),
        (["run", "--workdir", "/nowhere/at/all", "--", "true"], 78, "/nowhere/at/all: no such folder"),
        (["run", "--env", "NOT_SET_HERE_EITHER", "--", "true"], 64, "no value given"),
        (["run", "-t", "--gpus", "1", "--", "true"], 64, "--tty gives a terminal"),
        (["dev", "--ide", "jupyter", "--", "bash"], 64, "--ide jupyter runs its own program"),
        (["dev", "-t", "soon", "--", "true"], 64, "write 90m"),
        (["nodes", "drian", "n0"], 64, "did you mean drain?"),
        (["nodes", "show", "n[0-"], 64, "brackets"),
        (["nodes", "show", "n9"], 64, "no node 'n9'"),
        (["users", "set", "bbo", "--role", "admin"], 64, "did you mean bob?"),
        (["users", "add", "bob"], 64, "exists already"),
        (["ps", "--state", "runing"], 64, "did you mean running?"),
        (["logs", "12", "--rank", "x"], 64, "is not a rank"),
        (["update", "12"], 64, "nothing to change"),
        (["down", "--keep-jobs", "--cancel-jobs"], 64, "give one of the two"),
        (["top"], 64, "needs a terminal"),
        (["shell", "12"], 64, "needs a terminal"),
        (["exec", "12"], 64, "missing argument"),
        (["show"], 64, "missing argument"),
    ],
)
def test_a_slip_is_one_line_with_its_code(head, typed, words, code, said):
    got, out, err = typed(*words)
    assert (got, out) == (code, "")
    assert err.startswith("phalanx: error: ")
    assert err.count("\n") == 1
    assert said in err
    assert not head.sent("POST", "/v1/jobs"), "nothing is half-made"


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("run: true\ngpuz: 1\n", 2, "did you mean 'gpus'?"),
        ("run: true\ntime: 7200\n", 2, "7200m for minutes"),
        ("run: true\n\ngpus: many\n", 3, "not a number of GPUs"),
        ("run: |\n  a\n  b\n", 1, "tasks_per_node"),
    ],
)
def test_a_wrong_job_file_names_its_line(head, typed, tmp_path, text, line, said):
    (tmp_path / "work/job.yaml").write_text(text)
    code, _, err = typed("submit", "job.yaml")
    assert code == 78
    assert err.startswith(f"phalanx: error: job.yaml:{line}: ")
    assert said in err
    assert not head.requests


def test_a_wrong_option_beside_a_job_file_is_the_options_fault(head, typed, tmp_path):
    (tmp_path / "work/job.yaml").write_text("run: true\n")
    code, _, err = typed("submit", "job.yaml", "--checkpoint", "ftp://bucket")
    assert (code, err.startswith("phalanx: error: --checkpoint: ftp://")) == (64, True)


@pytest.mark.parametrize(
    ("status", "code", "exit_code"),
    [
        (422, "never_fits", 64),
        (403, "not_permitted", 77),
        (503, "store_refused", 75),
        (413, "too_large", 78),
        (404, "not_found", 64),
    ],
)
def test_refusals_of_the_head_keep_their_code(head, typed, status, code, exit_code, monkeypatch):
    head.refuse["/v1/nodes/n0/drain"] = (status, code, "it cannot be", "do this")
    monkeypatch.setattr("phalanx.cli.connection.PATIENCE_S", 0.0)
    got, _, err = typed("nodes", "drain", "n0")
    assert (got, err) == (exit_code, "phalanx: error: it cannot be (do this)\n")


def test_an_unknown_token_is_77(head, typed, monkeypatch):
    monkeypatch.setenv("PHALANX_TOKEN", "wrong")
    assert typed("ps")[0] == 77


def test_a_dead_head_is_69_within_a_second(head, typed):
    head.close()
    for words in (["ps"], ["submit", "--", "true"], ["nodes"], ["logs", "1"], ["cancel", "1"]):
        begun = time.monotonic()
        code, out, err = typed(*words)
        assert (code, out) == (69, "")
        assert "does not answer" in err
        assert time.monotonic() - begun < 60  # a hang guard: a second is what it takes


def test_no_head_at_all_is_69(typed, monkeypatch, tmp_path):
    monkeypatch.delenv("PHALANX_URL", raising=False)
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path))
    code, _, err = typed("ps")
    assert code == 69
    assert "phalanx up" in err


# ---------------------------------------------------------------------------------------------------------- watching


def run_events(*middle, state="succeeded", exit_code=0):
    return [
        ("state", {"job_id": "21", "state": "pending", "reason": "resources", "detail": "needs 16 GPUs; 8 free"}),
        *middle,
        ("end", {"job_id": "21", "state": state, "exit_code": exit_code}),
    ]


def log(rank, text, offset=0, epoch=1):
    return (
        "log",
        {
            "epoch": epoch,
            "stream": f"rank-{rank}",
            "rank": rank,
            "offset": offset,
            "end": offset + len(text),
            "text": text,
        },
    )


def test_run_streams_all_ranks_and_gives_the_jobs_code(head, typed):
    head.log_events = run_events(log(0, "a\n"), log(3, "b\n"), state="failed", exit_code=3)
    code, out, err = typed("run", "--gpus", "2x2", "--", "python", "train.py")
    assert code == 3
    assert out == "[rank 0] a\n[rank 3] b\n"
    assert "waiting: needs 16 GPUs; 8 free" in err
    assert "2 nodes x 8 = 16 GPUs; 16 tasks: 2 nodes x 8, one per GPU" in err
    assert "job 21 failed with exit code 3 after 2.0s" in err


def test_a_plain_command_is_sent_before_it_is_judged_and_its_fault_names_the_option(head, typed, monkeypatch):
    judged = []
    real = request.spec_from_mapping

    def judge(mapping, **more):
        judged.append(mapping)
        return real(mapping, **more)

    monkeypatch.setattr(request, "spec_from_mapping", judge)
    head.log_events = run_events(log(0, "a\n"))
    assert typed("run", "--gpus", "1", "--time", "1h", "--", "true")[:2] == (0, "a\n")
    assert typed("submit", "--gpus", "1", "--", "true")[0] == 0
    assert not judged
    head.refuse["/v1/jobs"] = (422, "bad_file", "time: of the head", "")
    code, _, err = typed("run", "--queue", "q", "--", "true")
    assert (code, err) == (78, "phalanx: error: time: of the head\n"), (
        "a fault that is not of the request is the head's"
    )
    too_long = "x" * 131_001
    code, _, err = typed("run", "--", "true", too_long)
    assert code == 64
    assert "exceed Linux' limit for one argument" in err
    assert "of the head" not in err
    posts = len(head.sent("POST", "/v1/jobs"))
    assert typed("run", "--retry", "1000", "--", "true")[0] == 64
    assert len(head.sent("POST", "/v1/jobs")) == posts, "other keys are judged here first"


def test_a_run_shows_where_it_runs_without_another_question_to_the_head(head, typed):
    where = {"job_id": "21", "state": "running", "attempt_state": "running", "epoch": 1, "generation": 0}
    head.log_events = run_events(("state", {**where, "nodes": ["n0", "n1"], "devices": [4, 4]}), log(0, "a\n"))
    assert "running on n0, n1: 2 nodes x 4 = 8 GPUs\n" in typed("run", "--gpus", "2x4", "--", "true")[2]
    assert len(head.sent("GET", "/v1/jobs/21")) == 1, "for its end"
    head.log_events = run_events(("state", {**where, "nodes": ["n0"], "devices": []}), log(0, "a\n"))
    assert "running on n0" in typed("run", "--gpus", "1", "--", "true")[2]
    assert len(head.sent("GET", "/v1/jobs/21")) == 3, "MIG slices are read from the job"


def test_a_small_number_needs_no_grammar_because_every_grammar_accepts_it():
    short = [
        text
        for text in ("", "0", "1", "8", "9999", "10000", "01", "-1", "1.5", "²", "٣", "2x8")
        if _is_small_number(text)
    ]
    assert short == ["1", "8", "9999"]
    for number in range(1, 10_000):
        parse_gpus(str(number))
        parse_nodes(str(number))


def test_a_plain_run_loads_no_records_of_jobs(head):
    head.log_events = run_events(log(0, "a\n"))
    script = (
        "import sys; from phalanx.cli.root import main; code = main(['run', '--gpus', '1', '--', 'true']);"
        "print(code, *sorted({'msgspec', 'dataclasses', 'phalanx.core.work.spec', 'phalanx.core.work.job'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "0"


def test_run_of_one_task_has_no_prefix_unless_asked(head, typed):
    head.log_events = run_events(log(0, "a\n"))
    assert typed("run", "--", "true")[:2] == (0, "a\n")
    assert typed("run", "--rank", "all", "--", "true")[:2] == (0, "[rank 0] a\n")
    assert typed("run", "--gpus", "4", "--rank", "0", "--", "true")[:2] == (0, "a\n")
    assert "rank=0" in head.sent("GET", "/v1/jobs/21/logs")[-1]["query"]


def test_a_run_that_was_long_enough_ends_with_two_lines_of_advice(head, typed, monkeypatch):
    head.log_events = run_events(log(0, "a\n"))
    head.ran_s = 599.0
    assert "advice" not in typed("run", "--", "true")[2]
    assert not head.sent("GET", "/v1/jobs/21/usage")
    head.ran_s = 600.0
    code, out, err = typed("run", "--", "true")
    assert (code, out) == (0, "a\n")
    last, first, second = err.splitlines()[-3:]
    assert last == "job 21 succeeded after 10m00s"
    assert first.startswith("advice: --gpus 1x4 --cpus 32: use one node. It ran on 2 nodes")
    assert second.startswith("advice: DataLoader(num_workers=8")
    monkeypatch.setattr(job_follower, "ADVICE_LIMIT_S", 0.1)
    head.refuse["/v1/jobs/21/usage"] = (503, "try_later", "busy", "")
    code, _, err = typed("run", "--", "true")
    assert (code, err.splitlines()[-1]) == (0, last), "advice that cannot be had is no error"


def test_usage_prints_all_advice_and_show_two_lines_of_it(head, typed):
    out = typed("usage", "12")[1]
    assert "use one node: --gpus 1x4 --cpus 32" in out
    assert "a shorter limit starts sooner: it fits into gaps: --time 15m" in out
    assert len(json.loads(typed("usage", "12", "--json")[1])["advice"]) == 3
    shown = typed("show", "12")[1]
    assert "  --gpus 1x4 --cpus 32: use one node." in shown
    assert "--time 15m" not in shown


@pytest.mark.parametrize(
    ("state", "exit_code", "ours"),
    [("failed", None, 1), ("cancelled", 0, 143), ("timeout", None, 143), ("failed", 137, 137), ("succeeded", 0, 0)],
)
def test_no_end_but_success_gives_0(head, typed, state, exit_code, ours):
    head.log_events = run_events(state=state, exit_code=exit_code)
    assert typed("run", "--", "true")[0] == ours


def test_detached_run_does_not_stay(head, typed):
    code, out, err = typed("run", "-d", "--", "true")
    assert (code, out) == (0, "")
    assert err.endswith("next: phalanx attach 21\n")
    assert not head.sent("GET", "/v1/jobs/21/logs")


def test_wait_times_out_with_124(head, typed):
    code, _, err = typed("submit", "--wait", "--timeout", "0.1s", "--", "true")
    assert code == 124
    assert "phalanx attach 21" in err


def test_lists_are_json_for_programs(head, typed):
    for words, count in (
        (["ps", "-a"], 5),
        (["nodes"], 4),
        (["nodes", "list"], 4),
        (["users"], 2),
        (["queues"], 1),
        (["tokens"], 0),
    ):
        code, out, err = typed(*words, "--json")
        assert (code, err) == (0, "")
        assert len(json.loads(out)) == count
    shown = json.loads(typed("show", "12", "--json")[1])
    assert set(shown) == {"job", "attempts", "story", "receipt"}


def test_lists_end_with_what_to_type_next(head, typed):
    for words in (["ps"], ["nodes"], ["users"], ["queues"], ["tokens"], ["show", "12"]):
        code, out, _ = typed(*words)
        assert code == 0
        assert out.splitlines()[-1].startswith("next: phalanx ")


def test_a_pipe_gets_no_colour_and_no_cut(head, typed, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    _, out, _ = typed("ps", "-a")
    assert "\x1b" not in out
    assert "a-name-that-is-rather-long-for-a-column" in out
    assert "needs 16 GPUs; 8 free in total, at most 4 on one node" in out


def test_changes_go_on_past_a_refusal_and_keep_its_code(head, typed):
    head.refuse["/v1/jobs/13/cancel"] = (403, "not_permitted", "job 13 is bob's", "")
    code, out, err = typed("cancel", "12", "13", "14")
    assert code == 77
    assert err == "phalanx: error: job 13 is bob's\n"
    assert len(out.splitlines()) == 2


def test_a_job_may_be_named(head, typed):
    typed("cancel", "train-gpt")
    assert "name=train-gpt" in head.sent("GET", "/v1/jobs")[0]["query"]


def test_paths_in_the_next_command_can_be_pasted_into_a_shell(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my rules.yaml").write_text("rules: []\n")
    code, out, err = typed("rules", "check", "my rules.yaml")
    assert (code, err) == (0, "")
    assert out.endswith("next: phalanx rules apply 'my rules.yaml'\n")


def test_ctrl_c_while_submit_waits_says_that_the_job_continues(head, typed, monkeypatch):
    def leave(_seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("phalanx.cli.jobs.job_end.time.sleep", leave)
    code, _, err = typed("submit", "--wait", "--gpus", "1", "--", "sleep", "30")
    assert code == 130
    assert "continues; next: phalanx show " in err


def test_down_without_a_head_is_harmless(typed, monkeypatch, tmp_path):
    monkeypatch.delenv("PHALANX_URL", raising=False)
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path))
    assert typed("down")[0] == 0


def test_down_refuses_with_75_while_jobs_run(head, typed):
    head.refuse["/v1/stop"] = (409, "conflict", "2 jobs run", "")
    code, _, err = typed("down")
    assert code == 75
    assert "--keep-jobs or --cancel-jobs" in err


def test_a_head_without_a_record_is_brought_down_by_its_lock(head, typed, monkeypatch, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "token").write_text(TOKEN)
    monkeypatch.delenv("PHALANX_URL")
    monkeypatch.delenv("PHALANX_TOKEN")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_THE_LOCK, str(home), head.url], stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            code, out, _ = typed("up")
            assert (code, out.splitlines()[0]) == (0, f"Phalanx is up already: {head.url}")
            found = {finding["what"]: finding for finding in json.loads(typed("doctor", "--json")[1])}
            assert found["head"]["level"] == "ok"
            head.on_stop = holder.kill
            code, out, err = typed("down")
        finally:
            holder.kill()
    assert (code, out, err) == (0, "Phalanx is down\n", "")


HOLDS_THE_LOCK = """
import fcntl, json, os, sys, time
with open(sys.argv[1] + "/head.lock", "w") as lock:
    json.dump({"pid": os.getpid(), "url": sys.argv[2]}, lock)
    lock.flush()
    fcntl.flock(lock, fcntl.LOCK_EX)
    print("held", flush=True)
    time.sleep(120)
"""


def test_down_elsewhere_does_not_wait_for_our_own_head(head, typed, tmp_path):
    (tmp_path / "home").mkdir()
    record = {"url": "http://127.0.0.1:1", "pid": os.getpid(), "head_id": "x"}
    (tmp_path / "home/head.json").write_text(json.dumps(record))
    assert typed("down")[:2] == (0, "Phalanx is down\n")


def test_a_stopped_head_does_not_hold_commands(typed, monkeypatch, tmp_path):
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path))
    monkeypatch.setenv("PHALANX_TOKEN", TOKEN)
    monkeypatch.setattr("phalanx.cli.connection.ANSWER_S", 0.1)
    monkeypatch.setattr("phalanx.cli.connection.PROBE_S", 0.1)
    monkeypatch.setattr("phalanx.cli.cluster.doctor.PROBE_S", 0.1)
    monkeypatch.setattr("phalanx.cli.cluster.up._ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.delenv("PHALANX_URL", raising=False)
        (tmp_path / "head.json").write_text(json.dumps({"url": url, "pid": os.getpid(), "head_id": "x"}))
        with open(tmp_path / "head.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert typed("up")[0] == 75
        found = {finding["what"]: finding for finding in json.loads(typed("doctor", "--json")[1])}
        assert found["head"]["level"] == "fail"
        assert "may be stopped or overloaded" in found["head"]["says"]
        assert found["head"]["mend"] == f"see {tmp_path}/head.log"
        code, out, err = typed("ps")
    assert (code, out, err.count("\n")) == (69, "", 1)
    assert f"the head at {url} does not answer; it may be stopped or overloaded" in err


def test_doctor_reports_an_empty_token_and_goes_on(head, typed, monkeypatch):
    monkeypatch.setenv("PHALANX_TOKEN", "")
    code, out, err = typed("doctor", "--json")
    found = {finding["what"]: finding for finding in json.loads(out)}
    assert (code, err, found["token"]["level"]) == (1, "", "fail")
    assert "PHALANX_TOKEN is empty" in found["token"]["says"]


def test_doctor_warns_of_nodes_that_take_no_jobs():
    cordon = CordonView(by="phalanx", why="full disk", since_s=0.0)
    fine, closed, down = (
        NodeView(id=NodeId(f"n{number}"), state=state, engine="local", devices=[], cpus=1, memory_bytes=1, cordon=why)
        for number, (state, why) in enumerate([(NodeState.UP, None), (NodeState.UP, cordon), (NodeState.DOWN, cordon)])
    )
    assert _nodes([fine]).level == "ok"
    found = _nodes([fine, closed])
    assert (found.level, found.mend) == ("warn", "phalanx nodes show n1")
    assert found.says == "2 of 2 nodes up, 0 devices; 1 cordoned or drained"
    assert _nodes([fine, down]).says.startswith("1 of 2 nodes up, ")
    assert _nodes([fine, down]).mend == "phalanx nodes show n2"


@pytest.mark.parametrize(
    ("stored", "line", "pools", "command"),
    [
        ({"virtual": "none"}, None, [], "up --listen ADDRESS"),
        ({"virtual": "none"}, "phalanx join ...", [], "nodes"),
        ({"virtual": "none"}, None, ["rented"], "run --gpus 1 -- python train.py"),
        ({"virtual": "3x4"}, None, [], "run --gpus 1 -- python train.py"),
    ],
)
def test_up_names_what_brings_the_first_node(stored, line, pools, command, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path))
    (tmp_path / "cluster.json").write_text(json.dumps(stored))
    monkeypatch.setattr(up, "fetch_join_command", lambda _: line)
    heads = SimpleNamespace(heads=[])
    head = SimpleNamespace(nodes=list, pools=lambda: pools, heads=lambda: heads)
    up._print_summary(head, "http://127.0.0.1:7600", "is up")  # type: ignore[arg-type]
    assert capsys.readouterr().out.splitlines()[-1] == f"next: phalanx {command}"


def test_up_waits_for_the_nodes_of_its_fleet_alone():
    states = {"n0": "down", "old": "down", "n1": "up"}
    asked = []

    class Head:
        def nodes(self):
            asked.append(dict(states))
            if len(asked) == 3:
                states["n0"] = "up"
            return [SimpleNamespace(id=name, state=NodeState(state)) for name, state in states.items()]

    up._wait_for_nodes(Head(), {"n0", "n1"})  # type: ignore[arg-type]
    assert len(asked) == 3


def test_fleet_is_what_the_head_wrote(tmp_path):
    assert own_node_names(str(tmp_path)) == set()
    (tmp_path / "cluster.json").write_text('{"port": 7600, "nodes": ["n0", "n1"]}')
    assert own_node_names(str(tmp_path)) == {"n0", "n1"}


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's jobs are all its own")
@pytest.mark.parametrize(
    ("brought_up", "variable", "machine", "level", "says"),
    [
        ({}, "", "x86_64", "ok", "jobs run as the account of their owner"),
        ({"jobs_as": "head"}, "", "x86_64", "warn", "all jobs run as root (phalanx up --jobs-as head)"),
        ({"jobs_as": "owner"}, "head", "x86_64", "ok", "jobs run as the account of their owner"),
        ({}, "head", "x86_64", "warn", "all jobs run as root (PHALANX_JOBS_AS=head)"),
        ({}, "", "riscv64", "warn", "all jobs run as root: "),
        ({"engine": "slurm"}, "", "x86_64", "ok", "jobs run as the user of their Slurm jobs"),
        ({"engine": "ray", "jobs_as": "head"}, "", "x86_64", "ok", "jobs run as the account of Ray's nodes"),
    ],
)
def test_doctor_says_whose_account_jobs_run_under(brought_up, variable, machine, level, says, monkeypatch):
    """Found by reading: it looked at its own shell alone, and called a head fine that ran all jobs as root."""
    monkeypatch.setenv("PHALANX_JOBS_AS", variable)
    monkeypatch.setattr("platform.machine", lambda: machine)
    found = check_accounts(brought_up)
    assert found.level == level
    assert found.says.startswith(says)


def test_usage_summary_says_what_of_a_huge_job_it_leaves_out():
    whole = msgspec.convert(views.usage(), UsageSummary)
    assert not [line for line in usage_lines(whole) if "reports" in line]
    cut_off = dataclasses.replace(whole, unread_bytes=3 << 20)
    assert usage_lines(cut_off)[-1] == "the last 3 MiB of reports are not included: too many to read"


def test_a_job_that_reports_no_steps_claims_no_goodput():
    bare = dataclasses.replace(msgspec.convert(views.usage(), UsageSummary), measured_by="attempts", goodput=None)
    assert usage_lines(bare)[0].endswith("GPU-seconds, goodput unknown: no steps reported")
    assert usage_lines(bare, replica=True)[0].endswith("GPU-seconds"), "a replica of a service makes no steps"


def test_doctor_reads_the_hooks_of_this_node(tmp_path, monkeypatch):
    file, program = tmp_path / "hooks.toml", tmp_path / "check"
    monkeypatch.setenv("PHALANX_HOOKS", str(file))
    assert (check_hooks().level, check_hooks().says) == ("ok", f"none: {file} does not exist or is empty")
    file.write_text(f'[[prolog]]\nprogram = "{program}"\n[[health]]\nprogram = "{program}"\n')
    program.write_text("#!/bin/sh\n")
    assert (check_hooks().level, check_hooks().mend) == ("fail", f"chmod +x {program}, or mend the file")
    program.chmod(0o755)
    assert (check_hooks().level, check_hooks().says) == ("ok", f"1 health, 1 prolog in {file}")
    program.chmod(0o777)
    assert check_hooks().level == "fail"
    file.write_text("[[prologue]]\n")
    assert (check_hooks().level, str(file) in check_hooks().says) == ("fail", True)


def test_doctor_names_nodes_of_another_release():
    def of(name, version, state=NodeState.UP):
        return NodeView(id=name, state=state, engine="joined", devices=[], cpus=1, memory_bytes=1, version=version)

    assert list(_node_versions([of("a", "0.2.0"), of("old", "")], "0.2.0")) == []
    nodes = [
        of("gpu1", "0.1.0"),
        of("gpu2", "0.1.0"),
        of("a", "0.2.0"),
        of("b", "0.0.9"),
        of("c", "0.1.0", NodeState.DOWN),
    ]
    (found,) = _node_versions(nodes, "0.2.0")
    assert (found.level, found.says) == ("warn", "the head is 0.2.0, nodes run 0.0.9 on b; 0.1.0 on gpu[1-2]")


def test_doctor_looks_for_every_dependency_of_the_package(monkeypatch):
    """Found by reading: a list of its own had 11 of 14, and an install without cryptography, h11 or numpy passed."""
    with open(os.path.join(os.path.dirname(__file__), "../../pyproject.toml"), "rb") as file:
        needed = [line.split("<")[0] for line in tomllib.load(file)["project"]["dependencies"]]
    looked_for: list[str] = []
    monkeypatch.setattr("importlib.metadata.version", looked_for.append)
    assert check_packages().says == f"all {len(needed)} required packages are installed"
    assert sorted(looked_for) == sorted(needed)

    def version(name):
        if name == "h11":
            raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    assert (check_packages().level, check_packages().says) == ("fail", "missing: h11")


@pytest.mark.parametrize("named_by", ["option", "variable"])
def test_plain_http_to_another_machine_is_64_and_sends_nothing(head, typed, monkeypatch, named_by):
    monkeypatch.delenv("PHALANX_INSECURE", raising=False)
    monkeypatch.setattr("http.client.HTTPConnection.connect", lambda *_: pytest.fail("a connection was opened"))
    words = ["--url", "http://10.0.0.5:7600"] if named_by == "option" else []
    if named_by == "variable":
        monkeypatch.setenv("PHALANX_URL", "http://10.0.0.5:7600")
    code, out, err = typed(*words, "ps")
    assert (code, out) == (64, "")
    assert "http://10.0.0.5:7600 is not encrypted" in err
    assert "use https://10.0.0.5:7600" in err
    found = {finding["what"]: finding for finding in json.loads(typed(*words, "doctor", "--json")[1])}
    assert (found["head"]["level"], "not encrypted" in found["head"]["says"]) == ("fail", True)


def test_plain_http_is_used_with_a_warning_where_it_is_insisted_on(head, typed, monkeypatch):
    monkeypatch.setattr("phalanx.wire.head_url.is_loopback", lambda _: False)
    monkeypatch.setenv("PHALANX_INSECURE", "")
    connection._warn_plain_text.cache_clear()
    assert typed("ps")[0] == 64
    code, out, err = typed("--insecure", "ps")
    assert (code, "train-gpt" in out) == (0, True)
    assert err == f"phalanx: warning: {head.url} is not encrypted; anyone on the network can read the token\n"


def test_doctor_warns_of_rights_that_are_too_wide(tmp_path):
    tmp_path.chmod(0o700)
    (tmp_path / "token").write_text("abc")
    (tmp_path / "token").chmod(0o600)
    assert check_permissions(str(tmp_path)).level == "ok"
    (tmp_path / "token").chmod(0o640)
    assert (check_permissions(str(tmp_path)).level, "0640" in check_permissions(str(tmp_path)).says) == ("warn", True)
    (tmp_path / "token").chmod(0o600)
    tmp_path.chmod(0o755)
    assert (check_permissions(str(tmp_path)).level, "0755" in check_permissions(str(tmp_path)).says) == ("warn", True)


def test_another_heads_url_without_a_token_is_77(head, typed, monkeypatch, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/token").write_text(TOKEN)
    for setting in (lambda: monkeypatch.delenv("PHALANX_TOKEN"), lambda: monkeypatch.setenv("PHALANX_TOKEN", "")):
        setting()
        code, _, err = typed("ps")
        assert (code, "PHALANX_TOKEN" in err) == (77, True)
    assert not head.requests, "nothing was sent"


def test_the_reason_of_a_failure_is_told(head, typed):
    why = "n0: nonexistentcmd: no such command"
    head.log_events = run_events(state="failed", exit_code=127)
    head.detail = why
    for words in (["run", "--", "nonexistentcmd"], ["attach", "21"], ["submit", "--wait", "--", "nonexistentcmd"]):
        code, _, err = typed(*words)
        assert code == 127
        assert f"job 21 failed with exit code 127 after 2.0s: {why}\n" in err
    assert _where_or_why(views.job(20, "x", "failed", exit_code=127, detail=why), 0.0) == f"exit code 127: {why}"
    assert _where_or_why(views.job(20, "x", "failed", exit_code=127), 0.0) == "exit code 127"


def test_an_exit_code_is_told_once(head, typed):
    why = "rank 0 on n1: exit code 3"
    head.log_events = run_events(state="failed", exit_code=3)
    head.detail = why
    assert f"job 21 failed after 2.0s: {why}\n" in typed("attach", "21")[2]
    ended = views.job(20, "x", "failed", exit_code=3, detail=why)
    assert _where_or_why(ended, 0.0) == why
    assert job_line(ended).startswith(f"job 20 failed: {why} ")
    other = views.job(20, "x", "failed", exit_code=1, detail="rank 0 on n1: exit code 13")
    assert _where_or_why(other, 0.0) == "exit code 1: rank 0 on n1: exit code 13"


@pytest.mark.parametrize(
    ("words", "node_rank", "command"),
    [
        (["21", "--node-rank", "1", "--", "hostname"], 1, ["hostname"]),
        (["21", "--node-rank=1", "-t", "hostname"], 1, ["hostname"]),
        (["--node-rank", "1", "21", "hostname", "-f"], 1, ["hostname", "-f"]),
        (["21", "ls", "--node-rank", "1"], 0, ["ls", "--node-rank", "1"]),
        (["21", "--", "--node-rank", "1"], 0, ["--node-rank", "1"]),
        (["--", "21", "ls", "-l"], 0, ["ls", "-l"]),
    ],
)
def test_options_of_exec_stand_on_either_side_of_the_job(typed, monkeypatch, words, node_rank, command):
    asked: dict[str, object] = {}
    monkeypatch.setattr(
        exec_module, "run_command", lambda job, argv, **more: asked.update(job=job, argv=list(argv), **more)
    )
    assert typed("exec", *words)[0] == 0
    assert (asked["job"], asked["argv"], asked["node_rank"]) == ("21", command, node_rank)


def test_exec_refuses_an_option_that_it_does_not_have(typed):
    assert typed("exec", "21", "--nod-rank", "1", "--", "ls")[0] == 64


def test_ps_shows_no_more_rows_than_asked(head, typed):
    assert len(json.loads(typed("ps", "--limit", "1", "--json")[1])) == 1
    assert "only the newest 1 jobs" in typed("ps", "--limit", "1")[1]


def test_a_report_names_labels_among_what_its_rows_may_be(head, typed):
    code, _, said = typed("report", "usage", "--by", "banana")
    assert code == 64
    assert "'job', or label:NAME" in said


def test_one_gpu_is_no_plural():
    for gpus, said in (("1", "1 GPU requested"), ("4", "4 GPUs requested")):
        facts = _facts(views.job(20, "x", "pending", gpus=gpus), [], terminal(), views.NOW_S)
        assert any(line.endswith(said) for line in facts)


def test_doctor_says_how_a_stopped_head_goes_on():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"]) as child:
        try:
            record = RecordedHead(url="http://127.0.0.1:1", pid=child.pid, head_id="x")
            assert _fix_for_silence(record, "/h") == "see /h/head.log"
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
            assert _fix_for_silence(record, "/h") == f"its process is stopped: kill -CONT {child.pid}"
        finally:
            child.kill()


def test_a_rank_that_is_not_there_is_64(head, typed):
    code, out, err = typed("logs", "12", "--rank", "99")
    assert (code, out) == (64, "")
    assert re.search(r"job 12 has ranks 0-\d+, no rank 99 \(", err)


# ----------------------------------------------------------------------------------------------------------- itself


@pytest.mark.slow
def test_a_closed_output_is_no_fault(head):
    command = f"{shlex.quote(sys.executable)} -m phalanx.app.cli ps -a"
    for closed in (">&-", "<&- >&-", ">&- 2>&-"):
        done = subprocess.run(
            ["sh", "-c", f"{command} {closed}"], capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("verb", sorted(set(COMMANDS) - {"demo"}))
def test_every_verb_has_help(typed, verb):
    code, out, _ = typed(verb, "--help")
    assert code == 0
    assert out.startswith(f"Usage: phalanx {verb}")


def test_a_fault_of_ours_is_a_line_and_a_traceback_only_on_request(head, typed, monkeypatch, capsys):
    monkeypatch.setattr("phalanx.cli.jobs.ps._shown", lambda *_, **__: 1 / 0)
    code, _, err = typed("ps")
    assert (code, err.count("\n")) == (70, 1)
    assert "ZeroDivisionError" in err
    assert main(["ps", "--debug"]) == 70
    assert "Traceback" in capsys.readouterr().err


def ps_into(stdout):
    return subprocess.run(
        [sys.executable, "-m", "phalanx.app.cli", "ps", "-a"],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


def test_a_full_disk_under_our_output_is_told(head):
    with open("/dev/full", "wb") as full:
        done = ps_into(full)
    assert done.returncode == 74
    assert (
        done.stderr == "phalanx: error: No space left on device (free some space, then type the same command again)\n"
    )


def test_a_reader_that_leaves_is_no_fault(head):
    ours, theirs = os.pipe()
    os.close(ours)
    done = ps_into(theirs)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, "")


def loaded_by(*words):
    script = (
        f"import sys; from phalanx.cli.root import main; main({list(words)!r}); print(*sys.modules, file=sys.stderr)"
    )
    return set(
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
        ).stderr.split()
    )


def test_help_and_submit_import_little(head):
    heavy = {
        "rich",
        "textual",
        "ruamel.yaml",
        "msgspec",
        "asyncio",
        "subprocess",
        "shutil",
        "tempfile",
        "tarfile",
        "pathspec",
        "phalanx.wire.api",
    }
    # click itself asks shutil how wide a help page may be
    assert loaded_by("--help") & (heavy | {"http.client", "ssl", "socket"}) <= {"shutil"}
    assert loaded_by("submit", "--gpus", "2", "--", "true") & heavy == set()
    assert loaded_by("run", "-d", "--", "true") & heavy == set()


def every_command(command=root, path=("phalanx",)):
    """Each command with its words."""
    yield command, path
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            found = command.get_command(click.Context(command), name)
            if found is not None:
                yield from every_command(found, (*path, name))


def test_no_help_shows_the_marks_of_its_paragraphs():
    shown = {
        path: command.get_help(click.Context(command, info_name=" ".join(path))) for command, path in every_command()
    }
    assert len(shown) > 100
    assert not [path for path, text in shown.items() if "\\b" in text]

"""An operator's hooks with real nodes and processes: programs that fail, hang and fork twice, and a supervisor that dies during one."""

import os
import signal
import time

import pytest

from benchmarks.cluster import free_port
from phalanx.node.processes.proctable import process_environment
from tests.e2e.test_cli_head import Shell

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(600)]
PATIENCE_S = 100.0  # a hang guard


@pytest.fixture
def phalanx(tmp_path):
    shell = Shell(tmp_path)
    shell.env["PHALANX_HOOKS"] = str(tmp_path / "hooks.toml")
    shell.env["PORT"] = str(free_port())
    yield shell
    shell("down", "--cancel-jobs")


def program(phalanx, tmp_path, name, script):
    path = tmp_path / name
    path.write_text(f"#!/bin/sh\necho $PHALANX_HOOK $PHALANX_JOB_ID $PHALANX_NODE >> {tmp_path}/log\n{script}\n")
    path.chmod(0o755)
    return path


def start(phalanx, tmp_path, text):
    (tmp_path / "hooks.toml").write_text(text)
    (tmp_path / "hooks.toml").chmod(0o600)
    phalanx("up", "--virtual", "2x2", "--port", phalanx.env["PORT"])


def log(tmp_path):
    return (tmp_path / "log").read_text().splitlines() if (tmp_path / "log").exists() else []


def until(condition):
    end_s = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end_s
        time.sleep(0.1)
    return found


def cordons(phalanx):
    return {node["id"]: node["cordon"]["why"] for node in phalanx.json("nodes") if node.get("cordon")}


def processes_of_hooks():
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return [pid for pid in pids if process_environment(pid).get(b"PHALANX_HOOK")]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ('echo "ECC errors on GPU 1"; exit 1', "prolog check ended with code 1: ECC errors on GPU 1"),
        ('trap "" TERM; echo "lspci"; sleep 600 & wait; sleep 600', "prolog check timed out after 1 s: lspci"),
    ],
)
def test_job_goes_to_another_node_uncharged_and_the_first_is_cordoned(phalanx, tmp_path, script, why):
    check, wipe = program(phalanx, tmp_path, "check", script), program(phalanx, tmp_path, "wipe", "exit 0")
    start(
        phalanx,
        tmp_path,
        f"[[prolog]]\nprogram='{check}'\nnodes=['n0']\ntimeout_s=1\n[[epilog]]\nprogram='{wipe}'\n",
    )
    assert phalanx("run", "--gpus", "2", "--", "true").returncode == 0
    found = phalanx.json("show", "1")
    assert [[grant["node_id"] for grant in one["grants"]] for one in found["attempts"]] == [["n0"], ["n1"]]
    assert cordons(phalanx) == {"n0": why}
    until(lambda: log(tmp_path) == ["prolog 1 n0", "epilog 1 n0", "epilog 1 n1"])
    assert processes_of_hooks() == []


def test_prolog_that_forks_twice_delays_nothing_and_its_daemon_stays(phalanx, tmp_path):
    fork = program(phalanx, tmp_path, "fork", "(setsid sleep 300 &)")
    start(phalanx, tmp_path, f"[[prolog]]\nprogram='{fork}'\ntimeout_s=200\n")
    assert phalanx("run", "--gpus", "2", "--", "true").returncode == 0
    assert cordons(phalanx) == {}
    assert len(processes_of_hooks()) == 1
    phalanx("down")
    assert processes_of_hooks() == []


def test_supervisor_that_dies_during_a_prolog_leaves_its_epilog_to_the_next_one(phalanx, tmp_path):
    slow = program(phalanx, tmp_path, "slow", "test $PHALANX_NODE = n1 || sleep 600")
    wipe = program(phalanx, tmp_path, "wipe", "exit 0")
    start(phalanx, tmp_path, f"[[prolog]]\nprogram='{slow}'\n[[epilog]]\nprogram='{wipe}'\n")
    phalanx("submit", "--gpus", "2", "--", "true")
    until(lambda: log(tmp_path) == ["prolog 1 n0"])
    (supervisor,) = [
        pid
        for pid in phalanx.processes("phalanx.app.node")
        if process_environment(pid).get(b"PHALANX_NODE_ID") == b"n0"
    ]
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: phalanx.json("show", "1")["job"]["state"] == "succeeded")
    assert "epilog 1 n0" not in log(tmp_path)
    assert processes_of_hooks() == []
    phalanx("down")
    phalanx("up", "--virtual", "2x2", "--port", phalanx.env["PORT"])
    until(lambda: "epilog 1 n0" in log(tmp_path))


def test_health_check_takes_a_node_out_and_returns_it(phalanx, tmp_path):
    sick = tmp_path / "sick"
    check = program(phalanx, tmp_path, "nhc", f"test ! -e {sick} || {{ echo xid 79; exit 1; }}")
    start(phalanx, tmp_path, f"[[health]]\nprogram='{check}'\nnodes=['n1']\ninterval_s=10\n")
    sick.touch()
    until(lambda: cordons(phalanx) == {"n1": "health check nhc ended with code 1: xid 79"})
    sick.unlink()
    until(lambda: cordons(phalanx) == {})

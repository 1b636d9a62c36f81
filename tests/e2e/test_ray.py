"""Ray with real daemons: a Ray head that dies under a running job, a Ray cluster of somebody else's, and servers that join."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from benchmarks.cluster import (
    ROOT,
    command_words,
    free_port,
    wait_until,
)
from phalanx.node.processes.proctable import read_table
from phalanx.node.processes.sweeps import sweep_node
from tests.contract import engine_rigs
from tests.contract.engine_rigs import gated, open_gate
from tests.e2e.test_join import HeadOn, of_phalanx, phalanx
from tests.lab.lab import Lab
from tests.lab.needs import why_not

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=engine_rigs.WHY_NOT["ray"]()),
]
in_the_lab = pytest.mark.skipif(bool(why_not()), reason=why_not() or "the lab")


def test_a_ray_head_that_is_killed_is_not_noticed_by_a_job_and_comes_back():
    with engine_rigs.ray() as rig:
        job = gated(rig, "gate", gpus="3x2")
        wait_until(lambda: rig.job(job)["attempt_state"] == "running", "it runs")
        rig.kill_ray("n0")  # Ray's head, the raylet beside it, and the driver's way to both
        time.sleep(6.0)  # past the lease
        assert rig.job(job)["attempt_state"] == "running", rig.history(job)
        open_gate(rig, "gate")
        view = rig.wait_for_state(job, "succeeded", "failed", "cancelled")
        assert (view["state"], view["attempts"], view["restarts"]) == ("succeeded", 1, 0), rig.history(job)
        after = gated(rig, "after", gpus="3x2")
        open_gate(rig, "after")
        assert rig.wait_for_state(after, "succeeded", "failed", "cancelled")["state"] == "succeeded"
        wait_until(
            lambda: held_by_us(rig) == {"n0": 2.0, "n1": 2.0, "n2": 2.0}, "Ray's books say again who has the GPUs"
        )


def held_by_us(rig):
    """GPUs that Ray counts as taken, by node: asked of Ray itself, as another of its users would."""
    with open(os.path.join(rig.home, "ray", "ray.json"), encoding="utf-8") as file:
        port = json.load(file)["port"]
    return taken(f"127.0.0.2:{port}", secured(rig.home))


def secured(home):
    tls = os.path.join(home, "tls")
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": os.path.join(home, "ray", "token"),
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": os.path.join(tls, "ray.pem"),
        "RAY_TLS_SERVER_KEY": os.path.join(tls, "ray.key"),
        "RAY_TLS_CA_CERT": os.path.join(tls, "ca.pem"),
    }


ASK = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
from ray._private.state import available_resources_per_node
free = available_resources_per_node()
print(json.dumps({n["Labels"].get("phalanx-node", n["NodeName"]): n["Resources"].get("GPU", 0) - free.get(n["NodeID"], {}).get("GPU", 0)
                  for n in ray.nodes() if n["Alive"]}))
"""


def taken(address, environment):
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK, address],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except subprocess.TimeoutExpired:  # Ray's head is being started again
        return {}
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 and done.stdout else {}


# ------------------------------------------------------------------------------------------ a Ray cluster that is there already


OTHER = """
import sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
from ray.util.placement_group import placement_group
ray.get(placement_group([{"GPU": 1}]).ready())
print("held", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def somebody_elses_ray(token):
    """A Ray node with three GPUs, one of them held by another user's placement group; its address, environment and that user's process."""
    folder = tempfile.mkdtemp(prefix="ray-")
    file = os.path.join(folder, "token")
    with open(file, "w", encoding="ascii") as out:
        out.write(token)
    port, key = free_port(), f"theirs-{os.getpid()}"
    mine = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": file, "RAY_USAGE_STATS_ENABLED": "0"}
    address = f"127.0.0.2:{port}"
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--head",
        "--block",
        "--port",
        str(port),
        "--node-ip-address",
        "127.0.0.2",
        "--num-gpus",
        "3",
        "--temp-dir",
        folder,
        "--include-dashboard",
        "false",
        "--ray-client-server-port",
        str(free_port()),
        "--object-store-memory",
        "80000000",
    ]
    with open(os.path.join(folder, "out"), "wb") as out:
        environment = {**os.environ, **mine, "PHALANX_NODE_KEY": key}
        subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
        try:
            other = subprocess.Popen(
                [sys.executable, "-c", OTHER, address], stdout=subprocess.PIPE, env=environment, text=True
            )
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            yield address, mine, other
            other.kill()
            other.wait()
            other.stdout.close()
        finally:
            sweep_node(key, root=None)
            shutil.rmtree(folder, ignore_errors=True)


def test_a_ray_cluster_that_is_there_is_used_beside_its_other_users(tmp_path, monkeypatch):
    token = "ab" * 32
    with somebody_elses_ray(token) as (address, theirs, other):
        home = str(tmp_path / "home")
        environment = {**os.environ, "PHALANX_HOME": home, "HOME": str(tmp_path), **theirs}

        def ours(*words):
            done = subprocess.run(
                [sys.executable, "-m", "phalanx.app.cli", *words],
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            return done.returncode, done.stdout, done.stderr

        monkeypatch.chdir(tmp_path)
        wrong = tmp_path / "wrong"
        wrong.write_text("cd" * 32, encoding="ascii")
        environment["RAY_AUTH_TOKEN_PATH"] = str(wrong)
        code, _, said = ours("up", "--engine", "ray", "--ray-address", address, "--port", str(free_port()))
        assert (code, said.count("\n")) == (69, 1), said
        assert "did not accept a driver" in said
        code, _, said = ours("up", "--engine", "ray", "--ray-address", "127.0.0.2:9", "--port", str(free_port()))
        assert (code, said.count("\n")) == (69, 1), said
        assert "no Ray head listens at 127.0.0.2:9" in said
        assert not os.path.exists(os.path.join(home, "phalanx.db"))
        environment["RAY_AUTH_TOKEN_PATH"] = theirs["RAY_AUTH_TOKEN_PATH"]
        code, told, said = ours("up", "--engine", "ray", "--ray-address", address, "--port", str(free_port()))
        try:
            assert code == 0, said
            assert "3 virtual devices" in told, told
            wait_until(
                lambda: ours("nodes")[1].count("other users of the Ray cluster") == 1, "one of them is another's"
            )
            assert list(taken(address, theirs).values()) == [3.0]
            code, told, said = ours(
                "run", "--gpus", "2", "--", sys.executable, "-c", "import os; print('rank', os.environ['RANK'])"
            )
            assert code == 0, said
            assert sorted(line.split()[-1] for line in told.splitlines() if "rank " in line) == ["0", "1"], told
            code, told, said = ours("submit", "--quiet", "--gpus", "1x3", "--", "sleep", "600")
            assert code == 0, said
            wide = told.split()[-1]
            wait_until(
                lambda: "1 in use outside Phalanx by other users of the Ray cluster" in ours("why", wide)[1], "it waits"
            )
            other.kill()  # with it ends its placement group
            wait_until(lambda: state_of(ours, wide) == "running", "it starts on what they released")
            ours("cancel", wide)
            wait_until(lambda: state_of(ours, wide) is None, "it ends")
        finally:
            assert ours("down", "--cancel-jobs")[0] == 0
        assert list(taken(address, theirs).values()) == [0.0], "what we held is given back"


def state_of(ours, job):
    """Of its attempt; None while it has none."""
    return json.loads(ours("show", job, "--json")[1])["job"]["attempt_state"]


def test_a_killed_head_of_a_ray_cluster_of_others_is_named_as_the_cause(tmp_path, monkeypatch):
    with somebody_elses_ray("ab" * 32) as (address, theirs, _):
        environment = {**os.environ, "PHALANX_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), **theirs}

        def ours(*words):
            command = [sys.executable, "-m", "phalanx.app.cli", *words]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
            )
            return done.returncode, done.stdout, done.stderr

        code, _, said = ours("up", "--engine", "ray", "--ray-address", address, "--port", str(free_port()))
        assert code == 0, said
        try:
            job = ours("submit", "--quiet", "--gpus", "1", "--", "sleep", "600")[1].split()[-1]
            wait_until(lambda: state_of(ours, job) == "running", "it runs")
            port = address.rpartition(":")[2]
            (head,) = [
                pid
                for pid in read_table()
                if command_words(pid)[:1]
                and command_words(pid)[0].endswith("/gcs_server")
                and port in " ".join(command_words(pid))
            ]
            os.kill(head, signal.SIGKILL)
            wait_until(
                lambda: (
                    f"the Ray head at {address} does not answer, and Ray ends its nodes without it" in ours("nodes")[1]
                ),
                "the node names its cause",
            )
            wait_until(lambda: state_of(ours, job) is None, "the attempt is over")
        finally:
            assert ours("down", "--cancel-jobs")[0] == 0


# ------------------------------------------------------------------------------------------------------------ in the lab


@pytest.fixture(scope="module")
def lab():
    with Lab(size=3, gpus=0) as made:
        yield made


class RayHeadOn(HeadOn):
    WORDS = ("--engine", "ray", "--virtual", "1x2", "--lease", "3")


@in_the_lab
@pytest.mark.root
def test_servers_join_ray_with_the_same_line_a_cut_cable_is_survived_and_nothing_stays(lab):
    head = RayHeadOn(lab, "h0")
    try:
        for name in ("h1", "h2"):
            code, said = head.join(name)
            assert code == 0, said
        nodes = head.nodes()
        assert {
            name: (node["state"], node["engine"], len(node["devices"])) for name, node in nodes.items()
        } == dict.fromkeys(("n0", "h1", "h2"), ("up", "ray", 2))
        code, said = head.call("submit", "--gpus", "2x2", "--name", "gang", "--", "sleep", "600")
        assert code == 0, said
        wait_until(lambda: running_on(head), "it runs")
        (victim, *_) = [name for name in running_on(head) if name != "n0"]
        lab.cut(victim)
        cut_s = time.monotonic()
        wait_until(lambda: running_on(head) and victim not in running_on(head), "it runs elsewhere")
        print(f"cut to running elsewhere: {time.monotonic() - cut_s:.1f} s")
        assert time.monotonic() - cut_s < 15.0
        lab.mend(victim)
        wait_until(lambda: head.state(victim) == "up", "the node is back")
        wait_until(lambda: not of_job(lab, victim), "the ranks of the superseded attempt are gone there")
    finally:
        for name in ("h2", "h1", "h0"):
            lab.mend(name)
            code, said = phalanx(lab, name, "down", "--cancel-jobs")
            assert code == 0, said
    for name in lab.hosts:
        assert of_phalanx(lab, name) == []
        assert "ray" not in lab.run(name, ["ps", "-eo", "args"])


def running_on(head):
    code, said = head.call("ps", "--json")
    assert code == 0, said
    return next((job["nodes"] for job in json.loads(said) if job["attempt_state"] == "running"), [])


def of_job(lab, name):
    return [line for line in lab.run(name, ["ps", "-eo", "args"]).splitlines() if line.startswith("sleep 600")]


def test_nothing_of_ray_is_left_by_any_test_above():
    assert [
        pid for pid in read_table() if any(ROOT in word and "/ray/core/" in word for word in command_words(pid)[:1])
    ] == []
    assert not os.path.exists(os.path.join(os.path.expanduser("~"), ".ray", "auth_token"))

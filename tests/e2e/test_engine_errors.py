"""Whatever is wrong with an engine or a server that joins is one line of the real command line, with its code, and nothing stays behind."""

import contextlib
import importlib.metadata
import importlib.util
import os
import socket
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from benchmarks.cluster import free_port, wait_until
from phalanx.node.processes.proctable import read_table
from phalanx.node.processes.sweeps import sweep_node
from tests.e2e.test_join import HeadOn, of_phalanx, phalanx
from tests.lab.lab import Lab
from tests.lab.needs import why_not
from tests.lab.slurm import Slurm, why_no_slurm

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(240)]
in_the_lab = pytest.mark.skipif(bool(why_not()), reason=why_not() or "the lab")
with_slurm = pytest.mark.skipif(bool(why_not() or why_no_slurm()), reason=why_not() or why_no_slurm() or "Slurm")
with_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
HANG_S = 200.0


def is_one_line(answer, wanted, line):
    """The whole of what a tired operator sees: one line that says what, which and what to do. `answer`: exit code and all that was printed."""
    code, said = answer
    assert (code, said.count("\n"), said.startswith("phalanx: error: ")) == (wanted, 1, True), said
    assert line in said, said
    assert said.rstrip().endswith(")"), f"it says what to do: {said}"


# ---------------------------------------------------------------------------------- `up` on this machine, whatever it has


@pytest.fixture
def here(tmp_path):
    """`phalanx` on this machine, for a user whose state folder is not there yet, nor afterwards."""
    home = tmp_path / "home"

    def call(*words, python=sys.executable, **more):
        environment = {**os.environ, "PHALANX_HOME": str(home), **more}
        argv = [python, "-m", "phalanx.app.cli", *words, "--port", str(free_port())]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
        assert not home.exists(), f"left: {list(home.rglob('*'))}"
        return done.returncode, done.stdout + done.stderr

    yield call
    mine = str(home).encode()
    assert [pid for pid in read_table() if mine in _environment(pid)] == []


def _environment(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def python_with_ray(folder, version):
    """Another interpreter with all that this one has, but for Ray: in this version, or "" for none."""
    venv.create(folder, with_pip=False, symlinks=True)
    theirs = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    ours = [Path(path) for path in sys.path if Path(path).name == "site-packages"]  # a .pth file may name another one
    for entry in (entry for packages in ours for entry in packages.iterdir()):
        if entry.name == "ray" or entry.name.startswith("ray-") or (theirs / entry.name).exists():
            continue
        if entry.suffix == ".pth":
            lines = entry.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if Path(line) not in ours]
            (theirs / entry.name).write_text("\n".join(kept), encoding="utf-8")
        else:
            (theirs / entry.name).symlink_to(entry)
    if version:
        ray = next(packages / "ray" for packages in ours if (packages / "ray").is_dir())
        (theirs / "ray").mkdir()
        for entry in ray.iterdir():
            if entry.name not in ("_version.py", "__pycache__"):
                (theirs / "ray" / entry.name).symlink_to(entry)
        text = (ray / "_version.py").read_text(encoding="utf-8")
        (theirs / "ray" / "_version.py").write_text(
            text.replace(importlib.metadata.version("ray"), version), encoding="utf-8"
        )
        (theirs / f"ray-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: ray\nVersion: {version}\n"
        (theirs / f"ray-{version}.dist-info" / "METADATA").write_text(metadata, encoding="utf-8")
    return str(folder / "bin" / "python")


def test_no_ray_is_installed(here, tmp_path):
    python = python_with_ray(tmp_path / "none", "")
    is_one_line(here("up", "--engine", "ray", "--virtual", "1x1", python=python), 64, "Ray is not installed here")


@with_ray
def test_another_ray_is_installed(here, tmp_path):
    python = python_with_ray(tmp_path / "old", "2.59.0")
    is_one_line(
        here("up", "--engine", "ray", "--virtual", "1x1", python=python),
        64,
        "Ray 2.59.0 is installed, but 2.60.* is needed",
    )


@with_ray
def test_the_ray_cluster_that_is_there_is_of_another_release(here, tmp_path):
    python, port, key = python_with_ray(tmp_path / "old", "2.59.0"), free_port(), f"other-ray-{os.getpid()}"
    mine = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PHALANX_NODE_KEY": key}
    start = [
        python,
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
        "1",
        "--temp-dir",
        f"/tmp/other-ray-{os.getpid()}",
        "--include-dashboard",
        "false",
        "--ray-client-server-port",
        "9907",
        "--object-store-memory",
        "80000000",
    ]
    with open(tmp_path / "out", "wb") as out:
        subprocess.Popen(start, env={**os.environ, **mine}, stdout=out, stderr=out, start_new_session=True)
    try:
        wait_until(
            lambda: "Ray runtime started" in (tmp_path / "out").read_text(encoding="utf-8"), "the other Ray runs"
        )
        code, said = here("up", "--engine", "ray", "--ray-address", f"127.0.0.2:{port}")
        is_one_line((code, said), 64, "Version mismatch: The cluster was started with Ray 2.59.0")
    finally:
        sweep_node(key, root=None)
        subprocess.run(["rm", "-rf", f"/tmp/other-ray-{os.getpid()}"], check=True)


@with_ray
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--ray-address", "127.0.0.2:9"], "no Ray head listens at 127.0.0.2:9"),
        (["--ray-redis", "127.0.0.1:9"], "no Redis at 127.0.0.1:9"),
    ],
)
def test_nobody_listens_where_ray_or_redis_should(here, words, line):
    is_one_line(here("up", "--engine", "ray", *words), 69, line)


def test_no_slurm_is_here(here, tmp_path):
    line = "sbatch, scancel, scontrol, sinfo, squeue not found on this machine"
    is_one_line(here("up", "--engine", "slurm", PATH=str(tmp_path)), 64, line)


def test_slurm_is_too_old(here, tmp_path):
    for name in ("sbatch", "scancel", "scontrol", "sinfo", "squeue"):  # all that is asked of one so old is its version
        (tmp_path / name).write_text("#!/bin/sh\necho slurm 20.02.7\n", encoding="ascii")
        (tmp_path / name).chmod(0o755)
    is_one_line(here("up", "--engine", "slurm", PATH=str(tmp_path)), 64, "needs Slurm 20.11 or newer, found 20.02")


@pytest.mark.parametrize("words", [["--partition", "gpu"], ["--ray-address", "h:1"], ["--ray-redis", "h:1"]])
def test_an_option_of_another_engine(here, words):
    is_one_line(here("up", *words), 64, f"{words[0]} needs the engine ")


def test_the_heads_port_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        argv = [sys.executable, "-m", "phalanx.app.cli", "up", "--virtual", "1x1", "--port", str(port)]
        environment = {**os.environ, "PHALANX_HOME": str(tmp_path / "home")}
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
    is_one_line((done.returncode, done.stdout + done.stderr), 64, f"port {port} on 127.0.0.1: Address already in use")
    assert not (tmp_path / "home").exists()


# ----------------------------------------------------------------------------------------------- more than one server


@pytest.fixture(scope="module")
def lab():
    with Lab(size=2, gpus=0) as made:
        yield made


@pytest.fixture
def head(lab):
    """A head on h0; h1 is a member of nothing before and afterwards, and no file of ours is there unless a test joined it."""
    head = HeadOn(lab, "h0")
    yield head
    for name in ("h1", "h0"):
        phalanx(lab, name, "down", "--cancel-jobs")
        assert of_phalanx(lab, name) == []
        lab.run(name, ["rm", "-rf", "/home/lab/.phalanx"])


def nothing_on(lab, name):
    assert of_phalanx(lab, name) == []
    assert lab.run(name, ["ls", "-A", "/home/lab"]) == ""


MAKE_TOKEN = """
import sys, time
from phalanx.core.access.node_tokens import join_token
print(join_token(bytes.fromhex(open("/home/lab/.phalanx/node_secret").read()), time.time() - 1))
"""


@in_the_lab
@pytest.mark.root
def test_a_join_token_that_is_over_wrong_or_of_another_line(lab, head):
    expired = lab.run("h0", [sys.executable, "-c", MAKE_TOKEN]).strip()
    is_one_line(
        head.join("h1", "--token", expired), 77, "the join token has expired; join tokens are valid for one day"
    )
    is_one_line(head.join("h1", "--token", "phxj.99.beef"), 77, "this head does not know the join token")
    is_one_line(head.join("h1", "--token", head.token[:-1]), 77, "this head does not know the join token")
    is_one_line(head.join("h1", "--fingerprint", "sha256:" + "a" * 64), 77, "nothing was sent to it")
    is_one_line(phalanx(lab, "h1", *head.line[:2], "--virtual", "1"), 64, "--fingerprint is missing")
    is_one_line(phalanx(lab, "h1", *head.line[:2], *head.line[4:], "--virtual", "1"), 77, "--token is missing")
    nothing_on(lab, "h1")


@in_the_lab
@pytest.mark.root
def test_a_line_that_was_shown_to_the_wrong_people_is_ended_and_another_printed(lab, head):
    code, said = head.call("join", "--print")
    assert (code, said.split()[1:4], said.split()[-1]) == (0, head.line[:3], head.fingerprint), said
    code, said = head.call("join", "--new-token")
    assert (code, said.split()[:3]) == (0, ["phalanx", "join", "10.77.0.1:7600"]), said
    is_one_line(head.join("h1"), 77, "revoked by a newer one (phalanx join --print")
    nothing_on(lab, "h1")
    code, said = phalanx(lab, "h1", *said.split()[1:], "--virtual", "1")
    assert code == 0, said
    assert phalanx(lab, "h0", "down", "--keep-jobs")[0] == 0
    assert head.call("up")[0] == 0
    is_one_line(phalanx(lab, "h1", "join", "--print"), 77, "is a node of the head at https://10.77.0.1:7600")
    assert head.state("h1") == "up", "who is in stays in"
    assert "phalanx join --print prints the command" in head.call("doctor")[1]
    assert "this server is node h1 of https://10.77.0.1:7600" in phalanx(lab, "h1", "doctor")[1]


@in_the_lab
@pytest.mark.root
def test_a_head_that_is_not_there_does_not_listen_or_is_cut_off(lab, head):
    for address, line in (
        ("10.77.0.1:7999", "no head at 10.77.0.1:7999: Connection refused"),
        ("10.77.0.77", "no head at 10.77.0.77:7600"),
        ("nohost", "no head at nohost:7600"),
    ):
        is_one_line(phalanx(lab, "h1", "join", address, *head.line[2:], "--virtual", "1"), 69, line)
    is_one_line(phalanx(lab, "h1", "join", "http://10.77.0.1", *head.line[2:]), 64, "is not the address of a head")
    nothing_on(lab, "h1")


@in_the_lab
@pytest.mark.root
def test_a_server_joins_twice_under_a_name_that_is_taken_or_beside_a_head(lab, head):
    is_one_line(
        head.join("h1", "--name", "n0"),
        64,
        "node n0 is already up, at 10.77.0.1; two servers cannot have the same name",
    )
    is_one_line(head.join("h1", "--name", "a.b"), 64, "'a.b' is not a valid name for a node")
    nothing_on(lab, "h1")
    assert head.join("h1")[0] == 0
    code, said = head.join("h1")
    assert (code, "h1 has already joined https://10.77.0.1:7600" in said) == (0, True), said
    is_one_line(phalanx(lab, "h1", "up"), 64, "this server is node h1 of the head at https://10.77.0.1:7600")
    is_one_line(head.join("h0"), 64, "a head runs on this machine (http://127.0.0.1:7600)")


@in_the_lab
@pytest.mark.root
def test_gpus_are_asked_of_a_fleet_that_has_none(lab, head):
    is_one_line(phalanx(lab, "h1", *head.line), 64, "NVML finds no GPU on this server")
    nothing_on(lab, "h1")
    assert head.join("h1", devices=0)[0] == 0
    assert head.nodes()["h1"]["devices"] == []
    is_one_line(
        head.call("submit", "--gpus", "h100:1", "--", "true"),
        64,
        "no node has a GPU of model h100 (this fleet has: virtual",
    )
    is_one_line(head.call("submit", "--gpus", "1x8", "--", "true"), 64, "at most 2 matching GPUs on one")


@in_the_lab
@pytest.mark.root
@pytest.mark.parametrize(
    ("listen", "line"),
    [
        ("10.77.0.1", "--listen 10.77.0.1:7600: another program already listens there"),
        ("10.77.0.9", "10.77.0.9 is not an address of this machine"),
        ("nohost", "the name nohost has no address"),
        ("10.77.0.1:seven", "'seven' is not a port"),
        ("0.0.0.0", "other servers cannot reach this address"),
    ],
)
def test_where_a_head_cannot_listen(lab, listen, line):
    serve = "import socket, time; s = socket.create_server(('10.77.0.1', 7600)); print('taken', flush=True); time.sleep(600)"
    with lab.start("h0", [sys.executable, "-c", serve], stdout=subprocess.PIPE) as taken:
        try:
            assert taken.stdout.readline() == "taken\n"
            is_one_line(phalanx(lab, "h0", "up", "--virtual", "1x1", "--listen", listen), 64, line)
        finally:
            taken.kill()
    nothing_on(lab, "h0")


MAKE_CA = """
import datetime, sys
from phalanx.app.certificates import CertificateAuthority
from phalanx.app.state_folder import StateFolder
CertificateAuthority(StateFolder.open("/home/lab/.phalanx"), datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=float(sys.argv[1])))
"""


@in_the_lab
@pytest.mark.root
@pytest.mark.parametrize(("days", "word"), [("3", "is not yet valid"), ("-4000", "has expired")])
def test_the_clock_of_a_head_was_wrong_when_it_made_its_ca(lab, days, word):
    lab.run("h0", [sys.executable, "-c", MAKE_CA, days])
    head = HeadOn(lab, "h0")
    try:
        code, said = head.join("h1")
        is_one_line(
            (code, said),
            69,
            f"the certificate of the head at https://10.77.0.1:7600 {word} by this machine's clock",
        )
        assert "date -u on both machines" in said
        nothing_on(lab, "h1")
    finally:
        phalanx(lab, "h0", "down", "--cancel-jobs")
        lab.run("h0", ["rm", "-rf", "/home/lab/.phalanx"])


# --------------------------------------------------------------------------------------------------------------- Slurm


@pytest.fixture(scope="module")
def slurm():
    with Lab(size=2, gpus=2) as lab:
        built = Slurm(lab=lab, more="PartitionName=short Nodes=ALL MaxTime=10 State=UP\n")
        built.start()
        yield built


@with_slurm
@pytest.mark.root
def test_what_slurm_lacks_or_refuses_before_a_head_is_there(slurm):
    lab, up = slurm.lab, ("up", "--engine", "slurm")
    listen = ("--listen", lab.host("h0").address)
    is_one_line(
        phalanx(lab, "h0", *up, *listen, "--partition", "nope"), 64, "--partition nope: Slurm has no such partition"
    )
    is_one_line(phalanx(lab, "h0", *up), 64, "must reach this head, but it listens only on loopback")
    lab.run("h0", ["sh", "-c", "kill $(cat /run/slurmctld.pid)"])
    try:
        is_one_line(phalanx(lab, "h0", *up, *listen), 69, "Unable to contact slurm controller (connect failure)")
    finally:
        lab.run("h0", ["slurmctld"])
        slurm.wait_idle(2)
    nothing_on(lab, "h0")


@with_slurm
@pytest.mark.root
def test_what_slurm_will_never_start_is_said_of_the_job(slurm):
    lab = slurm.lab

    def call(*words):
        return phalanx(lab, "h0", *words)

    code, said = call("up", "--engine", "slurm", "--listen", lab.host("h0").address, "--partition", "short")
    try:
        assert code == 0, said
        is_one_line(call("submit", "--gpus", "1x3", "--", "true"), 64, "at most 2 matching GPUs on one")
        is_one_line(
            call("submit", "--gpus", "v100:1", "--", "true"),
            64,
            "no node has a GPU of model v100 (this fleet has: h100",
        )
        assert call("submit", "--gpus", "1", "--time", "2h", "--", "true")[0] == 0
        line = "the job's time limit 0-02:00:00 exceeds the 00:10:00 of partition short"
        wait_until(lambda: line in call("show", "1", "--json")[1], "the job says why", limit_s=HANG_S)
        assert "failed" in call("ps", "-a")[1]
    finally:
        call("down", "--cancel-jobs")
        lab.run("h0", ["rm", "-rf", "/home/lab/.phalanx"])
    assert of_phalanx(lab, "h0") == []


@with_slurm
@pytest.mark.root
@pytest.mark.prove
def test_nodes_of_slurm_that_do_not_reach_the_head_say_so_themselves(slurm):
    lab, excluded = slurm.lab, ["INPUT", "-i", "eth0", "-p", "tcp", "--dport", "7600", "-j", "REJECT"]

    def call(*words):
        return phalanx(lab, "h0", *words)

    lab.run("h0", ["scontrol", "update", "NodeName=h0", "State=DRAIN", "Reason=elsewhere"])
    code, said = call("up", "--engine", "slurm", "--listen", lab.host("h0").address)
    try:
        assert code == 0, said
        lab.run("h0", ["iptables", "-I", *excluded])
        assert call("submit", "--gpus", "1", "--", "true")[0] == 0
        line = "h1 cannot reach the head at https://10.77.0.1:7600: check that the head listens on an address visible to the nodes"
        wait_until(lambda: line in call("show", "1", "--json")[1], "the job says why", limit_s=HANG_S)
        lab.run("h0", ["iptables", "-D", *excluded])
        wait_until(
            lambda: '"state": "succeeded"' in call("show", "1", "--json")[1],
            "it runs when the way is open",
            limit_s=HANG_S,
        )
    finally:
        lab.run("h0", ["iptables", "-D", *excluded], check=False)
        call("down", "--cancel-jobs")
        lab.run("h0", ["scontrol", "update", "NodeName=h0", "State=RESUME"])
        lab.run("h0", ["rm", "-rf", "/home/lab/.phalanx"])
    assert of_phalanx(lab, "h0") == of_phalanx(lab, "h1") == []

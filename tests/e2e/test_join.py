"""Servers that join a head elsewhere: three hosts of the lab that share no directory and reach each other by one cable each. Real processes."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from benchmarks.cluster import wait_until
from tests.lab.lab import Lab
from tests.lab.needs import why_not
from tests.lab.typed import join_words

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "the lab"),
    pytest.mark.timeout(180),
]

HANG_S = 60.0
until = partial(wait_until, every_s=0.1, limit_s=HANG_S)
PHALANX = [sys.executable, "-m", "phalanx.app.cli"]


@pytest.fixture(scope="module")
def lab():
    with Lab(size=3, gpus=0) as made:
        yield made


@pytest.fixture
def head(lab):
    """A head on h0 with one virtual node of two devices; every host is a member of nothing before and after."""
    head = HeadOn(lab, "h0")
    yield head
    for name in lab.hosts:
        lab.mend(name)
        if not lab.host(name).pid:
            lab.restart(name)
    with ThreadPoolExecutor() as hands:
        list(hands.map(partial(cleaned, lab), lab.hosts))


def cleaned(lab, name):
    phalanx(lab, name, "down", "--cancel-jobs")
    lab.run(name, ["rm", "-rf", "/home/lab/.phalanx"])


class HeadOn:
    WORDS: tuple[str, ...] = ("--virtual", "1x2", "--lease", "3")

    def __init__(self, lab, name):
        self.lab, self.name = lab, name
        code, said = phalanx(lab, name, "up", "--listen", lab.host(name).address, *self.WORDS)
        assert code == 0, said
        self.line = join_words(said)
        self.token, self.fingerprint = self.line[3], self.line[5]

    def join(self, name, *words, devices=2):
        return phalanx(self.lab, name, *self.line, "--virtual", str(devices), *words)

    def call(self, *words):
        return phalanx(self.lab, self.name, *words)

    def nodes(self):
        code, said = self.call("nodes", "--json")
        assert code == 0, said
        return {node["id"]: node for node in json.loads(said)}

    def state(self, name):
        node = self.nodes().get(name)
        return None if node is None else node["state"]


def phalanx(lab, name, *words):
    done = subprocess.run(
        lab.command(name, [*PHALANX, *words]), capture_output=True, text=True, timeout=HANG_S, check=False
    )
    return done.returncode, done.stdout + done.stderr


def of_phalanx(lab, name):
    """Command lines of our processes on a host."""
    table = lab.run(name, ["ps", "-eo", "args"])
    return [line for line in table.splitlines() if "phalanx.app" in line and "ps -eo" not in line]


def test_a_server_joins_with_the_printed_line_and_is_there_within_ten_seconds(lab, head):
    began = time.monotonic()
    code, said = head.join("h1")
    assert code == 0, said
    assert "h1 has joined https://10.77.0.1:7600: 2 virtual devices, at 10.77.0.2" in said
    node = head.nodes()["h1"]
    assert time.monotonic() - began < 10.0
    assert (node["state"], node["address"], node["engine"], len(node["devices"])) == ("up", "10.77.0.2", "joined", 2)
    code, again = phalanx(lab, "h1", *head.line)
    assert (code, "has already joined" in again) == (0, True), again
    assert len(of_phalanx(lab, "h1")) >= 2
    assert head.token not in "".join(of_phalanx(lab, "h1"))


def test_a_gang_runs_across_servers_and_its_lines_come_back(lab, head):
    for name in ("h1", "h2"):
        code, said = head.join(name)
        assert code == 0, said
    script = (
        "import os, socket, sys\nimport torch.distributed as dist, torch\ndist.init_process_group('gloo')\n"
        "x = torch.ones(1)\ndist.all_reduce(x)\nprint(socket.gethostname(), int(x.item()), flush=True)\n"
        "dist.barrier()\ndist.destroy_process_group()\n"  # gloo's threads may abort a process that just ends
    )
    lab.run("h0", ["sh", "-c", f"mkdir -p /home/lab/work && cat > /home/lab/work/sum.py <<'END'\n{script}END\n"])
    run = [*PHALANX, "run", "--copy", "--gpus", "3x2", "--", sys.executable, "sum.py"]
    done = subprocess.run(
        lab.command("h0", run, folder="/home/lab/work"), capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    words = [line.split("]")[-1].split()[-2:] for line in done.stdout.splitlines() if line.rstrip().endswith(" 6")]
    assert sorted(host for host, _ in words) == ["h0", "h0", "h1", "h1", "h2", "h2"], done.stdout


@pytest.mark.parametrize(
    ("words", "line", "code"),
    [
        (["--token", "phxj.99.beef"], "this head does not know the join token", 77),
        (["--fingerprint", "sha256:" + "a" * 64], "nothing was sent to it", 77),
        (["--fingerprint", "no"], "is not a fingerprint", 64),
    ],
)
def test_a_wrong_token_or_fingerprint_is_one_line_and_leaves_nothing(lab, head, words, line, code):
    ended, said = head.join("h1", *words)
    assert (ended, said.count("\n")) == (code, 1), said
    assert line in said
    assert of_phalanx(lab, "h1") == []
    assert lab.run("h1", ["ls", "-A", "/home/lab"]) == ""


def test_a_head_that_is_not_reached_is_one_line_and_leaves_nothing(lab, head):
    for address, line in (
        ("10.77.0.1:7999", "no head at 10.77.0.1:7999"),
        ("10.77.0.77", "no head at 10.77.0.77:7600"),
    ):
        code, said = phalanx(lab, "h1", "join", address, *head.line[2:], "--virtual", "1")
        assert (code, said.count("\n")) == (69, 1), said
        assert line in said
    assert of_phalanx(lab, "h1") == []
    assert lab.run("h1", ["ls", "-A", "/home/lab"]) == ""


def test_a_server_without_gpus_is_told_how_to_come_in_without(lab, head):
    code, said = phalanx(lab, "h1", *head.line)
    assert (code, said.count("\n")) == (64, 1), said
    assert "NVML finds no GPU" in said
    assert "--virtual 4" in said
    assert lab.run("h1", ["ls", "-A", "/home/lab"]) == ""


def test_two_servers_cannot_have_one_name(lab, head):
    assert head.join("h1")[0] == 0
    code, said = head.join("h2", "--name", "h1")
    assert (code, said.count("\n")) == (64, 1), said
    assert "two servers cannot have the same name" in said
    assert head.join("h2", "--name", "gpu2")[0] == 0
    assert head.state("gpu2") == "up"


def test_a_server_leaves_and_nothing_of_it_stays(lab, head):
    assert head.join("h1")[0] == 0
    code, said = phalanx(lab, "h1", "down")
    assert (code, said.strip()) == (0, "h1 has left https://10.77.0.1:7600")
    assert of_phalanx(lab, "h1") == []
    assert lab.run("h1", ["ls", "-A", "/home/lab/.phalanx"]) == ""
    until(lambda: head.state("h1") == "down", "the head sees that h1 has left")


def test_a_server_whose_power_was_cut_comes_back_by_joining_without_words(lab, head):
    assert head.join("h1")[0] == 0
    lab.kill("h1")
    until(lambda: head.state("h1") == "down", "the head sees that h1 is dead")
    lab.restart("h1")
    code, said = phalanx(lab, "h1", "join")
    assert code == 0, said
    assert head.state("h1") == "up"


def test_a_supervisor_that_was_killed_is_brought_back(lab, head):
    assert head.join("h1")[0] == 0
    before = head.nodes()["h1"]["supervisor_id"]
    lab.run("h1", ["pkill", "-9", "-f", "phalanx[.]app[.]node"])
    until(
        lambda: head.state("h1") == "up" and head.nodes()["h1"]["supervisor_id"] != before,
        "h1 has another supervisor",
    )


def test_the_line_is_printed_again_by_a_head_that_is_up(lab, head):
    code, said = head.call("up")
    assert code == 0
    assert "phalanx join 10.77.0.1:7600 --token phxj." in said
    assert head.fingerprint in said

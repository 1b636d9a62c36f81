"""A head that nothing can connect to, and a server that joins it through a relay: three hosts of the lab with one cable each, real processes."""

import json
import re
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from benchmarks.cluster import wait_until
from tests.e2e.test_join import PHALANX, phalanx
from tests.lab.lab import Lab
from tests.lab.needs import why_not
from tests.lab.typed import join_words

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "the lab"),
    pytest.mark.timeout(180),
]

until = partial(wait_until, every_s=0.1, limit_s=60.0)
HEAD, RELAY, NODE = "h0", "h1", "h2"
KEY_FILE = "/home/lab/.phalanx/relay.key"
MARKER = "seen-on-the-way"
COUNT = (
    "import os, time\n"
    "for number in range(10**6):\n"
    "    if os.environ['RANK'] == '0': print('count', number, flush=True)\n"
    "    time.sleep(0.2)\n"
)
# Writes every frame that the host sends or receives; AF_PACKET is raw (packet(7)).
CAPTURE = (
    "import socket\n"
    "frames = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))\n"
    "with open('/home/lab/capture', 'wb', buffering=0) as file:\n"
    "    file.write(b'begin')\n"
    "    while True: file.write(frames.recv(1 << 17))\n"
)


@pytest.fixture
def lab():
    with Lab(size=3, gpus=0) as made:
        yield made


class RelayOn:
    """`phalanx relay` on a host, which is killed and started again."""

    def __init__(self, lab, name):
        self.lab, self.name, self.address = lab, name, f"{lab.host(name).address}:7600"
        self.start()

    def start(self):
        self.process = self.lab.start(self.name, [*PHALANX, "relay", "--listen", self.address])
        until(self.answers_plain_http, "the relay listens")

    def answers_plain_http(self, path="/"):
        script = (
            "import socket\n"
            f"c = socket.create_connection({tuple(self.address.split(':'))!r}, timeout=5)\n"
            f"c.sendall(b'GET {path} HTTP/1.1\\r\\n\\r\\n')\nprint(c.recv(4096).decode())"
        )
        return "write https://" in self.lab.run(self.name, [sys.executable, "-c", script], check=False)

    def kill(self):
        self.lab.run(self.name, ["sh", "-c", "kill -9 $(pgrep -f '[p]halanx.app.relay_server')"])
        self.process.wait(timeout=20)


def listens_off_loopback(lab, name):
    """The addresses on which a host accepts TCP connections, as the kernel writes them (proc_net_tcp), without 127.0.0.0/8."""
    rows = lab.run(name, ["cat", "/proc/net/tcp", "/proc/net/tcp6"]).splitlines()
    found = [row.split()[1] for row in rows if row.split()[3] == "0A"]
    return [one for one in found if not re.match(r"[0-9A-F]{6}7F:", one)]


def counted(lab):
    code, said = phalanx(lab, HEAD, "logs", "1")
    assert code == 0, said
    return [int(number) for number in re.findall(r"count (\d+)", said)]


def node(lab):
    code, said = phalanx(lab, HEAD, "nodes", "--json")
    assert code == 0, said
    return next((one for one in json.loads(said) if one["id"] == NODE), None)


def history(lab):
    code, said = phalanx(lab, HEAD, "show", "1")
    assert code == 0, said
    return said


def test_a_server_joins_a_head_that_nothing_can_reach_and_the_relay_reads_no_token(lab):
    relay = RelayOn(lab, RELAY)
    capture = lab.start(RELAY, [sys.executable, "-c", CAPTURE])
    until(lab.host(RELAY).path("/home/lab/capture").exists, "the capture")
    assert relay.answers_plain_http("/" + MARKER)
    code, said = phalanx(lab, HEAD, "up", "--relay", relay.address, "--virtual", "1x2")
    assert (code, "relay.key" in said) == (78, True), said
    key = lab.run(RELAY, ["cat", KEY_FILE]).strip()
    lab.run(HEAD, ["sh", "-c", f"umask 077; mkdir -p /home/lab/.phalanx; echo {key} > {KEY_FILE}"])
    code, said = phalanx(lab, HEAD, "up", "--relay", relay.address, "--virtual", "1x2", "--lease", "10")
    assert code == 0, said
    line = join_words(said)
    assert line[1] == relay.address
    assert listens_off_loopback(lab, HEAD) == []
    code, said = phalanx(lab, NODE, *line, "--virtual", "4")
    assert code == 0, said
    until(lambda: node(lab)["state"] == "up", "the node")

    code, said = phalanx(lab, HEAD, "submit", "--copy", "--gpus", "4", "--", sys.executable, "-c", COUNT)
    assert code == 0, said
    until(lambda: counted(lab), "lines of the job")
    code, said = phalanx(lab, HEAD, "exec", "1", "--", "hostname")
    assert (code, NODE in said) == (0, True), said

    relay.kill()
    before = counted(lab)[-1]
    time.sleep(3.0)  # less than a lease: renewals fail meanwhile
    relay.start()
    until(lambda: counted(lab)[-1] > before + 20, "lines from after the outage")
    numbers = counted(lab)
    assert numbers == list(range(len(numbers)))  # no line is lost, and the job began once
    assert node(lab)["state"] == "up"
    code, said = phalanx(lab, HEAD, "exec", "1", "--", "hostname")
    assert (code, NODE in said) == (0, True), said

    assert "attempt 2" not in history(lab)

    # The head restarts: its connections to the relay are new, and the job goes on.
    code, said = phalanx(lab, HEAD, "down", "--keep-jobs")
    assert code == 0, said
    before = numbers[-1]
    code, said = phalanx(lab, HEAD, "up")
    assert code == 0, said
    until(lambda: counted(lab)[-1] > before + 20, "lines from after the restart")
    numbers = counted(lab)
    assert numbers == list(range(len(numbers)))
    assert "attempt 2" not in history(lab)

    capture.kill()
    capture.wait(timeout=20)
    seen = Path(lab.host(RELAY).path("/home/lab/capture")).read_bytes()
    admin = lab.run(HEAD, ["cat", "/home/lab/.phalanx/token"]).strip()
    assert MARKER.encode() in seen  # what is not encrypted is in the capture
    assert len(seen) > 1 << 17
    for secret in (line[3], admin, key, "Bearer", "count 7"):
        assert secret.encode() not in seen
    code, said = phalanx(lab, HEAD, "cancel", "1")
    assert code == 0, said

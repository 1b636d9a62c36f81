"""No call leaves a cluster that nobody told to call: in a network namespace whose only way out is counted, nothing goes out.

The way has a default route to a namespace that swallows everything, so that a call to any address, also of a name server, is one packet at least.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from benchmarks.cluster import free_port

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.root,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and iproute2"),
]
SERVICE = """name: answers
type: service
gpus: 1
port: 8123
ready: /
run: exec python3 -m http.server $PORT --bind 127.0.0.1
"""


class Sealed:
    """A namespace, and a shell in it."""

    def __init__(self, folder):
        self.name, self.folder = f"pxseal{os.getpid()}", folder
        self.world = f"{self.name}-world"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "GOOGLE_", "AZURE_"))}
        self.environment = {**kept, "PHALANX_HOME": str(folder / "home"), "HOME": str(folder)}
        made = subprocess.run(["ip", "netns", "add", self.name], capture_output=True, text=True, check=False)
        if made.returncode != 0:
            pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
        _ip("netns", "add", self.world)
        _ip("-n", self.name, "link", "add", "out", "type", "veth", "peer", "name", "in", "netns", self.world)
        self.run("sh", "-c", "echo 1 >/proc/sys/net/ipv6/conf/out/disable_ipv6")  # the kernel's own packets
        for name, line in (
            (self.name, "link set lo up"),
            (self.name, "addr add 10.99.0.1/24 dev out"),
            (self.name, "link set out up"),
            (self.world, "addr add 10.99.0.254/24 dev in"),
            (self.world, "link set in up"),
            (self.name, "route add default via 10.99.0.254"),
        ):
            _ip("-n", name, *line.split())

    def run(self, *words, code=0):
        done = subprocess.run(
            ["nsenter", f"--net=/run/netns/{self.name}", *words],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert code is None or done.returncode == code, (words, done.stdout, done.stderr)
        return done.stdout

    def phalanx(self, *words, code=0):
        return self.run(sys.executable, "-m", "phalanx.app.cli", *words, code=code)

    def sent(self):
        """Packets that left by the interface."""
        found = json.loads(
            subprocess.run(
                ["ip", "-n", self.name, "-s", "-j", "link", "show", "out"], capture_output=True, text=True, check=True
            ).stdout
        )
        return found[0]["stats64"]["tx"]["packets"]


@pytest.fixture
def sealed(tmp_path):
    made = Sealed(tmp_path)
    yield made
    made.phalanx("down", "--cancel-jobs", code=None)
    _ip("netns", "del", made.name)
    _ip("netns", "del", made.world)


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


def test_a_head_a_job_a_service_plans_and_prices_send_nothing_out(sealed):
    before = sealed.sent()
    sealed.phalanx("up", "--virtual", "2x2", "--port", str(free_port()))
    assert "hi" in sealed.phalanx("run", "--gpus", "2x2", "--", "echo", "hi")
    (sealed.folder / "answers.yaml").write_text(SERVICE)
    sealed.phalanx("serve", "up", "answers.yaml")
    sealed.phalanx("serve", "ps")
    for words in (
        ("plan", "llama-3-8b", "--gpus", "2xh100:8"),
        ("prices", "offers", "h100"),
        ("report", "cost"),
        ("doctor",),
        ("why", "1"),
    ):
        sealed.phalanx(*words, code=None)
    # No credentials: refused here, before anything is asked, and no metadata service is looked for.
    for provider, settings in (
        ("aws", ("region=us-east-1", "image=ami-1")),
        ("google", ("project=my-project-123", "image=projects/p/global/images/i")),
        ("command", ("script=none",)),
    ):
        given = [word for setting in settings for word in ("--set", setting)]
        sealed.phalanx("clouds", "check", provider, *given, code=None)
    sealed.run(sys.executable, "-m", "benchmarks.scheduler", "--help", code=None)
    assert sealed.sent() == before, "something tried to reach the outside"
    sealed.run(
        sys.executable, "-c", "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 9))"
    )
    assert sealed.sent() > before, "it would have been seen"

"""Rented machines as hosts: each instance of the cloud of `benchmarks.clouds` boots in a network namespace of its own, with its own address, its own
metadata service at the usual address, and a Python that has no Phalanx. All hosts hang on one bridge in a further namespace, with the head and the
cloud; nothing leads out.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.clouds.campaign_clouds import IMAGE, MOTO
from benchmarks.cluster import ROOT

NETWORK = "10.88.0"
HEAD, CLOUD_PORT, HEAD_PORT = f"{NETWORK}.1", 5100, 7610
METADATA = "169.254.169.254"
# A `python3` for the start scripts: the first call on a host makes the host. Its HOME is the folder of the instance.
PYTHON = """#!/bin/bash
set -e
name=$(basename "$HOME"); here=@PREFIX@-$name
exec 9>@FOLDER@/lock; flock 9
if [ ! -e /run/netns/$here ]; then
  index=$(( $(cat @FOLDER@/count 2>/dev/null || echo 1) + 1 )); echo $index >@FOLDER@/count
  ip netns add $here
  ip link add v$index type veth peer name eth0 netns $here
  ip link set v$index master bridge up
  ip -n $here link set lo up; ip -n $here link set eth0 up
  ip -n $here addr add @NETWORK@.$index/24 dev eth0
  ip -n $here addr add @METADATA@/32 dev lo
  nsenter --net=/run/netns/$here @PYTHON@ @SERVICE@ $HOME/notice </dev/null >/dev/null 2>&1 9>&- &
fi
flock --unlock 9; exec 9>&-
export GLOO_SOCKET_IFNAME=eth0  # the name of this machine is that of another network
export PHALANX_POWER_OFF="nsenter --net=/run/netns/@PREFIX@ $HOME/bin/shutdown -h now"
exec nsenter --net=/run/netns/$here @PYTHON@ "$@"
"""
SERVICE = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        status, body = 404, b""
        if self.command == "PUT" and self.path == "/latest/api/token":
            status, body = 200, b"token"
        elif self.headers.get("X-aws-ec2-metadata-token") != "token":
            status = 401
        elif self.path == "/latest/meta-data/spot/instance-action" and os.path.exists(sys.argv[1]):
            status, body = 200, open(sys.argv[1], "rb").read()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_GET = do_PUT = answer
http.server.ThreadingHTTPServer(("@METADATA@", 80), Handler).serve_forever()
"""


class CloudHosts:
    """The network, the cloud, and what a shell in the head's namespace types."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.prefix = folder, f"pxc{os.getpid()}"
        self.inside = ["nsenter", f"--net=/run/netns/{self.prefix}"]
        for name in ("hosts", "bin", "work"):
            (folder / name).mkdir()
        _run("ip", "netns", "add", self.prefix)
        for line in (
            "link set lo up",
            "link add bridge type bridge",
            "link set bridge up",
            f"addr add {HEAD}/24 dev bridge",
        ):
            _run("ip", "-n", self.prefix, *line.split())
        self._write_python()
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "CLOUD_MACHINES": str(folder / "hosts"),
            "CLOUD_PATH": f"{folder / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin",
        }
        words = [
            str(MOTO),
            f"{ROOT}/benchmarks/clouds/moto_cloud.py",
            "--port",
            str(CLOUD_PORT),
            "--boot",
            "1-4",
            "--seed",
            "3",
        ]
        with open(folder / "cloud.out", "wb") as output:
            self.cloud = subprocess.Popen([*self.inside, *words], env=environment, stdout=output, stderr=output)
        self.environment = {
            **os.environ,
            "PHALANX_HOME": str(folder / "home"),
            "GLOO_SOCKET_IFNAME": "bridge",
            "AWS_ACCESS_KEY_ID": "hosts",
            "AWS_SECRET_ACCESS_KEY": "hosts",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }

    def __call__(self, *words, code=0):
        """Type a command of the program; return its output."""
        done = subprocess.run(
            [*self.inside, sys.executable, "-m", "phalanx.app.cli", *words],
            env=self.environment,
            cwd=self.folder / "work",
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )
        assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def json(self, *words):
        return json.loads(self(*words, "--json"))

    def ask(self, word="list"):
        """The cloud's own list of all instances that ever were; None while it does not answer."""
        url = f"http://127.0.0.1:{CLOUD_PORT}/cloud/{word}"
        done = subprocess.run(
            [
                *self.inside,
                sys.executable,
                "-c",
                f"import urllib.request as u; print(u.urlopen({url!r}).read().decode())",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        return json.loads(done.stdout) if done.returncode == 0 else None

    def add_pool(self, name, *words):
        settings = {"region": "us-east-1", "image": IMAGE, "endpoint": f"http://127.0.0.1:{CLOUD_PORT}", "virtual": "1"}
        given = [word for pair in settings.items() for word in ("--set", "=".join(pair))]
        self("pools", "add", name, "--provider", "aws", "--type", "g4dn.xlarge", "--spot", *words, *given)

    def take_back(self, machine):
        """The cloud announces that it takes an instance back in two minutes."""
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 120))
        (self.folder / "hosts" / machine / "notice").write_text(json.dumps({"action": "terminate", "time": when}))

    def close(self):
        subprocess.run(
            [*self.inside, sys.executable, "-m", "phalanx.app.cli", "down", "--cancel-jobs"],
            env=self.environment,
            capture_output=True,
            timeout=120,
            check=False,
        )
        self.cloud.terminate()
        self.cloud.wait(timeout=60)
        for name in sorted(os.listdir("/run/netns"), reverse=True):
            if name == self.prefix or name.startswith(f"{self.prefix}-"):
                _kill_in(name)
                _run("ip", "netns", "del", name)

    def _write_python(self):
        service = self.folder / "metadata.py"
        service.write_text(SERVICE.replace("@METADATA@", METADATA))
        known = {
            "PREFIX": self.prefix,
            "FOLDER": self.folder,
            "NETWORK": NETWORK,
            "METADATA": METADATA,
            "PYTHON": os.path.realpath(sys.executable),
            "SERVICE": service,
        }
        text = PYTHON
        for name, value in known.items():
            text = text.replace(f"@{name}@", str(value))
        program = self.folder / "bin" / "python3"
        program.write_text(text)
        program.chmod(0o755)


def why_not() -> str:
    """Why there can be no hosts here; empty if there can."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nsenter", "flock"))):
        return "needs root, iproute2 and util-linux"
    if not MOTO.exists():
        return "moto is not installed: make s3-tools"
    probe = f"pxprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode == 0
    if made:
        _run("ip", "netns", "del", probe)
    return "" if made else "network namespaces cannot be made here"


def _run(*words):
    subprocess.run(words, check=True, capture_output=True, timeout=60)


def _kill_in(name):
    """Kill what still runs in a namespace that this test made."""
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
    for pid in found.split():
        try:
            os.kill(int(pid), 9)
        except ProcessLookupError:
            continue

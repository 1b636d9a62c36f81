"""Whether this machine can hold the lab, asked of the kernel and not guessed. Tests and benchmarks skip by its one line."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys

PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "iptables": "iptables",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "env": "coreutils",
}
"""Program -> the Debian package that brings it; `make lab` installs the first two packages, the rest is on every system."""

PROBE = """
mount -t tmpfs tmpfs /mnt && mknod /mnt/nvidia0 c 120 0
ip link add switch type bridge
ip link add h0 type veth peer name eth0
tc qdisc add dev h0 root tbf rate 1gbit burst 128kb latency 25ms
iptables -A INPUT -m statistic --mode random --probability 0.5 -j DROP
"""
"""One of each thing that the lab does, in namespaces that end with the probe."""

PROBE_S = 20.0
"""A guard against a hanging kernel module load; the probe takes 0.05 s here."""


@functools.cache
def why_not() -> str:
    """One line that says what the lab lacks here; empty where it can be built."""
    if not sys.platform.startswith("linux"):
        return "the lab is made of Linux namespaces, and this is no Linux"
    if os.geteuid() != 0:
        return "the lab needs root (network namespaces, character devices): run as root"
    lacking = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    if lacking:
        return f"the lab needs {', '.join(lacking)}: `make lab` installs what is missing, on Debian"
    command = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "sh", "-ec", PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"the lab's probe did not end in {PROBE_S:g} s on this kernel"
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit {done.returncode}"
        return f"root is not enough here, the kernel or the container forbids the lab: {said}"
    return ""

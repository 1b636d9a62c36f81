"""The lab: hosts and a switch as namespaces that live exactly as long as their keeper, and the verbs that break them.

No namespace has a name in the file system. The keeper is process 1 of a PID namespace in which all hosts are nested: when it dies, by
`down`, by a crash of whoever built the lab or by `kill -9`, the kernel ends every process of every host, and with the last process goes
every namespace, cable, mount and file. Two labs side by side know nothing of each other.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from json import dumps
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from tests.lab.needs import why_not
from tests.lab.network import HOSTS_MAX, address, cable_lines, drop_rules, port_lines, shape_command, switch_lines

ROOT = Path(__file__).resolve().parents[2]
INIT = Path(__file__).with_name("init.py")
COVERED = ("/tmp", "/run", "/home", "/var/tmp", "/dev")  # what `init.py` gives each host of its own
CLONE_NEWNET: Final = 0x40000000  # <linux/sched.h>
T = TypeVar("T")
READY_S = 20.0
"""A guard: a host is ready in 0.1 s here."""


@dataclass(slots=True, kw_only=True)
class Host:
    """One host.

    Attributes:
        pid: of its process 1, as seen from outside; 0 while it is dead.
        loss: share of packets that its link loses, 0 to 1.
    """

    name: str
    index: int
    rate_mbit: float
    pid: int = 0
    cut: bool = False
    loss: float = 0.0

    @property
    def address(self) -> str:
        """Its IPv4 address on the switch."""
        return address(self.index)

    def path(self, inside: str) -> Path:
        """Where a file of this host is seen from outside, while the host lives."""
        return Path(f"/proc/{self.pid}/root{inside}")


@dataclass(slots=True, kw_only=True)
class Lab:
    """A lab. Use as a context: leaving it removes everything, and so does the death of this process, or of the thread that built it.

    Attributes:
        size: how many hosts; they are named h0, h1, ...
        gpus: fake GPUs per host: character devices /dev/nvidia0, ...
        rate_mbit: what each link carries, each way.
        detached: it outlives this process; somebody must call `down`.
        pid: of the keeper, 0 before `up`.
    """

    size: int = 3
    gpus: int = 8
    rate_mbit: float = 1000.0
    detached: bool = False
    pid: int = 0
    hosts: dict[str, Host] = field(default_factory=dict)
    _holders: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def up(self) -> None:
        """Build the switch and start every host.

        Raises:
            RuntimeError: not here (`why_not`), or the lab is up.
        """
        if why_not():
            raise RuntimeError(why_not())
        if self.pid:
            raise RuntimeError(f"the lab is up; its keeper is process {self.pid}")
        if not 1 <= self.size <= HOSTS_MAX:
            raise RuntimeError(f"a lab has 1 to {HOSTS_MAX} hosts, not {self.size}")
        names = [f"h{index}" for index in range(self.size)]
        tie = [] if self.detached else ["setpriv", "--pdeathsig", "KILL"]
        unshare = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]
        self.pid = self._boot("keeper", [*tie, *unshare], {"role": "switch", "hosts": names})
        try:
            self._ip(self.pid, switch_lines())
            for index, name in enumerate(names):
                self.hosts[name] = Host(name=name, index=index, rate_mbit=self.rate_mbit)
            for name in names:
                self.restart(name)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Remove the lab; harmless when there is none."""
        if self.pid:
            _kill(self.pid)
        for holder in self._holders.values():
            holder.wait()
        self._holders.clear()
        self.hosts.clear()
        self.pid = 0

    def host(self, name: str) -> Host:
        """The host of that name.

        Raises:
            KeyError: no such host.
        """
        if name not in self.hosts:
            raise KeyError(f"no host {name!r} in the lab; it has {', '.join(self.hosts)}")
        return self.hosts[name]

    def cut(self, name: str) -> None:
        """Unplug the host's cable: its port loses carrier, and nobody is told more than that."""
        host = self.host(name)
        host.cut = True
        if host.pid:
            self._ip(self.pid, [f"link set {name} down"])

    def mend(self, name: str) -> None:
        """Plug the cable in again, and lose no packets."""
        host = self.host(name)
        host.cut = False
        if host.pid:
            self._ip(self.pid, [f"link set {name} up"])
        self.drop(name, 0.0)

    def drop(self, name: str, share: float) -> None:
        """Lose this share (0 to 1) of the packets on the host's link, each way."""
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"host {name}: a share of packets is 0 to 1, not {share:g}")
        self.host(name).loss = share
        losses = {host.index: host.loss for host in self.hosts.values()}
        for host in self.hosts.values():
            if host.pid:
                for rule in drop_rules(host.index, losses):
                    self._within(host.pid, rule)

    def shape(self, name: str, rate_mbit: float) -> None:
        """Bound what the host's link carries, each way."""
        host = self.host(name)
        host.rate_mbit = rate_mbit
        if host.pid:
            self._within(self.pid, shape_command(name, rate_mbit))
            self._within(host.pid, shape_command("eth0", rate_mbit))

    def kill(self, name: str) -> None:
        """End the host as a power cut does: its cable goes silent first, so no peer is sent a FIN or RST; then all its processes die.

        Its /home and /var/tmp stay, as a disk does; /tmp, /run and /dev/shm are lost. When this returns no process of the host lives.
        """
        host = self.host(name)
        if not host.pid:
            return
        self._ip(self.pid, [f"link del {name}"])
        _kill(host.pid)
        host.pid = 0
        holder = self._holders.pop(name, None)
        if holder is not None:
            holder.wait()

    def restart(self, name: str) -> None:
        """Start the host, after killing it if it lives; its cable is as cut, shaped and lossy as it was."""
        self.kill(name)
        host = self.host(name)
        plan = {
            "role": "host",
            "name": name,
            "gpus": self.gpus,
            "hosts": {other.name: other.address for other in self.hosts.values()},
            "shown": _shown(),
        }
        inside = ["nsenter", "--target", str(self.pid), "--pid", "--mount", "--"]
        unshare = [
            "unshare",
            "--net",
            "--mount",
            "--uts",
            "--ipc",
            "--pid",
            "--fork",
            "--kill-child",
            "--propagation",
            "private",
        ]
        host.pid = self._boot(name, [*inside, *unshare], plan)
        self._ip(self.pid, cable_lines(name, host.index, host.pid))
        self._ip(host.pid, port_lines(host.index))
        self.shape(name, host.rate_mbit)
        if host.cut:
            self.cut(name)
        if any(other.loss for other in self.hosts.values()):
            self.drop(name, host.loss)

    def command(self, name: str, argv: Sequence[str], *, folder: str | None = None) -> list[str]:
        """What to exec outside so that `argv` runs inside the host; it dies with the host, and with the process that was exec'd.

        nsenter and not `ip netns exec`: the latter mounts a new /sys over the control groups.

        Raises:
            RuntimeError: the host is dead.
        """
        host = self.host(name)
        if not host.pid:
            raise RuntimeError(f"host {name} is dead: restart it first")
        enter = ["nsenter", "--target", str(host.pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--"]
        return [
            *enter,
            "env",
            f"--chdir={folder or ROOT}",
            "HOME=/home/lab",
            "setpriv",
            "--pdeathsig",
            "KILL",
            "--",
            *argv,
        ]

    def start(self, name: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command inside the host; options as for Popen. Pipes are text."""
        options.setdefault("text", True)
        return subprocess.Popen(self.command(name, argv), **options)

    def run(self, name: str, argv: Sequence[str], *, timeout_s: float = 60.0, check: bool = True) -> str:
        """Run a command inside the host and return what it printed.

        Raises:
            RuntimeError: it failed, with what it said, and `check`.
        """
        done = subprocess.run(self.command(name, argv), capture_output=True, text=True, timeout=timeout_s, check=False)
        if check and done.returncode:
            raise RuntimeError(f"{name}: {' '.join(argv)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def inside(self, name: str, ask: Callable[[], T]) -> T:
        """Call something in a thread whose network is that of the host. Sockets that it makes can be used by all threads.

        Raises:
            RuntimeError: the host is dead.
        """
        pid = self.host(name).pid
        if not pid:
            raise RuntimeError(f"host {name} is dead: restart it first")
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_in_network, pid, ask).result()

    def processes(self, name: str) -> list[int]:
        """Outer pids of all that run inside the host: those that share its PID namespace."""
        pid = self.host(name).pid
        return sorted(_members(os.readlink(f"/proc/{pid}/ns/pid"))) if pid else []

    def _boot(self, name: str, under: list[str], plan: Mapping[str, Any]) -> int:
        argv = [*under, sys.executable, "-I", "-S", str(INIT), dumps(plan)]
        holder = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=self.detached,
        )
        assert holder.stdout is not None
        assert holder.stderr is not None
        line = holder.stdout.readline()  # ends also when the process does
        if line != b"ready\n":
            holder.kill()
            raise RuntimeError(f"{name} did not start: {holder.stderr.read().decode().strip()}")
        holder.stdout.close()
        holder.stderr.close()
        self._holders[name] = holder
        return _leaf(holder.pid)

    def _ip(self, pid: int, lines: Sequence[str]) -> None:
        self._within(pid, ["ip", "-batch", "-"], "\n".join(lines))

    @staticmethod
    def _within(pid: int, argv: Sequence[str], stdin: str = "") -> None:
        """Run a command of the outer system in the network of process `pid`."""
        command = ["nsenter", "--target", str(pid), "--net", "--", *argv]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=READY_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv)} {stdin!r} failed: {done.stderr.strip()}")


def _in_network(pid: int, ask: Callable[[], T]) -> T:
    """Only in a thread that ends afterwards: it cannot come back."""
    descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(descriptor)
    return ask()


def _shown() -> list[str]:
    """Folders that each host must still see although what holds them is covered: the checkout and the Python that runs it."""
    paths = {str(ROOT), os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)}
    return sorted(path for path in paths if any(path.startswith(f"{cover}/") for cover in COVERED))


def _leaf(pid: int) -> int:
    """The last of a chain of single children: process 1 of what was unshared."""
    while True:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        if not children:
            return pid
        pid = int(children[0])


def _kill(pid: int) -> None:
    """Kill a process 1 and wait until it is gone: the kernel ends its whole namespace before it."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + READY_S
    while alive(pid):
        if time.monotonic() > end:
            raise RuntimeError(f"process {pid} is not gone {READY_S:g} s after it was killed")
        time.sleep(0.002)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _members(namespace: str) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                if os.readlink(f"/proc/{entry}/ns/pid") == namespace and alive(int(entry)):
                    yield int(entry)

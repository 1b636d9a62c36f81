"""Process 1 of a lab host, or of the switch: makes the host's own view of the machine, then only reaps.

    python -I -S init.py '{"name": "h0", ...}'      started by `lab.py` under `unshare`, never by hand

It stands alone (standard library, started without site) because it is the first thing in a new PID namespace. When it dies the kernel
ends everything in the host: that is how a host is killed, and how a lab leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import stat
import sys
from typing import Any

MS_BIND, MS_REC = 0x1000, 0x4000  # <linux/mount.h>

PLAIN_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
"""Name in /dev -> major and minor: Linux admin-guide/devices.txt."""

GPU_MAJOR = 120
"""Of the range 120-127, "local/experimental use" (devices.txt): no driver owns it, so a fake GPU is never a real one."""

_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Set up what the one argument says, say `ready`, reap until killed."""
    plan = json.loads(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    if plan["role"] == "switch":
        _switch(plan)
    else:
        _host(plan)
    os.write(1, b"ready\n")
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    while True:
        signal.sigwait({signal.SIGCHLD})
        _reap()


def _switch(plan: dict[str, Any]) -> None:
    """One disk per host, in memory, that outlives the host but not the lab."""
    _mount("tmpfs", "/run", "tmpfs", data="mode=755")
    for name in plan["hosts"]:
        for part in ("home", "var-tmp"):
            os.makedirs(f"/run/disks/{name}/{part}")
        os.chmod(f"/run/disks/{name}/var-tmp", 0o1777)


def _host(plan: dict[str, Any]) -> None:
    socket.sethostname(plan["name"])
    # What is about to be covered is held by descriptor first: the disk, the control groups, the code.
    disk = f"/run/disks/{plan['name']}"
    home, var_tmp = (os.open(f"{disk}/{part}", os.O_PATH) for part in ("home", "var-tmp"))
    groups = os.open("/sys/fs/cgroup", os.O_PATH) if os.path.isdir("/sys/fs/cgroup") else -1
    shown = [(path, os.open(path, os.O_PATH)) for path in plan["shown"]]
    _mount("tmpfs", "/run", "tmpfs", data="mode=755")
    _mount("tmpfs", "/tmp", "tmpfs", data="mode=1777")  # a mount point
    _bind(home, "/home")
    _bind(var_tmp, "/var/tmp")  # a mount point
    _devices(plan["gpus"])
    _mount("sysfs", "/sys", "sysfs")  # of this network namespace: /sys/class/net is the host's own
    if groups >= 0:
        _bind(groups, "/sys/fs/cgroup")  # a new sysfs would hide them, as `ip netns exec` does
    for path, held in shown:
        os.makedirs(path, exist_ok=True)
        _bind(held, path)
    _names(plan)
    os.makedirs("/home/lab", exist_ok=True)
    _mount("proc", "/proc", "proc")  # last: until here /proc/self/fd is the way to what was held


def _devices(gpus: int) -> None:
    _mount("tmpfs", "/dev", "tmpfs", data="mode=755")
    os.umask(0)
    numbers = PLAIN_DEVICES | {f"nvidia{index}": (GPU_MAJOR, index) for index in range(gpus)}
    for name, (major, minor) in numbers.items():
        os.mknod(f"/dev/{name}", stat.S_IFCHR | 0o666, os.makedev(major, minor))
    os.umask(0o022)
    for name, target in {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}.items():
        os.symlink(target, f"/dev/{name}")
    os.mkdir("/dev/shm")  # a mount point
    _mount("tmpfs", "/dev/shm", "tmpfs", data="mode=1777")  # a mount point
    os.mkdir("/dev/pts")
    _mount("devpts", "/dev/pts", "devpts", data="newinstance,ptmxmode=0666,mode=620")
    os.symlink("pts/ptmx", "/dev/ptmx")


def _names(plan: dict[str, Any]) -> None:
    """The hosts know each other by name, without a name server."""
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in plan["hosts"].items())]
    for path, text in {"/etc/hosts": "\n".join(lines) + "\n", "/etc/hostname": f"{plan['name']}\n"}.items():
        if not os.path.exists(path):
            continue
        own = f"/run/{os.path.basename(path)}"
        with open(own, "w", encoding="ascii") as file:
            file.write(text)
        held = os.open(own, os.O_PATH)
        _bind(held, path)


def _bind(held: int, path: str) -> None:
    _mount(f"/proc/self/fd/{held}", path, "", flags=MS_BIND | MS_REC)
    os.close(held)


def _mount(source: str, path: str, kind: str, *, flags: int = 0, data: str = "") -> None:
    done = _LIBC.mount(source.encode(), path.encode(), kind.encode() or None, flags, data.encode() or None)
    if done:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {kind or source} on {path}: {os.strerror(number)}")


def _reap() -> None:
    """Orphans of the host come to process 1; unreaped they would stay as zombies."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


if __name__ == "__main__":
    main()

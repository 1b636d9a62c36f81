"""First process of a container of the stand-in kubelet: gives it its own root folder, volumes and name, then becomes its command.

    python -I -S pod_init.py '{"root": "/...", "argv": [...], ...}'      started by `kubelet.py` under `unshare`, never by hand

The root is an overlay of the host's: the command sees all files of the host, and what it writes is gone with the pod.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import stat
import sys

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC = 1, 32, 0x1000, 0x4000  # <linux/mount.h>
_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Set up what the one argument says, and exec."""
    plan = json.loads(sys.argv[1])
    root = plan["root"]
    for part in ("upper", "work", "merged"):
        os.makedirs(f"{root}/{part}", exist_ok=True)
    merged = f"{root}/merged"
    _mount("overlay", merged, "overlay", data=f"lowerdir=/,upperdir={root}/upper,workdir={root}/work")
    for path in ("/dev", "/sys", *plan["shared"]):
        os.makedirs(merged + path, exist_ok=True)
        _open_way(merged, path)
        _mount(path, merged + path, "", flags=MS_BIND | MS_REC)
    _open_way(merged, os.path.join(sys.base_prefix, "bin"))
    _mount("proc", f"{merged}/proc", "proc")
    socket.sethostname(plan["hostname"][:63])
    with open(f"{root}/hosts", "w", encoding="ascii") as hosts:
        hosts.write(plan["hosts"])
    _mount(f"{root}/hosts", f"{merged}/etc/hosts", "", flags=MS_BIND)
    for volume in plan["mounts"]:
        _mount_volume(merged, volume)
    if plan["read_only"]:
        _mount("", merged, "", flags=MS_REMOUNT | MS_RDONLY)
    os.chroot(merged)
    os.chdir(plan["folder"] or "/")
    if plan["group"] is not None:
        os.setgroups(plan["groups"])
        os.setgid(plan["group"])
    if plan["user"] is not None:
        os.setuid(plan["user"])
    os.umask(0o022)
    try:
        os.execvpe(plan["argv"][0], plan["argv"], plan["env"])
    except OSError as error:
        os.write(2, f"exec {plan['argv'][0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _open_way(merged: str, path: str) -> None:
    """Let every user of the container reach a folder, as those of an image. Only the overlay changes."""
    parent = os.path.dirname(path)
    while parent != "/":
        os.chmod(merged + parent, os.stat(merged + parent).st_mode | 0o055)
        parent = os.path.dirname(parent)


def _inside(root: str, path: str) -> str:
    """The path below a root folder, with links followed as a process in it would, such as /var/run."""
    found = root
    for part in path.strip("/").split("/"):
        following = f"{found}/{part}"
        while os.path.islink(following):
            link = os.readlink(following)
            following = (root if link.startswith("/") else os.path.dirname(following) + "/") + link
        found = following
    return found


def _mount_volume(merged: str, volume: dict[str, str]) -> None:
    source, target = volume["source"], _inside(merged, volume["path"])
    if stat.S_ISDIR(os.stat(source).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "ab"):
            pass
    _mount(source, target, "", flags=MS_BIND | MS_REC)
    if volume["read_only"]:
        _mount("", target, "", flags=MS_REMOUNT | MS_BIND | MS_RDONLY)


def _mount(source: str, path: str, kind: str, *, flags: int = 0, data: str = "") -> None:
    done = _LIBC.mount(source.encode() or None, path.encode(), kind.encode() or None, flags, data.encode() or None)
    if done:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {kind or source} on {path}: {os.strerror(number)}")


if __name__ == "__main__":
    main()

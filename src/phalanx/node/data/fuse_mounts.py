"""FUSE mounts: make one and get the descriptor that its file system program serves, detach one, find those that are left.

A program gets the descriptor instead of the right to mount, so it runs under the job's account. Without root, programs mount by themselves with
the help of fusermount3(1), which is setuid root. Source: fuse(4), mount(2), umount2(2),
and the kernel's Documentation/filesystems/fuse.rst for the options.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import subprocess
from typing import Final

DEVICE: Final = "/dev/fuse"
_TYPE: Final = b"fuse.rclone"
_SOURCE: Final = b"phalanx"
_FLAGS: Final = 1 | 2 | 4  # MS_RDONLY, MS_NOSUID, MS_NODEV
_DETACH: Final = 2  # MNT_DETACH: also while a process has a file of it open
_CAP_SYS_ADMIN: Final = 21  # capabilities(7)
_DETACH_LIMIT_S: Final = 10.0  # a hang guard
_OCTAL: Final = re.compile(r"\\([0-7]{3})")
_libc: Final = ctypes.CDLL(None, use_errno=True)


class MountUnavailable(Exception):
    """This node cannot mount; the text says why, and what to do."""


def why_not() -> str:
    """Why this process cannot mount here, as far as can be said without a try; "" if it may."""
    if not os.path.exists(DEVICE):
        return f"{DEVICE} does not exist; load the kernel's module fuse"
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        return f"{DEVICE} cannot be opened by this account; chmod 666 {DEVICE}, as udev sets it"
    if mounts_itself() and not _may_mount():
        return "the supervisor lacks the capability CAP_SYS_ADMIN, as in a container; start it with that, or outside"
    if not mounts_itself() and _fusermount() is None:
        return "fusermount3 is not installed, without which only root can mount; install the system's package fuse3"
    return ""


def mounts_itself() -> bool:
    """Whether this process mounts by system calls; else a program that it starts mounts by fusermount3."""
    return os.geteuid() == 0


def open_mount(path: str, uid: int, gid: int) -> int:
    """Mount a read-only FUSE file system on a folder; returns the descriptor to serve. Requests wait until it is served.

    The kernel checks the permissions that the file system reports. So a file with mode 0400 of `uid` is readable for that account and root.

    Args:
        path: a folder that only root can replace.
        uid: of the account that serves it.
        gid: its group.

    Raises:
        MountUnavailable: the node does not allow it.
    """
    try:
        descriptor = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise MountUnavailable(f"{DEVICE} cannot be opened: {error.strerror}") from error
    options = f"fd={descriptor},rootmode=40000,user_id={uid},group_id={gid},allow_other,default_permissions"
    if _libc.mount(_SOURCE, os.fsencode(path), _TYPE, _FLAGS, options.encode()) != 0:
        number = ctypes.get_errno()
        os.close(descriptor)
        missing = "; the supervisor needs the capability CAP_SYS_ADMIN" if number == errno.EPERM else ""
        raise MountUnavailable(f"mounting on {path} failed: {os.strerror(number)}{missing}")
    return descriptor


def detach(path: str) -> None:
    """Unmount it, also while files are open; processes that wait for it get errors once its program ends. Idempotent."""
    if mounts_itself():
        _libc.umount2(os.fsencode(path), _DETACH)
    elif (program := _fusermount()) is not None:
        words = [program, "-u", "-z", path]
        subprocess.run(words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False, timeout=_DETACH_LIMIT_S)


def mounts_below(folder: str) -> list[str]:
    """The folders below `folder` on which something is mounted, innermost first. See proc(5) for the columns of mountinfo."""
    above = os.path.realpath(folder) + "/"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        places = [_OCTAL.sub(lambda found: chr(int(found[1], 8)), line.split()[4]) for line in file]
    return sorted((place for place in places if place.startswith(above)), reverse=True)


def remove_mount_folders(folder: str) -> None:
    """Detach what is mounted below a folder, and remove it with the empty folders in it. Never enters or removes a file. Idempotent."""
    for path in mounts_below(folder):
        detach(path)
    for at, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(at)


def _may_mount() -> bool:
    """Whether this process has CAP_SYS_ADMIN, by proc(5)."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        found = next((line.split()[1] for line in file if line.startswith("CapEff:")), "0")
    return bool(int(found, 16) >> _CAP_SYS_ADMIN & 1)


def _fusermount() -> str | None:
    return shutil.which("fusermount3", path=os.defpath)

"""Finds a cgroup of version 2 whose children can have the cpu and memory controllers.

A group passes its controllers on only while no process is in it (the kernel's root group excepted). The supervisor's own group has processes:
those of the supervisor. So the place is, in this order: the own group; the own group after its processes moved into a leaf, if it is delegated
to us; the nearest ancestor. An ancestor is out of question beyond a group with a limit of its own: jobs would escape from that limit.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

from phalanx.node.processes.cgroup_mounts import LIMIT_CONTROLLERS

_LEAF: Final = "phalanx-main"
_DELEGATE_MARKS: Final = ("user.delegate", "trusted.delegate")
"""Set to "1" by systemd on the group of a unit with Delegate=yes. Source: systemd, "Control Group APIs and Delegation"."""
_LIMIT_FILES: Final = ("cpu.max", "memory.max", "memory.high")
_MOVE_ROUNDS: Final = 20  # processes may fork while they are moved


def find_parent(mount_folder: str, own: str, *, climb: bool) -> tuple[str | None, str]:
    """The folder of a group that passes cpu and memory on to its children, or None and the reason.

    Changes the system: it enables the controllers there, and may move processes of a delegated group into a leaf of it.

    Args:
        mount_folder: where the hierarchy is mounted.
        own: this process's group.
        climb: whether an ancestor may be used. Not in a group that another scheduler made for one job.
    """
    why = distribute(own)
    if not why:
        return own, ""
    if _is_delegated(own, mount_folder) and not _missing_controllers(own):
        _move_into_leaf(own)
        why_not = distribute(own)
        return (own, "") if not why_not else (None, why_not)
    folder = own
    while climb and folder != mount_folder and not _has_limit(folder):
        folder = os.path.dirname(folder)
        if not distribute(folder):
            return folder, ""
    return None, why


def distribute(folder: str) -> str:
    """Enable the cpu and memory controllers for the children of a group; returns why it is not possible, or ""."""
    missing = _missing_controllers(folder)
    if missing:
        return f"{folder} has no {' and no '.join(missing)} controller"
    if set(LIMIT_CONTROLLERS) <= set(_read(f"{folder}/cgroup.subtree_control").split()):
        return ""
    try:
        with open(f"{folder}/cgroup.subtree_control", "w") as file:
            file.write(" ".join(f"+{name}" for name in LIMIT_CONTROLLERS))
    except OSError as error:
        return f"{folder} cannot pass its controllers on: {error.strerror}"
    return ""


def _missing_controllers(folder: str) -> list[str]:
    known = _read(f"{folder}/cgroup.controllers").split()
    return [name for name in LIMIT_CONTROLLERS if name not in known]


def _is_delegated(folder: str, mount_folder: str) -> bool:
    """Whether all processes in the group are ours to move: systemd says so, or it is the root group of our container."""
    for name in _DELEGATE_MARKS:
        with contextlib.suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return True
    # Only the kernel's root group has no cgroup.type.
    return folder == mount_folder and os.path.exists(f"{folder}/cgroup.type")


def _move_into_leaf(folder: str) -> None:
    """Move the processes of a group into a group below it. A process that could not be moved keeps `distribute` from succeeding."""
    leaf = f"{folder}/{_LEAF}"
    with contextlib.suppress(OSError):
        os.makedirs(leaf, exist_ok=True)
        for _ in range(_MOVE_ROUNDS):
            pids = _read(f"{folder}/cgroup.procs").split()
            if not pids:
                return
            for pid in pids:
                with contextlib.suppress(OSError), open(f"{leaf}/cgroup.procs", "w") as file:  # it may have ended
                    file.write(pid)


def _has_limit(folder: str) -> bool:
    return any(_read(f"{folder}/{name}").split()[:1] not in ([], ["max"]) for name in _LIMIT_FILES)


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path) as file:
        return file.read()
    return ""

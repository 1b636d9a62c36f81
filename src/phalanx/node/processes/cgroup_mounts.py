"""The mounted cgroup hierarchies of both versions, and the group of this process in each. Pure: parses the texts of /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass

LIMIT_CONTROLLERS = ("cpu", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupMount:
    """A writable cgroup file system.

    Attributes:
        folder: where it is mounted.
        root: the group of the hierarchy that is mounted there.
        controllers: of version 1: which of LIMIT_CONTROLLERS the hierarchy has; None for version 2.
    """

    folder: str
    root: str
    controllers: tuple[str, ...] | None = None


def find_all(mountinfo: str) -> list[CgroupMount]:
    """The writable cgroup2 mounts, and those of version 1 with a controller for limits; see proc(5) for the columns of mountinfo."""
    found: list[CgroupMount] = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        columns, words = before.split(), after.split()
        if "rw" not in columns[5].split(","):
            continue
        folder, root = _unescape(columns[4]), _unescape(columns[3])
        if words[:1] == ["cgroup2"]:
            found.append(CgroupMount(folder=folder, root=root))
        elif words[:1] == ["cgroup"] and "rw" in (options := words[2].split(",")):
            controllers = tuple(name for name in LIMIT_CONTROLLERS if name in options)
            if controllers:
                found.append(CgroupMount(folder=folder, root=root, controllers=controllers))
    return found


def find_v2(mountinfo: str) -> CgroupMount | None:
    """The first writable cgroup2 mount."""
    return next((mount for mount in find_all(mountinfo) if mount.controllers is None), None)


def find_v1(mountinfo: str, controller: str) -> CgroupMount | None:
    """The first writable mount of version 1 with this controller."""
    return next((mount for mount in find_all(mountinfo) if controller in (mount.controllers or ())), None)


def own_folder(mount: CgroupMount, membership: str) -> str | None:
    """The folder of this process's group in a mount; `membership` is the text of /proc/self/cgroup. None: outside the mount."""
    for line in membership.splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if mount.controllers is None:
            wanted = number == "0" and not names
        else:
            wanted = mount.controllers[0] in names.split(",")
        if wanted:
            return _below(mount, path)
    return None


def _below(mount: CgroupMount, path: str) -> str | None:
    if path.startswith("/.."):  # outside this cgroup namespace
        return None
    if mount.root != "/":
        if path != mount.root and not path.startswith(f"{mount.root}/"):
            return None
        path = path[len(mount.root) :]
    return os.path.normpath(f"{mount.folder}/{path}")


def _unescape(path: str) -> str:
    """Undo the octal escapes of mountinfo (space, tab, newline, backslash)."""
    return path.encode().decode("unicode_escape") if "\\" in path else path

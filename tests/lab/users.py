"""Normal users on a host of the lab: names, homes, and a way to the interpreter that runs the tests, which may lie in root's own folder."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.lab.lab import ROOT, Lab

FIRST_UID = 61001
"""Of a range that Debian gives to nobody (60000 to 64999 is by hand, Debian policy 9.2.2)."""


def add_users(lab: Lab, host: str, names: Sequence[str]) -> None:
    """Give the host these users: to be called again after a restart, which loses all but their homes."""
    disk = lab.host(host).path("/var/tmp")
    for number, name in enumerate(names, FIRST_UID):
        lab.run(host, ["sh", "-c", f"mkdir -p -m 700 /home/{name} && chown {number}:{number} /home/{name}"])
    entries = {
        "passwd": "".join(f"{name}:x:{uid}:{uid}::/home/{name}:/bin/sh\n" for uid, name in enumerate(names, FIRST_UID)),
        "group": "".join(f"{name}:x:{gid}:\n" for gid, name in enumerate(names, FIRST_UID)),
    }
    for file, lines in entries.items():
        disk.joinpath(file).write_text(Path("/etc", file).read_text(encoding="utf-8") + lines, encoding="utf-8")
        lab.run(host, ["mount", "--bind", f"/var/tmp/{file}", f"/etc/{file}"])
    for path in (Path(sys.base_prefix), ROOT):
        _open_the_way(lab, host, path)


def as_user(name: str, line: str, more: Mapping[str, str] | None = None) -> list[str]:
    """What to run on a host so that this user types the line into a shell at home."""
    given = [f"{key}={value}" for key, value in (more or {}).items()]
    plain = ["env", f"HOME=/home/{name}", f"USER={name}", f"LOGNAME={name}", *given]
    who = ["setpriv", f"--reuid={name}", f"--regid={name}", "--init-groups", "--inh-caps=-all"]
    return [*who, *plain, "sh", "-c", f"cd; ( {line} ) 2>&1"]


def _open_the_way(lab: Lab, host: str, path: Path) -> None:
    """Where a folder above it is closed to others, the host sees that folder empty but for the way to this path."""
    closed = next((parent for parent in reversed(path.parents) if not parent.stat().st_mode & 0o001), None)
    if closed is None:
        return
    held, shown, empty = f"/run/way{abs(hash(path))}", shlex.quote(str(path)), shlex.quote(str(closed))
    lines = (
        f"mkdir {held}",
        f"mount --bind {shown} {held}",
        f"mount -t tmpfs -o mode=755 tmpfs {empty}",
        f"mkdir -p {shown}",
        f"mount --bind {held} {shown}",
    )
    lab.run(host, ["sh", "-ec", "; ".join(lines)])

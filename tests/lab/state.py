"""A lab that outlives the command that built it: where it is written down, so that the next command finds it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from tests.lab.lab import Host, Lab, alive

FOLDER = Path("/run/phalanx-lab")


def save(name: str, lab: Lab) -> None:
    """Write the lab down. A file that a crash leaves behind is harmless: `load` asks whether its keeper lives."""
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    record = {
        "size": lab.size,
        "gpus": lab.gpus,
        "rate_mbit": lab.rate_mbit,
        "pid": lab.pid,
        "born": born(lab.pid),
        "hosts": [asdict(host) for host in lab.hosts.values()],
    }
    new = FOLDER / f"{name}.new"
    new.write_text(json.dumps(record), encoding="ascii")
    os.replace(new, _file(name))


def load(name: str) -> Lab | None:
    """The lab of that name, or None where none is up."""
    try:
        record = json.loads(_file(name).read_text(encoding="ascii"))
    except FileNotFoundError:
        return None
    if not alive(record["pid"]) or born(record["pid"]) != record["born"]:
        return None  # the keeper died, or its number is now somebody else's
    hosts = {host["name"]: Host(**host) for host in record["hosts"]}
    return Lab(
        size=record["size"],
        gpus=record["gpus"],
        rate_mbit=record["rate_mbit"],
        detached=True,
        pid=record["pid"],
        hosts=hosts,
    )


def forget(name: str) -> None:
    """The lab of that name is down."""
    _file(name).unlink(missing_ok=True)


def names() -> list[str]:
    """Labs that are up."""
    return [path.stem for path in sorted(FOLDER.glob("*.json")) if load(path.stem) is not None]


def born(pid: int) -> int:
    """When the process started, in clock ticks since boot (proc(5), stat field 22)."""
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])


def _file(name: str) -> Path:
    return FOLDER / f"{name}.json"

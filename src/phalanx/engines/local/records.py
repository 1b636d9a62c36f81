"""The local engine's records on disk of which process runs which node, by which a new head finds them."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import NodeId, SupervisorId
from phalanx.durable_files import remove_file
from phalanx.node.files.private_files import write_private
from phalanx.node.processes.proctable import ProcessIdentity
from phalanx.ports.engine import LocalNode

_FILE: Final = "engine.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedNode:
    """A started node. `node_key` marks all its processes; `supervisor_id` is None if its supervisor was started without one."""

    id: NodeId
    node_key: str
    identity: ProcessIdentity
    virtual_devices: int
    supervisor_id: SupervisorId | None = None


def write(folder: str, living: StartedNode) -> None:
    """Write the record atomically; with pid 0 before the process is started."""
    record = {
        "node": living.id,
        "pid": living.identity.pid,
        "start_ticks": living.identity.started_ticks,
        "node_key": living.node_key,
        "virtual_devices": living.virtual_devices,
        "supervisor_id": living.supervisor_id,
    }
    write_private(folder, _FILE, json.dumps(record))


def read(folder: str) -> StartedNode | None:
    """Return the record; None if it is missing or unreadable."""
    try:
        with open(os.path.join(folder, _FILE), encoding="utf-8") as file:
            record = json.load(file)
        return StartedNode(
            id=NodeId(record["node"]),
            node_key=str(record["node_key"]),
            identity=ProcessIdentity(pid=int(record["pid"]), started_ticks=int(record["start_ticks"])),
            virtual_devices=int(record["virtual_devices"]),
            supervisor_id=_supervisor_of(record),
        )
    # Any of these for a damaged file.
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _supervisor_of(record: dict[str, object]) -> SupervisorId | None:
    """Return the supervisor's id; None also for a node started by an earlier release."""
    value = record.get("supervisor_id")
    return SupervisorId(value) if isinstance(value, str) else None


def remove(folder: str) -> None:
    """Remove the record. Idempotent."""
    with contextlib.suppress(FileNotFoundError):
        remove_file("local.forget", os.path.join(folder, _FILE))


def recorded_nodes(home: str) -> list[LocalNode]:
    """Return the nodes with a record under the head's state folder, by id."""
    root = os.path.join(home, "nodes")
    names = sorted(os.listdir(root)) if os.path.isdir(root) else []
    living = [read(os.path.join(root, name)) for name in names]
    return [LocalNode(id=node.id, virtual_devices=node.virtual_devices) for node in living if node is not None]

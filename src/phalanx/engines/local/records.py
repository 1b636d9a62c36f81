"""What the local engine remembers of its nodes on disk: which process is which node, so that a new head finds them again."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import NodeId, SupervisorId
from phalanx.engines.local.private import write_private
from phalanx.failpoints import around
from phalanx.node.shell.proctable import ProcessIdentity

_FILE: Final = "engine.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalNode:
    """A node to run: `virtual_devices` slots, or 0 for this machine's real GPUs."""

    id: NodeId
    virtual_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LivingNode:
    """A started node. `node_key` marks every process of it; `supervisor_id`: how its supervisor calls itself, None where nobody told it."""

    id: NodeId
    node_key: str
    identity: ProcessIdentity
    virtual_devices: int
    supervisor_id: SupervisorId | None = None


def write(folder: str, living: LivingNode) -> None:
    """Remember, atomically: a reader sees the old record or the new one. Written with pid 0 before the process is there."""
    record = {
        "node": living.id, "pid": living.identity.pid, "start_ticks": living.identity.started_ticks,
        "node_key": living.node_key, "virtual_devices": living.virtual_devices, "supervisor_id": living.supervisor_id,
    }  # fmt: skip
    write_private(folder, _FILE, json.dumps(record))


def read(folder: str) -> LivingNode | None:
    """The record, or None where there is none that can be read."""
    try:
        with open(os.path.join(folder, _FILE), encoding="utf-8") as file:
            record = json.load(file)
        return LivingNode(
            id=NodeId(record["node"]), node_key=str(record["node_key"]),
            identity=ProcessIdentity(pid=int(record["pid"]), started_ticks=int(record["start_ticks"])),
            virtual_devices=int(record["virtual_devices"]), supervisor_id=_supervisor_of(record),
        )  # fmt: skip
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        OverflowError,
        RecursionError,
    ):  # whatever a damaged file may hold
        return None


def _supervisor_of(record: dict[str, object]) -> SupervisorId | None:
    """None also of a node that a release before this one started."""
    said = record.get("supervisor_id")
    return SupervisorId(said) if isinstance(said, str) else None


def remove(folder: str) -> None:
    """Forget. Harmless twice."""
    with contextlib.suppress(FileNotFoundError), around("local.forget.name"):
        os.unlink(os.path.join(folder, _FILE))


def known(home: str) -> list[LocalNode]:
    """Nodes that have a record under the head's state folder, by id."""
    root = os.path.join(home, "nodes")
    names = sorted(os.listdir(root)) if os.path.isdir(root) else []
    living = [read(os.path.join(root, name)) for name in names]
    return [LocalNode(id=node.id, virtual_devices=node.virtual_devices) for node in living if node is not None]

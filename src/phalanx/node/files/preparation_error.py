"""The error for a member that cannot run on this node."""

from __future__ import annotations


class PreparationFailed(Exception):
    """The member cannot run here.

    `charge`: the job's own fault, it would fail elsewhere too; `exit_code`: as a shell would give; `node_fault`: the node is faulty and must be
    cordoned; `disk_full`: its fault is that its disk has no room; `note`: details for the job's supervisor stream.
    """

    def __init__(
        self,
        why: str,
        *,
        charge: bool,
        exit_code: int = 1,
        node_fault: bool = False,
        disk_full: bool = False,
        note: str = "",
    ) -> None:
        super().__init__(why)
        self.charge = charge
        self.exit_code = exit_code
        self.node_fault = node_fault
        self.disk_full = disk_full
        self.note = note

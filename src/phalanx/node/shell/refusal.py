"""The error for a member that cannot run on this node."""

from __future__ import annotations


class Refusal(Exception):
    """The member cannot run here.

    `charge`: the job's own fault, it would fail elsewhere too; `exit_code`: as a shell would give; `flaw`: the node is faulty and must be
    cordoned.
    """

    def __init__(self, why: str, *, charge: bool, exit_code: int = 1, flaw: bool = False) -> None:
        super().__init__(why)
        self.charge = charge
        self.exit_code = exit_code
        self.flaw = flaw

"""What preparing a member raises where it cannot run here."""

from __future__ import annotations


class Refusal(Exception):
    """Not here, and why.

    `charge`: the job's own fault, elsewhere it would fail alike; `exit_code`: what a shell would say of it; `flaw`: the node is not well,
    and is to be kept out.
    """

    def __init__(self, why: str, *, charge: bool, exit_code: int = 1, flaw: bool = False) -> None:
        super().__init__(why)
        self.charge = charge
        self.exit_code = exit_code
        self.flaw = flaw

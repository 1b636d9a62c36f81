"""The policies by name. A policy decides on a `Board` which jobs go first and which may be stopped; none reads a clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.entry import Listener
from phalanx.core.scheduling.hazard import HazardTable
from phalanx.core.scheduling.policies.baselines import Backfill, Fair, Rounds, Skip, Strict
from phalanx.core.scheduling.policies.default import Default
from phalanx.core.scheduling.policies.knobs import Knobs

__all__ = ["POLICIES", "Knobs", "make_policy", "policy_named"]

POLICIES: Final[dict[str, Callable[[Board], Listener]]] = {
    "default": Default,
    "fifo": Strict,
    "skip": Skip,
    "backfill": Backfill,
    "sjf": lambda board: Strict(board, shortest=True),
    "las": Rounds,
    "srtf": lambda board: Rounds(board, exact=True),
    "fair": Fair,
}


def make_policy(name: str, board: Board, knobs: Knobs, table: HazardTable) -> Listener:
    """The live policy on its board; its statistics go into `table`.

    Raises:
        BadRequest: no policy has this name.
    """
    return Default(board, knobs, table) if name == "default" else policy_named(name)(board)


def policy_named(name: str) -> Callable[[Board], Listener]:
    """The constructor of a policy.

    Raises:
        BadRequest: no policy has this name.
    """
    make = POLICIES.get(name)
    if make is None:
        raise BadRequest(f"unknown policy {name!r}", hint=f"one of: {', '.join(POLICIES)}")
    return make

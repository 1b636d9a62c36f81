"""The policies by name. A policy decides on a `Board` which jobs go first and which may be stopped; none reads a clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.hazard_table import HazardTable
from phalanx.core.scheduling.policies.baselines import (
    BackfillPolicy,
    FairSharePolicy,
    RoundBasedPolicy,
    SkipPolicy,
    StrictPolicy,
)
from phalanx.core.scheduling.policies.default import DefaultPolicy
from phalanx.core.scheduling.policies.parameters import PolicyParameters
from phalanx.core.scheduling.policy import Policy

__all__ = ["POLICIES", "PolicyParameters", "make_policy", "policy_named"]

POLICIES: Final[dict[str, Callable[[Board], Policy]]] = {
    "default": DefaultPolicy,
    "fifo": StrictPolicy,
    "skip": SkipPolicy,
    "backfill": BackfillPolicy,
    "sjf": lambda board: StrictPolicy(board, shortest=True),
    "las": RoundBasedPolicy,
    "srtf": lambda board: RoundBasedPolicy(board, exact=True),
    "fair": FairSharePolicy,
}


def make_policy(name: str, board: Board, knobs: PolicyParameters, table: HazardTable) -> Policy:
    """The live policy on its board; its statistics go into `table`.

    Raises:
        BadRequest: no policy has this name.
    """
    return DefaultPolicy(board, knobs, table) if name == "default" else policy_named(name)(board)


def policy_named(name: str) -> Callable[[Board], Policy]:
    """The constructor of a policy.

    Raises:
        BadRequest: no policy has this name.
    """
    make = POLICIES.get(name)
    if make is None:
        raise BadRequest(f"unknown policy {name!r}", hint=f"one of: {', '.join(POLICIES)}")
    return make

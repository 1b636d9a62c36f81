"""Runs the planner for a command: with the facts in this user's state folder, and the fleet of the user's head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from phalanx.plans.answer import compute_plan
from phalanx.plans.records import PlanAnswer

if TYPE_CHECKING:
    from phalanx.client import Client


def plan_answer(options: Mapping[str, Any], head: Client | None = None) -> PlanAnswer:
    """Run the planner with these options. `head`: for `--fleet here`; None connects when needed.

    Raises:
        PhalanxError: as `compute_plan`.
    """
    from phalanx.cli.cluster.state_folder import home_folder

    return compute_plan(options, home=home_folder(), fleet=lambda: head or _connect())


def _connect() -> Client:
    from phalanx.cli.connection import connect

    return connect()

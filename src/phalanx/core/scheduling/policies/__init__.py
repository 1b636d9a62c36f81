"""The policies by name. A policy decides on a `Board` which jobs go first and which may be stopped; none reads a clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Final, Protocol

from phalanx.core.errors import BadRequest
from phalanx.core.scheduling.policies.baselines import (
    BackfillPolicy,
    FairSharePolicy,
    RoundBasedPolicy,
    SkipPolicy,
    StrictPolicy,
)
from phalanx.core.scheduling.policies.default import DefaultPolicy
from phalanx.core.scheduling.policies.makespan import MakespanPolicy
from phalanx.core.scheduling.policies.parameters import PolicyParameters
from phalanx.core.scheduling.policy import Policy

__all__ = ["LEARNING_POLICIES", "POLICIES", "PolicyParameters", "policy_named"]


def throughput_policy(parameters: PolicyParameters | None = None) -> DefaultPolicy:
    """The default policy without a limit on waits: no job is overdue."""
    return DefaultPolicy(replace(parameters or PolicyParameters(), overdue_s=inf))


class PolicyConstructor(Protocol):
    """The constructor of a policy with parameters; without them, of one with the default ones."""

    def __call__(self, parameters: PolicyParameters | None = None) -> Policy: ...


LEARNING_POLICIES: Final[dict[str, PolicyConstructor]] = {
    "default": DefaultPolicy,
    "throughput": throughput_policy,
}
POLICIES: Final[dict[str, Callable[[], Policy]]] = {
    **LEARNING_POLICIES,
    "fifo": StrictPolicy,
    "skip": SkipPolicy,
    "backfill": BackfillPolicy,
    "sjf": lambda: StrictPolicy(shortest=True),
    "las": RoundBasedPolicy,
    "srtf": lambda: RoundBasedPolicy(exact=True),
    "fair": FairSharePolicy,
    "makespan": MakespanPolicy,
}


def policy_named(name: str) -> Callable[[], Policy]:
    """The constructor of a built-in policy.

    Raises:
        BadRequest: no policy has this name.
    """
    make = POLICIES.get(name)
    if make is None:
        raise BadRequest(f"unknown policy {name!r}", hint=f"one of: {', '.join(POLICIES)}")
    return make

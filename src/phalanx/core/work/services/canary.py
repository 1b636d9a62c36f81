"""A rollout that gives a share of the sessions to the new revision, and what speaks against it so far."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from phalanx.core.work.services.rollout_terms import WHOLE

ALTERNATIVES: Final = 4  # of each test


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Against the new revision: for each alternative, the logarithm of how much likelier it makes what was seen."""

    errors: tuple[float, ...] = (0.0,) * ALTERNATIVES
    first_tokens: tuple[float, ...] = (0.0,) * ALTERNATIVES
    speeds: tuple[float, ...] = (0.0,) * ALTERNATIVES


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A rollout in steps.

    Attributes:
        revision: the new one; `stable`: the one that it replaces.
        share: thousandths of the sessions that the new revision gets now; `planned`: for which its replicas are started.
        step_s: since when it has this share (Unix time); None before the first one.
        completing: the last step has passed, and the other replicas are replaced.
        answered, errors: requests of the new revision; `stable_answered`, `stable_errors`: of the other one meanwhile.
        evidence: up to about 10 s old.
    """

    revision: int
    stable: int
    share: int = 0
    planned: int = 0
    step_s: float | None = None
    completing: bool = False
    answered: int = 0
    errors: int = 0
    stable_answered: int = 0
    stable_errors: int = 0
    evidence: Evidence = Evidence()

    def replicas(self, awake: int) -> int:
        """The replicas of the new revision, of so many that shall be awake in all."""
        return min(awake, max(1, math.ceil(awake * self.planned / WHOLE)))

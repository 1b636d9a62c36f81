"""The failure rules in force: the operators' own, as the head keeps them, before those that come with Phalanx."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Final

from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.calibration import RULES, Calibration
from phalanx.core.recovery.rules import Rule, judge, judge_cause, laid_over, rules_from
from phalanx.core.state.world import World
from phalanx.core.work.attempt import Cause, TaskExit
from phalanx.core.work.failure import Verdict

_log: Final = logging.getLogger("phalanx.controller")


def own_rules(kept: Calibration | None) -> tuple[tuple[Rule, ...], str]:
    """The operators' rules of the document that the head keeps; none, and why, of one that a later release put and this one cannot read."""
    try:
        return () if kept is None else rules_from(json.loads(kept.profile)), ""
    except PhalanxError as error:  # a head with the shipped rules is better than none
        return (), error.message


class Rulebook:
    """Rules as of now; read anew when the operators have put others.

    Args:
        shipped: the rules that come with Phalanx. With none at all, codes and signals alone decide.
    """

    def __init__(self, world: World, shipped: Sequence[Rule]) -> None:
        self._world = world
        self._shipped = shipped
        self._read: Calibration | None = None
        self._rules: Sequence[Rule] = shipped

    @property
    def rules(self) -> Sequence[Rule]:
        """In the order in which they are tried."""
        kept = self._world.calibrations.get(RULES)
        if kept is not self._read:
            own, why_not = own_rules(kept)
            if why_not:
                _log.error("the operators' failure rules are not in force: this release cannot read them: %s", why_not)
            self._rules, self._read = laid_over(own, self._shipped), kept
        return self._rules

    def judge(self, exit: TaskExit) -> Verdict | None:
        """What a task's end means; None without rules."""
        rules = self.rules
        return judge(exit, rules) if rules else None

    def judge_cause(self, cause: Cause) -> Verdict | None:
        """What the end of a whole generation means; None where no rule speaks of it."""
        return judge_cause(cause, self.rules)

"""The failure rules in force: the operators' own, then those shipped with Phalanx."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Final

from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.failure_rules import OPERATORS, FailureRules
from phalanx.core.recovery.rules import Rule, judge, judge_cause, laid_over, rules_from
from phalanx.core.state.world import World
from phalanx.core.work.attempt import Cause, TaskExit
from phalanx.core.work.failure import Verdict

_log: Final = logging.getLogger("phalanx.controller")


def own_rules(stored: FailureRules | None) -> tuple[tuple[Rule, ...], str]:
    """Parse the operators' stored rules. If this release cannot parse them (a later one stored them): no rules, and why."""
    try:
        return () if stored is None else rules_from(json.loads(stored.rules)), ""
    except PhalanxError as error:  # a head with the shipped rules is better than none
        return (), error.message


class Rulebook:
    """Current rules, parsed again when the operators change theirs.

    Args:
        shipped: the rules shipped with Phalanx. Without any rule, exit codes and signals decide.
    """

    def __init__(self, world: World, shipped: Sequence[Rule]) -> None:
        self._world = world
        self._shipped = shipped
        self._parsed: FailureRules | None = None
        self._rules: Sequence[Rule] = shipped

    @property
    def rules(self) -> Sequence[Rule]:
        """All rules, in the order in which they are tried."""
        stored = self._world.failure_rules.get(OPERATORS)
        if stored is not self._parsed:
            own, why_not = own_rules(stored)
            if why_not:
                _log.error("the operators' failure rules are ignored: this release cannot read them: %s", why_not)
            self._rules, self._parsed = laid_over(own, self._shipped), stored
        return self._rules

    def judge(self, exit: TaskExit) -> Verdict | None:
        """Diagnose a task's exit; None without rules."""
        rules = self.rules
        return judge(exit, rules) if rules else None

    def judge_cause(self, cause: Cause) -> Verdict | None:
        """Diagnose the end of a whole generation; None if no rule covers it."""
        return judge_cause(cause, self.rules)

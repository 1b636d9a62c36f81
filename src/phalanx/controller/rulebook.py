"""The failure rules in force: the operators' own, then those shipped with Phalanx."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Final

from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.custom_failure_rules import OPERATORS, FailureRules
from phalanx.core.recovery.failure_rules import (
    FailureRule,
    diagnose,
    diagnose_cause,
    merge_rules,
    parse_rules,
)
from phalanx.core.state.records import FAILURE_RULES
from phalanx.core.state.world import World
from phalanx.core.work.attempt import EndCause, TaskExit
from phalanx.core.work.failure import FailureDiagnosis

_log: Final = logging.getLogger("phalanx.controller")


def parse_own_rules(stored: FailureRules | None) -> tuple[tuple[FailureRule, ...], str]:
    """Parse the operators' stored rules. If this release cannot parse them (a later one stored them): no rules, and why."""
    try:
        return () if stored is None else parse_rules(json.loads(stored.rules)), ""
    except PhalanxError as error:  # a head with the shipped rules is better than none
        return (), error.message


class Rulebook:
    """Current rules, parsed again when the operators change theirs.

    Args:
        shipped: the rules shipped with Phalanx. Without any rule, exit codes and signals decide.
    """

    def __init__(self, world: World, shipped: Sequence[FailureRule]) -> None:
        self._world = world
        self._shipped = shipped
        self._parsed: FailureRules | None = None
        self._rules: Sequence[FailureRule] = shipped

    @property
    def rules(self) -> Sequence[FailureRule]:
        """All rules, in the order in which they are tried."""
        stored = self._world.table(FAILURE_RULES).get(OPERATORS)
        if stored is not self._parsed:
            own, why_not = parse_own_rules(stored)
            if why_not:
                _log.error("the operators' failure rules are ignored: this release cannot read them: %s", why_not)
            self._rules, self._parsed = merge_rules(own, self._shipped), stored
        return self._rules

    def diagnose(self, exit: TaskExit) -> FailureDiagnosis | None:
        """Diagnose a task's exit; None without rules."""
        rules = self.rules
        return diagnose(exit, rules) if rules else None

    def diagnose_cause(self, cause: EndCause) -> FailureDiagnosis | None:
        """Diagnose the end of a whole generation; None if no rule covers it."""
        return diagnose_cause(cause, self.rules)

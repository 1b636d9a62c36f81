"""Records of failure rules."""

from __future__ import annotations

from typing import Any

import msgspec

from phalanx.core.work.failure import FailureAttribution, FailureReaction, RestartBudget


class RuleView(msgspec.Struct, frozen=True, kw_only=True):
    """A rule. `own`: set by an operator; `source`: the reference of a built-in rule."""

    name: str
    attribution: FailureAttribution = msgspec.field(name="blame")
    remedy: FailureReaction
    charge: RestartBudget
    codes: list[int] = []
    signals: list[int] = []
    xids: list[int] = []
    pattern: str = ""
    oom: bool = False
    cause: str = ""
    weight: float = 0.0
    says: str = ""
    source: str = ""
    own: bool = False


class RulesReply(msgspec.Struct, frozen=True, kw_only=True):
    """The active rules, in the order in which they are matched; who set the operators' own, and when."""

    rules: list[RuleView]
    by: str = ""
    stored_s: float | None = None


class RulesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules that replace the operators' earlier ones, as `core.recovery.failure_rules` reads them."""

    rules: list[dict[str, Any]]
    dry_run: bool = False

"""Failure rules as the API says them."""

from __future__ import annotations

from typing import Any

import msgspec

from phalanx.core.work.failure import Blame, Charge, Remedy


class RuleView(msgspec.Struct, frozen=True, kw_only=True):
    """A rule. `own`: put by an operator; `source`: where a shipped one is from."""

    name: str
    blame: Blame
    remedy: Remedy
    charge: Charge
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
    """The rules in force, in the order in which they are tried; who put the operators' own, and when."""

    rules: list[RuleView]
    by: str = ""
    stored_s: float | None = None


class RulesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules to put in place of those put before, as `core.recovery.rules` reads them."""

    rules: list[dict[str, Any]]
    dry_run: bool = False

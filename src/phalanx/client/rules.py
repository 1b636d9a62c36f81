"""Verbs of failure rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from phalanx.client.verbs import Records, Verbs, record

if TYPE_CHECKING:
    from phalanx.wire.api import rules as api
else:
    api = Records("phalanx.wire.api.rules")


class RuleVerbs(Verbs):
    """Look at failure rules and put the operators' own."""

    def rules(self) -> api.RulesReply:
        """The rules in force, in the order in which they are tried."""
        return self._get("/v1/rules", api.RulesReply)

    def put_rules(self, rules: Sequence[Mapping[str, object]], *, dry_run: bool = False) -> api.RulesReply:
        """Put these in place of those put before; with `dry_run` only check them."""
        body = {"rules": [dict(rule) for rule in rules], "dry_run": dry_run}
        return record(self._put("/v1/rules", body), api.RulesReply)

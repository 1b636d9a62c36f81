"""API calls for failure rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from phalanx.client.api_calls import ApiCalls, LazyModule, decode_record

if TYPE_CHECKING:
    from phalanx.wire.api import rules as api
else:
    api = LazyModule("phalanx.wire.api.rules")


class FailureRulesApi(ApiCalls):
    """Read failure rules and replace the operators' own."""

    def rules(self) -> api.RulesReply:
        """Return the active rules, in the order of evaluation."""
        return self._get("/v1/rules", api.RulesReply)

    def put_rules(self, rules: Sequence[Mapping[str, object]], *, dry_run: bool = False) -> api.RulesReply:
        """Replace the operators' rules with these; with `dry_run` only check them."""
        body = {"rules": [dict(rule) for rule in rules], "dry_run": dry_run}
        return decode_record(self._put("/v1/rules", body), api.RulesReply)

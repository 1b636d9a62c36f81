"""API calls for the audit trail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx.client.api_calls import ApiCalls, LazyModule, query_string

if TYPE_CHECKING:
    from phalanx.wire.api import audit as api
else:
    api = LazyModule("phalanx.wire.api.audit")


class AuditApi(ApiCalls):
    """Read and verify the audit trail."""

    def audit(
        self, *, user: str | None = None, since_s: float | None = None, after: int | None = None, limit: int = 100
    ) -> api.AuditList:
        """Return the newest lines, oldest first; with `after` the lines after that sequence number."""
        parameters = {"user": user, "since_s": since_s, "after": after, "limit": limit}
        return self._get("/v1/audit" + query_string(parameters), api.AuditList)

    def verify_audit(self, anchors: Sequence[str] = ()) -> api.AuditReport:
        """Make the head verify the whole trail, and compare it with `anchors`."""
        return self._get(
            "/v1/audit/verify" + query_string({}, [("anchor", anchor) for anchor in anchors]), api.AuditReport
        )

"""The call being served, for the audit trail. Each changing route sets it before its handler runs, so no handler can omit it.

It is a context variable because the functions in between need not pass it on: each request has its own task, and each task its own
context.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Final

from starlette.requests import HTTPConnection

from phalanx.core.access.audit import AuditCall, describe_target
from phalanx.core.access.caller import Caller


@dataclass(slots=True)
class AuditedCall:
    """A changing call in progress. `recorded`: its audit line was passed to the controller together with the change."""

    call: AuditCall
    recorded: bool = False

    def mark_recorded(self, detail: str = "") -> AuditCall:
        """Return the call, to be recorded together with its effect."""
        self.recorded = True
        return replace(self.call, detail=detail) if detail else self.call


CURRENT_CALL: Final[ContextVar[AuditedCall | None]] = ContextVar("serving", default=None)


def audit_call_of(request: HTTPConnection, caller: Caller, path: str) -> AuditCall:
    """Return who calls what from where, for the audit trail."""
    client = request.client
    return AuditCall(
        user=caller.user,
        token_id=caller.token_id,
        origin="" if client is None else client.host,
        action=f"{request.scope.get('method', 'WEBSOCKET')} {path}",
        target=describe_target(request.path_params),
    )

"""The call being served, for the audit trail. Each changing route sets it before its handler runs, so no handler can omit it.

It is a context variable because the functions in between need not pass it on: each request has its own task, and each task its own
context.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Final

from starlette.requests import Request

from phalanx.core.access.audit import Call, target_of
from phalanx.core.access.roles import Caller


@dataclass(slots=True)
class Serving:
    """A changing call in progress. `told`: its audit line was passed to the controller together with the change."""

    call: Call
    told: bool = False

    def take(self, detail: str = "") -> Call:
        """Return the call, to be recorded together with its effect."""
        self.told = True
        return replace(self.call, detail=detail) if detail else self.call


SERVING: Final[ContextVar[Serving | None]] = ContextVar("serving", default=None)


def call_of(request: Request, caller: Caller, path: str) -> Call:
    """Return who calls what from where, for the audit trail."""
    client = request.client
    return Call(
        user=caller.user,
        token_id=caller.token_id,
        origin="" if client is None else client.host,
        action=f"{request.method} {path}",
        target=target_of(request.path_params),
    )

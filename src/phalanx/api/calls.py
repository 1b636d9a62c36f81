"""The call being served, for the audit trail. Set by the gate of each changing route, so that no handler can forget it.

A context variable because a call passes through functions that know nothing of it: each request is served by a task of its own, and a
task has a context of its own.
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
    """A changing call under way. `told`: its line has been handed over with the change itself."""

    call: Call
    told: bool = False

    def take(self, detail: str = "") -> Call:
        """The call, to be written with its effect."""
        self.told = True
        return replace(self.call, detail=detail) if detail else self.call


SERVING: Final[ContextVar[Serving | None]] = ContextVar("serving", default=None)


def call_of(request: Request, caller: Caller, path: str) -> Call:
    """Who calls what, from where."""
    client = request.client
    return Call(
        user=caller.user,
        token_id=caller.token_id,
        origin="" if client is None else client.host,
        action=f"{request.method} {path}",
        target=target_of(request.path_params),
    )

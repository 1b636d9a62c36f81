"""The call being served, for the audit trail. Each changing route sets it before its handler runs, so no handler can omit it.

It is a context variable because the functions in between need not pass it on: each request has its own task, and each task its own
context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Final

from starlette.requests import HTTPConnection

from phalanx.core.access.audit import AuditCall, describe_target
from phalanx.core.access.caller import Caller
from phalanx.core.ids import TokenId

LINE_EVERY_S: Final = 3600.0  # of calls that a program repeats


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


class HourlyCalls:
    """Calls that a program repeats every few seconds, each with the same effect: the first one in an hour leaves a line in the audit trail.

    Args:
        clock_s: seconds of a clock that does not jump.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._left_s: dict[tuple[TokenId, str], float] = {}  # when a line was left

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve the current call: without a line, if its token has left one for the same target within the hour."""
        serving, now_s = CURRENT_CALL.get(), self._clock_s()
        if serving is None:
            yield
            return
        self._left_s = {key: at_s for key, at_s in self._left_s.items() if now_s - at_s < LINE_EVERY_S}
        key = (serving.call.token_id, f"{serving.call.action} {serving.call.target}")
        if key in self._left_s:
            CURRENT_CALL.set(None)
            yield
            return
        yield
        self._left_s[key] = now_s  # one that failed has left none


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

"""What a head answers that does not lead: its health, its CA, and to everything else where the leader is. Plain ASGI.

A head that leads lets each answer out only while it leads: one that was stopped in the middle of a request, and wakes when another has
taken over, must not tell its caller what no longer holds.
"""

from __future__ import annotations

from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phalanx.api.bodies import reply
from phalanx.api.errors import error_response
from phalanx.api.parts import Among
from phalanx.core.errors import NotLeading, OutcomeUnknown, PhalanxError
from phalanx.wire.api.head import Health

_HEALTH: Final = "/v1/health"
_READING: Final = ("GET", "HEAD")
_CA: Final = "/v1/ca"


def not_leading(among: Among) -> NotLeading:
    """The refusal of a head that stands by."""
    leader = among.leader()
    if leader.holder and leader.holder != among.mine.head_id:
        return NotLeading(
            f"this head stands by; the one at {leader.url} leads", hint=f"ask {leader.url}", leader=leader.url
        )
    return NotLeading("no head leads at the moment: one takes over within seconds", hint="try again in a moment")


class Standby:
    """The whole app of a head that waits for its turn. `ca_pem`: of one that listens off loopback."""

    def __init__(self, among: Among, *, version: str, ca_pem: str = "") -> None:
        self._among, self._version, self._ca_pem = among, version, ca_pem

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        await self._answer(scope["method"], scope["path"])(scope, receive, send)

    def _answer(self, method: str, path: str) -> Response:
        among = self._among
        if method in _READING and path == _HEALTH:
            return reply(
                Health(
                    status="ok",
                    version=self._version,
                    head_id=among.mine.head_id,
                    role="standby",
                    term=among.leader().term,
                    leader=among.leader().url if among.leader().holder else "",
                )
            )
        if method in _READING and path == _CA and self._ca_pem:
            return Response(self._ca_pem, media_type="text/plain")
        return error_response(not_leading(among))


class LeadersWord:
    """Wraps the app of a head that leads: nothing leaves, and no stream goes on, once it no longer does."""

    def __init__(self, app: ASGIApp, among: Among) -> None:
        self._app, self._among = app, among

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = refused = False

        async def sending(message: Message) -> None:
            nonlocal begun, refused
            if refused:
                return
            if self._among.leads():
                begun = True
                await send(message)
                return
            refused = True
            if begun:
                raise ConnectionAbortedError(
                    "this head leads no longer"
                )  # the caller sees a broken stream, and asks another
            await error_response(self._kept_back(scope["method"]))(scope, receive, send)

        if not self._among.leads():
            await error_response(not_leading(self._among))(scope, receive, send)
            return
        await self._app(scope, receive, sending)

    def _kept_back(self, method: str) -> PhalanxError:
        """In place of an answer that came too late: of what was done meanwhile nobody may say that it was not."""
        if method in _READING:
            return not_leading(self._among)
        return OutcomeUnknown(
            "this head leads no longer, and whether it did this before is not known",
            hint="look whether it was done before you repeat it; the same idempotency key is safe",
        )

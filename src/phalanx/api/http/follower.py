"""The API of a head that does not lead: it answers its health and its CA, and refers all other requests to the leader. Plain ASGI.

A leader sends responses only while it leads. A process that was suspended during a request, and resumes after another head took over,
must not send an outdated answer.
"""

from __future__ import annotations

from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phalanx.api.http.bodies import json_response
from phalanx.api.http.errors import error_response
from phalanx.api.services import LeaderStatus
from phalanx.core.errors import NotLeading, OutcomeUnknown, PhalanxError
from phalanx.wire.api.head import Health

_HEALTH: Final = "/v1/health"
_READING: Final = ("GET", "HEAD")
_CA: Final = "/v1/ca"


def not_leading_error(status: LeaderStatus) -> NotLeading:
    """Return the error that a standby answers."""
    leader = status.leader()
    if leader.holder and leader.holder != status.own_record.head_id:
        return NotLeading(
            f"this head is a standby; the leader is at {leader.url}", hint=f"use {leader.url}", leader=leader.url
        )
    return NotLeading("no head leads at the moment; one takes over within seconds", hint="try again in a moment")


class FollowerApp:
    """The whole app of a standby. `ca_pem`: the CA's certificate, if the head listens off loopback."""

    def __init__(self, status: LeaderStatus, *, version: str, ca_pem: str = "") -> None:
        self._leader_status, self._version, self._ca_pem = status, version, ca_pem

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; a WebSocket is refused before it opens."""
        await self._answer(scope.get("method", ""), scope["path"])(scope, receive, send)

    def _answer(self, method: str, path: str) -> Response:
        among = self._leader_status
        if method in _READING and path == _HEALTH:
            return json_response(
                Health(
                    status="ok",
                    version=self._version,
                    head_id=among.own_record.head_id,
                    role="standby",
                    term=among.leader().term,
                    leader=among.leader().url if among.leader().holder else "",
                )
            )
        if method in _READING and path == _CA and self._ca_pem:
            return Response(self._ca_pem, media_type="text/plain")
        return error_response(not_leading_error(among))


class LeaderOnlyMiddleware:
    """Middleware of a leader: once the head no longer leads, it sends no responses and cuts streams off."""

    def __init__(self, app: ASGIApp, status: LeaderStatus) -> None:
        self._app, self._leader_status = app, status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        started = refused = False

        async def sending(message: Message) -> None:
            nonlocal started, refused
            if refused:
                return
            if self._leader_status.leads():
                started = True
                await send(message)
                return
            refused = True
            if started:  # the caller sees a broken stream, and asks another head
                raise ConnectionAbortedError("this head no longer leads")
            await error_response(self._late_answer_error(scope.get("method", "GET")))(scope, receive, send)

        if not self._leader_status.leads():
            await error_response(not_leading_error(self._leader_status))(scope, receive, send)
            return
        await self._app(scope, receive, sending)

    def _late_answer_error(self, method: str) -> PhalanxError:
        """Return the error that replaces a late answer; after a change, the outcome is reported as unknown."""
        if method in _READING:
            return not_leading_error(self._leader_status)
        return OutcomeUnknown(
            "this head no longer leads, and it is unknown whether it performed the request",
            hint="check the result before you repeat the request; repeating it with the same idempotency key is safe",
        )

"""Forwards one HTTP request to a job's program over a stream, and its response to the browser; bodies in pieces, as fast as the other side reads.

h11 writes the request and reads the response, so that only well-formed HTTP/1.1 with one length passes in either direction.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import h11
from starlette.types import Receive, Scope, Send

from phalanx.api.programs.forwarded_headers import ProgramAddress, request_headers, response_headers
from phalanx.api.programs.port_streams import PortStream, PortStreamBroken
from phalanx.core.errors import BadRequest, PhalanxError, TryLater

RESPONSE_HEAD_BYTES_MAX: Final = 1 << 16
STALL_S: Final = 300.0  # without one byte of a body from the browser, or with no room for one to it
_NO_BODY: Final = frozenset({204, 304})


class NothingListens(TryLater):
    """The job runs, and nothing listens on the port yet. Its code is `try_later`."""


class ProgramFailed(PhalanxError):
    """The program of the job closed the connection, or sent no valid HTTP. Raised before a response was begun."""

    code = "program_failed"
    http_status = 502


class BrowserLeft(Exception):
    """The browser has closed its connection."""


class HttpForwarding:
    """One request and its response. `without`: names of headers that the program must not get."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        stream: PortStream,
        address: ProgramAddress,
        *,
        without: frozenset[bytes],
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._stream, self._address, self._without = stream, address, without
        self._connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=RESPONSE_HEAD_BYTES_MAX)
        self.started = False

    async def run(self) -> None:
        """Forward until the response has ended.

        Raises:
            BadRequest: the request cannot be passed on.
            NothingListens, ProgramFailed: there is no response.
            BrowserLeft: the browser left before the end, or stopped reading.
        """
        await self._stream.write(self._request_head())
        sides = [asyncio.ensure_future(side) for side in (self._send_body(), self._receive_response())]
        try:
            await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
            body, response = sides
            if not response.done():
                body.result()  # never returns: it waits for the browser to leave
            response.result()
        finally:
            for side in sides:
                side.cancel()
            await asyncio.gather(*sides, return_exceptions=True)

    def _request_head(self) -> bytes:
        headers: list[tuple[bytes, bytes]] = list(self._scope["headers"])
        found = request_headers(headers, self._address, scheme=str(self._scope["scheme"]), without=self._without)
        lengths = [value for name, value in headers if name == b"content-length"]
        if lengths:
            found.append((b"content-length", lengths[0]))
        elif any(name == b"transfer-encoding" for name, _ in headers):
            found.append((b"transfer-encoding", b"chunked"))
        try:
            request = h11.Request(
                method=self._scope["method"],
                target=program_target(self._scope, self._address),
                headers=[*found, (b"connection", b"close")],
            )
            return bytes(self._connection.send(request) or b"")
        except h11.LocalProtocolError as error:
            raise BadRequest(f"the request cannot be passed on: {error}") from error

    async def _send_body(self) -> None:
        """Send the body, then wait until the browser leaves."""
        more = True
        while True:
            try:
                async with asyncio.timeout(STALL_S if more else None):
                    message = await self._receive()
            except TimeoutError as error:
                raise BrowserLeft from error
            if message["type"] == "http.disconnect":
                raise BrowserLeft
            if not more:
                continue
            more = bool(message.get("more_body", False))
            with contextlib.suppress(PortStreamBroken):  # the reading side has the reason, or an early response
                try:
                    if message.get("body"):
                        await self._stream.write(bytes(self._connection.send(h11.Data(data=message["body"])) or b""))
                    if not more:
                        await self._stream.write(bytes(self._connection.send(h11.EndOfMessage()) or b""))
                except h11.LocalProtocolError as error:
                    raise BrowserLeft from error  # it sent another number of bytes than it said

    async def _receive_response(self) -> None:
        bodiless = self._scope["method"] == "HEAD"
        while True:
            event = await self._next_event()
            match event:
                case h11.InformationalResponse():
                    continue
                case h11.Response():
                    status, bodiless = event.status_code, bodiless or event.status_code in _NO_BODY
                    headers = response_headers(
                        list(event.headers), self._address, bodiless=event.status_code in _NO_BODY
                    )
                    self.started = True
                    await self._pass_on({"type": "http.response.start", "status": status, "headers": headers})
                case h11.Data():
                    await self._pass_on({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
                case _:
                    await self._pass_on({"type": "http.response.body", "body": b"", "more_body": False})
                    return

    async def _pass_on(self, message: dict[str, object]) -> None:
        try:
            async with asyncio.timeout(STALL_S):
                await self._send(message)
        except TimeoutError as error:
            raise BrowserLeft from error

    async def _next_event(self) -> h11.Event:
        while True:
            try:
                event = self._connection.next_event()
            except h11.RemoteProtocolError as error:
                raise ProgramFailed(f"{self._address.shown} sent no valid HTTP: {error}") from error
            if event is not h11.NEED_DATA and not isinstance(event, (h11.ConnectionClosed, type(h11.PAUSED))):
                assert isinstance(event, (h11.InformationalResponse, h11.Response, h11.Data, h11.EndOfMessage))
                return event
            if event is not h11.NEED_DATA:
                raise ProgramFailed(f"{self._address.shown} closed the connection without a response")
            try:
                self._connection.receive_data(await self._stream.read())
            except PortStreamBroken as error:
                raise broken_error(error, self._address.shown) from error


def broken_error(error: PortStreamBroken, program: str) -> PhalanxError:
    """Return what a broken stream means, before a response was begun."""
    if error.refused:
        return NothingListens(
            f"nothing listens on {program} yet", hint="start the program, or wait until it listens; its log says more"
        )
    return ProgramFailed(f"{program}: {error.why}")


def program_target(scope: Scope, address: ProgramAddress) -> bytes:
    """Return path and query as the program gets them, percent-encoded as the browser sent them."""
    path = address.own_path(scope["raw_path"].decode("latin-1")).encode("latin-1")
    return path + (b"?" + scope["query_string"] if scope["query_string"] else b"")

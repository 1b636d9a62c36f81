"""Forwards a WebSocket to a job's program. The browser's side is the head's own protocol, the program's a client without a socket."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake, WebSocketException
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Response as HandshakeResponse
from websockets.protocol import Event
from websockets.typing import Subprotocol
from websockets.uri import WebSocketURI

from phalanx.api.programs.forwarded_headers import ProgramAddress, request_headers, response_headers
from phalanx.api.programs.http_forwarding import ProgramFailed, broken_error, program_target
from phalanx.api.programs.port_streams import PortStream, PortStreamBroken

MESSAGE_BYTES_MAX: Final = 16 << 20  # in each direction: a picture or table of a notebook, a pasted file
_ABNORMAL: Final = 1011
_WHY: Final = "the connection to the program ended: it, its job or its node stopped"
_GIVEN_CODES: Final = frozenset({CloseCode.NO_STATUS_RCVD, CloseCode.ABNORMAL_CLOSURE, CloseCode.TLS_HANDSHAKE})
_SOCKET_HEADERS: Final = frozenset(
    (
        b"sec-websocket-key",
        b"sec-websocket-version",
        b"sec-websocket-extensions",
        b"sec-websocket-protocol",
        b"sec-websocket-accept",
    )
)


class WebSocketForwarding:
    """One WebSocket."""

    def __init__(
        self, websocket: WebSocket, stream: PortStream, address: ProgramAddress, *, without: frozenset[bytes]
    ) -> None:
        self._websocket, self._stream, self._address = websocket, stream, address
        headers = list(websocket.scope["headers"])
        offered = [Subprotocol(one) for one in websocket.scope["subprotocols"]]
        target = program_target(websocket.scope, address).decode("latin-1")
        path, _, query = target.partition("?")
        uri = WebSocketURI(secure=False, host="127.0.0.1", port=address.port, path=path, query=query)
        self._protocol = ClientProtocol(uri, subprotocols=offered or None, max_size=MESSAGE_BYTES_MAX)
        self._protocol.debug = False  # it would log all headers, cookies of the program too
        self._request = self._protocol.connect()
        for name, value in request_headers(
            headers, address, scheme=websocket.scope["scheme"], without=without | _SOCKET_HEADERS
        ):
            if name != b"host":  # the library sets it
                self._request.headers[name.decode("latin-1")] = value.decode("latin-1")
        self._events: list[Event] = []  # frames may come together with the answer to the handshake
        self._sending = asyncio.Lock()

    async def run(self) -> None:
        """Forward until one side closes.

        Raises:
            PhalanxError: the program did not answer the handshake; the browser was not answered either.
        """
        self._protocol.send_request(self._request)
        try:
            await self._flush()
            answer = await self._handshake()
        except PortStreamBroken as error:
            raise broken_error(error, self._address.shown) from error
        headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers.raw_items()
        ]
        shown = response_headers(headers, self._address, bodiless=True)
        if answer.status_code != 101:
            kept = [pair for pair in shown if pair[0] in (b"set-cookie", b"content-type", b"location")]
            await self._websocket.send(
                {"type": "websocket.http.response.start", "status": answer.status_code, "headers": kept}
            )
            await self._websocket.send({"type": "websocket.http.response.body", "body": bytes(answer.body or b"")})
            return
        cookies = [pair for pair in shown if pair[0] == b"set-cookie"]
        await self._websocket.accept(self._protocol.subprotocol, headers=cookies)
        sides = [asyncio.ensure_future(side) for side in (self._to_program(), self._to_browser())]
        try:
            done, _ = await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
            for side in done:
                # WebSocketException, RuntimeError: the other side has closed already.
                with contextlib.suppress(WebSocketDisconnect, PortStreamBroken, WebSocketException, RuntimeError):
                    side.result()
        finally:
            for side in sides:
                side.cancel()
            await asyncio.gather(*sides, return_exceptions=True)
            if self._websocket.application_state is WebSocketState.CONNECTED:
                with contextlib.suppress(WebSocketDisconnect, RuntimeError):
                    await self._websocket.close(_ABNORMAL, _WHY)

    async def _handshake(self) -> HandshakeResponse:
        while True:
            self._events += self._protocol.events_received()
            if self._events:
                event = self._events.pop(0)
                if isinstance(event, HandshakeResponse):
                    refused = isinstance(self._protocol.handshake_exc, InvalidHandshake) and event.status_code == 101
                    if refused:
                        raise ProgramFailed(f"{self._address.shown} sent an invalid WebSocket handshake")
                    return event
            if self._protocol.handshake_exc is not None:
                raise ProgramFailed(f"{self._address.shown} answered no WebSocket handshake")
            await self._feed()

    async def _feed(self) -> bool:
        """Give the protocol the program's next bytes; False at their end."""
        data = await self._stream.read()
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        return bool(data)

    async def _flush(self) -> None:
        async with self._sending:
            for piece in self._protocol.data_to_send():
                if piece:
                    await self._stream.write(piece)

    async def _to_program(self) -> None:
        while (message := await self._websocket.receive())["type"] != "websocket.disconnect":
            if message.get("bytes") is not None:
                self._protocol.send_binary(message["bytes"])
            else:
                self._protocol.send_text(message["text"].encode())
            await self._flush()
        code = message.get("code", CloseCode.NORMAL_CLOSURE)
        self._protocol.send_close(CloseCode.GOING_AWAY if code in _GIVEN_CODES else code, message.get("reason") or "")
        await self._flush()

    async def _to_browser(self) -> None:
        pieces: list[bytes] = []
        text = more = True
        while more:
            events, self._events = [*self._events, *self._protocol.events_received()], []
            for event in events:
                if not isinstance(event, Frame):
                    continue
                if event.opcode is Opcode.CLOSE:
                    await self._close(bytes(event.data))
                    return
                if event.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
                    text = event.opcode is Opcode.TEXT if event.opcode is not Opcode.CONT else text
                    pieces.append(bytes(event.data))
                    if event.fin:
                        await self._pass_on(b"".join(pieces), text=text)
                        pieces = []
            await self._flush()  # answers to pings
            if self._protocol.parser_exc is not None:
                return
            more = await self._feed()

    async def _pass_on(self, data: bytes, *, text: bool) -> None:
        if text:
            await self._websocket.send_text(data.decode(errors="replace"))
        else:
            await self._websocket.send_bytes(data)

    async def _close(self, data: bytes) -> None:
        code = int.from_bytes(data[:2], "big") if len(data) >= 2 else CloseCode.NORMAL_CLOSURE
        await self._flush()
        await self._websocket.close(code, data[2:].decode(errors="replace"))

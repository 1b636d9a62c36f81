"""uvicorn's WebSocket protocol, without log lines that show tokens or queries, and with an end for clients that no longer read."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

PING_INTERVAL_S: Final = 20.0  # proxies close connections that are idle for 60 s
PONG_TIMEOUT_S: Final = 20.0
MESSAGE_BYTES_MAX: Final = 1 << 20  # the same as for a JSON body
MESSAGE_LIMIT_SETTER: Final = "set_message_bytes_max"
_log: Final = logging.getLogger("phalanx.api.websocket")
_log.setLevel(logging.WARNING)  # uvicorn logs the path with its query at INFO


class HeadWebSocketProtocol(WebSocketsSansIOProtocol):
    """One connection, from its handshake on."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.logger = self.conn.logger = _log
        self.conn.debug = False  # it would log all headers, the token too

    def handle_connect(self, event: Any) -> None:
        """Start the app, which may raise the limit of messages once it has authorised the caller."""
        super().handle_connect(event)
        if self.handshake_initiated and not self.handshake_complete:
            self.scope["state"][MESSAGE_LIMIT_SETTER] = self._set_message_bytes_max

    def _set_message_bytes_max(self, size: int) -> None:
        self.conn.max_message_size = size

    def data_received(self, data: bytes) -> None:
        """Handle the bytes; also send the library's own refusal of a handshake, such as of too many headers, which uvicorn does not."""
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.transport.is_closing():
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    async def send(self, message: Any) -> None:
        """Send a message of the app; a refusal completes the handshake, which uvicorn otherwise logs as an error."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True

    def keepalive_timeout(self) -> None:
        """Close the connection without waiting for its unsent bytes, which a dead client never reads."""
        super().keepalive_timeout()
        self.transport.abort()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """Give the client some time for the closing handshake."""
        super().on_task_complete(task)
        self.loop.call_later(self.close_timeout, self.transport.abort)

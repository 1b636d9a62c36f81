"""The head's connections to its relay. Each idle one waits for a client; the client's TLS connection then goes to the head's own listener."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from phalanx.wire.head_relay import (
    ATTACHED,
    CARRY,
    GREETING,
    INSTANCE_BYTES,
    NONCE_BYTES,
    OCCUPIED,
    OPENING_S,
    PING,
    PING_EVERY_S,
    PONG_S,
    PROOF_BYTES,
    head_proof,
    is_equal,
    relay_proof,
)
from phalanx.wire.head_url import joined_address
from phalanx.wire.keepalive import notice_lost_peer, receive_exactly

IDLE_CONNECTIONS: Final = 16  # a supervisor opens five; each that is used is replaced within two round trips
_RETRY_FIRST_S: Final = 0.25
_RETRY_MAX_S: Final = 15.0
_SILENT_S: Final = PING_EVERY_S + PONG_S + 10.0  # the relay has gone if no PING came for so long
_log: Final = logging.getLogger("phalanx.api")


@dataclass(slots=True)
class RelayStatus:
    """What the head says of its connection to its relay. `problem`: why it has no connection; empty while it has one, or without a relay."""

    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """The relay of a head: its address, the key that both know, and where the state of the connection is written."""

    host: str
    port: int
    key: bytes
    status: RelayStatus = field(default_factory=RelayStatus)


class RelayAgent:
    """Keeps idle connections to a relay until it is closed. `take` gets each that carries a client. Use it on the event loop only.

    `status`: that of the settings, which other threads may read.
    """

    def __init__(self, settings: RelaySettings, take: Callable[[socket.socket], None]) -> None:
        self._settings, self._take = settings, take
        self._address = joined_address(settings.host, settings.port)
        self._instance = secrets.token_bytes(INSTANCE_BYTES)
        self.status = settings.status
        self._error = self.status.problem = "not yet tried"
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._keep_connected()) for _ in range(IDLE_CONNECTIONS)]

    def close(self) -> None:
        """Close the idle connections. Those that carry clients belong to the listener."""
        for task in self._tasks:
            task.cancel()

    async def _keep_connected(self) -> None:
        pause_s = _RETRY_FIRST_S
        while True:
            connection: socket.socket | None = None
            try:
                async with asyncio.timeout(OPENING_S):
                    connection = await self._connect()
                    await self._attach(connection)
                pause_s = _RETRY_FIRST_S
                self._report("")
                await _wait_for_client(connection)
                self._take(connection)
                connection = None
                continue
            except (OSError, TimeoutError) as error:
                self._report(_reason(error))
            finally:
                if connection is not None:
                    connection.close()
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # spreads retries, guards nothing
            pause_s = min(pause_s * 2, _RETRY_MAX_S)

    async def _connect(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._settings.host, self._settings.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            await loop.sock_connect(connection, address)
            notice_lost_peer(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _attach(self, connection: socket.socket) -> None:
        """Exchange proofs.

        Raises:
            OSError: the other end is not our relay, does not accept this head, or disconnects.
        """
        loop, key, instance = asyncio.get_running_loop(), self._settings.key, self._instance
        ours = secrets.token_bytes(NONCE_BYTES)
        await loop.sock_sendall(connection, GREETING + instance + ours)
        theirs = await receive_exactly(connection, NONCE_BYTES)
        if not is_equal(await receive_exactly(connection, PROOF_BYTES), relay_proof(key, instance, ours, theirs)):
            raise ConnectionError("what answers there does not have the key of this head's relay")
        await loop.sock_sendall(connection, head_proof(key, instance, ours, theirs))
        answer = await receive_exactly(connection, 1)
        if answer == OCCUPIED:
            raise ConnectionError("another head is attached to it")
        if answer != ATTACHED:
            raise ConnectionError("it answers against the protocol")

    def _report(self, error: str) -> None:
        """Log a change once, not for each connection and each retry; no error: a connection is attached."""
        if error and error != self._error:
            _log.warning("no connection to the relay %s: %s", self._address, error)
        elif self._error and not error:
            _log.info("attached to the relay %s", self._address)
        self._error = self.status.problem = error


def _reason(error: OSError) -> str:
    """The error in words: asyncio's own name the address again."""
    words = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)
    return words or "it does not answer"


async def _wait_for_client(connection: socket.socket) -> None:
    """Return pings until a client comes, and confirm it.

    Raises:
        OSError: the relay has gone, or sends what it must not.
        TimeoutError: it is silent.
    """
    loop = asyncio.get_running_loop()
    while True:
        async with asyncio.timeout(_SILENT_S):
            message = await receive_exactly(connection, 1)
        if message not in (PING, CARRY):
            raise ConnectionError("it sends what is no message of a relay")
        await loop.sock_sendall(connection, message)
        if message == CARRY:
            return

"""A relay (docs/relay.md): accepts connections for a head that has no port of its own, and carries them over connections that the head opened.

It forwards only to the head that knows its key, and only what begins as TLS. It has no token and no key of that TLS: it moves bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import os
import resource
import secrets
import signal
import socket
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

from phalanx.api.http.tls_listener import answer_plain_http, first_bytes, is_tls
from phalanx.app.relay.key_file import read_relay_key
from phalanx.core.errors import BadFile, BadRequest, PhalanxError
from phalanx.web.command_hints import error_line
from phalanx.wire.head_relay import (
    ATTACHED,
    CARRY,
    CONNECTIONS_MAX,
    CONNECTIONS_OF_A_SOURCE,
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
    new_key,
    relay_proof,
)
from phalanx.wire.head_url import joined_address, split_address
from phalanx.wire.keepalive import notice_lost_peer, receive_exactly

IDLE_MAX: Final = 256  # idle connections of the head
CONFIRM_S: Final = 3.0  # for the head to confirm a client; then another idle connection is tried
WAIT_S: Final = 10.0  # a client waits so long for an idle connection
LINGER_S: Final = 60.0  # the second direction of a connection may last so long after the end of the first
_CHUNK_BYTES: Final = 128 * 1024  # the most that the relay holds of one direction
_IPV6_SITE: Final = 64  # bits; one machine may choose addresses below them
_PAUSE_S: Final = 0.1  # after a failed accept, as when no descriptor is left
_LOG_EVERY_S: Final = 1.0
_DESCRIPTORS_SPARE: Final = 128
_log: Final = logging.getLogger("phalanx.relay")


@dataclass(eq=False, slots=True, kw_only=True)
class _IdleConnection:
    """A connection of the head that waits for a client. `task` watches it while it is `ready`."""

    socket: socket.socket
    instance: bytes
    task: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """How many connections the relay has: in all, and from one address (IPv6: one /64)."""

    connections: int = CONNECTIONS_MAX
    per_source: int = CONNECTIONS_OF_A_SOURCE


@dataclass(slots=True, kw_only=True)
class RelayServer:
    """Serves one listening socket. Use it on the event loop only."""

    key: bytes
    limits: RelayLimits = field(default_factory=RelayLimits)
    _ready: deque[_IdleConnection] = field(default_factory=deque)
    _attached: set[_IdleConnection] = field(default_factory=set)
    _carried: Counter[bytes] = field(default_factory=Counter)  # connections that carry, by instance of the head
    _clients: deque[asyncio.Future[_IdleConnection]] = field(default_factory=deque)
    _sources: Counter[str] = field(default_factory=Counter)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _logged_s: float = 0.0

    @property
    def carried(self) -> int:
        """How many connections it carries."""
        return self._carried.total()

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:
                self._warn("accepting a connection failed: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            source = _source(str(address[0]))
            if self._sources.total() >= self.limits.connections or self._sources[source] >= self.limits.per_source:
                self._warn("refused a connection from %s: too many are open", address[0])
                connection.close()
                continue
            self._sources[source] += 1
            task = loop.create_task(self._open(connection, source))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _open(self, connection: socket.socket, source: str) -> None:
        """Find out whether a head or a client connects, and serve it."""
        attached = False
        try:
            notice_lost_peer(connection)
            async with asyncio.timeout(OPENING_S):
                begin = await first_bytes(connection)
                if begin[:1] == GREETING[:1] and GREETING.startswith(begin[: len(GREETING)]):
                    idle = await self._attach(connection, source)
                    if idle is not None:
                        attached = True
                        self._watch(idle)
                    return
                if not is_tls(begin):
                    await answer_plain_http(connection)
                    return
            await self._carry(connection)
        except (OSError, TimeoutError) as error:
            _log.debug("a connection from %s ended: %s", source, error)
        finally:
            self._sources[source] -= 1
            if not self._sources[source]:
                del self._sources[source]
            if not attached:
                connection.close()

    async def _attach(self, connection: socket.socket, source: str) -> _IdleConnection | None:
        """Exchange proofs with a head; None if it is not ours, or not the one that is attached."""
        loop = asyncio.get_running_loop()
        await receive_exactly(connection, len(GREETING))
        instance = await receive_exactly(connection, INSTANCE_BYTES)
        theirs, ours = await receive_exactly(connection, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
        await loop.sock_sendall(connection, ours + relay_proof(self.key, instance, theirs, ours))
        given = await receive_exactly(connection, PROOF_BYTES)
        if not is_equal(given, head_proof(self.key, instance, theirs, ours)):
            self._warn("refused a head from %s: it does not know the key", source)
            return None
        others = {one.instance for one in self._attached} | set(self._carried)
        if others - {instance} or len(self._attached) >= IDLE_MAX:
            await loop.sock_sendall(connection, OCCUPIED)
            return None
        if not self._attached and not self.carried:
            _log.info("a head is attached, from %s", source)
        idle = _IdleConnection(socket=connection, instance=instance)
        self._attached.add(idle)  # before the answer, which may take a while: no second head gets in meanwhile
        try:
            await loop.sock_sendall(connection, ATTACHED)
        except BaseException:
            self._attached.discard(idle)
            raise
        return idle

    def _watch(self, idle: _IdleConnection) -> None:
        """Give the connection to a client that waits, else keep it ready."""
        while self._clients:
            client = self._clients.popleft()
            if not client.done():
                client.set_result(idle)
                return
        idle.task = asyncio.get_running_loop().create_task(self._keep(idle))
        self._ready.append(idle)

    async def _keep(self, idle: _IdleConnection) -> None:
        """Ping the head over a connection until a client takes it, which cancels this, or it ends."""
        loop = asyncio.get_running_loop()
        try:
            try:
                async with asyncio.timeout(PING_EVERY_S):
                    await loop.sock_recv(idle.socket, 1)  # the head sends nothing by itself: this is its end
            except TimeoutError:
                self._ready.remove(idle)
                async with asyncio.timeout(PONG_S):
                    await loop.sock_sendall(idle.socket, PING)
                    if await receive_exactly(idle.socket, 1) == PING:
                        self._watch(idle)
                        return
        except (OSError, TimeoutError) as error:
            _log.debug("an idle connection of the head ended: %s", error)
        self._drop(idle)

    def _drop(self, idle: _IdleConnection) -> None:
        with contextlib.suppress(ValueError):
            self._ready.remove(idle)
        idle.socket.close()
        self._release(idle)

    def _release(self, idle: _IdleConnection) -> None:
        self._attached.discard(idle)
        if not self._attached and not self.carried:
            _log.info("the head has gone")

    async def _carry(self, client: socket.socket) -> None:
        """Carry one client's connection to the head until both directions end."""
        async with asyncio.timeout(WAIT_S):
            idle = await self._confirmed()
        self._carried[idle.instance] += 1
        self._attached.discard(idle)
        try:
            await _splice(client, idle.socket)
        finally:
            self._carried[idle.instance] -= 1
            if not self._carried[idle.instance]:
                del self._carried[idle.instance]
            idle.socket.close()

    async def _confirmed(self) -> _IdleConnection:
        """Return a connection whose head has confirmed that a client follows."""
        loop = asyncio.get_running_loop()
        while True:
            idle = await self._take()
            try:
                async with asyncio.timeout(CONFIRM_S):
                    await loop.sock_sendall(idle.socket, CARRY)
                    if await receive_exactly(idle.socket, 1) == CARRY:
                        return idle
            except (OSError, TimeoutError):
                pass
            except asyncio.CancelledError:
                self._drop(idle)
                raise
            self._drop(idle)

    async def _take(self) -> _IdleConnection:
        """Take the idle connection that was used last, and stop watching it; if none is ready, wait for one."""
        if self._ready:
            idle = self._ready.pop()
            if idle.task is not None:
                idle.task.cancel()
                await asyncio.wait([idle.task])
            return idle
        client: asyncio.Future[_IdleConnection] = asyncio.get_running_loop().create_future()
        self._clients.append(client)
        try:
            return await client
        except asyncio.CancelledError:
            if client.done() and not client.cancelled():
                self._watch(client.result())
            with contextlib.suppress(ValueError):
                self._clients.remove(client)
            raise

    def _warn(self, text: str, *values: object) -> None:
        """Log a warning, at most one a second: strangers must not fill the log."""
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            _log.warning(text, *values)


async def _splice(one: socket.socket, other: socket.socket) -> None:
    """Copy both directions. Nothing is read before the last bytes are sent, so a slow reader slows its writer."""
    loop = asyncio.get_running_loop()
    ways = {loop.create_task(_copy(one, other)), loop.create_task(_copy(other, one))}
    try:
        done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        if all(way.exception() is None for way in done):
            await asyncio.wait(ways, timeout=LINGER_S)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _copy(source: socket.socket, target: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, _CHUNK_BYTES):
        await loop.sock_sendall(target, data)
    target.shutdown(socket.SHUT_WR)


def _source(address: str) -> str:
    """Return what counts as one source: an IPv4 address, or the /64 of an IPv6 address."""
    number = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(number, ipaddress.IPv6Address):
        if number.ipv4_mapped is not None:
            return str(number.ipv4_mapped)
        return str(ipaddress.ip_network((number, _IPV6_SITE), strict=False))
    return str(number)


def read_or_create_relay_key(path: str) -> bytes:
    """Return the key in a file, which is created for this user alone if it is missing.

    Raises:
        BadRequest: the file has no key.
        BadFile: it cannot be read or created.
    """
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), mode=0o700, exist_ok=True)
        with (
            contextlib.suppress(FileExistsError),
            open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file,
        ):
            file.write(new_key() + "\n")
        return read_relay_key(path)
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror}", hint="phalanx relay --key FILE") from None


def _bind(text: str) -> socket.socket:
    """Bind the address on which the relay listens; unlike a head it may be a wildcard.

    Raises:
        BadRequest: it is not an address of this machine, or its port is in use.
    """
    host, port = split_address(text)
    if not port or not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise BadRequest(f"--listen {text}: not an address and port", hint="phalanx relay --listen 0.0.0.0:7600")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a name"
        raise BadRequest(f"--listen {text}: {why}", hint="use an address of this machine and a free port") from None
    return listener


def _allow_descriptors(connections: int) -> None:
    """Raise the limit of open files for two sockets a connection.

    Raises:
        BadRequest: the system allows fewer.
    """
    wanted = 2 * connections + IDLE_MAX + _DESCRIPTORS_SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise BadRequest(
            f"{connections} connections need {wanted} open files, and this account may have {hard}",
            hint=f"raise LimitNOFILE (or ulimit -n), or --connections {(hard - IDLE_MAX - _DESCRIPTORS_SPARE) // 2}",
        )
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(server: RelayServer, listener: socket.socket) -> None:
    task = asyncio.create_task(server.serve(listener))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    parser = argparse.ArgumentParser(prog="phalanx-relay", description="Run a relay; `phalanx relay` starts this.")
    parser.add_argument("--listen", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--connections", type=int, default=RelayLimits().connections)
    parser.add_argument("--per-source", type=int, default=RelayLimits().per_source)
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        limits = RelayLimits(connections=given.connections, per_source=given.per_source)
        _allow_descriptors(limits.connections)
        server, listener = RelayServer(key=read_or_create_relay_key(given.key), limits=limits), _bind(given.listen)
    except PhalanxError as error:
        sys.stderr.write(f"phalanx: error: {error_line(error.message, error.hint)}\n")
        return int(error.exit_code)
    host, port = listener.getsockname()[:2]
    _log.info("listening on %s; the head needs a copy of %s", joined_address(host, port), given.key)
    asyncio.run(_serve(server, listener))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Requests to the head: HTTP over a persistent connection, one Connection per thread.

Follows the head to another address or leader (`head_address`), and turns every answer into a body or one of three errors that define the
next step. Retries only when the head had closed a persistent connection: every route is idempotent.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.node.head_link.head_address import HeadAddress
from phalanx.node.head_link.peer_account import check_peer_account
from phalanx.wire.head_http import BROKEN, HeadError, HeadHttp, context_for_file, parse_error, request_headers

_BODY_MAX: Final = 1 << 30  # an uploaded working directory is at most 100 MB; this bounds invalid answers
_CONNECT_S: Final = 5.0
_TRIES: Final = 2  # the known address, and the next one; a broken persistent connection does not count


class HeadUnavailable(Exception):
    """The head does not answer, or (`answered`) it cannot serve the request now. The same request may succeed later."""

    def __init__(self, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered


class RegistrationRequired(Exception):
    """The head does not know this incarnation of the supervisor: register, then repeat the request."""


class RequestRejected(Exception):
    """The head rejects this request permanently; do not repeat it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.code = code
        self.message = message


class HeadIsStandby(HeadUnavailable):
    """That head is in standby. `leader`: the address of the leader; empty if it knows none."""

    def __init__(self, message: str, leader: str) -> None:
        super().__init__(message, answered=True)
        self.leader = leader


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAccess:
    """The parameters of a connection: the address, the node's token, and the CA of a head that uses TLS.

    `head_uids`: accounts that a head on this machine may run under, besides root and ours.
    """

    address: HeadAddress
    token: str
    ca_file: str | None = None
    head_uids: frozenset[int] = frozenset()


class HeadConnection:
    """One persistent connection, for one thread. `protocol`: offered in TLS beside HTTP/1.1, if it is set."""

    def __init__(self, access: HeadAccess, *, protocol: str = "") -> None:
        self._access = access
        self._protocol = protocol
        self._url = ""
        self._http: HeadHttp | None = None
        access.address.on_change(self._cut)

    def call(self, method: str, path: str, body: bytes | None = None, *, timeout_s: float) -> bytes:
        """Send a request; returns the answer's body.

        Raises:
            HeadUnavailable: no answer in time, or the head asks to retry later.
            RegistrationRequired: the head requires a registration first.
            RequestRejected: the head will never accept this request.
        """
        response = self._send(method, path, body, timeout_s)
        try:
            data = response.read(_BODY_MAX)
        except BROKEN as error:
            self.close()
            raise HeadUnavailable(f"{method} {path}: {error!r}") from error
        return self._body_or_error(response.status, data, f"{method} {path}")

    def download(self, path: str, file: int, *, timeout_s: float) -> None:
        """Write the answer's body to a descriptor.

        Raises:
            HeadUnavailable, RegistrationRequired, RequestRejected: as `call`.
        """
        response = self._send("GET", path, None, timeout_s)
        try:
            if response.status != 200:
                self._body_or_error(response.status, response.read(_BODY_MAX), f"GET {path}")
                raise HeadUnavailable(f"GET {path}: status {response.status}")
            while piece := _read(response, f"GET {path}"):
                view = memoryview(piece)
                while view:
                    view = view[os.write(file, view) :]
        except http.client.HTTPException as error:
            self.close()
            raise HeadUnavailable(f"GET {path}: {error!r}") from error
        except HeadUnavailable:
            self.close()
            raise

    def close(self) -> None:
        """Drop the connection; the next call opens another."""
        if self._http is not None:
            self._http.close()
            self._http = None

    def _send(self, method: str, path: str, body: bytes | None, timeout_s: float) -> http.client.HTTPResponse:
        headers = request_headers(self._access.token, "" if body is None else "application/json")
        tries = 0
        while True:
            kept = self._http is not None and self._url == self._access.address.url
            try:
                return self._connection().request(
                    method,
                    path,
                    body,
                    headers=headers,
                    timeout_s=timeout_s,
                    connect_timeout_s=min(timeout_s, _CONNECT_S),
                )
            except TimeoutError as error:
                self.close()
                self._access.address.switch_head(self._url)
                raise HeadUnavailable(f"{method} {path}: no answer in {timeout_s:g} s from {self._url}") from error
            except BROKEN as error:
                self.close()
                if kept:
                    continue  # closed by the head while idle, which is no sign of a failure
                tries += 1
                self._access.address.switch_head(self._url)
                if tries == _TRIES or self._access.address.url == self._url:
                    raise HeadUnavailable(f"{method} {path}: {self._url}: {error!r}") from error

    def _body_or_error(self, status: int, data: bytes, what: str) -> bytes:
        try:
            return _checked_body(status, data, what)
        except HeadIsStandby as error:
            self._access.address.follow_referral(self._url, error.leader)
            raise

    def _cut(self) -> None:
        """Interrupt a request to a head that is no longer the current one; called from another thread."""
        connection = self._http
        wire = None if connection is None else connection.wire
        if wire is None or self._url == self._access.address.url:
            return
        # A duplicate descriptor: `shutdown` of a TLS socket is not thread-safe.
        with contextlib.suppress(OSError, ValueError), socket.socket(fileno=os.dup(wire.fileno())) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)

    def _connection(self) -> HeadHttp:
        url = self._access.address.url
        if self._http is None or url != self._url:
            self.close()
            self._url = url
            try:
                self._http = HeadHttp(url, self._trust, check_plain_peer=self._check_peer)
            except BadRequest as error:
                raise HeadUnavailable(error.message) from error
        return self._http

    def _trust(self) -> ssl.SSLContext:
        context = context_for_file(self._access.ca_file)
        if self._protocol:
            context.set_alpn_protocols([self._protocol, "http/1.1"])
        return context

    def _check_peer(self, wire: socket.socket) -> None:
        check_peer_account(wire, self._access.head_uids)


def _read(response: http.client.HTTPResponse, what: str) -> bytes:
    """The next bytes of a body. A broken connection means HeadUnavailable; other system errors are of this node's disk."""
    try:
        return response.read(1 << 18)
    except OSError as error:
        raise HeadUnavailable(f"{what}: {error!r}") from error


def _checked_body(status: int, data: bytes, what: str) -> bytes:
    if 200 <= status < 300:
        return data
    code, message, _, leader = parse_error(data) or HeadError("", data[:200].decode(errors="replace"))
    if status == 409 and code == "say_hello":
        raise RegistrationRequired(message)
    if status == 503 and code == "not_leading":
        raise HeadIsStandby(f"{what}: {message}", leader)
    if status in {408, 425, 429} or status >= 500:
        raise HeadUnavailable(f"{what}: {status} {code} {message}", answered=True)
    raise RequestRejected(status, code, message)

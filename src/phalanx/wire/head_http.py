"""The HTTP connection to a head that clients, supervisors and joining servers share: TLS trust, timeouts, headers, error replies.

It sends nothing over plain HTTP to another machine, unless the caller checks the peer itself or PHALANX_INSECURE permits it. The
caller decides about retries and about what an error means.
"""

from __future__ import annotations

import functools
import http.client
import json
import re
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, Final, NamedTuple

from phalanx.core.errors import BadFile
from phalanx.core.hints import parse_hint
from phalanx.wire.head_url import check_encrypted, split_url

FINGERPRINT_PREFIX: Final = "sha256:"
_CERTIFICATE: Final = r"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----"

_JOINED_MAX: Final = (
    65536  # bytes of a body that is copied behind its headers: a larger one costs more to copy than to send apart
)

BROKEN: Final = (OSError, http.client.HTTPException)
"""The head did not answer, or the connection broke."""

Body = bytes | IO[bytes] | Iterable[bytes] | None


class _JoinedConnection(http.client.HTTPConnection):
    """Sends a small body together with the headers: one system call here, and one wake-up of the head."""

    _held: bytes | None = None

    def request_joined(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
        """Send a request; as `request` does, in one piece."""
        self._held = b""
        try:
            self.request(method, path, body=body, headers=headers)
            held, self._held = self._held, None
            self.send(held)
        finally:
            self._held = None

    def send(self, data: Any) -> None:
        """Send bytes, or hold them while a request is put together."""
        if self._held is None:
            super().send(data)
        else:
            self._held += data


class _JoinedTlsConnection(_JoinedConnection, http.client.HTTPSConnection):
    """The same through TLS."""


class HeadHttp:
    """One persistent connection, for one thread. A request reconnects where the head has closed it after the last reply.

    Args:
        url: of the head.
        trust: returns the TLS context; called only for https.
        check_plain_peer: rejects the peer of a plain connection, before anything is sent to it. None applies `check_encrypted`.

    Raises:
        BadRequest: the URL is malformed, or plain HTTP to another machine.
    """

    def __init__(
        self,
        url: str,
        trust: Callable[[], ssl.SSLContext],
        *,
        check_plain_peer: Callable[[socket.socket], None] | None = None,
    ) -> None:
        secure, host, port = split_url(url)
        if check_plain_peer is None:
            check_encrypted(url)
        self._check_peer = None if secure else check_plain_peer
        self._http = _JoinedTlsConnection(host, port, context=trust()) if secure else _JoinedConnection(host, port)
        self._http.auto_open = 0  # only `_connect` may open it, because it checks the peer
        self.wire: socket.socket | None = None  # of the last request

    def request(
        self,
        method: str,
        path: str,
        body: Body = None,
        *,
        headers: Mapping[str, str],
        timeout_s: float,
        connect_timeout_s: float | None = None,
    ) -> http.client.HTTPResponse:
        """Send a request and return the reply, body unread.

        Args:
            method: HTTP method.
            path: with query string.
            body: of the request.
            headers: of the request; `request_headers` returns the common ones.
            timeout_s: of each send and receive.
            connect_timeout_s: of a new connection; None for `timeout_s`.

        Raises:
            OSError, HTTPException: the head did not answer, or the connection broke (BROKEN).
        """
        if self._http.sock is None:
            self._connect(timeout_s if connect_timeout_s is None else connect_timeout_s)
        self.wire = self._http.sock
        self.wire.settimeout(timeout_s)
        try:
            if isinstance(body, bytes) and len(body) <= _JOINED_MAX:
                self._http.request_joined(method, path, body, dict(headers))
            else:
                self._http.request(method, path, body=body, headers=dict(headers))
        except (BrokenPipeError, ConnectionResetError):
            pass  # the head may have refused the request before all of it was sent: read its reply
        return self._http.getresponse()

    def open_socket(self, timeout_s: float) -> socket.socket:
        """Connect and return the socket, for a protocol other than HTTP requests; the caller closes it. Raises as `request` does."""
        self._connect(timeout_s)
        opened, self._http.sock = self._http.sock, None
        opened.settimeout(None)
        return opened

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        self._http.close()

    def _connect(self, timeout_s: float) -> None:
        self._http.timeout = timeout_s
        try:
            self._http.connect()
            if self._check_peer is not None:
                self._check_peer(self._http.sock)
        except BaseException:
            self._http.close()
            raise


def request_headers(token: str, content_type: str = "") -> dict[str, str]:
    """Return the headers of every request with a token. `content_type`: of its body."""
    headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
    return {**headers, "Content-Type": content_type} if content_type else headers


class HeadError(NamedTuple):
    """The error that a head names in a reply. `leader`: URL of the leading head, if the error is `not_leading` and it is known."""

    code: str
    message: str
    hint: str = ""
    leader: str = ""


def parse_error(payload: bytes) -> HeadError | None:
    """Return the error in the body of a reply; None if the body has none."""
    try:
        error = json.loads(payload)["error"]
        hint = parse_hint(str(error.get("hint") or ""), error.get("hint_code"), error.get("hint_args"))
        return HeadError(str(error["code"]), str(error["message"]), hint, str(error.get("leader") or ""))
    except (ValueError, KeyError, TypeError):
        return None


@functools.cache
def context_for_ca(ca_pem: str) -> ssl.SSLContext:
    """Return a TLS context that trusts only this CA."""
    return ssl.create_default_context(cadata=ca_pem)


def context_for_file(ca_file: str | None) -> ssl.SSLContext:
    """Return a TLS context that trusts the CAs in a file; None for those of the system.

    Raises:
        OSError: the file cannot be read, or has no certificate.
    """
    return ssl.create_default_context(cafile=ca_file)


def unverified_context() -> ssl.SSLContext:
    """Return a TLS context that verifies nothing: only for a reply that is verified in another way, and never with a secret."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def fingerprint(certificate_pem: str) -> str:
    """Return the SHA-256 of the first certificate of a PEM text, over its DER form, as `sha256:<64 hex digits>`.

    Raises:
        BadFile: the text has no certificate.
    """
    import base64
    import hashlib

    found = re.search(_CERTIFICATE, certificate_pem, re.DOTALL)
    try:
        der = base64.b64decode("".join((found[1] if found else "").split()), validate=True)
    except ValueError:
        der = b""
    if not der:
        raise BadFile("no PEM certificate found", hint="GET /v1/ca returns the head's certificate")
    return FINGERPRINT_PREFIX + hashlib.sha256(der).hexdigest()

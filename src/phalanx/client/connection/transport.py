"""HTTP transport of the client: persistent connections, retries of idempotent requests, errors as Phalanx classes.

Only idempotent requests are retried: reads, PUT, DELETE, PATCH, and requests with an idempotency key. A first contact fails within a
second; a head that this client has reached before is retried for longer.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from phalanx.client.connection.clusters import chosen_cluster
from phalanx.client.connection.discovery import find_token, find_urls, own_ca_file
from phalanx.core.errors import BY_CODE, BadRequest, NotLeading, PhalanxError, TryLater, Unreachable
from phalanx.core.hints import Hint, HintCode
from phalanx.wire.head_http import (
    BROKEN,
    Body,
    HeadError,
    HeadHttp,
    context_for_ca,
    parse_error,
    request_headers,
)
from phalanx.wire.head_url import joined_address, split_url, split_urls

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

FIRST_PATIENCE_S: Final = 0.5  # a dead head is reported within a second (issue: what must be seen)
PATIENCE_S: Final = 30.0  # a head with 10,000 jobs restarts in a few seconds
REPLY_TIMEOUT_S: Final = 60.0  # for long polls, uploads and archives: longer than the longest poll of the head
ANSWER_S: Final = 5.0  # for all other calls: a stopped or overloaded head is reported, not waited for
ANSWER_OF_SEVERAL_S: Final = 3.0  # the same with several heads, where another may lead by now: a leader's lease
WEBSOCKET_CLOSE_S: Final = 1.0  # for the closing handshake
OUTAGE_REPORT_S: Final = 3.0  # of retries; most restarts of a head are over by then
_PAUSE_S: Final = 0.05
_PAUSE_MAX_S: Final = 1.0
_SHUN_S: Final = 3.0  # how long a redirect to a head that just timed out is ignored: a leader's lease
_SAFE: Final = frozenset({"GET", "HEAD", "PUT", "DELETE", "PATCH"})


class Outage(NamedTuple):
    """`message`: why the head cannot be reached; `left_s`: how long it is still retried."""

    message: str
    left_s: float


class Transport:
    """Requests to one cluster. Thread-safe; each thread has its own connection."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        home: str | None = None,
        retry_limit_s: float = PATIENCE_S,
        answer_timeout_s: float = ANSWER_S,
        ca: str = "",
        on_outage: Callable[[Outage | None], None] = lambda _: None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`on_outage`: called once when retries last OUTAGE_REPORT_S, and with None when the head answers again."""
        self._url, self._token, self._home, self._ca = url, token, home, ca
        self._on_outage, self._outage_reported = on_outage, False
        self._failing_since: float | None = None
        self._patience_s, self._answer_s = retry_limit_s, answer_timeout_s
        self._tokens: dict[str, str] = {}
        self._monotonic, self._sleep = monotonic, sleep
        self._reached = False
        self._own = threading.local()
        self._current = ""  # the head in use, of several
        self._several = False  # several heads were known at the last lookup
        self._silent: dict[str, float] = {}  # url -> time at which it did not answer

    def url(self) -> str:
        """Return the URL of the head in use. A restarted head may have another one."""
        return self._current or self.known_urls()[0]

    def known_urls(self) -> list[str]:
        """Return the URLs of all known heads, in the order in which they are tried.

        Raises:
            Unreachable: no head is known.
        """
        found = split_urls(self._url) if self._url else find_urls(self._home)
        self._several = len(found) > 1
        return found

    def _untried(self) -> bool:
        """Return whether the next head has not timed out yet. It is tried even if the retry time is over."""
        return bool(self._current) and self._current not in self._silent

    def try_next_head(self, failed: str) -> bool:
        """Switch to the next head after `failed` did not answer; return whether there is another. A single head is looked up again."""
        self._silent[failed] = self._monotonic()
        try:
            heads = self.known_urls()
        except PhalanxError:
            heads = []
        others = [url for url in heads if url != failed]
        if self._current in ("", failed):
            after = heads.index(failed) if failed in heads else -1
            self._current = next((url for url in [*heads[after + 1 :], *heads] if url != failed), "")
        return bool(others)

    def _refer(self, asked: str, leader: str) -> None:
        """Follow the redirect of the standby at `asked`, unless its leader timed out a moment ago: the standby may not know yet."""
        silent_s = self._silent.get(leader)
        if leader and (silent_s is None or self._monotonic() - silent_s > _SHUN_S):
            self._current = leader
        else:
            self._current = asked  # it will know the next leader

    def headers(self) -> dict[str, str]:
        """Return the headers of every request."""
        token = self._token
        if not token:
            url = self.url()
            # While the head restarts, the folder may not say to which head its token belongs
            token = self._tokens.get(url)
            if token is None:
                token = self._tokens[url] = find_token(self._home, url)
        return request_headers(token)

    def json(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        idempotent: bool | None = None,
        timeout_s: float | None = None,
    ) -> bytes:
        """Send a JSON request and return the body of the reply.

        Args:
            method: HTTP method.
            path: with query string.
            body: JSON.
            idempotent: whether the request is idempotent and may be retried; None decides by the method.
            timeout_s: of the reply; None for that of a short call.

        Raises:
            PhalanxError: the head refused the request, or cannot be reached.
        """
        return self.send(
            method, path, body, idempotent=method in _SAFE if idempotent is None else idempotent, timeout_s=timeout_s
        )

    def send(
        self,
        method: str,
        path: str,
        body: Body,
        *,
        idempotent: bool,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        on_headers: Callable[[http.client.HTTPMessage], None] | None = None,
    ) -> bytes:
        """Send a request with any body. A body that can be read only once must not be retried. `on_headers` gets those of the reply, also of a refusal."""
        retry = Retry(self)
        url = ""
        while True:
            try:
                url = self.url()
                limit_s = self._limit_s() if timeout_s is None else timeout_s
                sent = {**self.headers(), **(headers or {})}
                reply = self._exchange(method, path, body, sent, fresh=not idempotent, timeout_s=limit_s)
                payload = reply.read()
            except (*BROKEN, Unreachable) as error:
                self.close_connection()
                another = self.try_next_head(url)
                # A follower retries after a timeout; other calls fail after the first one, unless another head may answer.
                silent = isinstance(error, TimeoutError) and self.retry_limit_s() < REPLY_TIMEOUT_S and not another
                retry.wait_or_raise(
                    error,
                    retryable=not silent and (idempotent or _never_sent(error)),
                    other_head_untried=another and self._untried(),
                )
                continue
            self._reached = True
            if on_headers is not None:
                on_headers(reply.headers)
            if reply.status < 300:
                self._note_reply()
                return payload
            bodiless = method == "HEAD"
            refusal = error_from_reply(
                reply.status, payload, f"{method} {path.partition('?')[0]}", "" if bodiless else url
            )
            if refusal.http_status != 503:
                self._note_reply()
            if isinstance(refusal, NotLeading) and _rewound(body):  # the request had no effect
                self.close_connection()
                self._reached = True  # the cluster is reachable and will elect a leader
                self._refer(url, refusal.leader)
                retry.wait_or_raise(refusal, retryable=True)
                continue
            if isinstance(refusal, TryLater) and not idempotent and _read_again(body):
                self.close_connection()
                self._reached = True
            elif not (refusal.http_status == 503 and idempotent):
                raise refusal
            retry.wait_or_raise(refusal, retryable=True)

    def open(
        self, path: str, headers: Mapping[str, str], *, timeout_s: float = REPLY_TIMEOUT_S
    ) -> http.client.HTTPResponse:
        """Return a reply to read in pieces, on a connection of its own. Raises as `stream` does."""
        return self.stream(path, headers, timeout_s=timeout_s)[0]

    def stream(
        self, path: str, headers: Mapping[str, str], *, timeout_s: float
    ) -> tuple[http.client.HTTPResponse, socket.socket]:
        """Return such a reply with its socket, whose timeout may be changed between two reads.

        Raises:
            PhalanxError: the head refused the request.
            OSError, HTTPException: the head cannot be reached; the caller decides about a retry.
        """
        url = self.url()
        connection = None
        try:
            connection = self._connection()
            sent = {**self.headers(), **headers, "Connection": "close"}
            reply = connection.request("GET", path, headers=sent, timeout_s=timeout_s)
            if reply.status >= 300:
                raise error_from_reply(reply.status, reply.read(), f"GET {path.partition('?')[0]}", url)
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, NotLeading):
                self._refer(url, error.leader)
            elif isinstance(error, BROKEN):
                self.try_next_head(url)
            raise
        self._reached = True
        self._note_reply()
        assert connection.wire is not None
        return reply, connection.wire

    def websocket(self, path: str) -> ClientConnection:
        """Return an open WebSocket; the caller closes it. Retried until it is open, as that has no effect.

        Raises:
            PhalanxError: the head refused it, or cannot be reached.
        """
        retry = Retry(self)
        url = ""
        while True:
            try:
                url = self.url()
                connection = self._upgrade(path)
            except NotLeading as refusal:
                self._reached = True
                self._refer(url, refusal.leader)
                retry.wait_or_raise(refusal, retryable=True)
            except (*BROKEN, Unreachable) as error:
                another = self.try_next_head(url)
                retry.wait_or_raise(error, retryable=True, other_head_untried=another and self._untried())
            else:
                self._reached = True
                self._note_reply()
                return connection

    def _upgrade(self, path: str) -> ClientConnection:
        """Open a WebSocket on a new connection. Its messages wait in memory: its protocol must bound them."""
        import logging

        from websockets.exceptions import InvalidHandshake, InvalidStatus
        from websockets.sync.client import connect

        from phalanx.client.connection.shared_tls import SharedTlsSocket

        logger = logging.getLogger("phalanx.client.websocket")
        # At DEBUG it would log the token; its errors are raised as well, and would be printed with a traceback on the user's terminal.
        logger.setLevel(logging.CRITICAL)
        headers = self.headers()
        sock = self._connection().open_socket(self._limit_s())
        if isinstance(sock, ssl.SSLSocket):  # websockets reads in a thread of its own
            sock = cast(socket.socket, SharedTlsSocket(sock))
        _, host, port = split_url(self.url())
        try:
            return connect(
                f"ws://{joined_address(host, port)}{path}",  # the socket has TLS already, if its URL says so
                sock=sock,
                additional_headers=headers,
                user_agent_header=None,
                compression=None,
                proxy=None,
                open_timeout=self._limit_s(),
                close_timeout=WEBSOCKET_CLOSE_S,
                max_queue=None,
                logger=logger,
                legacy=True,
            )
        except InvalidStatus as refusal:
            reply = refusal.response
            raise error_from_reply(reply.status_code, bytes(reply.body), f"WEBSOCKET {path}") from refusal
        except (InvalidHandshake, EOFError) as error:
            raise ConnectionError(str(error)) from error

    def close_connection(self) -> None:
        """Close the connection of this thread."""
        connection = getattr(self._own, "connection", None)
        if connection is not None:
            connection.close()
            self._own.connection = None

    def _limit_s(self) -> float:
        """Return the timeout of a short call."""
        return min(self._answer_s, ANSWER_OF_SEVERAL_S) if self._several else self._answer_s

    def retry_limit_s(self) -> float:
        """Return how long a head that does not answer is retried, in seconds."""
        return self._patience_s if self._reached else min(FIRST_PATIENCE_S, self._patience_s)

    def note_retry(self, error: BaseException, left_s: float) -> None:
        """Report an outage, once, when it has lasted so long that the user wonders."""
        if self._failing_since is None:
            self._failing_since = self._monotonic()
        is_brief = self._monotonic() - self._failing_since < OUTAGE_REPORT_S and not isinstance(error, TimeoutError)
        if self._outage_reported or is_brief or left_s <= 0:
            return
        self._outage_reported = True
        found = error if isinstance(error, PhalanxError) else unreachable_error(self, error)
        self._on_outage(Outage(found.message, left_s))

    def _note_reply(self) -> None:
        self._failing_since = None
        if self._outage_reported:
            self._outage_reported = False
            self._on_outage(None)

    def now(self) -> float:
        """Return the time of the clock that limits retries, in seconds."""
        return self._monotonic()

    def pause(self, seconds: float) -> None:
        """Sleep before a retry."""
        self._sleep(seconds)

    def _exchange(
        self, method: str, path: str, body: Body, headers: Mapping[str, str], *, fresh: bool, timeout_s: float
    ) -> http.client.HTTPResponse:
        """Send a request and return the reply, body unread. `fresh` opens a new connection: the head may have closed the old one."""
        if fresh:
            self.close_connection()
        connection = getattr(self._own, "connection", None)
        if connection is None:
            connection = self._own.connection = self._connection()
        reply: http.client.HTTPResponse = connection.request(method, path, body, headers=headers, timeout_s=timeout_s)
        return reply

    def _connection(self) -> HeadHttp:
        """Return a connection to the current head, not yet open."""
        url = self.url()
        return HeadHttp(url, lambda: self.trust(url))

    def trust(self, url: str) -> ssl.SSLContext:
        """Return the TLS context for the head at `url`.

        Raises:
            PhalanxError: its CA cannot be read, or has another fingerprint.
        """
        if self._ca:
            return context_for_ca(self._ca)
        from phalanx.client.connection.tls import (  # plain HTTP on this machine needs no trust
            cluster_context,
            context_for,
        )

        cluster = None if self._url or self._home else chosen_cluster()
        if cluster is not None:
            return cluster_context(url, cluster)
        elsewhere = self._url or (os.environ.get("PHALANX_URL") and self._home is None)
        return context_for(url, None if elsewhere else own_ca_file(self._home, url))


class Retry:
    """Decides whether and when a request is retried."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._began = transport.now()
        self._pause_s = _PAUSE_S

    def reset(self) -> None:
        """Restart the retry time: the head has answered."""
        self._began = self._transport.now()
        self._pause_s = _PAUSE_S

    def wait_or_raise(self, error: BaseException, *, retryable: bool, other_head_untried: bool = False) -> None:
        """Sleep before the next attempt.

        Args:
            error: why the last attempt failed.
            retryable: whether the request may be retried.
            other_head_untried: retry even if the retry time is over, because the next head has not been tried yet.

        Raises:
            PhalanxError: the request may not be retried, or the retry time is over.
        """
        left_s = self._began + self._transport.retry_limit_s() - self._transport.now()
        if not retryable or (left_s <= 0 and not other_head_untried):
            raise error if isinstance(error, PhalanxError) else unreachable_error(self._transport, error)
        self._transport.note_retry(error, left_s)
        self._transport.pause(max(0.0, min(self._pause_s, left_s)))
        self._pause_s = min(self._pause_s * 2, _PAUSE_MAX_S)


def unreachable_error(transport: Transport, error: BaseException) -> Unreachable:
    """Return the error for a broken connection."""
    try:
        where = transport.url()
    except PhalanxError as gone:
        return Unreachable(gone.message, hint=gone.hint)
    if isinstance(error, TimeoutError):
        return Unreachable(
            f"the head at {where} does not answer; it may be stopped or overloaded", hint=Hint(HintCode.CHECK_HEAD)
        )
    if where.startswith("https://"):
        from phalanx.client.connection.tls import handshake_error

        tls_error = handshake_error(error, where)
        if tls_error is not None:
            return tls_error
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
        why = "another program listens there, which does not speak HTTP"
    return Unreachable(f"the head at {where} does not answer: {why}", hint=Hint(HintCode.CHECK_OR_START_HEAD))


def error_from_reply(status: int, payload: bytes, what: str, url: str = "") -> PhalanxError:
    """Return the error in a reply, as the class that its code names.

    A head always names one. With `url`, a reply without one is said to be of another server, or of a proxy in front of a head.
    """
    error = parse_error(payload)
    if error is None and status < 500 and url:
        return BadRequest(
            f"{url} answers, but is no head of Phalanx: {what} has status {status}", hint=Hint(HintCode.USE_PRINTED_URL)
        )
    code, message, hint, leader = error or HeadError("", _without_reason(status, what, url), Hint(HintCode.CHECK_HEAD))
    if code == NotLeading.code:
        return NotLeading(message, hint=hint, leader=leader)
    kind = BY_CODE.get(code) or next((k for k in BY_CODE.values() if k.http_status == status), PhalanxError)
    return kind(message, hint=hint)


def _without_reason(status: int, what: str, url: str) -> str:
    if not url:
        return f"{what}: status {status} without a reason"
    return (
        f"{url} answers {what} with status {status}, but not as a head: a proxy may stand before one that does not run"
    )


def _rewound(body: Body) -> bool:
    """Rewind the body; return whether it can be sent again."""
    if body is None or isinstance(body, bytes):
        return True
    rewind = getattr(body, "seek", None)  # an iterable has none
    if rewind is None:
        return False
    rewind(0)
    return True


def _read_again(body: Body) -> bool:
    """Rewind a body that is a file; return whether it can be sent again. An upload is idempotent: its path is its hash."""
    return body is not None and not isinstance(body, bytes) and _rewound(body)


def _never_sent(error: BaseException) -> bool:
    """Return whether the request certainly did not reach the head."""
    return isinstance(error, (ConnectionRefusedError, Unreachable, socket.gaierror))

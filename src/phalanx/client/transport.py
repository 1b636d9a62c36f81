"""One request and its reply, over http.client: kept connections, retries that cannot do a thing twice, errors as our classes.

A request is sent again only if that is harmless: reading, setting, removing, and what carries an idempotency key. How long depends on
whether this client has ever reached its head: a first contact fails within a second, a head that was there is waited for.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, Final

from phalanx.client.discovery import authority, find_token, find_urls, split_url, split_urls
from phalanx.core.errors import BY_CODE, NotLeading, PhalanxError, TryLater, Unreachable

FIRST_PATIENCE_S: Final = 0.5  # a dead head is told within a second (issue: what must be seen)
PATIENCE_S: Final = 30.0  # a head that restarts with 10,000 jobs is back in a few seconds
REPLY_TIMEOUT_S: Final = 60.0  # of long polls, uploads and archives: over the longest poll that the head grants
ANSWER_S: Final = 5.0  # of all else: a head that is stopped or overloaded is told, not waited for
ANSWER_AMONG_S: Final = 3.0  # the same where another head may lead by now: as long as a leader's lease
_PAUSE_S: Final = 0.05
_PAUSE_MAX_S: Final = 1.0
_SHUN_S: Final = 3.0  # a head that was silent is not gone back to on a standby's word: as long as a leader's lease
_SAFE: Final = frozenset({"GET", "HEAD", "PUT", "DELETE", "PATCH"})
_BROKEN: Final = (OSError, http.client.HTTPException)

Body = bytes | IO[bytes] | Iterable[bytes] | None


class Transport:
    """Requests to one head. Threads may share it; each has a connection of its own."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        home: str | None = None,
        patience_s: float = PATIENCE_S,
        answer_s: float = ANSWER_S,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._url, self._token, self._home = url, token, home
        self._patience_s, self._answer_s = patience_s, answer_s
        self._tokens: dict[str, str] = {}
        self._monotonic, self._sleep = monotonic, sleep
        self._reached = False
        self._own = threading.local()
        self._at = ""  # of several heads the one that we speak to
        self._among = False  # several heads were known when we looked last
        self._silent: dict[str, float] = {}  # url -> when it did not answer

    def url(self) -> str:
        """Where the head is now; a restarted one may be elsewhere."""
        return self._at or self._heads()[0]

    def _heads(self) -> list[str]:
        found = split_urls(self._url) if self._url else find_urls(self._home)
        self._among = len(found) > 1
        return found

    def _untried(self) -> bool:
        """Whether the head to ask next has not been found silent yet: it is asked, however short the patience."""
        return bool(self._at) and self._at not in self._silent

    def look_elsewhere(self, failed: str) -> bool:
        """After `failed` did not answer: whether there is another head to ask. Where there is one alone, it is looked for anew."""
        self._silent[failed] = self._monotonic()
        try:
            heads = self._heads()
        except PhalanxError:
            heads = []
        others = [url for url in heads if url != failed]
        if self._at in ("", failed):
            after = heads.index(failed) if failed in heads else -1
            self._at = next((url for url in [*heads[after + 1 :], *heads] if url != failed), "")
        return bool(others)

    def _refer(self, asked: str, leader: str) -> None:
        """The head at `asked` stands by. Its word counts, but for a leader that was silent a moment ago: it may not know that yet."""
        silent_s = self._silent.get(leader)
        if leader and (silent_s is None or self._monotonic() - silent_s > _SHUN_S):
            self._at = leader
        else:
            self._at = asked  # whoever takes over, this one will know

    def headers(self) -> dict[str, str]:
        """What every request carries."""
        token = self._token
        if not token:
            url = self.url()
            token = self._tokens.get(url)  # while its head restarts the folder may not say whose the token is
            if token is None:
                token = self._tokens[url] = find_token(self._home, url)
        return {"Authorization": f"Bearer {token}", "Accept": "application/json"}

    def json(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        again: bool | None = None,
        timeout_s: float | None = None,
    ) -> bytes:
        """The body of the reply to a JSON request.

        Args:
            method: of HTTP.
            path: with its query.
            body: JSON.
            again: whether the request may be sent twice; None lets the method decide.
            timeout_s: how long its answer may take; None for that of a short call.

        Raises:
            PhalanxError: the head refused, or cannot be reached.
        """
        return self.send(method, path, body, again=method in _SAFE if again is None else again, timeout_s=timeout_s)

    def send(
        self,
        method: str,
        path: str,
        body: Body,
        *,
        again: bool,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> bytes:
        """The same for any body; one that is read only once must not be sent again."""
        retry = Retry(self)
        url = ""
        while True:
            try:
                url = self.url()
                limit_s = self._limit_s() if timeout_s is None else timeout_s
                sent = {**self.headers(), **(headers or {})}
                reply = self._exchange(method, path, body, sent, fresh=not again, timeout_s=limit_s)
                payload = reply.read()
            except (*_BROKEN, Unreachable) as error:
                self.drop()
                another = self.look_elsewhere(url)
                # Who has the patience of a follower goes on asking; others are told after one silence, unless another head may know.
                silent = isinstance(error, TimeoutError) and self.patience() < REPLY_TIMEOUT_S and not another
                retry.after(
                    error, again=not silent and (again or _never_sent(error)), once_more=another and self._untried()
                )
                continue
            self._reached = True
            if reply.status < 400:
                return payload
            refusal = refusal_of(reply.status, payload, f"{method} {path.partition('?')[0]}")
            if isinstance(refusal, NotLeading) and _rewound(body):  # it did nothing with the request
                self.drop()
                self._reached = True  # the cluster is there, and will be led
                self._refer(url, refusal.leader)
                retry.after(refusal, again=True)
                continue
            if isinstance(refusal, TryLater) and not again and _read_again(body):
                self.drop()
                self._reached = True
            elif not (refusal.http_status == 503 and again):
                raise refusal
            retry.after(refusal, again=True)

    def open(
        self, path: str, headers: Mapping[str, str], *, timeout_s: float = REPLY_TIMEOUT_S
    ) -> http.client.HTTPResponse:
        """A reply to be read piece by piece, on a connection of its own that ends with it; raises what `stream` does."""
        return self.stream(path, headers, timeout_s=timeout_s)[0]

    def stream(
        self, path: str, headers: Mapping[str, str], *, timeout_s: float
    ) -> tuple[http.client.HTTPResponse, socket.socket]:
        """Such a reply with the socket it comes by, whose timeout may be changed between two reads.

        Raises:
            PhalanxError: the head refused.
            OSError, HTTPException: it cannot be reached; the caller knows whether another try helps.
        """
        url = self.url()
        connection = None
        try:
            connection = self._connect(timeout_s)
            connection.request("GET", path, headers={**self.headers(), **headers, "Connection": "close"})
            wire = connection.sock
            reply = connection.getresponse()
            if reply.status >= 400:
                raise refusal_of(reply.status, reply.read(), f"GET {path.partition('?')[0]}")
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, NotLeading):
                self._refer(url, error.leader)
            elif isinstance(error, _BROKEN):
                self.look_elsewhere(url)
            raise
        self._reached = True
        return reply, wire

    def drop(self) -> None:
        """Close this thread's connection."""
        connection = getattr(self._own, "connection", None)
        if connection is not None:
            connection.close()
            self._own.connection = None

    def _limit_s(self) -> float:
        """How long a short answer may take."""
        return min(self._answer_s, ANSWER_AMONG_S) if self._among else self._answer_s

    def patience(self) -> float:
        """How long a head that does not answer is waited for."""
        return self._patience_s if self._reached else min(FIRST_PATIENCE_S, self._patience_s)

    def now(self) -> float:
        """Seconds of the clock that patience is measured on."""
        return self._monotonic()

    def pause(self, seconds: float) -> None:
        """Wait before another try."""
        self._sleep(seconds)

    def _exchange(
        self, method: str, path: str, body: Body, headers: Mapping[str, str], *, fresh: bool, timeout_s: float
    ) -> http.client.HTTPResponse:
        """Send and get the reply's head. A connection kept open may have been closed by the head meanwhile, so `fresh` takes a new one."""
        if fresh:
            self.drop()
        connection = getattr(self._own, "connection", None)
        if connection is None:
            connection = self._own.connection = self._connect(timeout_s)
        connection.timeout = timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        try:
            connection.request(method, path, body=body, headers=dict(headers))
        except (BrokenPipeError, ConnectionResetError):
            # Refused before all was sent: what the head has to say is on its way, unless it is gone.
            pass
        reply: http.client.HTTPResponse = connection.getresponse()
        return reply

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        url = self.url()
        secure, name, port = split_url(url)
        if secure:
            from phalanx.client.tls import context_for  # 20 ms of ssl that a head on loopback need not pay

            known_ca = (
                None
                if self._url or (os.environ.get("PHALANX_URL") and self._home is None)
                else authority(self._home, url)
            )
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                name, port, timeout=timeout_s, context=context_for(name, port, known_ca)
            )
        else:
            connection = http.client.HTTPConnection(name, port, timeout=timeout_s)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


class Retry:
    """Whether and when a request is tried again."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._began = transport.now()
        self._pause_s = _PAUSE_S

    def again_after_success(self) -> None:
        """The head answered: patience begins anew."""
        self._began = self._transport.now()
        self._pause_s = _PAUSE_S

    def after(self, error: BaseException, *, again: bool, once_more: bool = False) -> None:
        """Pause before the next try. `once_more`: there is one whatever the patience, for it goes to a head that was not asked yet.

        Raises:
            PhalanxError: there is none: it may not be sent twice, or patience is over.
        """
        left_s = self._began + self._transport.patience() - self._transport.now()
        if not again or (left_s <= 0 and not once_more):
            raise error if isinstance(error, PhalanxError) else unreachable(self._transport, error)
        self._transport.pause(max(0.0, min(self._pause_s, left_s)))
        self._pause_s = min(self._pause_s * 2, _PAUSE_MAX_S)


def unreachable(transport: Transport, error: BaseException) -> Unreachable:
    """What a broken connection means to a user."""
    try:
        where = transport.url()
    except PhalanxError as gone:
        return Unreachable(gone.message, hint=gone.hint)
    if isinstance(error, TimeoutError):
        return Unreachable(
            f"the head at {where} does not answer; it may be stopped or overloaded", hint="phalanx doctor looks into it"
        )
    if where.startswith("https://"):
        from phalanx.client.tls import explained

        told = explained(error, where)
        if told is not None:
            return told
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return Unreachable(
        f"the head at {where} does not answer: {why}", hint="phalanx doctor looks into it; phalanx up starts one"
    )


def refusal_of(status: int, payload: bytes, what: str) -> PhalanxError:
    """The error that a reply carries, as the class whose code it names."""
    body: dict[str, Any] = {}
    try:
        body = json.loads(payload)["error"]
        code, message, hint = str(body["code"]), str(body["message"]), str(body.get("hint", ""))
    except (ValueError, KeyError, TypeError):
        code, message, hint = "", f"{what}: status {status} and no reason", ""
    if code == NotLeading.code:
        return NotLeading(message, hint=hint, leader=str(body.get("leader", "")))
    kind = BY_CODE.get(code) or next((k for k in BY_CODE.values() if k.http_status == status), PhalanxError)
    return kind(message, hint=hint)


def _rewound(body: Body) -> bool:
    """Whether the body can be sent again from its beginning."""
    if body is None or isinstance(body, bytes):
        return True
    rewind = getattr(body, "seek", None)  # an iterable has none
    if rewind is None:
        return False
    rewind(0)
    return True


def _read_again(body: Body) -> bool:
    """Whether the body is a file, which stands at its beginning now: what it asked for was not done, and is kept under its own hash."""
    return body is not None and not isinstance(body, bytes) and _rewound(body)


def _never_sent(error: BaseException) -> bool:
    """Whether the request certainly did not reach the head."""
    return isinstance(error, (ConnectionRefusedError, Unreachable, socket.gaierror))

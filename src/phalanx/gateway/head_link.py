"""The connection to the head: the list of services, the users of keys, and requests for a replica. All of it goes on from memory while the head is away."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import ssl
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from phalanx.core.errors import PhalanxError
from phalanx.core.ids import ProjectId
from phalanx.core.work.users import Action, UserRole
from phalanx.durable_files import replace_file
from phalanx.gateway.load_reports import LoadReporter
from phalanx.gateway.services import RoutedService, ServiceTable
from phalanx.wire.api.head import CurrentUser
from phalanx.wire.api.services import ProjectTerms, ServiceList, ServiceView
from phalanx.wire.head_http import parse_error

T = TypeVar("T")

POLL_S: Final = 0.5
ANSWER_S: Final = 5.0
KEY_FRESH_S: Final = 60.0  # a key that was revoked works at most this long, while the head answers
KEY_STALE_S: Final = 24 * 3600.0  # and at most this long while it does not
KEYS_MAX: Final = 100_000
REJECTED_S: Final = 10.0  # a wrong key is not asked for again
REJECTED_MAX: Final = 10_000
WAKE_EVERY_S: Final = 5.0
AWAY_S: Final = 5.0  # without an answer of the head, after which the log says so
_log: Final = logging.getLogger("phalanx.gateway")


@dataclass(frozen=True, slots=True)
class GatewayHead:
    """How the head is reached.

    Attributes:
        url: called for each request, because a restarted head may have another one, and another head may lead.
        headers: with the gateway's token.
        failed: gets the URL of a head that does not answer, or does not lead, so that `url` returns another one.
        tls: the context for https; None for plain HTTP.
    """

    url: Callable[[], str]
    headers: Callable[[], dict[str, str]]
    failed: Callable[[str], object]
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True, slots=True)
class KeyOwner:
    """The user of a key. `at_s`: monotonic time at which the head said so."""

    user: CurrentUser
    at_s: float


class HeadAway(Exception):
    """The head does not answer. The text says why."""


class HeadLink:
    """Keeps a table of services up to date.

    Args:
        head: how it is reached.
        table: that is kept.
        snapshot: file with the last list of services, from which a gateway starts while the head is away; "" for none.
    """

    def __init__(self, head: GatewayHead, table: ServiceTable, snapshot: str) -> None:
        self._head, self._table, self._snapshot = head, table, snapshot
        self._session: aiohttp.ClientSession | None = None
        self._keys: OrderedDict[bytes, KeyOwner] = OrderedDict()
        self._rejected: OrderedDict[bytes, float] = OrderedDict()  # apart, so that wrong keys displace no good one
        self.load = LoadReporter(table, self._send_load)
        self._asked: dict[bytes, asyncio.Task[CurrentUser | None]] = {}
        self._woken_s: dict[str, float] = {}
        self._saved = b""
        self._away_logged = False
        self.answered_s = 0.0  # monotonic time of the last list; 0 before the first
        self.wake_error: dict[str, str] = {}

    @property
    def away_s(self) -> float:
        """Seconds since the head last answered; infinite before the first answer."""
        return time.monotonic() - self.answered_s if self.answered_s else float("inf")

    async def run(self) -> None:
        """Follow the list of services until cancelled."""
        self._load()
        connector = aiohttp.TCPConnector(ssl=self._head.tls if self._head.tls is not None else True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session:
            self._session = session
            reporting = asyncio.create_task(self.load.run())
            try:
                while not reporting.done():
                    try:
                        await self._refresh()
                    except HeadAway as error:
                        self._log_away(error)
                    await asyncio.sleep(POLL_S)
                await reporting  # it ends by an error alone
            finally:
                reporting.cancel()

    def _log_away(self, error: HeadAway) -> None:
        if self.away_s > AWAY_S and not self._away_logged:
            self._away_logged = True
            _log.warning(
                "No list of services from the head: %s. Requests go on with the last list. Replicas freeze when the head is away for longer than "
                "their lease; requests to them then wait until it is back.",
                error,
            )

    async def _refresh(self) -> None:
        views: list[ServiceView] = []
        terms: list[ProjectTerms] = []
        after = ""
        while True:
            status, payload = await self._ask("GET", f"/v1/services?after={quote(after)}", self._own_headers())
            if status != 200:
                raise HeadAway(refusal_text(status, payload))
            try:
                page = msgspec.json.decode(payload, type=ServiceList)
            except msgspec.MsgspecError as error:
                raise HeadAway(str(error)) from None
            views += page.services
            terms += page.projects
            after = page.next
            if not after:
                break
        self.answered_s = time.monotonic()
        if self._away_logged:
            self._away_logged = False
            _log.warning("The head answers again.")
        self._table.update(views, terms)
        whole = msgspec.json.encode(ServiceList(services=views, projects=terms))
        if whole != self._saved and self._snapshot:
            self._saved = whole
            with contextlib.suppress(OSError):  # only a restart without the head needs it
                replace_file("", self._snapshot, whole)

    def _load(self) -> None:
        if not self._snapshot or not os.path.exists(self._snapshot):
            return
        with contextlib.suppress(OSError, msgspec.MsgspecError), open(self._snapshot, "rb") as file:
            found = msgspec.json.decode(file.read(), type=ServiceList)
            self._table.update(found.services, found.projects)

    async def owner_of(self, key: str) -> CurrentUser | None:
        """Return the user of a key; None for a wrong one.

        Raises:
            HeadAway: the head does not answer, and the key was not used before.
        """
        digest = hashlib.sha256(key.encode()).digest()  # the keys themselves are not kept
        known, now_s = self._keys.get(digest), time.monotonic()
        if now_s - self._rejected.get(digest, -REJECTED_S) < REJECTED_S:
            return None
        if known is not None and now_s - known.at_s < KEY_FRESH_S:
            return known.user
        asked = self._asked.get(digest)
        if asked is None:  # requests with one key that come together ask once
            asked = self._asked[digest] = asyncio.create_task(self._ask_owner(key, digest, known))
            asked.add_done_callback(lambda done: (self._asked.pop(digest, None), done.cancelled() or done.exception()))
        return await asyncio.shield(asked)

    async def _ask_owner(self, key: str, digest: bytes, known: KeyOwner | None) -> CurrentUser | None:
        now_s = time.monotonic()
        try:
            status, payload = await self._ask("GET", "/v1/me", {"Authorization": f"Bearer {key}"})
            if status not in (200, 401, 403):
                raise HeadAway
            user = msgspec.json.decode(payload, type=CurrentUser) if status == 200 else None
        except (HeadAway, msgspec.MsgspecError):
            if known is not None and now_s - known.at_s < KEY_STALE_S:
                return known.user
            raise HeadAway from None
        if user is None:
            self._keys.pop(digest, None)
            _put(self._rejected, digest, now_s, REJECTED_MAX)
        else:
            _put(self._keys, digest, KeyOwner(user, now_s), KEYS_MAX)
        return user

    async def want_replica(self, service: RoutedService) -> None:
        """Ask for a replica of a service that has none awake; at most every few seconds. The load is enough where the number follows it."""
        if service.view.scale:
            if not service.replicas:
                self.load.report_soon()
            return
        name, now_s = str(service.view.name), time.monotonic()
        if now_s - self._woken_s.get(name, -WAKE_EVERY_S) < WAKE_EVERY_S:
            return
        if service.view.asleep_wanted >= service.view.desired > 0:
            change: dict[str, int] = {"awake": 1}
        elif service.view.desired == 0:
            change = {"replicas": service.view.first_replicas}
        else:
            return  # one is on its way
        self._woken_s[name] = now_s
        try:
            status, payload = await self.ask_own("PATCH", f"/v1/services/{name}", msgspec.json.encode(change))
        except HeadAway:
            return
        self.wake_error.pop(name, None)
        if status >= 400:
            self.wake_error[name] = refusal_text(status, payload)

    async def ask_own(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Send JSON with the gateway's own token; returns status and body.

        Raises:
            HeadAway: the head does not answer.
        """
        return await self._ask(method, path, {**self._own_headers(), "Content-Type": "application/json"}, body)

    @contextlib.asynccontextmanager
    async def open_as(
        self,
        key: str,
        method: str,
        path: str,
        *,
        body: bytes | AsyncIterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        silent_s: float = ANSWER_S,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request with a client's key, whose user the head then judges; yields the answer, whose body is read as the caller likes.

        Args:
            key: the client's.
            method: of the request.
            path: with its query.
            body: of the request, whole or in pieces.
            headers: more of them.
            silent_s: the head may send nothing for this long.

        Raises:
            HeadAway: the head does not answer.
        """
        if self._session is None:
            raise HeadAway
        url, timeout = self._head.url(), aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_S, sock_read=silent_s)
        ours = {"Authorization": f"Bearer {key}", **(headers or {})}
        try:
            async with self._session.request(
                method, url + path, headers=ours, data=body, timeout=timeout, allow_redirects=False
            ) as answer:
                if answer.status == 503:
                    self._head.failed(url)
                    raise HeadAway(refusal_text(503, await answer.read()))
                yield answer
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._head.failed(url)
            raise HeadAway(str(error) or type(error).__name__) from None

    async def _send_load(self, body: bytes) -> None:
        """Post a report of the load."""
        with contextlib.suppress(HeadAway):
            await self.ask_own("POST", "/v1/gateways/load", body)

    async def _ask(
        self, method: str, path: str, headers: dict[str, str], body: bytes | None = None
    ) -> tuple[int, bytes]:
        if self._session is None:
            raise HeadAway
        url = self._head.url()
        try:
            async with self._session.request(
                method, url + path, headers=headers, data=body, allow_redirects=False
            ) as answer:
                status, payload = answer.status, await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._head.failed(url)
            raise HeadAway(str(error) or type(error).__name__) from None
        if status == 503:  # a standby, or a head that is about to stop
            self._head.failed(url)
            raise HeadAway(refusal_text(status, payload))
        return status, payload

    def _own_headers(self) -> dict[str, str]:
        try:
            return self._head.headers()
        except PhalanxError as error:  # no token is to be found while the head of this machine restarts
            raise HeadAway(str(error)) from None


def refusal_text(status: int, payload: bytes) -> str:
    """Return why the head refused a request."""
    error = parse_error(payload)
    return f"status {status}" if error is None else f"{error.message[:300]} (status {status})"


def _put(known: OrderedDict[bytes, T], digest: bytes, value: T, most: int) -> None:
    known[digest] = value
    known.move_to_end(digest)
    if len(known) > most:
        known.popitem(last=False)


def may_use(user: CurrentUser, project: ProjectId, is_open: bool, *, as_member: bool = False) -> bool:
    """Return whether a user may use the services of a project: its members, operators and administrators, with keys that may submit.

    All users belong to an open project. `as_member`: whether the user belongs to it, whatever the role.
    """
    wide = not as_member and user.role in (UserRole.OPERATOR, UserRole.ADMIN)
    return Action.SUBMIT in user.actions and (wide or is_open or project in user.projects)

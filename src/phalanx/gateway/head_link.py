"""The connection to the head: the list of services, the users of keys, and requests for a replica. All of it goes on from memory while the head is away."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import aiohttp
import msgspec

from phalanx.core.ids import ProjectId
from phalanx.core.work.users import Action, UserRole
from phalanx.durable_files import replace_file
from phalanx.gateway.services import RoutedService, ServiceTable
from phalanx.wire.api.head import CurrentUser
from phalanx.wire.api.services import ServiceList

POLL_S: Final = 0.5
ANSWER_S: Final = 5.0
KEY_FRESH_S: Final = 60.0  # a key that was revoked works at most this long, while the head answers
KEY_STALE_S: Final = 24 * 3600.0  # and at most this long while it does not
KEYS_MAX: Final = 100_000
REJECTED_S: Final = 10.0  # a wrong key is not asked for again
WAKE_EVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class GatewayHead:
    """How the head is reached. `url`: called for each request, because a restarted head may have another one; `headers`: with the gateway's token."""

    url: Callable[[], str]
    headers: Callable[[], dict[str, str]]
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True, slots=True)
class KeyOwner:
    """The user of a key, or None for a wrong one. `at_s`: monotonic time at which the head said so."""

    user: CurrentUser | None
    at_s: float


class HeadAway(Exception):
    """The head does not answer."""


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
        self._woken_s: dict[str, float] = {}
        self._saved = b""
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
            while True:
                with contextlib.suppress(HeadAway):
                    await self._refresh()
                await asyncio.sleep(POLL_S)

    async def _refresh(self) -> None:
        status, payload = await self._ask("GET", "/v1/services", self._head.headers())
        if status != 200:
            raise HeadAway
        try:
            views = msgspec.json.decode(payload, type=ServiceList).services
        except msgspec.MsgspecError:
            raise HeadAway from None
        self.answered_s = time.monotonic()
        self._table.update(views)
        if payload != self._saved and self._snapshot:
            self._saved = payload
            with contextlib.suppress(OSError):  # only a restart without the head needs it
                replace_file("", self._snapshot, payload)

    def _load(self) -> None:
        if not self._snapshot or not os.path.exists(self._snapshot):
            return
        with contextlib.suppress(OSError, msgspec.MsgspecError), open(self._snapshot, "rb") as file:
            self._table.update(msgspec.json.decode(file.read(), type=ServiceList).services)

    async def owner_of(self, key: str) -> CurrentUser | None:
        """Return the user of a key; None for a wrong one.

        Raises:
            HeadAway: the head does not answer, and the key was not used before.
        """
        digest = hashlib.sha256(key.encode()).digest()  # the keys themselves are not kept
        known, now_s = self._keys.get(digest), time.monotonic()
        if known is not None and now_s - known.at_s < (REJECTED_S if known.user is None else KEY_FRESH_S):
            return known.user
        try:
            status, payload = await self._ask("GET", "/v1/me", {"Authorization": f"Bearer {key}"})
            if status not in (200, 401, 403):
                raise HeadAway
            user = msgspec.json.decode(payload, type=CurrentUser) if status == 200 else None
        except (HeadAway, msgspec.MsgspecError):
            if known is not None and known.user is not None and now_s - known.at_s < KEY_STALE_S:
                return known.user
            raise HeadAway from None
        self._keys[digest] = KeyOwner(user, now_s)
        self._keys.move_to_end(digest)
        if len(self._keys) > KEYS_MAX:
            self._keys.popitem(last=False)
        return user

    async def want_replica(self, service: RoutedService) -> None:
        """Ask for a replica of a service that has none awake; at most every few seconds."""
        name, now_s = str(service.view.name), time.monotonic()
        if now_s - self._woken_s.get(name, -WAKE_EVERY_S) < WAKE_EVERY_S:
            return
        if service.view.asleep_wanted >= service.view.desired > 0:
            change: dict[str, int] = {"awake": 1}
        elif service.view.desired == 0:
            change = {"replicas": 1}
        else:
            return  # one is on its way
        self._woken_s[name] = now_s
        headers = {**self._head.headers(), "Content-Type": "application/json"}
        try:
            status, payload = await self._ask("PATCH", f"/v1/services/{name}", headers, msgspec.json.encode(change))
        except HeadAway:
            return
        self.wake_error.pop(name, None)
        if status >= 400:
            with contextlib.suppress(msgspec.MsgspecError, AttributeError, TypeError):
                found = msgspec.json.decode(payload)
                self.wake_error[name] = str(found.get("error", {}).get("message", ""))[:300]

    async def _ask(
        self, method: str, path: str, headers: dict[str, str], body: bytes | None = None
    ) -> tuple[int, bytes]:
        if self._session is None:
            raise HeadAway
        try:
            url = self._head.url() + path
            async with self._session.request(method, url, headers=headers, data=body, allow_redirects=False) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            raise HeadAway from None


def may_use(user: CurrentUser, project: ProjectId) -> bool:
    """Return whether a user may use the services of a project: its members, operators and administrators, with keys that may submit."""
    wide = user.role in (UserRole.OPERATOR, UserRole.ADMIN)
    return Action.SUBMIT in user.actions and (wide or project in user.projects)

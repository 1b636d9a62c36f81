"""One request on its way to a replica: its place in line, the comments that its stream gets meanwhile, and the answers that the gateway itself gives to its client."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from http import HTTPStatus
from typing import Final

import aiohttp
from aiohttp import web

from phalanx.gateway.canary_sessions import NoTrial, Session, SessionTrial
from phalanx.gateway.fair_queue import WaitingRoomFull
from phalanx.gateway.head_link import HeadLink
from phalanx.gateway.load_reports import StreamTimer
from phalanx.gateway.metrics import GatewayMetrics
from phalanx.gateway.refusals import Refused
from phalanx.gateway.request_accounts import RequestAccount
from phalanx.gateway.routing import RoutedReplica
from phalanx.gateway.services import RoutedService, ServiceTable

ERROR_BYTES: Final = 4096  # of an error of an engine that are passed on
COMMENT_S: Final = 5.0  # between comments to a client that waits; proxies commonly close a silent connection after 60 s
HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-request-id",  # the gateway's own
    }
)
_NOT_RETURNED: Final = HOP_BY_HOP | {"date", "server"}
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RoutedRequest:
    """One request on its way to a replica. It may wait; a stream then gets comments.

    Args:
        request: the client's.
        service: that it asks for.
        account: of the request.
        timer: of the first token.
        stream: the client wants a stream.
        table: the services as they are.
        head: is asked for a replica where none is ready.
        metrics: that are counted.
        wait_max_s: the longest that it waits for a replica.
    """

    def __init__(
        self,
        request: web.Request,
        service: RoutedService,
        account: RequestAccount,
        timer: StreamTimer,
        *,
        stream: bool,
        table: ServiceTable,
        head: HeadLink,
        metrics: GatewayMetrics,
        wait_max_s: float,
    ) -> None:
        self.timer = timer
        self._service, self._stream = service, stream
        self._table, self._head, self._metrics, self._wait_max_s = table, head, metrics, wait_max_s
        self.account, self.request = account, request
        self.session: Session | None = None  # while revisions are compared
        self.trial: SessionTrial | NoTrial = NoTrial()
        self.unread: set[str] = set()  # jobs that failed to read its prompt
        self.answered = 0  # tokens of parts of an answer whose replicas failed
        self._held: web.StreamResponse | None = None
        self._begun: web.StreamResponse | None = None
        asked = request.headers.get("X-Request-Id", "")
        self.request_id = asked if _REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex

    @contextlib.asynccontextmanager
    async def replica(
        self,
        prompt: bytes,
        limit: int | None,
        failed: frozenset[str],
        *,
        of: RoutedService | None = None,
        timer: StreamTimer | None = None,
    ) -> AsyncIterator[RoutedReplica]:
        """A replica that has counted this request, and counts it down at the end, however it ends. `of`: another service, with its timer."""
        session, service, timer = self.session, of or self._service, timer or self.timer
        found = None if len(service.waiting) else service.choose(prompt, limit, failed, session)
        until_s, first = time.monotonic() + self._wait_max_s, bool(failed)
        while found is None:
            await self._wait(service, timer, until_s, first=first)
            first = True  # one that was called, and came too late, keeps its place
            found = service.choose(prompt, limit, failed, session) or service.choose(prompt, limit, session=session)
        timer.chosen()
        chosen, tokens = found
        try:
            with self.account.at_replica(chosen.job_id):
                yield chosen
        finally:
            service.done(chosen, tokens)

    async def _wait(self, service: RoutedService, timer: StreamTimer, until_s: float, *, first: bool) -> None:
        name = str(service.view.name)
        if self._table.services.get(name) is not service:
            await self.refuse(Refused(404, f"the service {name} was stopped", "model_not_found"), leave=True)
        try:
            waiting = service.waiting.enter(self.account.place, time.monotonic(), first=first)
        except WaitingRoomFull:
            full = f"{len(service.waiting)} requests wait for a replica of {name}, which is the most"
            raise Refused(429, full, "too_many_waiting", retry_after_s=10) from None
        self._metrics.waits(name)
        timer.waits()
        try:
            while not waiting.called.is_set():
                await self._head.want_replica(service)
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    why = self._head.wake_error.get(name) or service.view.detail or "no replica is ready"
                    late = Refused(
                        503, f"no replica of {name} could take this request: {why}", "no_replica", retry_after_s=30
                    )
                    await self.refuse(late, leave=True)
                try:
                    await asyncio.wait_for(waiting.called.wait(), min(COMMENT_S, left_s))
                except TimeoutError:
                    service.call_waiting()  # a replica may be avoided no longer, while no list comes from the head
                    if self._stream and not waiting.called.is_set():
                        await self._comment(service, service.waiting.before(waiting))
        except BaseException:
            service.waiting.leave(waiting)
            service.call_waiting()  # its place, if it was called, is the next one's
            raise
        service.waiting.leave(waiting)  # and it chooses at once

    async def _comment(self, service: RoutedService, before: int) -> None:
        if self._held is None:
            self._held = web.StreamResponse(
                headers={
                    "Content-Type": "text/event-stream",
                    "Cache-Control": "no-cache",
                    "X-Request-Id": self.request_id,
                    **self.account.headers,
                }
            )
            await self._held.prepare(self.request)
        state = service.view.state.value
        await self._held.write(
            f": waiting for a replica of {service.view.name} ({state}), {before} before\n\n".encode()
        )

    async def begin(self, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        """The answer to the client, with the headers of the replica's."""
        if self._held is not None:
            if upstream.status != HTTPStatus.OK:  # the client has got status 200 already
                text = b""
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                    text = await upstream.content.read(ERROR_BYTES)
                refused = Refused(upstream.status, text.decode(errors="replace"), "replica_error")
                await self.refuse(refused, leave=True)
            return self._held
        answer = web.StreamResponse(status=upstream.status, reason=upstream.reason)
        for name, value in forwarded_headers(upstream.headers.items(), _NOT_RETURNED):
            answer.headers.add(name, value)
        answer.headers["X-Request-Id"] = self.request_id
        answer.headers.update(self.account.headers)
        self._begun = answer
        await answer.prepare(self.request)
        return answer

    def hold(self, answer: web.StreamResponse, answered: int) -> None:
        """Keep an answer that has begun, with this many tokens: what comes next goes into it."""
        self._held = answer
        self.answered += answered

    def hold_begun(self) -> None:
        """Keep a stream whose headers were sent and nothing else, if there is one."""
        if self._begun is not None and self._held is None:
            self._held = self._begun

    @property
    def begun(self) -> web.StreamResponse:
        """The answer that was kept."""
        assert self._held is not None
        return self._held

    async def refuse(self, refused: Refused, *, leave: bool = False) -> web.StreamResponse:
        """Give the gateway's own answer: as an event where the stream has begun. `leave`: end the request by an exception."""
        if self._held is None:
            raise refused
        await self._held.write(b"data: " + refused.body() + b"\n\n")
        await self._held.write_eof()
        if leave:
            raise AlreadyAnswered(self._held)
        return self._held

    async def end(self, refused: Refused) -> web.StreamResponse:
        """End a request early, whether its answer has begun or not."""
        if self._begun is None:
            return await self.refuse(refused)
        streamed = self._begun.content_type == "text/event-stream"
        return await break_off(self._begun, refused, streamed=streamed)


class AlreadyAnswered(Exception):
    """The request has its answer, from within a wait."""

    def __init__(self, answer: web.StreamResponse) -> None:
        super().__init__()
        self.answer = answer


def forwarded_headers(headers: Iterable[tuple[str, str]], without: frozenset[str]) -> list[tuple[str, str]]:
    """Return the headers that are passed on; `without` are names in lower case."""
    return [(name, value) for name, value in headers if name.lower() not in without]


async def break_off(answer: web.StreamResponse, refused: Refused, *, streamed: bool) -> web.StreamResponse:
    """End an answer in its middle: an event of a stream says so, any other answer is cut off."""
    if streamed:
        await answer.write(b"data: " + refused.body() + b"\n\n")
        await answer.write_eof()
        return answer
    answer.force_close()
    raise ConnectionResetError(refused.message)

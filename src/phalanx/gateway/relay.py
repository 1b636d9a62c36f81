"""Passes requests to replicas and their answers back, byte for byte.

A request that no replica has answered yet goes to another one if its replica fails, and a stream goes on there where its text stays the same
(`continuation`). One that no replica can take waits in line; a client that
wants a stream gets comments meanwhile, which clients of server-sent events skip.
"""

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
import msgspec
from aiohttp import web

from phalanx.gateway.answer_tokens import AnswerTokens
from phalanx.gateway.canary_sessions import SESSION_HEADER, NoTrial, Session, SessionTrial, session_of
from phalanx.gateway.continuation import ReplicaFailed, StreamContinuation
from phalanx.gateway.fair_queue import WaitingRoomFull
from phalanx.gateway.head_link import HeadLink, may_use
from phalanx.gateway.key_check import user_of
from phalanx.gateway.load_reports import StreamTimer
from phalanx.gateway.metrics import GatewayMetrics
from phalanx.gateway.prefill import (
    NotTransferred,
    PrefillRequest,
    PreparedBody,
    PromptNotRead,
    PromptReader,
    check_fields,
    is_divisible,
    waits_for_prompts,
)
from phalanx.gateway.refusals import Refused
from phalanx.gateway.request_accounts import RequestAccount, RequestAccounts, read_headers
from phalanx.gateway.request_body import CompletionRequest, parse_request, read_body
from phalanx.gateway.routing import RoutedReplica
from phalanx.gateway.services import RoutedService, ServiceTable
from phalanx.gateway.silence import SilenceWatch
from phalanx.gateway.stream_records import NotExact, RecordBudget, StreamRecord, begins_with_error
from phalanx.wire.api.head import CurrentUser

ROUTES: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/rerank",
    "/v1/score",
)
TRIES: Final = 3
CLIENT_LEFT: Final = 499  # in metrics, as nginx counts it
CONNECT_S: Final = 5.0
ERROR_BYTES: Final = 4096  # of an error of an engine that are passed on
COMMENT_S: Final = 5.0  # between comments to a client that waits; proxies commonly close a silent connection after 60 s
_RETRY_STATUS: Final = frozenset({502, 503, 504})
_HOP_BY_HOP: Final = frozenset(
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
# The key is the gateway's and no engine's; aiohttp decodes the body, and sets the others.
_NOT_FORWARDED: Final = _HOP_BY_HOP | {
    "authorization",
    "api-key",
    "x-api-key",
    "cookie",
    "host",
    "content-encoding",
    "content-length",
    "expect",
    "x-request-priority",
    "x-request-timeout",
}
_NOT_RETURNED: Final = _HOP_BY_HOP | {"date", "server"}
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestRelay:
    """The handlers of one gateway.

    Args:
        table: the services.
        head: checks keys and asks for replicas.
        metrics: that are counted.
        accounts: of the requests, with their limits.
        wait_max_s: the longest that a request waits for a replica.
        silent_max_s: an answer that is silent for this long is ended.
    """

    def __init__(
        self,
        table: ServiceTable,
        head: HeadLink,
        metrics: GatewayMetrics,
        accounts: RequestAccounts,
        *,
        wait_max_s: float,
        silent_max_s: float,
    ) -> None:
        self.table, self.head, self.metrics, self.accounts = table, head, metrics, accounts
        self.wait_max_s = wait_max_s
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silent_max_s)
        self._session: aiohttp.ClientSession | None = None
        self._records = RecordBudget()
        self._prompts = PromptReader(metrics)
        self.silence = SilenceWatch(silent_max_s)

    async def open(self) -> None:
        """Open the connections to replicas."""
        connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=60)
        self._session = aiohttp.ClientSession(
            connector=connector, auto_decompress=False, timeout=self._timeout, cookie_jar=aiohttp.DummyCookieJar()
        )

    async def close(self) -> None:
        """Close them."""
        if self._session is not None:
            await self._session.close()

    # ---- handlers ---------------------------------------------------------------------------------------------------

    async def models(self, request: web.Request) -> web.StreamResponse:
        """List the services that the user may use."""
        try:
            user = await user_of(self.head, request)
        except Refused as refused:
            return refused.response()
        found = [service.view for _, service in sorted(self.table.services.items()) if self._may_use(user, service)]
        found = [one for one in found if not one.prefill_for]  # these answer nothing
        data = [
            {"id": one.name, "object": "model", "created": int(one.created_s), "owned_by": one.project} for one in found
        ]
        return web.Response(body=msgspec.json.encode({"object": "list", "data": data}), content_type="application/json")

    async def scrape(self, request: web.Request) -> web.StreamResponse:
        """The gateway's metrics for Prometheus."""
        try:
            await user_of(self.head, request)
        except Refused as refused:
            return refused.response()
        return web.Response(body=self.metrics.text(self.table), headers={"Content-Type": self.metrics.content_type})

    async def health(self, _request: web.Request) -> web.StreamResponse:
        """Whether the gateway has a list of services, for load balancers."""
        away_s = self.head.away_s
        known = bool(self.table.services) or away_s != float("inf")
        body = {
            "services": len(self.table.services),
            "head_away_s": None if away_s == float("inf") else round(away_s, 1),
        }
        return web.Response(
            status=HTTPStatus.OK if known else HTTPStatus.SERVICE_UNAVAILABLE,
            body=msgspec.json.encode(body),
            content_type="application/json",
        )

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Pass one request to a replica."""
        name, began_s = "", time.monotonic()
        try:
            user = await user_of(self.head, request)
            body = await read_body(request)
            wanted = parse_request(body)
            service = self._service(wanted.model, user)
            name = str(service.view.name)
            asked = read_headers(request.headers)
            account = self.accounts.open(
                user,
                service,
                asked,
                prompt_bytes=len(wanted.prompt_json),
                tokens=wanted.tokens,
                priority=wanted.priority or 0,
            )
            try:
                with self.metrics.in_flight(name), self.head.load.meter(name).request(stream=wanted.stream) as timer:
                    answer = await self._serve_within(asked.timeout_s, request, service, wanted, body, account, timer)
            finally:
                account.close()
                self.head.load.meter(name).tokens += account.answer_tokens
        except _Answered as given:
            answer = given.answer
        except Refused as refused:
            self.metrics.refused(name, refused.status)
            return refused.response()
        except ConnectionResetError:
            if not _client_left(request):
                raise
            self.metrics.refused(name, CLIENT_LEFT)
            return web.Response(status=CLIENT_LEFT)
        self.metrics.answered(name, answer.status, time.monotonic() - began_s)
        return answer

    # ---- the steps of a request ---------------------------------------------------------------------------------------

    def _service(self, model: str, user: CurrentUser) -> RoutedService:
        service = self.table.services.get(model)
        if service is None or service.view.prefill_for or not self._may_use(user, service):
            raise Refused(
                404, f"there is no model {model[:80]!r} that this key may use; see /v1/models", "model_not_found"
            )
        return service

    def _may_use(self, user: CurrentUser, service: RoutedService) -> bool:
        return may_use(user, service.view.project, self.table.is_open(service.view.project))

    async def _serve_within(
        self,
        timeout_s: float | None,
        request: web.Request,
        service: RoutedService,
        wanted: CompletionRequest,
        body: bytes,
        account: RequestAccount,
        timer: StreamTimer,
    ) -> web.StreamResponse:
        line = _Line(self, request, service, account, timer, stream=wanted.stream)
        if timeout_s is None:
            return await self._serve(request, service, wanted, body, line)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._serve(request, service, wanted, body, line)
        except TimeoutError:
            late = f"no whole answer within the {timeout_s:g} s that the request allows"
            return await line.end(Refused(504, late, "timeout"))

    async def _serve(
        self, request: web.Request, service: RoutedService, wanted: CompletionRequest, body: bytes, line: _Line
    ) -> web.StreamResponse:
        prompt, limit = bytes(wanted.prompt_json), wanted.answer_limit
        prefill = service.prefill
        if prefill is not None:
            check_fields(body)
        if service.canary is not None or (prefill is not None and prefill.canary is not None):
            line.session = _session(request, wanted, prompt, line)
        failed, why, begun_at, alone = frozenset[str](), "", 0, False
        goes_on = wanted.stream and not waits_for_prompts(prefill)
        with StreamRecord.opened(request.path, body, self._records, stream=goes_on) as record:
            try:
                for turn in range(1, TRIES + 1):
                    async with line.replica(prompt, limit, failed) as replica:
                        try:
                            if record.begun:
                                if service.canary is not None and replica.revision != begun_at:
                                    why = f"{why}, and no other replica of its revision is there"
                                    break
                                return await self._continue(service, replica, record, line)
                            begun_at = replica.revision
                            with service.trial(replica, line.session, stream=wanted.stream) as line.trial:
                                async with self._prepared(service, request, body, prompt, line, alone=alone) as sent:
                                    return await self._exchange(
                                        request, service, replica, sent, line, record, last=turn == TRIES
                                    )
                        except NotTransferred as error:
                            alone, why = True, str(error)
                        except PromptNotRead as error:
                            why = f"a replica that reads prompts: {error}"
                            line.hold_begun()
                        except _NotAnswered as error:
                            service.failed(replica)
                            failed |= {replica.job_id}
                            why = str(error)
            finally:
                if line.answered:
                    line.account.used(0, line.answered)
            if record.begun:
                return await line.refuse(_failed_midway(why))
        return await line.refuse(Refused(502, f"no replica of {service.view.name} answered: {why}", "no_answer"))

    def _prepared(
        self, service: RoutedService, request: web.Request, body: bytes, prompt: bytes, line: _Line, *, alone: bool
    ) -> contextlib.AbstractAsyncContextManager[PreparedBody]:
        """What a replica gets: the request, or how it fetches its prompt that another one has read. `alone`: that has failed before."""
        prefill = service.prefill
        if prefill is None or (not waits_for_prompts(prefill) and (alone or not is_divisible(request.path, body))):
            return contextlib.nullcontext(PreparedBody(body))
        assert self._session is not None

        def place(wanted: RoutedService, timer: StreamTimer) -> contextlib.AbstractAsyncContextManager[RoutedReplica]:
            unread = frozenset(line.unread) if wanted.replicas.keys() - line.unread else frozenset[str]()
            return line.replica(prompt, 1, unread, of=wanted, timer=timer)

        asked = PrefillRequest(
            path_qs=request.path_qs,
            body=body,
            prompt=prompt,
            headers=self._headers(request, line),
            account=line.account,
            session=line.session,
            place=place,
            unread=line.unread,
        )
        return self._prompts.prepared(self._session, prefill, asked, self.head)

    def _headers(self, request: web.Request, line: _Line) -> list[tuple[str, str]]:
        headers = _forwarded(request.headers.items(), _NOT_FORWARDED)
        headers.append(("X-Request-Id", line.request_id))
        return headers

    async def _exchange(
        self,
        request: web.Request,
        service: RoutedService,
        replica: RoutedReplica,
        sent: PreparedBody,
        line: _Line,
        record: StreamRecord,
        *,
        last: bool,
    ) -> web.StreamResponse:
        """Send the request to one replica and its answer to the client.

        Raises:
            _NotAnswered: it failed before it answered, or its stream may go on elsewhere; another replica may be asked.
            NotTransferred: it could not fetch what another one has read.
        """
        assert self._session is not None
        headers = self._headers(request, line)
        try:
            upstream = await self._session.post(
                replica.url + request.path_qs, data=sent.body, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            line.trial.failed(alone=False)
            raise _NotAnswered(type(error).__name__) from None
        async with upstream:
            if sent.transfers and upstream.status == HTTPStatus.INTERNAL_SERVER_ERROR and not last:
                raise NotTransferred("status 500")
            if upstream.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                line.trial.failed(alone=True)
            if upstream.status in _RETRY_STATUS and not last:
                raise _NotAnswered(f"status {upstream.status}")
            answer = await line.begin(upstream)
            count, goes_on = AnswerTokens(streamed=_is_stream(upstream)), False
            try:
                await self._pass_on(upstream, answer, sent, line, record, count, may_retry=not last)
            except NotTransferred:
                goes_on = True
                line.hold(answer, 0)
                raise
            except (
                aiohttp.ClientPayloadError,
                aiohttp.ServerDisconnectedError,
                TimeoutError,
                ConnectionResetError,
            ) as error:
                if _client_left(request):
                    raise ConnectionResetError("the client has gone") from None
                self.metrics.broken(str(service.view.name))
                line.trial.failed(alone=record.failed)
                if count.streamed and upstream.status == HTTPStatus.OK and (record.begun or count.empty):
                    goes_on = True
                    line.hold(answer, count.result()[1])
                    raise _NotAnswered(type(error).__name__) from None
                service.failed(replica)
                return await _broken(answer, _failed_midway(type(error).__name__), streamed=count.streamed)
            finally:
                tokens = count.result()
                if upstream.status == HTTPStatus.OK and not goes_on:
                    line.account.used(*tokens)
            line.trial.done(tokens[1])
            await answer.write_eof()
            return answer

    async def _pass_on(
        self,
        upstream: aiohttp.ClientResponse,
        answer: web.StreamResponse,
        sent: PreparedBody,
        line: _Line,
        record: StreamRecord,
        count: AnswerTokens,
        *,
        may_retry: bool,
    ) -> None:
        """Write an answer to the client as it comes.

        Raises:
            NotTransferred: it begins with an error, and may be asked for again.
        """
        watched, begun = self.silence.watch(upstream), False
        try:
            async for chunk in upstream.content.iter_any():
                watched.chunks += 1
                if not begun:
                    if may_retry and sent.transfers and count.streamed and begins_with_error(chunk):
                        raise NotTransferred("it ended its answer with an error")
                    begun = sent.begun = True
                    line.timer.first_token()
                    line.trial.first_token()
                passed = record.take(chunk)
                if passed:
                    count.add(passed)
                    watched.reading = False
                    await answer.write(passed)
                    watched.reading = True
                if record.failed:
                    raise aiohttp.ServerDisconnectedError("it ended its answer with an error")
        finally:
            self.silence.end(watched)

    async def _continue(
        self, service: RoutedService, replica: RoutedReplica, record: StreamRecord, line: _Line
    ) -> web.StreamResponse:
        """Go on with a stream at another replica.

        Raises:
            _NotAnswered: it has failed as well.
        """
        assert self._session is not None
        answer, request = line.begun, line.request
        headers = self._headers(request, line)
        count = AnswerTokens(streamed=True)

        async def write(part: bytes) -> None:
            count.add(part)
            await answer.write(part)

        try:
            how = await StreamContinuation(self._session, record, headers, write).run(replica.url)
        except ReplicaFailed as error:
            if _client_left(request):
                raise ConnectionResetError("the client has gone") from None
            raise _NotAnswered(str(error)) from None
        except NotExact as error:
            return await line.refuse(_failed_midway(f"not continued elsewhere: {error}"))
        finally:
            prompt, answered = count.result()
            if prompt:  # the usage of the whole answer
                line.answered = 0
                line.account.used(prompt, answered)
            else:
                line.answered += answered
        self.metrics.continued(str(service.view.name), how)
        await answer.write_eof()
        return answer


class _NotAnswered(Exception):
    """A replica failed before the first byte of its answer, or in the middle of one that may go on elsewhere."""


class _Line:
    """One request on its way to a replica. It may wait; a stream then gets comments."""

    def __init__(
        self,
        relay: RequestRelay,
        request: web.Request,
        service: RoutedService,
        account: RequestAccount,
        timer: StreamTimer,
        *,
        stream: bool,
    ) -> None:
        self.timer = timer
        self._relay, self._service, self._stream = relay, service, stream
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
        until_s, first = time.monotonic() + self._relay.wait_max_s, bool(failed)
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
        if self._relay.table.services.get(name) is not service:
            await self.refuse(Refused(404, f"the service {name} was stopped", "model_not_found"), leave=True)
        try:
            waiting = service.waiting.enter(self.account.place, time.monotonic(), first=first)
        except WaitingRoomFull:
            full = f"{len(service.waiting)} requests wait for a replica of {name}, which is the most"
            raise Refused(429, full, "too_many_waiting", retry_after_s=10) from None
        self._relay.metrics.waits(name)
        timer.waits()
        try:
            while not waiting.called.is_set():
                await self._relay.head.want_replica(service)
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    why = self._relay.head.wake_error.get(name) or service.view.detail or "no replica is ready"
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
        for name, value in _forwarded(upstream.headers.items(), _NOT_RETURNED):
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
            raise _Answered(self._held)
        return self._held

    async def end(self, refused: Refused) -> web.StreamResponse:
        """End a request early, whether its answer has begun or not."""
        if self._begun is None:
            return await self.refuse(refused)
        streamed = self._begun.content_type == "text/event-stream"
        return await _broken(self._begun, refused, streamed=streamed)


class _Answered(Exception):
    """The request has its answer, from within a wait."""

    def __init__(self, answer: web.StreamResponse) -> None:
        super().__init__()
        self.answer = answer


def _session(request: web.Request, wanted: CompletionRequest, prompt: bytes, line: _Line) -> Session:
    header = request.headers.get(SESSION_HEADER, "")[:256]
    named = tuple(map(bytes, (wanted.safety_identifier, wanted.user, wanted.prompt_cache_key)))
    user = line.account.user
    return session_of(request.path, header, named, prompt, user=user, request_id=line.request_id)


def _client_left(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _is_stream(upstream: aiohttp.ClientResponse) -> bool:
    """Return whether a replica answers with events."""
    return upstream.content_type == "text/event-stream"


def _forwarded(headers: Iterable[tuple[str, str]], without: frozenset[str]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers if name.lower() not in without]


def _failed_midway(why: str) -> Refused:
    return Refused(502, f"the replica failed in the middle of its answer ({why})", "replica_failed")


async def _broken(answer: web.StreamResponse, refused: Refused, *, streamed: bool) -> web.StreamResponse:
    """End an answer in its middle: an event of a stream says so, any other answer is cut off."""
    if streamed:
        await answer.write(b"data: " + refused.body() + b"\n\n")
        await answer.write_eof()
        return answer
    answer.force_close()
    raise ConnectionResetError(refused.message)

"""Passes requests to replicas and their answers back, byte for byte.

A request that no replica has answered yet goes to another one if its replica fails, and a stream goes on there where its text stays the same
(`continuation`). One that no replica can take waits in line; a client that
wants a stream gets comments meanwhile, which clients of server-sent events skip.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from http import HTTPStatus
from typing import Final

import aiohttp
import msgspec
from aiohttp import web

from phalanx.gateway.answer_tokens import AnswerTokens
from phalanx.gateway.canary_sessions import SESSION_HEADER, Session, session_of
from phalanx.gateway.continuation import ReplicaFailed, StreamContinuation
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
from phalanx.gateway.routed_request import (
    HOP_BY_HOP,
    AlreadyAnswered,
    RoutedRequest,
    break_off,
    forwarded_headers,
)
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
_RETRY_STATUS: Final = frozenset({502, 503, 504})
# The key is the gateway's and no engine's; aiohttp decodes the body, and sets the others.
_NOT_FORWARDED: Final = HOP_BY_HOP | {
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
        except AlreadyAnswered as given:
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
        routed = RoutedRequest(
            request,
            service,
            account,
            timer,
            stream=wanted.stream,
            table=self.table,
            head=self.head,
            metrics=self.metrics,
            wait_max_s=self.wait_max_s,
        )
        if timeout_s is None:
            return await self._serve(request, service, wanted, body, routed)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._serve(request, service, wanted, body, routed)
        except TimeoutError:
            late = f"no whole answer within the {timeout_s:g} s that the request allows"
            return await routed.end(Refused(504, late, "timeout"))

    async def _serve(
        self,
        request: web.Request,
        service: RoutedService,
        wanted: CompletionRequest,
        body: bytes,
        routed: RoutedRequest,
    ) -> web.StreamResponse:
        prompt, limit = bytes(wanted.prompt_json), wanted.answer_limit
        prefill = service.prefill
        if prefill is not None:
            check_fields(body)
        if service.canary is not None or (prefill is not None and prefill.canary is not None):
            routed.session = _session(request, wanted, prompt, routed)
        failed, why, begun_at, alone = frozenset[str](), "", 0, False
        goes_on = wanted.stream and not waits_for_prompts(prefill)
        with StreamRecord.opened(request.path, body, self._records, stream=goes_on) as record:
            try:
                for turn in range(1, TRIES + 1):
                    async with routed.replica(prompt, limit, failed) as replica:
                        try:
                            if record.begun:
                                if service.canary is not None and replica.revision != begun_at:
                                    why = f"{why}, and no other replica of its revision is there"
                                    break
                                return await self._continue(service, replica, record, routed)
                            begun_at = replica.revision
                            with service.trial(replica, routed.session, stream=wanted.stream) as routed.trial:
                                async with self._prepared(service, request, body, prompt, routed, alone=alone) as sent:
                                    return await self._exchange(
                                        request, service, replica, sent, routed, record, last=turn == TRIES
                                    )
                        except NotTransferred as error:
                            alone, why = True, str(error)
                        except PromptNotRead as error:
                            why = f"a replica that reads prompts: {error}"
                            routed.hold_begun()
                        except _NotAnswered as error:
                            service.failed(replica)
                            failed |= {replica.job_id}
                            why = str(error)
            finally:
                if routed.answered:
                    routed.account.used(0, routed.answered)
            if record.begun:
                return await routed.refuse(_failed_midway(why))
        return await routed.refuse(Refused(502, f"no replica of {service.view.name} answered: {why}", "no_answer"))

    def _prepared(
        self,
        service: RoutedService,
        request: web.Request,
        body: bytes,
        prompt: bytes,
        routed: RoutedRequest,
        *,
        alone: bool,
    ) -> contextlib.AbstractAsyncContextManager[PreparedBody]:
        """What a replica gets: the request, or how it fetches its prompt that another one has read. `alone`: that has failed before."""
        prefill = service.prefill
        if prefill is None or (not waits_for_prompts(prefill) and (alone or not is_divisible(request.path, body))):
            return contextlib.nullcontext(PreparedBody(body))
        assert self._session is not None

        def place(wanted: RoutedService, timer: StreamTimer) -> contextlib.AbstractAsyncContextManager[RoutedReplica]:
            unread = frozenset(routed.unread) if wanted.replicas.keys() - routed.unread else frozenset[str]()
            return routed.replica(prompt, 1, unread, of=wanted, timer=timer)

        asked = PrefillRequest(
            path_qs=request.path_qs,
            body=body,
            prompt=prompt,
            headers=self._headers(request, routed),
            account=routed.account,
            session=routed.session,
            place=place,
            unread=routed.unread,
        )
        return self._prompts.prepared(self._session, prefill, asked, self.head)

    def _headers(self, request: web.Request, routed: RoutedRequest) -> list[tuple[str, str]]:
        headers = forwarded_headers(request.headers.items(), _NOT_FORWARDED)
        headers.append(("X-Request-Id", routed.request_id))
        return headers

    async def _exchange(
        self,
        request: web.Request,
        service: RoutedService,
        replica: RoutedReplica,
        sent: PreparedBody,
        routed: RoutedRequest,
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
        headers = self._headers(request, routed)
        try:
            upstream = await self._session.post(
                replica.url + request.path_qs, data=sent.body, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            routed.trial.failed(alone=False)
            raise _NotAnswered(type(error).__name__) from None
        async with upstream:
            if sent.transfers and upstream.status == HTTPStatus.INTERNAL_SERVER_ERROR and not last:
                raise NotTransferred("status 500")
            if upstream.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                routed.trial.failed(alone=True)
            if upstream.status in _RETRY_STATUS and not last:
                raise _NotAnswered(f"status {upstream.status}")
            answer = await routed.begin(upstream)
            count, goes_on = AnswerTokens(streamed=_is_stream(upstream)), False
            try:
                await self._pass_on(upstream, answer, sent, routed, record, count, may_retry=not last)
            except NotTransferred:
                goes_on = True
                routed.hold(answer, 0)
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
                routed.trial.failed(alone=record.failed)
                if count.streamed and upstream.status == HTTPStatus.OK and (record.begun or count.empty):
                    goes_on = True
                    routed.hold(answer, count.result()[1])
                    raise _NotAnswered(type(error).__name__) from None
                service.failed(replica)
                return await break_off(answer, _failed_midway(type(error).__name__), streamed=count.streamed)
            finally:
                tokens = count.result()
                if upstream.status == HTTPStatus.OK and not goes_on:
                    routed.account.used(*tokens)
            routed.trial.done(tokens[1])
            await answer.write_eof()
            return answer

    async def _pass_on(
        self,
        upstream: aiohttp.ClientResponse,
        answer: web.StreamResponse,
        sent: PreparedBody,
        routed: RoutedRequest,
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
                    routed.timer.first_token()
                    routed.trial.first_token()
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
        self, service: RoutedService, replica: RoutedReplica, record: StreamRecord, routed: RoutedRequest
    ) -> web.StreamResponse:
        """Go on with a stream at another replica.

        Raises:
            _NotAnswered: it has failed as well.
        """
        assert self._session is not None
        answer, request = routed.begun, routed.request
        headers = self._headers(request, routed)
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
            return await routed.refuse(_failed_midway(f"not continued elsewhere: {error}"))
        finally:
            prompt, answered = count.result()
            if prompt:  # the usage of the whole answer
                routed.answered = 0
                routed.account.used(prompt, answered)
            else:
                routed.answered += answered
        self.metrics.continued(str(service.view.name), how)
        await answer.write_eof()
        return answer


class _NotAnswered(Exception):
    """A replica failed before the first byte of its answer, or in the middle of one that may go on elsewhere."""


def _session(request: web.Request, wanted: CompletionRequest, prompt: bytes, routed: RoutedRequest) -> Session:
    header = request.headers.get(SESSION_HEADER, "")[:256]
    named = tuple(map(bytes, (wanted.safety_identifier, wanted.user, wanted.prompt_cache_key)))
    user = routed.account.user
    return session_of(request.path, header, named, prompt, user=user, request_id=routed.request_id)


def _client_left(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _is_stream(upstream: aiohttp.ClientResponse) -> bool:
    """Return whether a replica answers with events."""
    return upstream.content_type == "text/event-stream"


def _failed_midway(why: str) -> Refused:
    return Refused(502, f"the replica failed in the middle of its answer ({why})", "replica_failed")

"""Lets a replica for prompts read a prompt, before or while a replica of the service answers the request with what was read.

The engines move what was read between them. The gateway only introduces them to each other, as the engines' own proxies do:

- vLLM: the first engine gets the request for a single token, and answers with `kv_transfer_params`, which go into the request to the second.
- SGLang: both get the same request at once, with a room of the first one's bootstrap server in which they meet.

An engine of vLLM can also read a prompt itself. So a request whose prompt could not be read elsewhere is answered without that. One of SGLang
that answers cannot, so that requests wait for a replica for prompts, and go to another pair if either fails before the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from phalanx.core.work.services.prefill_terms import TransferProtocol
from phalanx.gateway.canary_sessions import NoTrial, Session, SessionTrial
from phalanx.gateway.head_link import HeadLink
from phalanx.gateway.load_reports import LoadMeter, StreamTimer
from phalanx.gateway.metrics import GatewayMetrics
from phalanx.gateway.refusals import Refused
from phalanx.gateway.request_accounts import RequestAccount
from phalanx.gateway.routing import RoutedReplica
from phalanx.gateway.services import RoutedService

PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
TRIES: Final = 2  # replicas for prompts that a request is sent to
ANSWER_MAX: Final = 4 << 20  # of the first engine: its block ids, some bytes for each 16 tokens
PORT_S: Final = 5.0
ROOM_BITS: Final = 63
_WITHOUT: Final = ("stream_options", "min_tokens", "min_completion_tokens")  # they contradict a single token
_ASKS: Final = {  # what vLLM's engine that reads is asked for; the others are for it to fill in
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_DEAD: Final = frozenset({502, 503, 504})  # a 500 may be of this request alone
_log: Final = logging.getLogger("phalanx.gateway")
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class PromptNotRead(Exception):
    """A replica has not read a prompt. The text says why. `dead`: other requests would fail there as well."""

    def __init__(self, why: str, *, dead: bool) -> None:
        super().__init__(why)
        self.dead = dead


class _ReservedFields(msgspec.Struct):
    """What only the gateway tells engines."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"")
    bootstrap_host: msgspec.Raw = msgspec.Raw(b"")
    bootstrap_port: msgspec.Raw = msgspec.Raw(b"")
    bootstrap_room: msgspec.Raw = msgspec.Raw(b"")


_reserved: Final = msgspec.json.Decoder(_ReservedFields)


class NotTransferred(Exception):
    """The replica that answers could not fetch what another one has read, and has sent nothing of its answer."""


class PrefillAnswer(msgspec.Struct):
    """What vLLM's engine says that has read a prompt. `kv_transfer_params`: null if it has no connector for transfers."""

    kv_transfer_params: dict[str, Any] | None = None


_answers: Final = msgspec.json.Decoder(PrefillAnswer)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRequest:
    """One request whose prompt shall be read.

    Attributes:
        path_qs: its route with its query.
        body, prompt: JSON of the whole and of its prompt.
        headers: as replicas get them.
        account: that pays for it. `session`: while revisions are compared.
        place: waits for a replica, which counts the request. `unread`: the jobs of those that failed it, which are asked again only without others.
    """

    path_qs: str
    body: bytes
    prompt: bytes
    headers: list[tuple[str, str]]
    account: RequestAccount
    session: Session | None
    place: Callable[[RoutedService, StreamTimer], AbstractAsyncContextManager[RoutedReplica]]
    unread: set[str]


@dataclass(slots=True)
class PreparedBody:
    """What the replica that answers gets. `transfers`: it has to fetch what another one read. `begun`: its answer has begun."""

    body: bytes
    transfers: bool = False
    begun: bool = False


def check_fields(body: bytes) -> None:
    """Check that a request does not say itself where engines shall fetch what was read: they would connect to any host.

    Raises:
        Refused: it does.
    """
    found = _reserved.decode(body)
    name = next((one for one in _ReservedFields.__struct_fields__ if getattr(found, one)), "")
    if name:
        raise Refused(400, f"{name} is the gateway's to set for this model", "invalid_field")


def is_divisible(path: str, body: bytes) -> bool:
    """Return whether a prompt can be read elsewhere: an answer needs all of the prompt's tokens otherwise, or there are several prompts or answers."""
    if path not in PATHS:
        return False
    try:
        found = _fields.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    prompt = bytes(found.get("prompt", b'""'))
    several = prompt.startswith(b"[") and not prompt[1:].lstrip()[:1].isdigit()
    alone = all(bytes(found.get(name, b"null")) in (b"null", b"1", b"false") for name in ("n", "best_of", "echo"))
    return alone and not several and bytes(found.get("prompt_logprobs", b"null")) == b"null"


def body_with(body: bytes, fields: Mapping[str, Any], without: tuple[str, ...] = ()) -> bytes:
    """Return a request with other values of some fields; all other bytes of values stay."""
    found: dict[str, Any] = dict(_fields.decode(body))
    for name in without:
        found.pop(name, None)
    return msgspec.json.encode({**found, **fields})


class PromptReader:
    """Sends prompts to the replicas that read them.

    Args:
        metrics: that are counted.
    """

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._ports: dict[tuple[str, str], int] = {}
        self._warned: set[str] = set()

    @contextlib.asynccontextmanager
    async def prepared(
        self, session: aiohttp.ClientSession, prefill: RoutedService, request: PrefillRequest, head: HeadLink
    ) -> AsyncIterator[PreparedBody]:
        """Let a prompt be read, and yield what the replica gets that answers.

        Raises:
            PromptNotRead: no replica read it, and the one that answers cannot.
            Refused: a replica refused the request.
        """
        meter = head.load.meter(str(prefill.view.name))
        if not waits_for_prompts(prefill):
            if not prefill.replicas:
                self._metrics.prefilled(str(prefill.view.name), "none_free")
                with meter.request(stream=False) as timer:
                    timer.waits()  # so that one starts where their number follows load; the request goes on without it
                    await head.want_replica(prefill)
                    yield PreparedBody(request.body)
                return
            yield await self._read(session, prefill, request, meter)
            return
        with meter.request(stream=True) as timer:
            async with request.place(prefill, timer) as replica:
                try:
                    async with self._beside(session, prefill, replica, request, timer) as found:
                        yield found
                except (PromptNotRead, NotTransferred) as error:  # where that one has died, the other may notice first
                    request.unread.add(replica.job_id)
                    if isinstance(error, PromptNotRead) and error.dead:
                        prefill.failed(replica)
                    raise

    async def _read(
        self, session: aiohttp.ClientSession, prefill: RoutedService, request: PrefillRequest, meter: LoadMeter
    ) -> PreparedBody:
        name, alone = str(prefill.view.name), PreparedBody(request.body)
        first = body_with(request.body, {"stream": False, "max_tokens": 1, "kv_transfer_params": _ASKS}, _WITHOUT)
        if b'"max_completion_tokens"' in first:
            first = body_with(first, {"max_completion_tokens": 1})
        failed, how = frozenset[str](), "none_free"
        for _ in range(TRIES):
            found = prefill.choose(request.prompt, 1, failed, request.session)
            if found is None:
                break
            replica, tokens = found
            try:
                with (
                    request.account.at_replica(replica.job_id),
                    meter.request(stream=True) as timer,
                    prefill.trial(replica, request.session, stream=False) as trial,
                ):
                    status, answer = await self._post(session, replica, request, first, trial)
                    timer.first_token()
            except PromptNotRead as error:
                if error.dead:
                    prefill.failed(replica)
                failed |= {replica.job_id}
                how = "failed"
                continue
            finally:
                prefill.done(replica, tokens)
            if status != HTTPStatus.OK:  # the request itself is wrong: the other replica tells the client
                how = "refused"
                break
            transfer = _transfer_of(answer)
            if transfer is None:
                self._warn(name, "its engine has no connector for transfers: it answered without kv_transfer_params")
                how = "no_transfer"
                break
            self._metrics.prefilled(name, "read")
            return PreparedBody(body_with(request.body, {"kv_transfer_params": transfer}), transfers=True)
        self._metrics.prefilled(name, how)
        return alone

    async def _post(
        self,
        session: aiohttp.ClientSession,
        replica: RoutedReplica,
        request: PrefillRequest,
        body: bytes,
        trial: SessionTrial | NoTrial,
    ) -> tuple[int, bytes]:
        """Send a request to a replica for prompts; return status and body of its answer.

        Raises:
            PromptNotRead: it failed.
        """
        headers = [(name, value) for name, value in request.headers if name.lower() != "content-type"]
        headers.append(("Content-Type", "application/json"))
        try:
            async with session.post(
                replica.url + request.path_qs, data=body, headers=headers, allow_redirects=False
            ) as answer:
                text = bytearray()
                async for part in answer.content.iter_any():
                    if len(text) <= ANSWER_MAX:
                        text += part
                status = answer.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            trial.failed(alone=False)
            raise PromptNotRead(type(error).__name__, dead=True) from None
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS:
            if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                trial.failed(alone=True)
            raise PromptNotRead(f"status {status}", dead=status in _DEAD)
        trial.done(1)
        return status, bytes(text)

    @contextlib.asynccontextmanager
    async def _beside(
        self,
        session: aiohttp.ClientSession,
        prefill: RoutedService,
        replica: RoutedReplica,
        request: PrefillRequest,
        timer: StreamTimer,
    ) -> AsyncIterator[PreparedBody]:
        """SGLang: let a prompt be read while the other replica has the request; yield what both get.

        Raises:
            PromptNotRead: the replica failed before the other one's answer began.
            Refused: it refused the request.
        """
        name = str(prefill.view.name)
        port = await self._bootstrap_port(session, replica)
        room = {
            "bootstrap_host": urlsplit(replica.url).netloc.rpartition(":")[0],
            "bootstrap_port": port,
            "bootstrap_room": secrets.randbits(ROOM_BITS),
        }
        prepared = PreparedBody(body_with(request.body, room), transfers=True)
        with prefill.trial(replica, request.session, stream=False) as trial:
            reading = asyncio.create_task(self._post(session, replica, request, prepared.body, trial))
            scope = asyncio.timeout(None)
            try:
                async with scope:

                    def ended(task: asyncio.Task[tuple[int, bytes]]) -> None:
                        if not prepared.begun and (
                            task.cancelled() or task.exception() or task.result()[0] != HTTPStatus.OK
                        ):
                            scope.reschedule(asyncio.get_running_loop().time())

                    reading.add_done_callback(ended)
                    yield prepared
            except TimeoutError:
                if not (scope.expired() and reading.done() and not reading.cancelled()):
                    raise
                self._metrics.prefilled(name, "failed")
                failure = reading.exception()
                if failure is not None:
                    raise failure from None
                status, text = reading.result()
                raise Refused(status, text[:4096].decode(errors="replace"), "replica_error") from None
            else:
                self._metrics.prefilled(name, "read")
                timer.first_token()
            finally:
                prepared.begun = True
                if not reading.done():
                    reading.cancel()
                with contextlib.suppress(asyncio.CancelledError, PromptNotRead):
                    await reading

    async def _bootstrap_port(self, session: aiohttp.ClientSession, replica: RoutedReplica) -> int:
        """Return the port of a replica's bootstrap server, as its engine says.

        Raises:
            PromptNotRead: it does not say.
        """
        key = (replica.job_id, replica.url)
        known = self._ports.get(key)
        if known is not None:
            return known
        try:
            async with session.get(
                f"{replica.url}/get_server_info", timeout=aiohttp.ClientTimeout(total=PORT_S), allow_redirects=False
            ) as answer:
                found = msgspec.json.decode(await answer.read(), type=_ServerInfo)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise PromptNotRead(f"its bootstrap port is unknown: {type(error).__name__}", dead=True) from None
        if len(self._ports) > 10_000:
            self._ports.clear()
        self._ports[key] = found.disaggregation_bootstrap_port
        return found.disaggregation_bootstrap_port

    def _warn(self, service: str, text: str) -> None:
        if service not in self._warned:
            self._warned.add(service)
            _log.warning("Service %s reads no prompts: %s.", service, text)


class _ServerInfo(msgspec.Struct):
    """What SGLang says of itself."""

    disaggregation_bootstrap_port: int


def _transfer_of(answer: bytes) -> dict[str, Any] | None:
    try:
        return _answers.decode(answer).kv_transfer_params or None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def waits_for_prompts(prefill: RoutedService | None) -> bool:
    """Return whether the replicas that answer cannot read prompts themselves."""
    return prefill is not None and prefill.view.protocol == TransferProtocol.SGLANG

"""Runs a gateway until it is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import ssl
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.http_exceptions import PayloadEncodingError

from phalanx.core.errors import BadRequest
from phalanx.gateway.batches.file_store import FileStore
from phalanx.gateway.batches.routes import BatchRoutes
from phalanx.gateway.head_link import GatewayHead, HeadLink
from phalanx.gateway.limit_shares import LimitShareLink
from phalanx.gateway.metrics import GatewayMetrics
from phalanx.gateway.rate_limits import RateLimiter
from phalanx.gateway.refusals import Refused
from phalanx.gateway.relay import ROUTES, RequestRelay
from phalanx.gateway.request_accounts import RequestAccounts
from phalanx.gateway.request_body import BODY_MAX
from phalanx.gateway.saved_prefixes import PrefixFiles
from phalanx.gateway.services import ServiceTable
from phalanx.gateway.slow_clients import SlowClients
from phalanx.gateway.usage_link import UsageLink
from phalanx.gateway.usage_meter import UsageMeter

COLLECT_EVERY = 10_000  # objects that came and did not go
M_MMAP_THRESHOLD = -3  # of mallopt(3)
LARGE_BYTES = 256 << 10
DRAIN_S = 30.0  # that answers under way have to end after a stop


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """Options of one gateway.

    Attributes:
        host, port: where it listens; port 0 is any free one. tls: None for plain HTTP, which only loopback may have.
        snapshot: file with the last list of services; "" for none.
        files_folder: where uploaded files are kept; "" for no files and batches.
        prefix_folder: where each gateway of the machine saves which replica has read which prompts; "" for nowhere.
        usage_folder: where the use of services is kept until the head has counted it; "" for none.
        replica_limit: requests that one replica gets at once.
        waiting_max: requests of one service that may wait; wait_max_s: for how long.
        silent_max_s: an answer that is silent for this long is ended.
        shared: other gateways may listen on the same port, and the kernel divides the connections.
    """

    host: str
    port: int
    tls: ssl.SSLContext | None
    snapshot: str
    prefix_folder: str
    usage_folder: str
    replica_limit: int
    waiting_max: int
    wait_max_s: float
    silent_max_s: float
    shared: bool = False
    files_folder: str = ""


def run_gateway(head: GatewayHead, options: GatewayOptions, ready: Callable[[int], None]) -> None:
    """Run until SIGTERM or SIGINT; `ready` gets the port.

    Raises:
        BadRequest: it cannot listen there.
    """
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(_run(head, options, ready))


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's where it is installed: it takes an eighth less processor time for a stream than asyncio's own."""
    try:
        import uvloop  # not everywhere
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _tune_gc() -> None:
    """Leave out of each collection what lives as long as the process, such as modules, and collect more rarely: requests leave few cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, 20, 50)


def _return_large_buffers() -> None:
    """Let glibc give the memory of each large body back when it is freed. Else the first one moves all later ones into the heap, which only grows."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


async def _run(head: GatewayHead, options: GatewayOptions, ready: Callable[[int], None]) -> None:
    table = ServiceTable(replica_limit=options.replica_limit, waiting_max=options.waiting_max)
    prefixes = PrefixFiles(table, options.prefix_folder)
    prefixes.open()
    link = HeadLink(head, table, options.snapshot)
    metrics = GatewayMetrics()
    limiter = RateLimiter()
    meter = UsageMeter()
    accounts = RequestAccounts(table, limiter, metrics, meter)
    usage = UsageLink(link, table, meter, options.usage_folder)
    shares = LimitShareLink(link, limiter, uuid.uuid4().hex)
    relay = RequestRelay(
        table, link, metrics, accounts, wait_max_s=options.wait_max_s, silent_max_s=options.silent_max_s
    )
    await relay.open()
    batches = BatchRoutes(link, table, FileStore(options.files_folder)) if options.files_folder else None
    runner = web.AppRunner(
        _app(relay, batches),
        handler_cancellation=True,
        access_log=None,
        logger=_http_log(),
        shutdown_timeout=DRAIN_S,
        keepalive_timeout=75.0,
    )
    await runner.setup()
    site = web.TCPSite(
        runner, options.host, options.port, ssl_context=options.tls, reuse_port=options.shared, backlog=4096
    )
    assert runner.server is not None  # set up above
    slow = SlowClients(runner.server)
    stop = asyncio.Event()
    reporting = asyncio.create_task(usage.run())
    following = [
        reporting,
        *(
            asyncio.create_task(one)
            for one in (link.run(), shares.run(), slow.run(), prefixes.run(), relay.silence.run())
        ),
    ]
    for task in following:
        task.add_done_callback(lambda _: stop.set())  # it ends by an error alone, which then ends the gateway
    try:
        try:
            await site.start()
        except OSError as error:
            where = f"{options.host}:{options.port}"
            reason = (
                os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            )  # asyncio's text is long
            raise BadRequest(f"cannot listen on {where}: {reason}", hint="choose another port") from None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        _tune_gc()
        _return_large_buffers()
        ready(runner.addresses[0][1])
        await stop.wait()
    finally:
        await runner.cleanup()
        await relay.close()
        reporting.cancel()  # before the last report, which needs the others
        await asyncio.wait([reporting])
        await usage.close()
        for task in following:
            task.cancel()
        for task in following:
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _http_log() -> logging.Logger:
    """The log of the HTTP server, without requests that are none: anyone can send them, and they may quote a key."""
    log = logging.getLogger("phalanx.gateway.http")
    wrong = (HttpProcessingError, PayloadEncodingError, web.RequestPayloadError)
    log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], wrong)))
    return log


@web.middleware
async def _refuse_unknown_routes(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Give the errors of the router OpenAI's form."""
    where = f"{request.method} {request.path[:200]}"
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        text = f"{where}: this route takes {allowed} only"
        return Refused(405, text, "method_not_allowed", headers={"Allow": allowed}).response()
    except web.HTTPNotFound:
        return Refused(404, f"{where}: there is no such route", "unknown_url").response()


def _app(relay: RequestRelay, batches: BatchRoutes | None = None) -> web.Application:
    app = web.Application(client_max_size=BODY_MAX, middlewares=[_refuse_unknown_routes])
    app.router.add_get("/v1/models", relay.models)
    app.router.add_get("/metrics", relay.scrape)
    app.router.add_get("/health", relay.health)
    for path in ROUTES:
        app.router.add_post(path, relay.forward)
    if batches is not None:
        batches.add_to(app)
    return app

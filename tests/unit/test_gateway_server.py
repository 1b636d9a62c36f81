"""The gateway's own answers to requests that no route takes, and what it keeps of bodies."""

import asyncio
import gc
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from phalanx.gateway.refusals import Refused
from phalanx.gateway.relay import RequestRelay
from phalanx.gateway.request_body import BODY_MAX, read_body
from phalanx.gateway.server import _app


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/v1/images/generations", 404, "unknown_url"),
        ("GET", "/", 404, "unknown_url"),
    ],
)
def test_errors_of_the_router_have_openais_form(method, path, status, code):
    async def check():
        nothing: Any = None  # no request gets as far as a handler
        relay = RequestRelay(nothing, nothing, nothing, nothing, wait_max_s=1.0, silent_max_s=1.0)
        runner = web.AppRunner(_app(relay))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.request(method, f"http://127.0.0.1:{runner.addresses[0][1]}{path}") as answer,
            ):
                return answer.status, await answer.json(), answer.headers.get("Allow")
        finally:
            await runner.cleanup()

    found, body, allowed = asyncio.run(check())
    assert (found, body["error"]["code"]) == (status, code)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert bool(allowed) == (status == 405)


@pytest.mark.parametrize(("size", "status"), [(3 << 20, 200), (BODY_MAX, 200), (BODY_MAX + 1, 413)])
def test_a_connection_that_waits_for_its_next_request_keeps_no_body(size, status):
    """aiohttp keeps the last request of a connection, and with it what `request.read` returned: 16 MiB for each idle client."""
    served: list[web.Request] = []

    async def handle(request):
        served.append(request)
        try:
            return web.Response(text=str(len(await read_body(request))))
        except Refused as refused:
            return refused.response()

    async def check():
        app = web.Application(client_max_size=BODY_MAX)
        app.router.add_post("/", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"http://127.0.0.1:{runner.addresses[0][1]}/", data=b"x" * size) as answer,
            ):
                assert answer.status == status
                if status == 200:
                    assert await answer.text() == str(size)
                kept = [one for one in gc.get_referents(served[0]) if isinstance(one, bytes | bytearray)]
                return max(map(len, kept), default=0)
        finally:
            await runner.cleanup()

    assert asyncio.run(check()) < 1 << 20

"""The gateway's own answers to requests that no route takes."""

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from phalanx.gateway.relay import RequestRelay
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

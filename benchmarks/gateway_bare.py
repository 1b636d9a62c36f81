"""The least that a proxy does with aiohttp: no keys, no limits, no prefixes: `python -m benchmarks.gateway_bare PORT URL [URL ...]`."""

from __future__ import annotations

import sys
from typing import Any

import aiohttp
from aiohttp import web

BODY_MAX = 16 << 20


class BareProxy:
    """Passes each request to the upstream with the fewest requests under way."""

    def __init__(self, urls: list[str]) -> None:
        self.flight = dict.fromkeys(urls, 0)
        self.session: aiohttp.ClientSession | None = None

    async def open(self, _app: web.Application) -> None:
        """Open the connections to upstreams."""
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)

    async def post(self, request: web.Request) -> web.StreamResponse:
        """Pass a request and its answer."""
        assert self.session is not None
        url = min(self.flight, key=lambda one: self.flight[one])
        self.flight[url] += 1
        try:
            headers = {"Content-Type": "application/json"}
            async with self.session.post(url + request.path_qs, data=await request.read(), headers=headers) as upstream:
                answer = web.StreamResponse(
                    status=upstream.status, headers={"Content-Type": upstream.headers["Content-Type"]}
                )
                await answer.prepare(request)
                async for chunk in upstream.content.iter_any():
                    await answer.write(chunk)
                await answer.write_eof()
                return answer
        finally:
            self.flight[url] -= 1


async def _health(_request: web.Request) -> web.Response:
    return web.Response()


def main(port: int, urls: list[str]) -> None:
    """Run it."""
    proxy = BareProxy(urls)
    app = web.Application(client_max_size=BODY_MAX)
    app.on_startup.append(proxy.open)
    app.router.add_post("/v1/{path:.*}", proxy.post)
    app.router.add_get("/health", _health)
    more: dict[str, Any] = {"access_log": None, "print": None}
    web.run_app(app, host="127.0.0.1", port=port, **more)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

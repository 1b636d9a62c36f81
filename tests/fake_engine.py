"""An engine with OpenAI's routes, without a model: `python -m tests.fake_engine --port P [--chunks N] [--pause S]`.

Its answers name the process and count how much of the prompt it had read before, as an engine with a prefix cache does. `GET /seen` lists the
headers that reached it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os

from aiohttp import web

BLOCK = 64


class Engine:
    def __init__(self, chunks: int, pause_s: float) -> None:
        self.chunks, self.pause_s = chunks, pause_s
        self.blocks: set[bytes] = set()
        self.seen: list[dict[str, str]] = []
        self.cancelled = self.peak = self.now = 0

    def read_before(self, prompt: bytes) -> int:
        prompt = prompt[: 1 << 16]
        ends = range(BLOCK, len(prompt) + 1, BLOCK)
        known = sum(1 for end in ends if prompt[:end] in self.blocks)
        self.blocks.update(prompt[:end] for end in ends)
        return known * BLOCK

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        try:
            asked = json.loads(body)
        except ValueError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        self.seen.append(dict(request.headers))
        self.now += 1
        self.peak = max(self.peak, self.now)
        try:
            return await self.answer(request, asked)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.now -= 1

    async def answer(self, request: web.Request, asked: dict) -> web.StreamResponse:
        prompt = json.dumps(asked.get("messages") or asked.get("prompt")).encode()
        cached = self.read_before(prompt)
        chunks = asked.get("chunks", self.chunks)
        count = min(asked.get("max_tokens", chunks), chunks)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        words = [f"{os.getpid()} ", *(f"{asked.get('user', '')}{number} " for number in range(1, count))]
        if not asked.get("stream"):
            await asyncio.sleep(self.pause_s * count)
            return web.json_response({"model": asked["model"], "choices": [{"text": "".join(words)}], "usage": usage})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for word in words:
            await answer.write(b"data: " + json.dumps({"choices": [{"delta": {"content": word}}]}).encode() + b"\n\n")
            await asyncio.sleep(asked.get("pause", self.pause_s))
        if asked.get("stream_options", {}).get("include_usage"):
            await answer.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        return answer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.0)
    options = parser.parse_args()
    engine = Engine(options.chunks, options.pause)

    async def ok(_request: web.Request) -> web.Response:
        return web.Response()

    async def seen(_request: web.Request) -> web.Response:
        return web.json_response(
            {"seen": engine.seen, "cancelled": engine.cancelled, "peak": engine.peak, "now": engine.now}
        )

    app = web.Application(client_max_size=32 << 20)
    app.router.add_post("/v1/chat/completions", engine.complete)
    app.router.add_post("/v1/completions", engine.complete)
    for path in ("/health", "/ping"):
        app.router.add_get(path, ok)
    app.router.add_get("/seen", seen)
    app.router.add_post("/sleep", ok)
    app.router.add_post("/wake_up", ok)
    web.run_app(app, host="127.0.0.1", port=options.port, print=None, handler_cancellation=True, access_log=None)


if __name__ == "__main__":
    main()

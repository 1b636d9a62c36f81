"""A gateway process before engines of the tests, with a head that only lists them and knows every key that begins with `good`.

    python -m tests.gateway_rig --head URL --port P      the gateway alone, as `phalanx gateway` runs it

Use it where a whole head adds nothing but processor time; `tests/e2e/test_gateway.py` has a real one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from benchmarks.cluster import free_port

ROOT = Path(__file__).parents[1]
KEY = "good-key"
SERVICE = "chat"
READER = "chat-prefill"


@dataclass(slots=True, kw_only=True)
class EngineProcess:
    """One engine: the number of its job, its port, and its process where the rig started it."""

    number: int
    port: int
    process: asyncio.subprocess.Process | None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(slots=True, kw_only=True)
class GatewayRig:
    """The head, engines and gateways of one test.

    Attributes:
        engines: that are listed as ready.
        patched: bodies of requests to change the service, such as a wish for a replica.
        desired: replicas wanted, as the list says.
        protocol: of a second service, "chat-prefill", which reads the prompts of the first; "" without it. `readers`: engines of it.
        away: the head cuts each connection.
    """

    session: aiohttp.ClientSession
    url: str = ""
    head: str = ""
    engines: dict[int, EngineProcess] = field(default_factory=dict)
    gateways: list[asyncio.subprocess.Process] = field(default_factory=list)
    patched: list[dict] = field(default_factory=list)
    desired: int = 1
    protocol: str = ""
    readers: set[int] = field(default_factory=set)
    away: bool = False
    last: int = 0
    started: list[asyncio.subprocess.Process] = field(default_factory=list)

    async def engine(self, *options: str, listed: bool = True, reads: bool = False) -> EngineProcess:
        """Start an engine, wait until it answers, and list it; one that reads prompts with the second service."""
        port = free_port()
        words = ["-m", "tests.protocol_engine", "--port", str(port), "--served-model-name", SERVICE, *options]
        env = {**os.environ, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        process = await asyncio.create_subprocess_exec(sys.executable, *words, cwd=ROOT, env=env)
        self.started.append(process)
        self.last += 1
        one = EngineProcess(number=self.last, port=port, process=process)
        await self.until_up(one.url + "/health")
        if reads:
            self.readers.add(one.number)
        if listed:
            self.engines[one.number] = one
        return one

    async def stop(self, one: EngineProcess, number: int = signal.SIGKILL) -> None:
        """Signal an engine. The list still has it until `forget`."""
        assert one.process is not None
        with contextlib.suppress(ProcessLookupError):
            one.process.send_signal(number)
        if number == signal.SIGKILL:
            await one.process.wait()

    def forget(self, one: EngineProcess) -> None:
        """Take an engine from the list."""
        self.engines.pop(one.number, None)

    async def gateway(self, *options: str, port: int = 0) -> asyncio.subprocess.Process:
        """Start a gateway."""
        port = port or free_port()
        words = ["-m", "tests.gateway_rig", "--head", self.head, "--port", str(port), *options]
        process = await asyncio.create_subprocess_exec(sys.executable, *words, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        assert (await process.stdout.readline()).startswith(b"ready")
        self.gateways.append(process)
        self.url = f"http://127.0.0.1:{port}"
        return process

    async def until_up(self, url: str) -> None:
        """Wait until something answers there."""
        await _until(lambda: self._answers(url))

    async def until_listed(self, count: int, service: str = SERVICE) -> None:
        """Wait until the gateway has this many replicas."""

        async def listed() -> bool:
            return f'phalanx_gateway_replicas{{service="{service}"}} {count}.0' in await self.metrics()

        await _until(listed)

    async def until_generated(self, one: EngineProcess, count: int) -> None:
        """Wait until an engine has generated this many tokens."""

        async def generated() -> bool:
            async with self.session.get(one.url + "/seen") as answer:
                return bool((await answer.json())["generated"] >= count)

        await _until(generated)

    async def _answers(self, url: str) -> bool:
        try:
            async with self.session.get(url):
                return True
        except (aiohttp.ClientError, OSError):
            return False

    async def metrics(self) -> str:
        async with self.session.get(self.url + "/metrics", headers={"Authorization": f"Bearer {KEY}"}) as answer:
            return await answer.text()

    async def metric(self, name: str) -> float:
        """The sum of a metric of the gateway over its labels."""
        lines = (await self.metrics()).splitlines()
        return sum(float(one.rpartition(" ")[2]) for one in lines if one.startswith((name + "{", name + " ")))

    async def fault(self, one: EngineProcess, **asked: object) -> None:
        async with self.session.post(one.url + "/fault", json=asked) as answer:
            assert answer.status == 200

    # ---- the head ---------------------------------------------------------------------------------------------------

    @property
    def cut_while_away(self) -> Middleware:
        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self.away and request.transport is not None:
                request.transport.abort()
            return await handler(request)

        return check

    def record(self, *, reads: bool = False) -> dict:
        ready = [
            {
                "job_id": str(one.number),
                "revision": 1,
                "node_id": "n",
                "address": "127.0.0.1",
                "port": one.port,
                "ready": True,
            }
            for one in self.engines.values()
            if (one.number in self.readers) is reads
        ]
        return {
            "name": READER if reads else SERVICE,
            "prefill_for": SERVICE if reads else "",
            "protocol": self.protocol if reads else "",
            "state": "ready" if ready else "starting",
            "user": "ada",
            "project": "p",
            "queue": "q",
            "created_s": 1.0,
            "revision": 1,
            "served_revision": 1,
            "replicas": "0..100",
            "desired": self.desired,
            "ready": len(ready),
            "endpoints": ready,
        }

    async def services(self, _request: web.Request) -> web.Response:
        services = [self.record(), *([self.record(reads=True)] if self.protocol else [])]
        return web.json_response({"services": services, "next": ""})

    async def me(self, request: web.Request) -> web.Response:
        key = request.headers["Authorization"].removeprefix("Bearer ")
        if not key.startswith("good"):
            return web.json_response({"error": {}}, status=401)
        me = {"user": key, "role": "user", "token_id": key, "projects": ["p"], "actions": ["submit"]}
        return web.json_response(me)

    async def patch(self, request: web.Request) -> web.Response:
        self.patched.append(await request.json())
        return web.json_response({})


@contextlib.asynccontextmanager
async def gateway_rig() -> AsyncIterator[GatewayRig]:
    """A head without engines and gateways; all of them end with the block."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:
        rig = GatewayRig(session=session)
        app = web.Application(middlewares=[rig.cut_while_away])
        app.router.add_get("/v1/services", rig.services)
        app.router.add_get("/v1/me", rig.me)
        app.router.add_patch("/v1/services/{name}", rig.patch)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        rig.head = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield rig
        finally:
            for process in [*rig.started, *rig.gateways]:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            await runner.cleanup()


async def _until(check: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(120):
        while not await check():  # noqa: ASYNC110 - it looks at another process
            await asyncio.sleep(0.02)


def main() -> None:
    """Run a gateway, as `phalanx gateway` does after it has read its options."""
    from phalanx.gateway.head_link import GatewayHead
    from phalanx.gateway.server import GatewayOptions, run_gateway

    parser = argparse.ArgumentParser()
    parser.add_argument("--head", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--snapshot", default="")
    parser.add_argument("--prefixes", default="")
    parser.add_argument("--per-replica", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--silent", type=float, default=600.0)
    parser.add_argument("--shared", action="store_true")
    asked = parser.parse_args()
    head = GatewayHead(
        url=lambda: asked.head, headers=lambda: {"Authorization": f"Bearer {KEY}"}, failed=lambda _url: None
    )
    options = GatewayOptions(
        host="127.0.0.1",
        port=asked.port,
        tls=None,
        snapshot=asked.snapshot,
        prefix_folder=asked.prefixes,
        usage_folder="",
        replica_limit=asked.per_replica,
        waiting_max=asked.waiting,
        wait_max_s=300.0,
        silent_max_s=asked.silent,
        shared=asked.shared,
    )
    run_gateway(head, options, lambda _port: print("ready", flush=True))


if __name__ == "__main__":
    main()

"""How engines of the tests pass what one has read of a prompt to another one, as vLLM's NixlConnector and SGLang do; the bytes of the cache are not real.

vLLM: an engine with `--kv-transfer-config` answers a request with `do_remote_decode` with the `kv_transfer_params` with which another engine fetches
the blocks once, from the side channel (VLLM_NIXL_SIDE_CHANNEL_PORT). One that cannot fetch them fails the request (`kv_load_failure_policy: fail`).

SGLang: `--disaggregation-mode prefill` and `decode` meet in the `bootstrap_room` of the first one's bootstrap server. None of them answers alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import uuid

import aiohttp
from aiohttp import web

PULL_S = 20.0  # as a wait for a handshake; SGLang's is 300 s
BLOCK = 16


class TransferFailed(Exception):
    """The engine has not got what another one should have read."""


class CacheTransfers:
    """What one engine offers to others and fetches from them. `reads`: prompts that it read for others; `fetched`: that it fetched."""

    def __init__(self, options: argparse.Namespace) -> None:
        config = json.loads(options.kv_transfer_config) if options.kv_transfer_config else {}
        self.connector: str = config.get("kv_connector", "")
        self.mode: str = options.disaggregation_mode
        self.bootstrap_port: int = options.disaggregation_bootstrap_port
        self.side_port = int(os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600"))
        self.engine_id = uuid.uuid4().hex
        self.reads = self.fetched = 0
        self.loses = 0  # the next so many offers are gone when they are fetched
        self._offers: dict[str, asyncio.Future[int]] = {}  # tokens that were read
        self._pulled: dict[str, asyncio.Event] = {}
        self._next_block = 1

    async def listen(self) -> None:
        """Listen for other engines."""
        if not (self.connector or self.mode == "prefill"):
            return
        app = web.Application()
        app.router.add_get("/pull/{key}", self._pull)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.bootstrap_port if self.mode else self.side_port).start()

    async def _pull(self, request: web.Request) -> web.Response:
        key = request.match_info["key"]
        offer = self._offer(key) if self.mode else self._offers.get(key)
        if offer is None:
            return web.Response(status=404)
        tokens = await asyncio.wait_for(asyncio.shield(offer), PULL_S)
        self._offers.pop(key, None)
        self._pulled.setdefault(key, asyncio.Event()).set()
        return web.json_response({"tokens": tokens})

    def _offer(self, key: str) -> asyncio.Future[int]:
        return self._offers.setdefault(key, asyncio.get_running_loop().create_future())

    # ---- vLLM -------------------------------------------------------------------------------------------------------

    def offer(self, asked: dict, tokens: int) -> dict | None:
        """The `kv_transfer_params` of an answer."""
        wanted = asked.get("kv_transfer_params") or {}
        if not self.connector or not wanted.get("do_remote_decode"):
            return None
        blocks = list(range(self._next_block, self._next_block + -(-tokens // BLOCK)))
        self._next_block += len(blocks)
        if self.loses:
            self.loses -= 1
        else:
            self._offer(f"{self.engine_id}-{blocks[0]}").set_result(tokens)
        self.reads += 1
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": blocks,
            "remote_engine_id": self.engine_id,
            "remote_host": "127.0.0.1",
            "remote_port": self.side_port,
            "tp_size": 1,
        }

    # ---- both -------------------------------------------------------------------------------------------------------

    def refusal(self, asked: dict) -> str:
        """Why SGLang refuses a request at once."""
        if self.mode and asked.get("bootstrap_room") is None:
            return "Disaggregated request received without bootstrap room id."
        return ""

    async def fetch(self, asked: dict, tokens: int) -> bool:
        """Fetch what another engine has read of a prompt; False if the request names none.

        Raises:
            TransferFailed: it is not there.
        """
        wanted = asked.get("kv_transfer_params") or {}
        if self.connector and wanted.get("do_remote_prefill"):
            host, port = wanted["remote_host"], wanted["remote_port"]
            key = f"{wanted['remote_engine_id']}-{wanted['remote_block_ids'][0]}"
        elif self.mode == "decode":
            host, port, key = asked["bootstrap_host"], asked["bootstrap_port"], str(asked["bootstrap_room"])
        else:
            return False
        try:
            timeout = aiohttp.ClientTimeout(total=PULL_S)
            async with aiohttp.request("GET", f"http://{host}:{port}/pull/{key}", timeout=timeout) as answer:
                found = (await answer.json())["tokens"] if answer.status == 200 else -1
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise TransferFailed(f"KV transfer failed: {type(error).__name__}") from None
        if found != tokens:
            raise TransferFailed(f"KV transfer failed: {found} tokens instead of {tokens}")
        self.fetched += 1
        return True

    async def hand_over(self, asked: dict, tokens: int) -> None:
        """SGLang's engine that reads: keep what was read until the other one has it."""
        if self.mode != "prefill":
            return
        key = str(asked["bootstrap_room"])
        self.reads += 1
        self._offer(key).set_result(tokens)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._pulled.setdefault(key, asyncio.Event()).wait(), PULL_S)
        del self._pulled[key]


def add_options(options: argparse.ArgumentParser) -> None:
    """Add those of both engines, named as there."""
    options.add_argument("--kv-transfer-config", default="", help="JSON")
    options.add_argument("--disaggregation-mode", choices=["prefill", "decode"], default="")
    options.add_argument("--disaggregation-bootstrap-port", type=int, default=8998)

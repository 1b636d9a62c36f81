"""Reads how much of their KV cache replicas use, from the metrics of their engines, where `scale: {kv: ...}` needs it."""

from __future__ import annotations

import asyncio
import re
from typing import Final

import aiohttp

from phalanx.gateway.routing import RoutedReplica
from phalanx.gateway.services import ServiceTable

READ_EVERY_S: Final = 2.0
ANSWER_S: Final = 1.0
BYTES_MAX: Final = 1 << 20
# vLLM (since 0.10, and before), SGLang, llama.cpp: shares from 0 to 1. An engine with several ranks has a line for each; the fullest counts.
_LINE: Final = re.compile(
    rb"^(?:vllm:kv_cache_usage_perc|vllm:gpu_cache_usage_perc|sglang:token_usage|llamacpp:kv_cache_usage_ratio)"
    rb"(?:\{[^}\n]*\})?\s+([0-9.eE+-]{1,30})",
    re.MULTILINE,
)


class EngineMetrics:
    """See the module."""

    def __init__(self, table: ServiceTable) -> None:
        self._table = table

    async def run(self) -> None:
        """Read until cancelled."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session:
            while True:
                replicas = [
                    replica
                    for service in self._table.services.values()
                    if "kv" in service.view.scale
                    for replica in service.replicas.values()
                ]
                await asyncio.gather(*(self._read_one(session, replica) for replica in replicas))
                await asyncio.sleep(READ_EVERY_S)

    async def _read_one(self, session: aiohttp.ClientSession, replica: RoutedReplica) -> None:
        try:
            async with session.get(f"{replica.url}/metrics", allow_redirects=False) as answer:
                text = bytearray()
                async for part in answer.content.iter_any():
                    text += part
                    if len(text) > BYTES_MAX:
                        break
            replica.cache_use = parse_cache_use(bytes(text)) if answer.status == 200 else 0.0
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            replica.cache_use = 0.0


def parse_cache_use(text: bytes) -> float:
    """Return the share of the KV cache in use, 0 to 1; 0 if the metrics do not say.

    Raises:
        ValueError: the figure is no number.
    """
    found = [float(value) for value in _LINE.findall(text)]
    return max(0.0, min(1.0, max(found, default=0.0)))

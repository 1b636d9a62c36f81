"""Reads how much of their KV cache replicas use, from the metrics of their engines: for the choice of a replica, and for `scale: {kv: ...}`."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Final

import aiohttp

from phalanx.gateway.routing import RoutedReplica
from phalanx.gateway.services import RoutedService, ServiceTable

READ_EVERY_S: Final = 2.0
ABSENT_EVERY_S: Final = 60.0  # of a replica that has no such metric: servers of any kind are replicas
ANSWER_S: Final = 1.0
BYTES_MAX: Final = 1 << 20
# vLLM (since 0.10, and before), SGLang, llama.cpp: shares from 0 to 1. An engine with several ranks has a line for each; the fullest counts.
_LINE: Final = re.compile(
    rb"^(?:vllm:kv_cache_usage_perc|vllm:gpu_cache_usage_perc|sglang:token_usage|llamacpp:kv_cache_usage_ratio)"
    rb"(?:\{[^}\n]*\})?\s+([0-9.eE+-]{1,30})",
    re.MULTILINE,
)
_VLLM_CONFIG: Final = re.compile(rb"^vllm:cache_config_info\{([^}\n]*)\}", re.MULTILINE)
_VLLM_SIZES: Final = re.compile(rb'(?:^|,)(block_size|num_gpu_blocks)="(\d{1,9})"')
_SGLANG_SIZE: Final = re.compile(rb"^sglang:max_total_num_tokens(?:\{[^}\n]*\})?\s+([0-9.]{1,20})", re.MULTILINE)


class EngineMetrics:
    """See the module."""

    def __init__(self, table: ServiceTable) -> None:
        self._table = table
        self._absent: dict[
            tuple[str, str], float
        ] = {}  # replicas without the metric, and until when they are not asked

    async def run(self) -> None:
        """Read until cancelled."""
        plain = {"Accept-Encoding": "identity"}  # a compressed answer could be of any size
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with aiohttp.ClientSession(timeout=timeout, headers=plain, auto_decompress=False) as session:
            while True:
                began_s = time.monotonic()
                self._absent = {key: until_s for key, until_s in self._absent.items() if until_s > began_s}
                wanted = [one for service in self._table.services.values() for one in self._wanted(service)]
                async with asyncio.TaskGroup() as reads:
                    for replica in wanted:
                        reads.create_task(self._read_one(session, replica))
                        await asyncio.sleep(READ_EVERY_S / 2 / len(wanted))  # all at once would hold up streams
                await asyncio.sleep(max(0.1, began_s + READ_EVERY_S - time.monotonic()))

    def _wanted(self, service: RoutedService) -> list[RoutedReplica]:
        """Return the replicas to read: for the choice only where there is one."""
        replicas = list(service.replicas.values())
        if "kv" in service.view.scale:
            return replicas
        return [one for one in replicas if (one.job_id, one.url) not in self._absent] if len(replicas) > 1 else []

    async def _read_one(self, session: aiohttp.ClientSession, replica: RoutedReplica) -> None:
        """Read one replica. One that does not answer keeps its last figure, which counts less and less."""
        try:
            async with session.get(f"{replica.url}/metrics", allow_redirects=False) as answer:
                text = bytearray()
                async for part in answer.content.iter_any():
                    text += part
                    if len(text) > BYTES_MAX:
                        break
            whole = bytes(text) if answer.status == 200 else b""
            use, tokens = parse_cache_use(whole), parse_cache_tokens(whole)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return
        if use is None:
            self._absent[replica.job_id, replica.url] = time.monotonic() + ABSENT_EVERY_S
        replica.read_cache(use or 0.0, tokens, time.monotonic())


def parse_cache_use(text: bytes) -> float | None:
    """Return the share of the KV cache in use, 0 to 1; None if the metrics do not say.

    Raises:
        ValueError: the figure is no number.
    """
    found = [float(value) for value in _LINE.findall(text)]
    return max(0.0, min(1.0, max(found))) if found else None


def parse_cache_tokens(text: bytes) -> int:
    """Return how many tokens the smallest KV cache of an engine's ranks holds; 0 if the metrics do not say.

    Raises:
        ValueError: the figure is no number.
    """
    found = [int(float(value)) for value in _SGLANG_SIZE.findall(text)]
    for labels in _VLLM_CONFIG.findall(text):
        sizes = {name: int(value) for name, value in _VLLM_SIZES.findall(labels)}
        found.append(sizes.get(b"block_size", 0) * sizes.get(b"num_gpu_blocks", 0))
    return min(found, default=0)

"""Time to the first token of real vLLM replicas behind the gateway, against round robin over the same replicas. Prints a table, or JSON with --json.

Sessions share a few system prompts, begin with a text of their own and ask on. The same requests in the same order go once through the gateway and
once to each replica in turn, without a gateway between, which costs round robin nothing. Both take turns at going first, and begin with empty caches.
Needs what `make vllm-tools` installs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster import free_port
from benchmarks.figures import Figure, at_most, plain_figure, print_progress, print_report
from tests import vllm_here
from tests.gateway_rig import KEY, SERVICE, EngineProcess, GatewayRig, gateway_rig

CHAT = "/v1/chat/completions"
REPLICAS = 2
SYSTEM_WORDS, TEXT_WORDS, QUESTION_WORDS = 180, 270, 12
WORDS = [
    "river",
    "stone",
    "cloud",
    "winter",
    "harbour",
    "letter",
    "engine",
    "garden",
    "silver",
    "morning",
    "bridge",
    "market",
    "window",
    "forest",
    "paper",
    "signal",
    "copper",
    "island",
    "summer",
    "ladder",
    "thunder",
    "valley",
    "candle",
    "orchard",
    "meadow",
    "lantern",
    "pocket",
    "mirror",
    "anchor",
    "saddle",
    "feather",
    "kettle",
    "violin",
    "barrel",
    "compass",
    "blanket",
    "chimney",
    "pebble",
    "ribbon",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One turn of a session: `messages` of a chat, `turn` from 0."""

    session: int
    turn: int
    messages: list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a request took: `first_s` to the first text, and the tokens of its prompt, of which the engine had `cached` in its cache."""

    turn: int
    first_s: float
    prompt: int
    cached: int


def requests(seed: int, sessions: int, systems: int, turns: int) -> list[Request]:
    """Return all requests in the order of their start: turn by turn, the sessions shuffled in each, as users come in no fixed order."""
    chance = random.Random(seed)

    def text(words: int) -> str:
        return " ".join(chance.choices(WORDS, k=words)) + "."

    shared = [text(SYSTEM_WORDS) for _ in range(systems)]
    talks: list[list[dict[str, str]]] = [
        [{"role": "system", "content": shared[number % systems]}] for number in range(sessions)
    ]
    found = []
    for turn in range(turns):
        for number in chance.sample(range(sessions), sessions):
            talks[number].append({"role": "user", "content": text(QUESTION_WORDS if turn else TEXT_WORDS)})
            found.append(Request(session=number, turn=turn, messages=list(talks[number])))
            talks[number].append({"role": "assistant", "content": text(QUESTION_WORDS)})
    return found


async def ask(rig: GatewayRig, url: str, one: Request, tokens: int) -> Answer:
    """Send one request, and read its stream to the end."""
    body = {
        "model": SERVICE,
        "messages": one.messages,
        "temperature": 0,
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    began_s, first_s, usage = time.monotonic(), None, None
    async with rig.session.post(url + CHAT, json=body, headers={"Authorization": f"Bearer {KEY}"}) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            if first_s is None and any(choice["delta"].get("content") for choice in event.get("choices", ())):
                first_s = time.monotonic() - began_s
            usage = event.get("usage") or usage
    if first_s is None or usage is None:
        raise RuntimeError("an answer without text")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(turn=one.turn, first_s=first_s, prompt=usage["prompt_tokens"], cached=cached)


async def ask_all(
    rig: GatewayRig, wanted: Sequence[Request], place: Callable[[], str], clients: int, tokens: int
) -> list[Answer]:
    """Send all requests, so many at once; a session waits for its last answer. `place`: the address for the next request."""
    left, found = iter(wanted), list[Answer]()
    talking = {one.session: asyncio.Lock() for one in wanted}

    async def client() -> None:
        for one in left:
            async with talking[one.session]:
                found.append(await ask(rig, place(), one, tokens))

    await asyncio.gather(*(client() for _ in range(clients)))
    return found


async def compare(ports: Sequence[int], asked: argparse.Namespace) -> dict[str, list[list[Answer]]]:
    """Return the answers of each round, by `routed` and `round_robin`."""
    direct = [f"http://127.0.0.1:{port}" for port in ports]
    found: dict[str, list[list[Answer]]] = {"routed": [], "round_robin": []}
    async with gateway_rig() as rig:
        for number, port in enumerate(ports, 1):
            rig.engines[number] = EngineProcess(number=number, port=port, process=None)
        await rig.gateway()
        await rig.until_listed(len(ports))
        for url in direct:  # the first request of an engine takes longer than any other
            await ask(rig, url, requests(0, 1, 1, 1)[0], 2)
        for number in range(asked.runs):
            wanted = requests(asked.seed + number, asked.sessions, asked.systems, asked.turns)
            ways = list(found) if number % 2 else list(reversed(found))
            for way in ways:
                for url in direct:
                    async with rig.session.post(url + "/reset_prefix_cache") as answer:
                        answer.raise_for_status()
                turns = itertools.cycle(direct)
                place = (lambda: rig.url) if way == "routed" else (lambda turns=turns: next(turns))
                found[way].append(await ask_all(rig, wanted, place, asked.clients, asked.tokens))
                middle_s = statistics.median(one.first_s for one in found[way][-1])
                print_progress(f"round {number + 1}: {way} {middle_s:.2f} s to the first token (median)")
    return found


def p95(values: Sequence[float]) -> float:
    """Return the 95th percentile."""
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def figures_of(found: dict[str, list[list[Answer]]]) -> list[Figure]:
    """Return the figures; ratios are medians of rounds."""
    figures, by_name = [], dict[str, dict[str, list[float]]]()
    for way, rounds in found.items():
        by_name[way] = {
            "ttft_p50": [statistics.median(one.first_s for one in each) * 1000 for each in rounds],
            "ttft_mean": [statistics.fmean(one.first_s for one in each) * 1000 for each in rounds],
            "ttft_p95": [p95([one.first_s for one in each]) * 1000 for each in rounds],
            "next_turns_p50": [statistics.median([one.first_s for one in each if one.turn]) * 1000 for each in rounds],
        }
        figures += [plain_figure(f"{name}_{way}_ms", values, "ms") for name, values in by_name[way].items()]
        shares = [sum(one.cached for one in each) / sum(one.prompt for one in each) for each in rounds]
        figures.append(plain_figure(f"cached_share_{way}", shares, "of prompt tokens"))
    for name, ours in by_name["routed"].items():
        pairs = [one / other for one, other in zip(ours, by_name["round_robin"][name], strict=True)]
        figures.append(at_most(f"{name}_ratio", pairs, "x", 1.0, note="routed over round robin, in the same round"))
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one flat object")
    parser.add_argument("--runs", type=int, default=5, help="rounds, each with texts of its own")
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--systems", type=int, default=2, help="system prompts that the sessions share")
    parser.add_argument("--turns", type=int, default=3, help="of each session, at least 2")
    parser.add_argument("--clients", type=int, default=2, help="requests at once")
    parser.add_argument("--tokens", type=int, default=4, help="of each answer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--cache-blocks", type=int, default=0, help="blocks in the KV cache of a replica; 0: as many as fit in 1 GiB"
    )
    asked = parser.parse_args()
    if not vllm_here.installed():
        sys.exit("vLLM is not installed: make vllm-tools")
    options = ("--num-gpu-blocks-override", str(asked.cache_blocks)) if asked.cache_blocks else ()
    before = os.getloadavg()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="replicas-")))
        ports = [free_port() for _ in range(REPLICAS)]
        for port in ports:  # one after the other: their starts take all cores
            stack.enter_context(vllm_here.replica(port, folder / f"{port}.log", *options))
        found = asyncio.run(compare(ports, asked))
    figures = figures_of(found)
    facts: dict[str, Any] = {
        "requests": sum(len(one) for one in found["routed"]),
        "prompt_tokens": round(statistics.fmean(one.prompt for each in found["routed"] for one in each)),
        "load_before": [round(one, 1) for one in before],
        "load_after": [round(one, 1) for one in os.getloadavg()],
        "cores": os.cpu_count(),
    }
    if asked.json:
        flat = {one.name: round(one.value, 4) for one in figures}
        print(json.dumps({**flat, "missed": [one.name for one in figures if one.met is False], **facts}, indent=1))
        return
    print_report("prefix routing", figures, as_json=False)
    for name, value in facts.items():
        print(name, value)


if __name__ == "__main__":
    main()

"""Soak test of gateways: two of them before engines that die, hang and are cut off; each answer is compared with the one that it must be.

    python -m benchmarks.gateway_soak [--minutes 30] [--rate 12] [--json]

The head is the tests' own, and the engines are protocol-true ones whose text follows from all tokens of the prompt, so that each answer is told
from every other one. Each request has a marker of its own, in its prompt and as its `X-Request-Id`. A client whose gateway is killed asks the
other one. Exits with 1 if an answer was wrong or mixed with another, or if the second gateway did not answer after a reset.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from benchmarks.cluster import free_port
from benchmarks.figures import print_progress
from tests.gateway_rig import KEY, SERVICE, EngineProcess, GatewayRig, gateway_rig
from tests.protocol_engine import chat_prompt, expected_text

ENGINES: Final = 4
CUTTABLE: Final = 2  # of them are reached over a connection that can be cut
FAULT_EVERY_S: Final = 8.0
SILENT_S: Final = 5.0  # after which a gateway gives up an engine
LEAVES_SHARE: Final = 0.05  # of clients, in the middle of their streams
RESETS: Final = (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError)
SYSTEMS: Final = tuple(
    f"You are helper {number}. " + "Answer briefly and politely, in the words of the user. " * 30 for number in range(6)
)


class Link:
    """Passes connections to an engine; `cut` ends all that are open."""

    def __init__(self, port: int) -> None:
        self._port, self.port = port, 0
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> int:
        """Cut all connections; returns how many."""
        cut = list(self._open)
        for one in cut:
            one.transport.abort()
        return len(cut) // 2

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, far_writer}
        with contextlib.suppress(OSError):
            await asyncio.gather(_pass(reader, far_writer), _pass(far_reader, writer))
        for one in (writer, far_writer):
            self._open.discard(one)
            one.transport.abort()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while part := await reader.read(65536):
        writer.write(part)
        await writer.drain()
    raise ConnectionResetError  # ends the other direction too


@dataclass(slots=True)
class Got:
    """What a client got of one answer. `whole`: it ended as it should; `error`: what the gateway said instead; `reset`: the connection broke."""

    text: str = ""
    ids: set[str] = field(default_factory=set)
    whole: bool = False
    error: str = ""
    reset: bool = False


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What the soak has counted. `wrong`: markers of answers that were not as they must be, and how."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)  # reset by one gateway, and then not answered by the other
    seconds: list[float] = field(default_factory=list)
    continued: int = 0
    left_in_flight: float = 0.0
    memory_mib: list[list[float]] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the figures."""
        return {
            **dict(sorted(self.counts.items())),
            "wrong": len(self.wrong),
            "reset_and_not_answered_by_the_other": len(self.unanswered),
            "whole_share": round(self.counts["whole"] / max(1, self.counts["asked"] - self.counts["left"]), 5),
            "continued": self.continued,
            "in_flight_at_the_end": self.left_in_flight,
            "errors": dict(self.errors.most_common(12)),
            "faults": dict(sorted(self.faults.items())),
            "seconds_p50_p99": [round(one, 2) for one in _percentiles(self.seconds)],
            "gateway_mib_at_start_and_end": self.memory_mib,
        }


def _percentiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return 0.0, 0.0
    cuts = statistics.quantiles(values, n=100)
    return cuts[49], cuts[98]


class GatewaySoak:
    """One run.

    Args:
        rig: head, engines and gateways.
        folder: of the gateways' files.
        rate_per_s: requests.
        seed: of prompts and faults.
        planted: the last engine says other words than it should.
    """

    def __init__(self, rig: GatewayRig, folder: str, *, rate_per_s: float, seed: int, planted: bool = False) -> None:
        self._rig, self._folder, self._rate_per_s = rig, folder, rate_per_s
        self._chance = random.Random(seed)
        self._planted = planted
        self._ports = [free_port(), free_port()]
        self._gateways: list[asyncio.subprocess.Process] = []
        self._links: dict[int, Link] = {}
        self.outcome = Outcome()

    async def run(self, minutes: float) -> Outcome:
        """Run for so long, and until all answers have ended."""
        for number in range(ENGINES):
            await self._start_engine(cuttable=number < CUTTABLE)
        if self._planted:
            await self._rig.engine("--pause", "0.03", "--odd", "--ends-every", "3")
        for number in range(len(self._ports)):
            self._gateways.append(await self._start_gateway(number))
        for port in self._ports:
            self._rig.url = f"http://127.0.0.1:{port}"
            await self._rig.until_listed(len(self._rig.engines))
        before = [_memory_mib(one.pid) for one in self._gateways]
        until_s = time.monotonic() + minutes * 60
        faults = asyncio.create_task(self._faults(until_s))
        asked = set[asyncio.Task[None]]()
        number, next_s = 0, time.monotonic()
        told_s = next_s
        while time.monotonic() < until_s and not faults.done():
            next_s = max(next_s + self._chance.expovariate(self._rate_per_s), time.monotonic() - 1.0)
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            number += 1
            task = asyncio.create_task(self._client(number))
            asked.add(task)
            task.add_done_callback(asked.discard)
            if time.monotonic() - told_s > 30:
                told_s = time.monotonic()
                print_progress(json.dumps(self.outcome.summary()))
        await faults
        while asked:
            await asyncio.wait(asked)
        for port in self._ports:
            self._rig.url = f"http://127.0.0.1:{port}"
            await asyncio.sleep(0.5)
            self.outcome.left_in_flight += await self._rig.metric("phalanx_gateway_in_flight")
            self.outcome.continued += int(await self._rig.metric("phalanx_gateway_continued_total"))
        after = [_memory_mib(one.pid) for one in self._gateways]
        self.outcome.memory_mib = [[one, two] for one, two in zip(before, after, strict=True)]
        return self.outcome

    # ---- clients ----------------------------------------------------------------------------------------------------

    async def _client(self, number: int) -> None:
        chance = random.Random(f"{number} of {self._chance.random()}")
        marker, count = f"marker-{number:07}", chance.randint(10, 60)
        messages = [
            {"role": "system", "content": chance.choice(SYSTEMS)},
            {"role": "user", "content": f"{marker} " + "Say something. " * chance.randint(1, 20)},
        ]
        body: dict[str, Any] = {
            "model": SERVICE,
            "temperature": 0,
            "max_tokens": count,
            "stream": chance.random() < 0.85,
        }
        chat = chance.random() < 0.8
        prompt = chat_prompt(messages)
        body |= {"messages": messages} if chat else {"prompt": prompt}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        leaves_after = chance.randint(1, 10) if body["stream"] and chance.random() < LEAVES_SHARE else 0
        first = chance.randrange(2)
        expected = expected_text(prompt, count)
        counts = self.outcome.counts
        counts["asked"] += 1
        began_s = time.monotonic()
        got, turn = Got(), 0
        for turn in (0, 1):
            got = await self._ask(self._ports[(first + turn) % 2], path, body, marker, leaves_after)
            self._check(marker, got, expected)
            if not got.reset:
                break
            counts["resets"] += 1
        if got.reset:
            self.outcome.unanswered.append(f"{marker}: reset twice")
        elif turn:
            counts["answered by the other after a reset" if got.whole else "refused by the other after a reset"] += 1
        if got.whole:
            counts["whole"] += 1
            self.outcome.seconds.append(time.monotonic() - began_s)
        elif leaves_after and not got.error and not got.reset:
            counts["left"] += 1
        if got.error:
            counts["ended with an error"] += 1
            self.outcome.errors[got.error[:90]] += 1

    def _check(self, marker: str, got: Got, expected: str) -> None:
        wrong = got.text != expected if got.whole else not expected.startswith(got.text)
        if wrong or any(marker not in one for one in got.ids):
            how = f"{marker}: {'whole' if got.whole else 'part'} {got.text[:200]!r}, expected {expected[:200]!r}, ids {sorted(got.ids)[:3]}"
            self.outcome.wrong.append(how)
            print_progress(how)

    async def _ask(self, port: int, path: str, body: dict[str, Any], marker: str, leaves_after: int) -> Got:
        got = Got()
        headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": marker}
        try:
            async with self._rig.session.post(f"http://127.0.0.1:{port}{path}", json=body, headers=headers) as answer:
                got.ids.add(answer.headers.get("X-Request-Id", marker if answer.status != 200 else "none"))
                if answer.status != 200:
                    got.error = f"status {answer.status}: " + _message(await answer.read())
                elif not body["stream"]:
                    found = await answer.json()
                    got.ids.add(found["id"])
                    got.text, got.whole = _text(found), True
                else:
                    await _read_stream(answer, got, leaves_after)
        except (*RESETS, ValueError) as error:
            got.reset = not isinstance(error, ValueError)
            got.error = "" if got.reset else f"no JSON: {error}"
        return got

    # ---- faults -----------------------------------------------------------------------------------------------------

    async def _faults(self, until_s: float) -> None:
        kinds = [
            self._kill_engine,
            self._crash_engine,
            self._hang_engine,
            self._dead_engine,
            self._refusing_engine,
            self._slow_engine,
            self._cut_links,
            self._head_away,
            self._kill_gateway,
        ]
        while True:
            self._chance.shuffle(kinds)
            for one in kinds:
                await asyncio.sleep(FAULT_EVERY_S * self._chance.uniform(0.5, 1.5))
                if time.monotonic() > until_s - 15:
                    return
                self.outcome.faults[one.__name__.strip("_").replace("_", " ")] += 1
                await one()

    def _engine(self) -> EngineProcess:
        return self._chance.choice(list(self._rig.engines.values()))

    async def _start_engine(self, *, cuttable: bool) -> None:
        options = ("--pause", "0.03", "--prefill", "0.0002", "--kv-blocks", "4000")
        one = await self._rig.engine(*options, listed=False)
        if cuttable:
            link = self._links[one.number] = Link(one.port)
            await link.open()
            one = EngineProcess(number=one.number, port=link.port, process=one.process)
        self._rig.engines[one.number] = one

    async def _replace(self, one: EngineProcess) -> None:
        """The head takes a while to see that it is dead, and another one starts."""
        await asyncio.sleep(self._chance.uniform(0.2, 2.0))
        self._rig.forget(one)
        await self._start_engine(cuttable=self._links.pop(one.number, None) is not None)

    async def _kill_engine(self) -> None:
        one = self._engine()
        await self._rig.stop(one)
        await self._replace(one)

    async def _crash_engine(self) -> None:
        one = self._engine()
        await self._rig.fault(one, kind="crash", after_tokens=self._chance.randint(1, 100))
        assert one.process is not None
        await one.process.wait()
        await self._replace(one)

    async def _hang_engine(self) -> None:
        one = self._engine()
        await self._rig.fault(one, kind="hang")
        await asyncio.sleep(SILENT_S + 3)
        await self._rig.fault(one, kind="none")

    async def _dead_engine(self) -> None:
        one = self._engine()
        await self._rig.fault(one, kind="dead")
        await asyncio.sleep(2)
        await self._rig.stop(one)
        await self._replace(one)

    async def _refusing_engine(self) -> None:
        await self._rig.fault(self._engine(), kind="status", status=503, count=10)

    async def _slow_engine(self) -> None:
        one = self._engine()
        await self._rig.fault(one, kind="slow", factor=8)
        await asyncio.sleep(5)
        await self._rig.fault(one, kind="none")

    async def _cut_links(self) -> None:
        for one in self._links.values():
            self.outcome.counts["connections cut"] += one.cut()

    async def _head_away(self) -> None:
        self._rig.away = True
        await asyncio.sleep(self._chance.uniform(2, 15))
        self._rig.away = False

    async def _kill_gateway(self) -> None:
        number = self._chance.randrange(len(self._gateways))
        self._gateways[number].send_signal(signal.SIGKILL)
        await self._gateways[number].wait()
        await asyncio.sleep(self._chance.uniform(1, 6))
        self._gateways[number] = await self._start_gateway(number)

    async def _start_gateway(self, number: int) -> asyncio.subprocess.Process:
        files = ("--snapshot", f"{self._folder}/services-{number}", "--prefixes", f"{self._folder}/prefixes")
        return await self._rig.gateway("--silent", str(SILENT_S), *files, port=self._ports[number])


def _text(found: dict[str, Any]) -> str:
    choice = found["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def _message(body: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return repr(body[:80])


async def _read_stream(answer: aiohttp.ClientResponse, got: Got, leaves_after: int) -> None:
    events = 0
    async for line in answer.content:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            got.whole = not got.error
            continue
        event = json.loads(line[6:])
        if "error" in event:
            got.error = "event: " + str(event["error"].get("message"))
            continue
        got.ids.add(event["id"])
        for choice in event["choices"]:
            got.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        events += 1
        if leaves_after and events >= leaves_after:
            answer.close()
            return


def _memory_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return round(int(line.split()[1]) / 1024, 1)
    return 0.0


async def run_gateway_soak(minutes: float, rate_per_s: float, seed: int = 1, *, planted: bool = False) -> Outcome:
    """Run a soak of its own processes. `planted`: one engine says other words than it should."""
    with tempfile.TemporaryDirectory(prefix="gateway-soak-") as folder:
        async with gateway_rig() as rig:
            return await GatewaySoak(rig, folder, rate_per_s=rate_per_s, seed=seed, planted=planted).run(minutes)


def main() -> int:
    """Run, and print what was counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=12.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one object")
    asked = parser.parse_args()
    outcome = asyncio.run(run_gateway_soak(asked.minutes, asked.rate, asked.seed))
    if asked.json:
        print(json.dumps({**outcome.summary(), "what_was_wrong": outcome.wrong + outcome.unanswered}, indent=1))
    else:
        for name, value in outcome.summary().items():
            print(name, value)
        print(*outcome.wrong, *outcome.unanswered, sep="\n")
    return 1 if outcome.wrong or outcome.unanswered else 0


if __name__ == "__main__":
    raise SystemExit(main())

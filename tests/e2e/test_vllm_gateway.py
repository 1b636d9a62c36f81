"""Two replicas of vLLM itself behind a gateway: OpenAI's client, a replica that is killed under its streams, and prompts that were read before."""

import asyncio
import json
import os
import re
import signal
import subprocess
import time

import pytest

from benchmarks.cluster import free_port
from tests import vllm_here
from tests.gateway_rig import KEY, SERVICE, EngineProcess, gateway_rig

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not vllm_here.installed(), reason="vLLM is not installed (make vllm-tools)"),
]

CHAT = "/v1/chat/completions"
CLIENT = """
import sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1] + "/v1", api_key=sys.argv[2])
assert [one.id for one in client.models.list().data] == ["chat"]
asked = dict(model="chat", messages=[{"role": "user", "content": "Name three rivers."}], temperature=0, max_tokens=16)
streamed = "".join(one.choices[0].delta.content or "" for one in client.chat.completions.create(**asked, stream=True))
whole = client.chat.completions.create(**asked).choices[0].message.content
assert streamed == whole, (streamed, whole)
print(streamed)
"""
QUESTIONS = [
    "List three rivers, each on a line of its own.",
    "Write a haiku about a stone.",
    "Explain in three sentences where rivers begin.",
    "Count from one to twenty, in words.",
    "Write two lines about the sea, with an emoji in each.",
    "Explain what a cache is.",
    "Écris une phrase sur la mer.",
    "Give me a table of three fruits and their colours in Markdown.",
]


async def ask(rig, url, text, count, key=KEY):
    """The text of a stream, the errors in it, and the seconds to its first text."""
    body = {
        "model": SERVICE,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": count,
        "stream": True,
    }
    began_s, first_s, found, errors = time.monotonic(), 0.0, [], []
    async with rig.session.post(url + CHAT, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            errors += [event["error"]] if "error" in event else []
            for choice in event.get("choices", ()):
                if choice["delta"].get("content"):
                    first_s = first_s or time.monotonic() - began_s
                    found.append(choice["delta"]["content"])
    return "".join(found), errors, first_s


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """Two replicas: their ports and processes."""
    folder = tmp_path_factory.mktemp("vllm")
    ports = [free_port(), free_port()]
    with vllm_here.replica(ports[0], folder / "0.log") as one, vllm_here.replica(ports[1], folder / "1.log") as two:
        yield list(zip(ports, (one, two), strict=True))


async def list_replicas(rig, replicas):
    for number, (port, process) in enumerate(replicas, 1):
        if process.poll() is None:
            rig.engines[number] = EngineProcess(number=number, port=port, process=None)
    await rig.gateway()
    await rig.until_listed(len(rig.engines))


def test_openais_client_streams(replicas):
    async def inside():
        async with gateway_rig() as rig:
            await list_replicas(rig, replicas)
            words = [str(vllm_here.PYTHON), "-c", CLIENT, rig.url, KEY]
            return await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, timeout=300)

    done = asyncio.run(inside())
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_prompt_goes_where_its_beginning_was_read(replicas):
    """The second turn of each conversation finds its first in the cache of its replica; elsewhere it is read again."""

    async def turns(rig, turn_url):
        times = []
        for number in range(4):
            text = f"{number} Rivers begin in hills, and they end in the sea. " * 22
            await ask(rig, turn_url(number), text, 1)
            times.append((await ask(rig, turn_url(number + 1), text + "And then?", 1))[2])
        return times

    async def inside():
        async with gateway_rig() as rig:
            await list_replicas(rig, replicas)
            cached = [await cached_tokens(rig, replicas)]
            routed = await turns(rig, lambda _number: rig.url)
            cached.append(await cached_tokens(rig, replicas))
            direct = [f"http://127.0.0.1:{port}" for port, _ in replicas]
            for url in direct:
                await (await rig.session.post(url + "/reset_prefix_cache")).read()
            apart = await turns(rig, lambda number: direct[number % 2])
            cached.append(await cached_tokens(rig, replicas))
            return routed, apart, cached

    routed, apart, (before, between, after) = asyncio.run(inside())
    print("seconds to the first token of second turns:", "routed", routed, "elsewhere", apart)
    print("tokens found in caches:", "routed", between - before, "elsewhere", after - between)
    assert between - before > 4 * 200, "four first turns of more than 200 tokens"
    assert after - between < (between - before) / 4


class CutConnections:
    """Passes connections to a replica, and cuts each one after so many events of a stream."""

    def __init__(self, port):
        self.port, self.events, self.passed_events = port, 0, 0
        self.passed = None  # the text that passed before the last cut
        self.server = None

    async def open(self):
        self.server = await asyncio.start_server(self.connected, "127.0.0.1", 0)
        return self.server.sockets[0].getsockname()[1]

    async def connected(self, reader, writer):
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.port)
        sending = asyncio.create_task(copy(reader, up_writer))
        passed = b""
        while part := await up_reader.read(65536):  # several events come at once from a quick engine
            starts = [one.start() for one in re.finditer(b"data: ", passed + part)]
            if len(starts) > self.events:
                kept = (passed + part)[: starts[self.events]]
                self.passed, self.passed_events = text_in(kept), self.events
                writer.write(kept[len(passed) :])
                break
            passed += part
            writer.write(part)
        sending.cancel()
        up_writer.transport.abort()
        writer.close()  # after what was written, in the middle of the answer


async def copy(reader, writer):
    while part := await reader.read(65536):
        writer.write(part)


def text_in(stream):
    events = [json.loads(one[6:]) for one in stream.splitlines() if one.startswith(b"data: {")]
    return "".join(one["choices"][0]["delta"].get("content") or "" for one in events)


async def generate(rig, url, text, so_far, count):
    """The rest of an answer, by the replica itself, from the tokens of its prompt and of its beginning."""

    async def tokens(**body):
        async with rig.session.post(url + "/tokenize", json={"model": SERVICE, **body}) as answer:
            return (await answer.json())["tokens"]

    await (await rig.session.post(url + "/reset_prefix_cache")).read()
    begun = await tokens(prompt=so_far, add_special_tokens=False)
    prompt = await tokens(messages=[{"role": "user", "content": text}])
    body = {"model": SERVICE, "prompt": prompt + begun, "temperature": 0, "max_tokens": count - len(begun)}
    async with rig.session.post(url + "/v1/completions", json=body) as answer:
        return (await answer.json())["choices"][0]["text"]


def test_a_stream_that_is_cut_goes_on_with_what_the_other_replica_says_to_its_tokens(replicas):
    """One at a time, with an empty cache: vLLM rounds otherwise in other batches and after other caches, with and without a gateway."""
    other = f"http://127.0.0.1:{replicas[1][0]}"

    async def inside():
        async with gateway_rig() as rig:
            whole = [(await ask(rig, other, one, 40))[0] for one in QUESTIONS]
            cut = CutConnections(replicas[0][0])
            rig.engines[1] = EngineProcess(number=1, port=await cut.open(), process=None)
            rig.engines[2] = EngineProcess(number=2, port=replicas[1][0], process=None)
            await rig.gateway()
            await rig.until_listed(2)
            found: list[tuple[str, str]] = []
            cuts: list[int] = []
            for number, text in enumerate(QUESTIONS):
                cut.events, cut.passed, answer = 2 + number % 4, None, ""
                while cut.passed is None:  # the gateway avoids a replica that failed for a while
                    await (await rig.session.post(other + "/reset_prefix_cache")).read()
                    answer, errors, _ = await ask(rig, rig.url, text, 40)
                    assert not errors
                cuts.append(cut.passed_events)
                found.append((answer, cut.passed + await generate(rig, other, text, cut.passed, 40)))
            return whole, found, cuts, await rig.metrics()

    whole, found, cuts, metrics = asyncio.run(inside())
    same = sum(answer == one for (answer, _), one in zip(found, whole, strict=True))
    print(
        f"{same} of {len(whole)} as if nothing was cut",
        [one for one in metrics.splitlines() if "continued_total{" in one],
    )
    assert [answer for answer, _ in found] == [expected for _, expected in found]
    begun = sum(1 for one in cuts if one)  # one that was cut before its first event is asked again
    assert begun > len(QUESTIONS) / 2
    assert f'phalanx_gateway_continued_total{{how="tokens",service="chat"}} {begun}.0' in metrics


def test_kill_9_of_a_replica_under_its_streams_costs_no_stream(replicas):
    """What they say may differ in words that are about as likely: vLLM itself says other things in other batches."""

    async def inside():
        async with gateway_rig() as rig:
            await list_replicas(rig, replicas)
            before = await generated(rig, replicas[0][0])
            # Long answers: a quick machine gives 40 tokens between two looks at how far they are.
            tasks = [asyncio.create_task(ask(rig, rig.url, one, 300)) for one in QUESTIONS]
            limit_s = time.monotonic() + 120
            while await generated(rig, replicas[0][0]) < before + 20:
                assert time.monotonic() < limit_s
                await asyncio.sleep(0.02)
            os.killpg(replicas[0][1].pid, signal.SIGKILL)
            return await asyncio.gather(*tasks), await rig.metrics()

    answers, metrics = asyncio.run(inside())
    print([one for one in metrics.splitlines() if "continued_total{" in one])
    assert [errors for _, errors, _ in answers] == [[]] * len(QUESTIONS)
    assert all(len(text) > 20 for text, _, _ in answers)
    assert 'phalanx_gateway_continued_total{how="tokens"' in metrics


async def cached_tokens(rig, replicas):
    return sum([await counted(rig, port, "prefix_cache_hits_total") for port, _ in replicas])


async def generated(rig, port):
    return await counted(rig, port, "generation_tokens_total")


async def counted(rig, port, name):
    async with rig.session.get(f"http://127.0.0.1:{port}/metrics") as answer:
        text = await answer.text()
    line = next(one for one in text.splitlines() if one.startswith(f"vllm:{name}"))
    return float(line.rpartition(" ")[2])

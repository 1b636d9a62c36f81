"""Streams whose replica fails in their middle, and which go on at another one: the text is that of a replica that did not fail."""

import asyncio
import json
import signal

import pytest

from tests.gateway_rig import KEY, SERVICE, gateway_rig
from tests.protocol_engine import chat_prompt, expected_text, tokens_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


async def stream(rig, path, **body):
    """The events of a stream: JSON, comments left out."""
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"model": SERVICE, "stream": True, **body}
    async with rig.session.post(rig.url + path, json=body, headers=headers) as answer:
        text = await answer.text()
        assert answer.status == 200, text
    blocks = [one for one in text.split("\n\n") if one.startswith("data: ")]
    ended = blocks[-1] == "data: [DONE]"
    return [json.loads(one.removeprefix("data: ")) for one in (blocks[:-1] if ended else blocks)], ended


def text_of(events):
    choices = [choice for event in events for choice in event.get("choices", ())]
    return "".join(one["text"] if "text" in one else one["delta"].get("content") or "" for one in choices)


def errors_of(events):
    return [one["error"] for one in events if "error" in one]


def say(text):
    return [{"role": "user", "content": text}]


def whole_chat(text, count):
    return expected_text(chat_prompt(say(text)), count)


def test_kill_9_under_64_streams_costs_no_stream_and_no_byte():
    """Half are chats and half completions; all are greedy."""

    async def inside():
        async with gateway_rig() as rig:
            victim = await rig.engine("--pause", "0.02")
            await rig.engine("--pause", "0.02")
            await rig.gateway()
            await rig.until_listed(2)
            usage = {"include_usage": True}
            chats = [
                stream(rig, CHAT, messages=say(f"chat {number}"), temperature=0, max_tokens=40, stream_options=usage)
                for number in range(32)
            ]
            texts = [stream(rig, TEXT, prompt=f"text {number}", temperature=0, max_tokens=40) for number in range(32)]
            tasks = [asyncio.create_task(one) for one in chats + texts]
            await rig.fault(victim, kind="crash", after_tokens=300)
            answers = await asyncio.gather(*tasks)
            return answers, await rig.metric("phalanx_gateway_continued_total")

    answers, continued = asyncio.run(inside())
    assert continued > 10, "the replica was killed under its streams"
    for number, (events, ended) in enumerate(answers):
        assert ended
        assert not errors_of(events)
        expected = whole_chat(f"chat {number}", 40) if number < 32 else expected_text(f"text {number - 32}", 40)
        assert text_of(events) == expected
        assert len({(one["id"], one["created"], one["object"]) for one in events}) == 1
        finishes = [choice["finish_reason"] for one in events for choice in one["choices"]]
        assert [one for one in finishes if one] == ["length" if finishes[-1] == "length" else "stop"]
    for number, (events, _) in enumerate(answers[:32]):
        stopped = events[-2]["choices"][0]["finish_reason"] == "stop"
        count = len(tokens_of(whole_chat(f"chat {number}", 40))) + 1 if stopped else 40
        usage = events[-1]["usage"]
        assert usage["completion_tokens"] == count
        assert usage["prompt_tokens"] == len(tokens_of(chat_prompt(say(f"chat {number}"))))
        assert usage["total_tokens"] == usage["prompt_tokens"] + count
        assert {frozenset(one["choices"][0]) for one in events[1:-2]} == {
            frozenset({"index", "delta", "logprobs", "finish_reason", "token_ids"})
        }


CASES = {
    "from tokens": ({"temperature": 0, "max_tokens": 60}, "tokens", ()),
    "with a stop string": ({"temperature": 0, "max_tokens": 60, "stop": ["nothing"]}, "repetition", ()),
    "without a limit": ({"temperature": 0}, "repetition", ("--chunks", "60")),
    "with a penalty": ({"temperature": 0, "max_tokens": 60, "presence_penalty": 0.5}, "repetition", ()),
    "with a tool": ({"temperature": 0, "max_tokens": 60, "tools": [{"type": "function"}]}, "repetition", ()),
    "seeded": ({"temperature": 1, "seed": 5, "max_tokens": 60}, "repetition", ()),
    "of words that a tokenizer cuts otherwise": ({"temperature": 0, "max_tokens": 60}, "repetition", ("--odd",)),
}


def odd_prompt():
    """A prompt in whose answer a tokenizer soon joins what the model keeps apart."""
    every = (f"odd {number}" for number in range(100))
    return next(one for one in every if len(tokens_of(expected_text(chat_prompt(say(one)), 20, odd=True))) < 20)


async def broken(rig, body, *, kind="crash", options=()):
    """A stream whose first replica fails after 30 tokens, and the same request at a replica that does not fail."""
    victim = await rig.engine("--pause", "0.01", *options)
    await rig.gateway("--silent", "2")
    await rig.until_listed(1)
    if kind == "crash":
        await rig.fault(victim, kind="crash", after_tokens=30)
    text = odd_prompt() if "--odd" in options else "rivers"
    task = asyncio.create_task(stream(rig, CHAT, messages=say(text), **body))
    if kind != "crash":
        await rig.until_generated(victim, 30)
        await rig.fault(victim, kind=kind)
    await rig.engine("--pause", "0.001", *options)
    events, ended = await task
    rig.forget(victim)
    await rig.until_listed(1)
    direct, _ = await stream(rig, CHAT, messages=say(text), **body)
    await rig.stop(victim, signal.SIGKILL)
    return events, ended, direct, await rig.metrics()


@pytest.mark.parametrize("name", CASES)
def test_how_a_stream_goes_on(name):
    body, how, options = CASES[name]

    async def inside():
        async with gateway_rig() as rig:
            return await broken(rig, body, options=options)

    events, ended, direct, metrics = asyncio.run(inside())
    assert ended
    assert not errors_of(events)
    assert text_of(events) == text_of(direct)
    assert f'phalanx_gateway_continued_total{{how="{how}",service="chat"}} 1.0' in metrics


@pytest.mark.parametrize("kind", ["hang", "dead"])
def test_a_replica_that_is_silent_or_reports_that_its_engine_is_dead_has_failed(kind):
    async def inside():
        async with gateway_rig() as rig:
            return await broken(rig, {"temperature": 0, "max_tokens": 60}, kind=kind)

    events, ended, direct, _ = asyncio.run(inside())
    assert ended
    assert not errors_of(events)
    assert text_of(events) == text_of(direct)


@pytest.mark.parametrize(
    "body",
    [{"temperature": 1, "max_tokens": 60}, {"temperature": 0, "n": 2, "max_tokens": 60}, {"max_tokens": 60}],
    ids=["sampled", "two choices", "by default sampled"],
)
def test_an_answer_that_does_not_repeat_itself_ends_with_an_error(body):
    async def inside():
        async with gateway_rig() as rig:
            # A drawn answer may end before its replica fails.
            return (await broken(rig, {**body, "ignore_eos": True}))[0]

    events = asyncio.run(inside())
    (error,) = errors_of(events)
    assert error["code"] == "replica_failed"

"""What the gateway and the tests of services rely on in an engine: the same tests for vLLM and for `tests/protocol_engine.py`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

LONG = "Rivers begin in hills and end in the sea. " * 30  # several blocks of a prefix cache
SHAPE = {
    "chat": {"id", "object", "created", "model", "choices"},
    "text": {"id", "object", "created", "model", "choices"},
}
METRICS = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "request_success_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "e2e_request_latency_seconds_count",
    "request_queue_time_seconds_count",
)


CLIENT = httpx.Client(verify=False, trust_env=False, timeout=300)  # one for all: a client's TLS context costs 50 ms


@dataclass
class Running:
    """An engine that serves the model `chat`."""

    url: str

    def post(self, path: str, body: dict[str, Any] | bytes, **headers: str) -> httpx.Response:
        data = body if isinstance(body, bytes) else json.dumps({"model": "chat", **body}).encode()
        return CLIENT.post(self.url + path, content=data, headers={"Content-Type": "application/json", **headers})

    def whole(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream; the last one is [DONE]."""
        answer = self.post(path, {"stream": True, **body})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        blocks = answer.text.split("\n\n")
        assert blocks.pop() == ""
        assert blocks.pop() == "data: [DONE]"
        assert all(one.startswith("data: ") for one in blocks)
        return [json.loads(one.removeprefix("data: ")) for one in blocks]

    def tokens(self, **body: Any) -> list[int]:
        found: list[int] = self.whole("/tokenize", **body)["tokens"]
        return found

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over its other labels."""
        found = 0.0
        for line in CLIENT.get(self.url + "/metrics").text.splitlines():
            if line.startswith(f"vllm:{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
                found += float(line.rpartition(" ")[2])
        return found


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def texts(events: list[dict[str, Any]]) -> list[str]:
    """The text of each event that has some part of an answer."""
    choices = [choice for event in events for choice in event["choices"]]
    return [one["text"] if "text" in one else one["delta"].get("content") or "" for one in choices]


def until(check: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + 60
    while not check():
        assert time.monotonic() < limit_s
        time.sleep(0.1)


class EngineProtocol:
    """The tests; a class below it has a fixture `engine`."""

    def test_a_stream_of_a_chat(self, engine):
        events = engine.events(CHAT, messages=say("Name a river."), temperature=0, max_tokens=6)
        first, *middle, last = events
        assert first["choices"] == [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ]
        assert {one["id"] for one in events} == {first["id"]}
        assert first["id"].startswith("chatcmpl-")
        assert {one["object"] for one in events} == {"chat.completion.chunk"}
        assert {one["created"] for one in events} == {first["created"]}
        for one in middle:
            assert set(one) == SHAPE["chat"]
            (choice,) = one["choices"]
            assert set(choice) == {"index", "delta", "logprobs", "finish_reason", "token_ids"}
            assert set(choice["delta"]) == {"content"}
        assert set(last["choices"][0]) == {"index", "delta", "logprobs", "finish_reason", "stop_reason", "token_ids"}
        assert last["choices"][0]["finish_reason"] == "length"

    def test_a_stream_of_a_completion(self, engine):
        events = engine.events(TEXT, prompt="Once upon", temperature=0, max_tokens=6)
        assert events[0]["id"].startswith("cmpl-")
        for one in events:
            assert set(one) - {"system_fingerprint"} == SHAPE["text"]
            keys = {"index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"}
            assert set(one["choices"][0]) == keys
        assert [one["choices"][0]["finish_reason"] for one in events] == [None] * (len(events) - 1) + ["length"]

    @pytest.mark.parametrize("path", [CHAT, TEXT])
    def test_usage_is_the_last_event_where_it_is_asked_for(self, engine, path):
        asked = {"messages": say("Hello")} if path == CHAT else {"prompt": "Hello"}
        events = engine.events(path, **asked, temperature=0, max_tokens=5, stream_options={"include_usage": True})
        assert events[-1]["choices"] == []
        usage = events[-1]["usage"]
        assert usage["completion_tokens"] == 5
        assert usage["prompt_tokens"] == len(engine.tokens(**asked))
        assert usage["total_tokens"] == usage["prompt_tokens"] + 5
        assert all(one.get("usage") is None for one in events[:-1])

    def test_usage_of_every_event(self, engine):
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = engine.events(TEXT, prompt="Hello", temperature=0, max_tokens=4, stream_options=options)
        counts = [one["usage"]["completion_tokens"] for one in events]
        assert counts == sorted(counts)
        assert counts[-2:] == [4, 4]

    @pytest.mark.parametrize("path", [CHAT, TEXT])
    def test_a_greedy_answer_is_the_same_whole_and_streamed(self, engine, path):
        asked = {"messages": say("Where do rivers end?")} if path == CHAT else {"prompt": "Rivers end"}
        body = engine.whole(path, **asked, temperature=0, max_tokens=12)
        (choice,) = body["choices"]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert "".join(texts(engine.events(path, **asked, temperature=0, max_tokens=12))) == text
        assert choice["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 12
        assert body["object"] == ("chat.completion" if path == CHAT else "text_completion")

    def test_a_completion_goes_on_from_its_tokens_byte_for_byte(self, engine):
        parts = texts(engine.events(TEXT, prompt="Rivers", temperature=0, max_tokens=16))
        for cut in (1, 5, 11, 15):
            so_far = engine.tokens(prompt="".join(parts[:cut]), add_special_tokens=False)
            assert len(so_far) == cut
            tokens = engine.tokens(prompt="Rivers") + so_far
            rest = engine.whole(TEXT, prompt=tokens, temperature=0, max_tokens=16 - cut)
            assert rest["choices"][0]["text"] == "".join(parts[cut:]), cut
            assert rest["usage"]["prompt_tokens"] == len(tokens)

    def test_a_chat_goes_on_as_a_completion_from_its_tokens_byte_for_byte(self, engine):
        asked = {"messages": say("List three rivers, each on a line.")}
        parts = texts(engine.events(CHAT, **asked, temperature=0, max_tokens=24))[1:]
        prompt = engine.tokens(**asked)
        for cut in range(1, 24, 6):
            so_far = engine.tokens(prompt="".join(parts[:cut]), add_special_tokens=False)
            assert len(so_far) <= cut, "a character that was not whole is generated again"
            rest = engine.whole(TEXT, prompt=prompt + so_far, temperature=0, max_tokens=24 - len(so_far))
            assert rest["choices"][0]["text"] == "".join(parts[cut:]), cut

    @pytest.mark.parametrize("so_far", ["1. Rhine", "1. Rhine\n"])
    def test_a_final_message_goes_on_from_its_tokens(self, engine, so_far):
        """With this template, which trims nothing."""
        more = {"add_generation_prompt": False, "continue_final_message": True}
        found = engine.tokens(messages=[*say("List."), {"role": "assistant", "content": so_far}], **more)
        assert found == engine.tokens(messages=say("List.")) + engine.tokens(prompt=so_far, add_special_tokens=False)

    def test_names_of_tokens_are_their_bytes(self, engine):
        text = "Two rivers, ça va\n 🙂 end"
        found = engine.whole("/tokenize", prompt=text, return_token_strs=True, add_special_tokens=False)
        assert len(found["token_strs"]) == len(found["tokens"]) == found["count"]
        assert sum(map(len, found["token_strs"])) == len(text.encode())
        assert found["max_model_len"] > 100
        assert engine.whole("/detokenize", tokens=found["tokens"])["prompt"] == text

    def test_a_seed_repeats_an_answer_but_does_not_continue_it(self, engine):
        asked = {"temperature": 1.5, "seed": 7, "max_tokens": 12}
        one = engine.whole(TEXT, prompt="Rivers", **asked)["choices"][0]["text"]
        assert engine.whole(TEXT, prompt="Rivers", **asked)["choices"][0]["text"] == one
        other = engine.whole(TEXT, prompt="Rivers", **{**asked, "seed": 8})["choices"][0]["text"]
        assert other != one
        parts = texts(engine.events(TEXT, prompt="Rivers", **asked))
        tokens = engine.tokens(prompt="Rivers" + "".join(parts[:6]))
        rest = engine.whole(TEXT, prompt=tokens, **{**asked, "max_tokens": 6})["choices"][0]["text"]
        assert rest != "".join(parts[6:])

    def test_several_choices_have_their_indexes(self, engine):
        events = engine.events(CHAT, messages=say("Hi"), n=2, temperature=1, max_tokens=3)
        assert {one["choices"][0]["index"] for one in events} == {0, 1}

    def test_a_stop_string_is_left_out_and_named(self, engine):
        whole = engine.whole(TEXT, prompt="Rivers", temperature=0, max_tokens=12)["choices"][0]["text"]
        stop = whole.split()[4]
        before = whole[: whole.index(stop)]
        found = engine.whole(TEXT, prompt="Rivers", temperature=0, max_tokens=12, stop=stop)["choices"][0]
        assert (found["text"], found["finish_reason"], found["stop_reason"]) == (before, "stop", stop)
        parts = texts(engine.events(TEXT, prompt="Rivers", temperature=0, max_tokens=12, stop=[stop]))
        assert "".join(parts) == before

    def test_echo_repeats_the_prompt(self, engine):
        asked = {"prompt": "Rivers", "temperature": 0, "max_tokens": 3}
        plain = engine.whole(TEXT, **asked)["choices"][0]["text"]
        assert engine.whole(TEXT, **asked, echo=True)["choices"][0]["text"] == "Rivers" + plain
        assert "".join(texts(engine.events(TEXT, **asked, echo=True))) == "Rivers" + plain

    @pytest.mark.parametrize(
        ("path", "body", "status"),
        [
            (TEXT, b"{", 400),
            (TEXT, b"[]", 400),
            (CHAT, {}, 400),
            (TEXT, {"model": "nope", "prompt": "a"}, 404),
            (TEXT, {"prompt": "a", "max_tokens": 0}, 400),
            (TEXT, {"prompt": "a", "max_tokens": 10_000_000}, 400),
            (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}, 400),
            (CHAT, {"messages": [], "add_generation_prompt": True, "continue_final_message": True}, 400),
        ],
    )
    def test_errors_have_openais_form(self, engine, path, body, status):
        answer = engine.post(path, body)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["message"]
        assert error["code"] == status
        assert {"type", "param"} <= set(error)

    def test_a_prompt_that_was_read_before_is_cached(self, engine):
        hits = engine.metric("prefix_cache_hits_total")
        asked = {"prompt": LONG, "temperature": 0, "max_tokens": 1}
        engine.whole(TEXT, **asked)
        again = engine.whole(TEXT, **asked)["usage"]
        cached = again["prompt_tokens_details"]["cached_tokens"]
        assert cached % 16 == 0
        assert cached > again["prompt_tokens"] - 130, "a block has 16 tokens on GPUs and 128 on processors"
        assert engine.metric("prefix_cache_hits_total") - hits >= cached

    def test_metrics_have_vllms_names_and_follow_requests(self, engine):
        text = CLIENT.get(engine.url + "/metrics").text
        for name in METRICS:
            assert f"\nvllm:{name}{{" in text, name
        before = (
            engine.metric("generation_tokens_total"),
            engine.metric("request_success_total", finished_reason="length"),
        )
        engine.whole(TEXT, prompt="Rivers", max_tokens=5, ignore_eos=True)
        until(lambda: engine.metric("request_success_total", finished_reason="length") == before[1] + 1)
        assert engine.metric("generation_tokens_total") == before[0] + 5

    def test_a_client_that_leaves_ends_its_request(self, engine):
        ended = engine.metric("request_success_total")
        body = {"model": "chat", "prompt": LONG, "max_tokens": 500, "stream": True, "ignore_eos": True}
        with CLIENT.stream("POST", engine.url + TEXT, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            until(lambda: engine.metric("num_requests_running") == 1)
            assert engine.metric("kv_cache_usage_perc") > 0
        until(lambda: engine.metric("num_requests_running") == 0)
        assert engine.metric("request_success_total") == ended, "it is counted nowhere"
        until(lambda: engine.metric("kv_cache_usage_perc") == 0)

    def test_the_identifier_of_a_request_is_in_its_answer(self, engine):
        answer = engine.post(TEXT, {"prompt": "a", "max_tokens": 1}, **{"X-Request-Id": "mine-7"})
        assert answer.json()["id"] == "cmpl-mine-7"

    def test_it_sleeps_and_wakes_up(self, engine):
        assert CLIENT.get(engine.url + "/is_sleeping").json() == {"is_sleeping": False}
        assert CLIENT.post(engine.url + "/sleep?level=1").status_code == 200
        assert CLIENT.get(engine.url + "/is_sleeping").json() == {"is_sleeping": True}
        assert CLIENT.post(engine.url + "/wake_up").status_code == 200
        engine.whole(TEXT, prompt="a", max_tokens=1)

    def test_other_routes(self, engine):
        assert CLIENT.get(engine.url + "/health").status_code == 200
        assert CLIENT.get(engine.url + "/version").json()["version"] == "0.32.0"
        assert CLIENT.get(engine.url + "/load").json() == {"server_load": 0}
        (model,) = CLIENT.get(engine.url + "/v1/models").json()["data"]
        assert model["id"] == "chat"
        assert model["max_model_len"] > 100

"""Which streams may go on elsewhere, what is noted of them, and when tokens of a text are those that the model gave."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.gateway.continuation import StreamContinuation
from phalanx.gateway.stream_records import (
    RECORD_MAX,
    NotExact,
    RecordBudget,
    StreamRecord,
    StreamTerms,
    are_same_tokens,
)
from tests.protocol_engine import WORDS, name_of, tokens_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GREEDY = {
    "model": "chat",
    "stream": True,
    "temperature": 0,
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "a"}],
}


def terms(path=CHAT, **more):
    asked = {key: value for key, value in (GREEDY | more).items() if value is not ...}
    return StreamTerms.of(path, json.dumps(asked).encode())


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": ...},
        {"temperature": 0.1},
        {"temperature": None},
        {"n": 2},
        {"best_of": 3},
        {"use_beam_search": True},
        {"stream": False},
        {"logprobs": True},
        {"prompt_logprobs": 1},
        {"temperature": 1, "seed": None},
        {"temperature": 1, "seed": -1},
    ],
)
def test_an_answer_that_may_not_repeat_itself_goes_on_nowhere(more):
    assert terms(**more) is None


@pytest.mark.parametrize("value", [b'"\xff"', b"9" * 5000])
def test_a_body_that_only_the_engine_can_judge_is_passed_without_a_record(value):
    body = json.dumps(GREEDY).encode().removesuffix(b"}") + b', "other": ' + value + b"}"
    assert StreamTerms.of(CHAT, body) is None


def test_other_routes_go_on_nowhere():
    assert terms("/v1/responses") is None


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": ...},
        {"seed": 1, "temperature": 1},
        {"stop": "x"},
        {"tools": [{}]},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 1},
        {"min_tokens": 1},
        {"logit_bias": {"1": 2}},
        {"echo": True},
        {"add_generation_prompt": False},
        {"add_special_tokens": False},
        {"continue_final_message": True},
        {"include_stop_str_in_output": True},
        {"skip_special_tokens": False},
        {"truncate_prompt_tokens": 1},
        {"chat_template_kwargs": {"thinking": True}},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "tool", "content": "a", "tool_call_id": "1"}]},
        {"messages": "a"},
    ],
)
def test_what_depends_on_which_tokens_are_the_answer_s_goes_on_by_repetition(more):
    assert terms(**more).from_tokens is False


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stop": None},
        {"n": 1},
        {"tools": []},
        {"presence_penalty": 0},
        {"repetition_penalty": 1.0, "echo": False, "skip_special_tokens": True},
        {"max_tokens": ..., "max_completion_tokens": 5},
        {"seed": 1},
    ],
)
def test_greedy_texts_go_on_from_their_tokens(more):
    assert terms(**more).from_tokens is True


def test_the_request_for_the_rest_has_the_tokens_and_what_is_left():
    made = terms(top_k=3, user="u", stream_options={"include_usage": True}).continued([1, 2], 4)
    assert made == {
        "model": "chat",
        "stream": True,
        "temperature": 0,
        "top_k": 3,
        "user": "u",
        "stream_options": {"include_usage": True},
        "prompt": [1, 2],
        "max_tokens": 4,
    }


def event(**delta):
    return (
        b"data: "
        + json.dumps({"id": "1", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}).encode()
        + b"\n\n"
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=60))
def test_whole_events_pass_however_the_bytes_come(cuts):
    stream = b"".join(event(content=f"w{number} ") for number in range(12)) + b"data: [DO"
    budget = RecordBudget()
    record, at, passed = StreamRecord(terms(), budget), 0, b""
    for cut in [*cuts, len(stream)]:
        out = record.take(stream[at : at + cut]) if stream[at : at + cut] else b""
        assert out.endswith(b"\n\n") or not out
        passed += out
        at += cut
    assert passed == stream[: -len(b"data: [DO")]
    assert record.seen().text == "".join(f"w{number} " for number in range(12))
    assert budget.used == len(passed)
    record.close()
    assert budget.used == 0


def test_events_of_another_kind_pass_as_they_come_and_are_not_kept():
    record = StreamRecord(terms(), RecordBudget())
    assert record.take(b"data: {}\r\n\r\n") == b"data: {}\r\n\r\n"
    assert not record.begun
    assert record.take(b"data: {") == b"data: {"


def test_a_stream_that_grows_too_long_is_kept_no_longer():
    budget = RecordBudget()
    record = StreamRecord(terms(), budget)
    part = event(content="x" * 1000)
    for _ in range(RECORD_MAX // len(part) + 1):
        assert record.take(part) == part
    assert not record.begun
    assert budget.used == 0


def test_an_event_without_end_stops_a_continuation():
    class EndlessEvent:
        taken = 0

        @property
        def content(self):
            return self

        async def iter_any(self):
            while self.taken < 100 * RECORD_MAX:
                self.taken += 1 << 18
                yield b"x" * (1 << 18)

    async def read():
        unused: Any = None
        answer: Any = EndlessEvent()
        going_on = StreamContinuation(unused, StreamRecord(terms(), RecordBudget()), [], unused)
        with pytest.raises(NotExact, match="too long"):
            async for _ in going_on._events(answer):
                pass
        assert answer.taken < 2 * RECORD_MAX

    asyncio.run(read())


@pytest.mark.parametrize("error", [b'{"error":{"message":"EngineCore","type":"x","param":null,"code":500}}'])
def test_an_error_of_the_engine_does_not_pass(error):
    record = StreamRecord(terms(), RecordBudget())
    assert record.take(event(content="a") + b"data: " + error + b"\n\ndata: [DONE]\n\n") == event(content="a")
    assert record.failed
    record.resume()
    assert record.seen().texts == ["a"]


def test_an_error_of_the_request_or_in_a_text_passes():
    record = StreamRecord(terms(), RecordBudget())
    for part in (b'data: {"error":{"message":"a","code":400}}\n\n', event(content='data: {"error":{"code":500}}')):
        assert record.take(part) == part
    assert not record.failed


@pytest.mark.parametrize(
    "parts",
    [
        [{"tool_calls": [{"index": 0}]}],
        [{"content": "a"}, {"reasoning": "b"}],
        [{"content": 5}],
    ],
)
def test_more_than_text_goes_on_nowhere(parts):
    record = StreamRecord(terms(), RecordBudget())
    for delta in parts:
        record.take(event(**delta))
    with pytest.raises(NotExact):
        record.seen()


TEXTS = st.lists(st.sampled_from([*(one.decode() for one in WORDS), "\n", ".", "🙂", "é"]), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(TEXTS)
def test_tokens_agree_with_the_events_that_they_came_in(parts):
    names = [name_of(one) for one in tokens_of("".join(parts))]
    assert are_same_tokens(names, parts)


@pytest.mark.parametrize(
    ("names", "texts", "same"),
    [
        (["Ġtrees"], [" tree", "s"], False),
        (["Ġtree", "s"], [" trees"], True),  # two tokens in one event
        (["Ġtree", "s"], [" tree", "", "s"], True),
        (["Ġtree"], [" tree", "s"], False),
        (["Ġtree", "s", "s"], [" tree", "s"], False),
        (["▁tree", "s", "<0x0A>"], [" tree", "s", "\n"], True),
        (["▁tree"], ["tree"], False),
        (["ð", "Ł", "Ļ", "Ĥ"], ["🙂"], True),
        ([], [], True),
        (["a"], [], False),
    ],
)
def test_tokens_are_the_same_where_every_event_ends_at_one(names, texts, same):
    assert are_same_tokens(names, texts) is same

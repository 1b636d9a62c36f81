"""What a client has got of a stream, and whether another replica can go on with it so that the text stays the same. Pure.

There are two ways. **From tokens**: the new replica gets the prompt and the text so far as tokens, and generates the rest. It is exact for greedy
answers whose text has the same tokens again, and costs the reading of the prompt. **By repetition**: the new replica answers the whole request, and
what the client has is left out, once it was compared. It is exact for all answers that repeat themselves, and takes as long as the first time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

RECORD_MAX: Final = 1 << 20  # bytes of one stream; about 5,000 tokens
RECORDS_MAX: Final = 256 << 20  # bytes of all streams of a gateway
_ROUTES: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
_ERROR_START: Final = b'data: {"error":{'
_ERROR: Final = re.compile(
    rb'(?<![^\n])data: \{"error":\{(?=[^\n]*"code":5\d\d\})'
)  # of the engine, not of the request
_HINTS: Final = (b'"temperature"', b'"seed"')
# What a continuation from tokens can hand on. Of everything else, some depends on which tokens are prompt and which are answer.
_FROM_TOKENS: Final = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "user",
        "ignore_eos",
        "stop_token_ids",
        "metadata",
        "store",
    }
)
# Further fields whose value is the engine's default, and changes nothing.
_DEFAULTS: Final = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "logprobs": 0,
    "prompt_logprobs": 0,
    "top_logprobs": 0,
    "min_tokens": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "length_penalty": 1,
    "use_beam_search": False,
    "include_stop_str_in_output": False,
    "continue_final_message": False,
    "add_generation_prompt": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "parallel_tool_calls": True,
}
_PROMPT_FIELDS: Final = frozenset({"messages", "prompt", "max_tokens", "max_completion_tokens", "metadata", "store"})


class NotExact(Exception):
    """A stream cannot go on elsewhere with the same text. The text says why."""


@dataclass(slots=True)
class RecordBudget:
    """Bytes that the records of all streams take together."""

    used: int = 0


@dataclass(slots=True)
class StreamTerms:
    """The request of a stream that may go on elsewhere.

    Attributes:
        asked: the body.
        chat: whether it is a chat, and not a completion.
    """

    asked: dict[str, Any]
    chat: bool

    @staticmethod
    def of(path: str, body: bytes) -> StreamTerms | None:
        """Return the terms; None for requests whose answers do not repeat themselves: sampled without a seed, or of several choices."""
        if path not in _ROUTES or not any(hint in body for hint in _HINTS):
            return None
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):  # in a field that the gateway does not decode: the engine decides
            return None
        heat, seed = asked.get("temperature"), asked.get("seed")
        repeats = heat == 0 or (isinstance(seed, int) and seed >= 0)
        single = asked.get("n") in (None, 1) and asked.get("best_of") in (None, 1) and not asked.get("use_beam_search")
        if (
            not asked.get("stream")
            or not repeats
            or not single
            or asked.get("logprobs")
            or asked.get("prompt_logprobs")
        ):
            return None
        return StreamTerms(asked, path == "/v1/chat/completions")

    @property
    def token_limit(self) -> int | None:
        """The most tokens of the answer; None if the engine decides."""
        both = (self.asked.get("max_completion_tokens") if self.chat else None, self.asked.get("max_tokens"))
        return next((one for one in both if isinstance(one, int)), None)

    @property
    def from_tokens(self) -> bool:
        """Whether the rest can be generated from the tokens so far."""
        if self.asked.get("temperature") != 0 or self.token_limit is None:
            return False
        others = {key: value for key, value in self.asked.items() if key not in _FROM_TOKENS}
        if any(value not in (None, [], {}, _DEFAULTS.get(key)) for key, value in others.items()):
            return False
        if not self.chat:
            prompt = self.asked.get("prompt")
            return isinstance(prompt, str) or _are_tokens(prompt)
        messages = self.asked.get("messages")
        return isinstance(messages, list) and all(
            isinstance(one, dict) and set(one) <= {"role", "content"} and isinstance(one.get("content"), str)
            for one in messages
        )

    def continued(self, tokens: list[int], left: int) -> dict[str, Any]:
        """Return the body of the request for the rest."""
        kept = {key: value for key, value in self.asked.items() if key in _FROM_TOKENS - _PROMPT_FIELDS}
        return {**kept, "prompt": tokens, "max_tokens": left}


def _are_tokens(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(one) is int for one in prompt)


def begins_with_error(chunk: bytes) -> bool:
    """Return whether the first event of a stream is an error of the replica."""
    return _ERROR.match(chunk) is not None


class StreamRecord:
    """The events of one stream that its client has got.

    Args:
        terms: of its request; None for one whose answers do not repeat themselves, of which nothing is kept.
        budget: shared by all records of the gateway.
    """

    def __init__(self, terms: StreamTerms | None, budget: RecordBudget) -> None:
        self._terms, self._budget = terms, budget
        self._passed: list[bytes] = []
        self._size = 0
        self._rest = b""
        self.failed = False  # the replica has sent an error in the place of an event

    @staticmethod
    @contextmanager
    def opened(path: str, body: bytes, budget: RecordBudget, *, stream: bool) -> Iterator[StreamRecord]:
        """The record of a request, until its end."""
        record = StreamRecord(StreamTerms.of(path, body) if stream else None, budget)
        try:
            yield record
        finally:
            record.close()

    @property
    def terms(self) -> StreamTerms:
        """The terms of the request, while the record is kept."""
        assert self._terms is not None
        return self._terms

    def take(self, chunk: bytes) -> bytes:
        """Note the next bytes of a replica; returns those that may go to the client, which are whole events."""
        if self._terms is None:
            return chunk
        if self._rest:
            chunk = self._rest + chunk
        end = len(chunk) if chunk.endswith(b"\n\n") else chunk.rfind(b"\n\n") + 2
        if end == 1:
            end = 0
        error = (
            _ERROR.search(chunk, 0, end) if _ERROR_START in chunk else None
        )  # the expression alone looks at each byte
        if error is not None:
            end, self.failed = error.start(), True
        self._size += end
        self._budget.used += end
        too_much = self._size > RECORD_MAX or self._budget.used > RECORDS_MAX
        if too_much or len(chunk) - end > RECORD_MAX or (end == 0 and b"\r\n\r\n" in chunk):
            self.close()
            return chunk
        self._rest = chunk[end:]
        if end:
            self._passed.append(chunk[:end])
        return chunk[:end]

    def resume(self) -> None:
        """Forget the part of an event that a replica did not finish: another one goes on."""
        self._rest, self.failed = b"", False

    def close(self) -> None:
        """Keep nothing any longer: the stream has ended, or has grown too long and ends with its replica."""
        self._terms = None
        self._budget.used -= self._size
        self._size, self._rest = 0, b""
        self._passed.clear()

    @property
    def begun(self) -> bool:
        """Whether the client has got an event."""
        return bool(self._passed)

    def seen(self) -> SeenStream:
        """Return what the client has got.

        Raises:
            NotExact: it has something besides text, such as the beginning of a tool call.
        """
        return SeenStream.read(events_in(b"".join(self._passed)), chat=self.terms.chat)


def events_in(text: bytes) -> list[dict[str, Any]]:
    """Return the JSON of each event but [DONE].

    Raises:
        NotExact: one is no JSON object.
    """
    found = []
    for block in text.split(b"\n\n"):
        if not block.startswith(b"data:"):
            continue  # a comment
        data = block[5:].strip()
        if data == b"[DONE]":
            continue
        try:
            event = json.loads(data)
        except ValueError:
            raise NotExact("an event is no JSON") from None
        if not isinstance(event, dict):
            raise NotExact("an event is no object")
        found.append(event)
    return found


@dataclass(slots=True)
class SeenStream:
    """The answer so far.

    Attributes:
        first: the first event, whose `id` and `created` all others have.
        texts: the text of each event.
        layout: the last event with text, after which those of a continuation are made.
        finished: whether the reason of its end was sent; `counted`: and its usage.
    """

    first: dict[str, Any]
    texts: list[str] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    finished: bool = False
    counted: bool = False

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)

    @staticmethod
    def read(events: Sequence[dict[str, Any]], *, chat: bool) -> SeenStream:
        """Read the events of a stream.

        Raises:
            NotExact: they hold something besides text.
        """
        if not events:
            raise NotExact("it has no event")
        seen = SeenStream(events[0])
        for event in events:
            choices = event.get("choices")
            if not choices:
                seen.counted = seen.counted or event.get("usage") is not None
                continue
            text, finish, role_only = text_of(event, chat=chat)
            seen.finished = seen.finished or finish is not None
            if not role_only:
                seen.texts.append(text)
                seen.layout = event
        return seen


def text_of(event: dict[str, Any], *, chat: bool) -> tuple[str, str | None, bool]:
    """Return the text of an event, the reason of the end, and whether it has the role alone.

    Raises:
        NotExact: it has several choices, or something besides text.
    """
    choices = event.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise NotExact("it has several choices")
    choice = choices[0]
    delta = choice.get("delta", {}) if chat else choice
    if not isinstance(delta, dict) or choice.get("index", 0) != 0 or choice.get("logprobs"):
        raise NotExact("it has more than one text")
    known = (
        {"role", "content"}
        if chat
        else {"text", "index", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"}
    )
    if any(value for key, value in delta.items() if key not in known):
        raise NotExact("it has more than text, such as a tool call")
    text = delta.get("content" if chat else "text") or ""
    if not isinstance(text, str):
        raise NotExact("its text is no text")
    return (
        text,
        choice.get("finish_reason"),
        chat and "role" in delta and not text and choice.get("finish_reason") is None,
    )


def with_text(event: dict[str, Any], text: str, *, chat: bool) -> dict[str, Any]:
    """Return an event with another text."""
    choice = dict(event["choices"][0])
    if chat:
        choice["delta"] = {**choice["delta"], "content": text}
    else:
        choice["text"] = text
    return {**event, "choices": [choice]}


def are_same_tokens(names: Iterable[str], texts: Iterable[str]) -> bool:
    """Return whether tokens, by their names, have a boundary wherever an event of the stream had one.

    Where they have, a tokenizer has cut the text as the model did. Names are of byte-level tokenizers (a character for each byte) or those of
    SentencePiece (`▁` for a space, `<0x0A>` for a byte).
    """
    names = list(names)
    whole = "".join(texts := list(texts)).encode()
    for read in (_byte_level, _sentence_piece):
        pieces = read(names)
        if pieces is None or b"".join(pieces) != whole:
            continue
        ends, at = {0}, 0
        for piece in pieces:
            at += len(piece)
            ends.add(at)
        at = 0
        for text in texts:
            at += len(text.encode())
            if at not in ends:
                return False
        return True
    return False


def _byte_level(names: Sequence[str]) -> list[bytes] | None:
    try:
        return [bytes(_BYTES[one] for one in name) for name in names]
    except KeyError:
        return None


def _sentence_piece(names: Sequence[str]) -> list[bytes]:
    return [
        bytes([int(name[3:5], 16)])
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">")
        else name.replace("▁", " ").encode()
        for name in names
    ]


def _byte_names() -> dict[str, int]:
    """Return the byte behind each character of the names of byte-level tokenizers, as GPT-2 has them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [one for one in range(256) if one not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + number): byte for number, byte in enumerate(hidden)}


_BYTES: Final = _byte_names()

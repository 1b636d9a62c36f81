"""An engine without a model that speaks as vLLM does: `python -m tests.protocol_engine --port P`.

Routes, fields, errors and names of metrics are those of vLLM 0.32; `tests/contract/test_engine_protocol.py` holds both to the same tests. The text
is a function of all tokens before it, so that a continuation is right only if its tokens are, and `expected_text` says what a greedy answer must be.
The time of a prompt depends on its tokens that are not in the prefix cache.

Of its own it has `POST /fault` (see `Engine.fault`), `GET /seen`, and the header `X-Engine-Pid` of every answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import xxhash
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tests.engine_transfers import CacheTransfers, TransferFailed, add_options

BLOCK = 16  # tokens of a block of the prefix cache, as vLLM's
START, END = 1, 2  # special tokens; END ends an answer
SPECIAL = {START: "<|im_start|>", END: "<|im_end|>"}
_PIECES = re.compile(rb"<\|im_(?:start|end)\|>| ?[A-Za-z]{1,6}| ?[0-9]{1,4}|\s|[!-~]|[\x80-\xff]")
WORDS = tuple(
    f" {one}".encode()
    for one in [
        "the",
        "of",
        "a",
        "to",
        "in",
        "red",
        "blue",
        "tree",
        "stone",
        "river",
        "night",
        "green",
        "light",
        "quick",
        "slow",
        "north",
        "seven",
        "round",
        "paper",
        "glass",
    ]
)
_GPT2 = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_NAMES = {byte: chr(byte) for byte in _GPT2} | {
    byte: chr(256 + number) for number, byte in enumerate(one for one in range(256) if one not in _GPT2)
}


def tokens_of(text: str) -> list[int]:
    """Return the tokens of a text."""
    found = []
    for piece in _PIECES.findall(text.encode()):
        if piece.startswith(b"<|im_"):
            found.append(START if piece == b"<|im_start|>" else END)
        else:
            found.append(_token(piece))
    return found


def bytes_of(token: int) -> bytes:
    """Return the text of a token; a character may have several."""
    if token in SPECIAL:
        return SPECIAL[token].encode()
    return token.to_bytes(8).lstrip(b"\0")[1:]


def name_of(token: int) -> str:
    """Return a token as `token_strs` has it: a character for each byte, a space as Ġ."""
    return SPECIAL.get(token) or "".join(_BYTE_NAMES[one] for one in bytes_of(token))


def chat_prompt(
    messages: Sequence[dict], *, add_generation_prompt: bool = True, continue_final_message: bool = False
) -> str:
    """Return the prompt of a conversation, with the template of SmolLM2."""
    parts = []
    if not messages or messages[0].get("role") != "system":
        parts.append("<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n")
    parts += [f"<|im_start|>{one['role']}\n{_plain(one.get('content'))}<|im_end|>\n" for one in messages]
    if continue_final_message:
        parts[-1] = parts[-1].removesuffix("<|im_end|>\n")
    elif add_generation_prompt:
        parts.append("<|im_start|>assistant\n")
    return "".join(parts)


def _plain(content: str | list | None) -> str:
    return "".join(one.get("text", "") for one in content) if isinstance(content, list) else content or ""


class Generator:
    """Chooses tokens: by all before them, and by a seeded or fresh draw where the temperature is above 0."""

    def __init__(
        self, tokens: Iterable[int], *, ends_every: int, odd: bool, temperature: float, seed: int | None
    ) -> None:
        self._state = xxhash.xxh3_64()
        self._open = b""  # bytes of a character that is not whole
        self._ends_every, self._odd = ends_every, odd
        self._draws = random.Random(seed) if temperature > 0 else None
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        self._state.update(token.to_bytes(8))
        piece = b"" if token in SPECIAL else bytes_of(token)
        if piece[:1] == b"\xf0":
            self._open = piece
        elif self._open:
            self._open = (self._open + piece) if len(self._open) < 3 else b""

    def next(self, *, may_end: bool = True) -> int:
        """Return the next token, and count it in."""
        drawn = self._state.intdigest()
        if self._draws is not None:
            drawn ^= self._draws.getrandbits(64)
        token = self._choose(drawn, may_end)
        self.add(token)
        return token

    def _choose(self, drawn: int, may_end: bool) -> int:
        if self._open:
            return _token([b"\x9f", b"\x98", bytes([0x80 + drawn % 0x40])][len(self._open) - 1])
        if may_end and drawn % self._ends_every == 0:
            return END
        kind, drawn = (drawn >> 16) % 100, drawn >> 24
        if kind < 84:
            return _token(WORDS[drawn % len(WORDS)])
        if kind < 90:
            return _token((b",", b".", b"!")[drawn % 3])
        if kind < 94:
            return _token(b"\n")
        if kind < 97:
            return _token(b"\xf0")
        return (
            _token(b"s") if self._odd else _token(b" odd")
        )  # "s" behind a word is a token that no tokenizer would make


def _token(piece: bytes) -> int:
    return int.from_bytes(b"\x01" + piece)


@dataclass(slots=True)
class Delta:
    """What one step adds to an answer."""

    text: str
    tokens: list[int]
    finish: str | None = None
    stop: str | None = None


class Text:
    """Tokens as text: bytes of a character that is not whole are held back, and what may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        import codecs

        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops, self._held = stops, ""
        self._hold = max((len(one) - 1 for one in stops), default=0)

    def add(self, token: int) -> tuple[str, str | None]:
        """Return the text that may go out, and the stop string that was met."""
        self._held += self._decoder.decode(bytes_of(token))
        for stop in self._stops:
            if stop in self._held:
                return self._held[: self._held.index(stop)], stop
        cut = max(0, len(self._held) - self._hold)
        out, self._held = self._held[:cut], self._held[cut:]
        return out, None

    def end(self) -> str:
        return self._held + self._decoder.decode(b"", final=True)


ENDS_EVERY = 400


def expected_text(prompt: str, max_tokens: int, *, ends_every: int = ENDS_EVERY, odd: bool = False) -> str:
    """Return the greedy answer to a prompt."""
    generator = Generator(tokens_of(prompt), ends_every=ends_every, odd=odd, temperature=0.0, seed=None)
    text, out = Text(()), ""
    for _ in range(max_tokens):
        token = generator.next()
        if token == END:
            break
        out += text.add(token)[0]
    return out + text.end()


class Refusal(Exception):
    """An error in vLLM's form."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.body = status, {"error": {"message": message, "type": kind, "param": param, "code": status}}


class PrefixCache:
    """Blocks of tokens that were read, the oldest dropped first; blocks of running requests are counted apart."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._known: OrderedDict[int, None] = OrderedDict()
        self.used = 0
        self.changed = asyncio.Condition()

    def read(self, tokens: Sequence[int]) -> int:
        """Return how many of the first tokens were read before, and note all."""
        state, cached, whole = xxhash.xxh3_64(), 0, True
        for at in range(0, len(tokens) - BLOCK + 1, BLOCK):
            state.update(b"".join(one.to_bytes(8) for one in tokens[at : at + BLOCK]))
            key = state.intdigest()
            whole = whole and key in self._known
            cached += BLOCK if whole else 0
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > self.blocks:
            self._known.popitem(last=False)
        return min(cached, max(0, (len(tokens) - 1) // BLOCK * BLOCK))  # the last token is always computed

    def clear(self) -> None:
        self._known.clear()


class Metrics:
    """vLLM's metrics that routers and autoscalers read."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        names, values = ("model_name", "engine"), (model, "0")

        def gauge(name: str) -> Gauge:
            return Gauge(f"vllm:{name}", name, names, registry=self.registry).labels(*values)

        def counter(name: str) -> Counter:
            return Counter(f"vllm:{name}", name, names, registry=self.registry).labels(*values)

        def histogram(name: str) -> Histogram:
            return Histogram(f"vllm:{name}", name, names, registry=self.registry).labels(*values)

        self.running, self.waiting, self.kv = (
            gauge("num_requests_running"),
            gauge("num_requests_waiting"),
            gauge("kv_cache_usage_perc"),
        )
        self.queries, self.hits = counter("prefix_cache_queries"), counter("prefix_cache_hits")
        self.prompt, self.generated, self.preemptions = (
            counter("prompt_tokens"),
            counter("generation_tokens"),
            counter("num_preemptions"),
        )
        self.ttft, self.between = histogram("time_to_first_token_seconds"), histogram("inter_token_latency_seconds")
        self.whole, self.queued = histogram("e2e_request_latency_seconds"), histogram("request_queue_time_seconds")
        ended = Counter("vllm:request_success", "ended", (*names, "finished_reason"), registry=self.registry)
        self.ended = {reason: ended.labels(*values, reason) for reason in ("stop", "length", "abort", "error")}


@dataclass(slots=True, kw_only=True)
class Sampling:
    """What a request asks of the generator."""

    max_tokens: int
    temperature: float
    seed: int | None
    n: int
    stops: tuple[str, ...]
    ignore_end: bool


@dataclass(slots=True, kw_only=True)
class Faults:
    """What an engine does wrong now."""

    status: int = 0
    status_left: int = 0
    factor: float = 1.0
    crash_at: int = -1  # tokens generated
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    going: asyncio.Event = field(default_factory=asyncio.Event)


class Engine:
    """One replica.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.failing = random.Random(1)
        self.options = options
        self.model = options.served_model_name
        self.cache = PrefixCache(options.kv_blocks)
        self.metrics = Metrics(self.model or "any")
        self.faults = Faults()
        self.faults.going.set()
        self.awake = asyncio.Event()
        self.awake.set()
        self.seats = asyncio.Semaphore(options.max_num_seqs)
        self.prefill = asyncio.Lock()
        self.transfers = CacheTransfers(options)
        self.seen: list[dict[str, str]] = []
        self.cancelled = self.peak = self.now = self.generated = 0

    # ---- generation -------------------------------------------------------------------------------------------------

    async def run(
        self, tokens: list[int], sampling: Sampling, cached_out: list[int]
    ) -> AsyncIterator[tuple[int, Delta]]:
        """Generate all choices of one prompt; `cached_out` gets the tokens that were in the cache."""
        began_s = time.monotonic()
        self.metrics.waiting.inc()
        try:
            await self.seats.acquire()
        finally:
            self.metrics.waiting.dec()
        blocks = -(-(len(tokens) + sampling.max_tokens) // BLOCK)
        self.metrics.running.inc()
        self.metrics.queued.observe(time.monotonic() - began_s)
        reason = ""  # a client that left is counted nowhere, as in vLLM
        try:
            self.cache.used += blocks
            self.metrics.kv.set(min(1.0, self.cache.used / self.cache.blocks))
            async with self.prefill:
                cached = self.cache.read(tokens)
                cached_out.append(cached)
                self.metrics.queries.inc(len(tokens))
                self.metrics.hits.inc(cached)
                self.metrics.prompt.inc(len(tokens))
                await self._pause(self.options.prefill * (len(tokens) - cached))
            self.metrics.ttft.observe(time.monotonic() - began_s)
            choices = [self._choice(tokens, sampling, number) for number in range(sampling.n)]
            open_ = dict(enumerate(choices))
            while open_:
                await self._pause(self.options.pause)
                for number, choice in list(open_.items()):
                    delta = next(choice)
                    self._count()
                    if delta.finish is not None:
                        del open_[number]
                        reason = delta.finish
                    yield number, delta
        finally:
            self.seats.release()
            self.cache.used -= blocks
            self.metrics.kv.set(min(1.0, self.cache.used / self.cache.blocks))
            self.metrics.running.dec()
            if reason:
                self.metrics.ended[reason].inc()
            self.metrics.whole.observe(time.monotonic() - began_s)

    def _choice(self, tokens: list[int], sampling: Sampling, number: int) -> Iterator[Delta]:
        seed = None if sampling.seed is None else sampling.seed + number
        generator = Generator(
            tokens,
            ends_every=self.options.ends_every,
            odd=self.options.odd,
            temperature=sampling.temperature,
            seed=seed,
        )
        text = Text(sampling.stops)
        for count in range(1, sampling.max_tokens + 1):
            token = generator.next(may_end=not sampling.ignore_end)
            if token == END or (0 < self.options.chunks < count and not sampling.ignore_end):
                yield Delta(text.end(), [END], "stop")
                return
            out, stop = text.add(token)
            if stop is not None:
                yield Delta(out, [token], "stop", stop)
                return
            last = count == sampling.max_tokens
            yield Delta(out + (text.end() if last else ""), [token], "length" if last else None)

    async def _pause(self, seconds: float) -> None:
        await self.faults.going.wait()
        await self.awake.wait()
        await asyncio.sleep(seconds * self.faults.factor)
        if self.faults.dead.is_set():
            raise Refusal(
                500,
                "EngineCore encountered an issue. See stack trace (above) for the root cause.",
                "InternalServerError",
            )

    def _count(self) -> None:
        self.generated += 1
        self.metrics.generated.inc()
        if 0 <= self.faults.crash_at <= self.generated:
            os.kill(os.getpid(), signal.SIGKILL)

    # ---- OpenAI's routes --------------------------------------------------------------------------------------------

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """`/v1/completions` and `/v1/chat/completions`."""
        self.seen.append(dict(request.headers))
        del self.seen[:-1000]
        self.now += 1
        self.peak = max(self.peak, self.now)
        try:
            if self.faults.status_left > 0:
                self.faults.status_left -= 1
                raise Refusal(self.faults.status, "a fault that was asked for", "InternalServerError")
            if self.failing.random() < self.options.fail_share:
                raise Refusal(500, "one of the share that fails", "InternalServerError")
            asked = await _json(request)
            return await self._answer(request, asked, chat=request.path.endswith("chat/completions"))
        except Refusal as refused:
            return web.json_response(refused.body, status=refused.status)
        except (asyncio.CancelledError, ConnectionResetError):
            self.cancelled += 1
            raise
        finally:
            self.now -= 1

    async def _answer(self, request: web.Request, asked: dict, *, chat: bool) -> web.StreamResponse:
        prompts = [self._chat_tokens(asked)] if chat else _prompts(asked)
        self._check_model(asked)
        sampling = self._sampling(asked, max(map(len, prompts)), chat=chat)
        refusal = self.transfers.refusal(asked)
        if refusal:
            raise Refusal(400, refusal)
        base = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{base}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": int(time.time()),
            "model": asked.get("model") or self.model,
        }
        if asked.get("stream"):
            return await self._stream(request, asked, prompts, sampling, head, chat=chat)
        if asked.get("stream_options"):
            raise Refusal(400, "Stream options can only be defined when `stream=True`.", param="stream_options")
        return await self._whole(asked, prompts, sampling, head, chat=chat)

    async def _stream(
        self, request: web.Request, asked: dict, prompts: list[list[int]], sampling: Sampling, head: dict, *, chat: bool
    ) -> web.StreamResponse:
        options = asked.get("stream_options") or {}
        with_usage = bool(options.get("include_usage"))
        always = with_usage and bool(options.get("continuous_usage_stats"))
        answer = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "X-Engine-Pid": str(os.getpid())}
        )

        async def send(choices: list[dict], more: dict | None = None) -> None:
            if not answer.prepared:
                await answer.prepare(request)
            await answer.write(b"data: " + _dump({**head, "choices": choices, **(more or {})}) + b"\n\n")

        count, cached = 0, list[int]()
        prompt = sum(map(len, prompts))
        echo = "" if not asked.get("echo") else _last_text(asked, chat=chat)
        if self.transfers.mode or asked.get("kv_transfer_params"):  # both send the status before the first token
            await answer.prepare(request)
        try:
            await self._fetch(asked, prompts[0])
            for place, tokens in enumerate(prompts):
                begun = False
                async for number, delta in self.run(tokens, sampling, cached):
                    index = place * sampling.n + number
                    if chat and not begun:
                        begun = True
                        first = {"role": "assistant", "content": ""}
                        usage = {"usage": _usage(prompt, 0)} if always else {}
                        for each in range(sampling.n):
                            await send(
                                [{"index": each, "delta": first, "logprobs": None, "finish_reason": None}],
                                {"prompt_token_ids": None, "prompt_text": None, **usage},
                            )
                            if echo:
                                await send(
                                    [
                                        {
                                            "index": each,
                                            "delta": {"content": echo},
                                            "logprobs": None,
                                            "finish_reason": None,
                                        }
                                    ]
                                )
                    count += len(delta.tokens)
                    if count == 1:
                        await self.transfers.hand_over(asked, len(tokens))
                    text = delta.text
                    if echo and not chat:
                        text, echo = echo + text, ""
                    usage = {"usage": _usage(prompt, count)} if always else {}
                    await send([_stream_choice(index, text, delta, chat=chat, asked=asked)], usage)
            if with_usage:
                await send(
                    [],
                    {"usage": _usage(prompt, count, cached[0] if self.options.enable_prompt_tokens_details else None)},
                )
        except Refusal as refused:
            if not answer.prepared:
                raise
            await answer.write(b"data: " + _dump(refused.body) + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        await answer.write_eof()
        return answer

    async def _whole(
        self, asked: dict, prompts: list[list[int]], sampling: Sampling, head: dict, *, chat: bool
    ) -> web.StreamResponse:
        choices: list[dict] = []
        count, cached = 0, list[int]()
        await self._fetch(asked, prompts[0])
        for tokens in prompts:
            texts = [""] * sampling.n
            ends = [Delta("", [])] * sampling.n
            async for number, delta in self.run(tokens, sampling, cached):
                texts[number] += delta.text
                ends[number] = delta
                count += len(delta.tokens)
            for text, end in zip(texts, ends, strict=True):
                shared: dict = {
                    "logprobs": None,
                    "finish_reason": end.finish,
                    "stop_reason": end.stop,
                    "token_ids": None,
                }
                whole = (_last_text(asked, chat=chat) if asked.get("echo") else "") + text
                if chat:
                    message = {
                        "role": "assistant",
                        "content": whole,
                        "refusal": None,
                        "annotations": None,
                        "audio": None,
                    }
                    shared["message"] = message | {"function_call": None, "reasoning": None}
                else:
                    shared |= {"text": whole, "prompt_logprobs": None, "prompt_token_ids": None}
                choices.append({"index": len(choices), **shared})
        await self.transfers.hand_over(asked, len(prompts[0]))
        shown = cached[0] if self.options.enable_prompt_tokens_details else None
        usage = _usage(sum(map(len, prompts)), count, shown)
        body = {**head, "object": head["object"].removesuffix(".chunk"), "choices": choices, "usage": usage}
        return web.Response(
            body=_dump(
                {
                    **body,
                    "service_tier": None,
                    "system_fingerprint": None,
                    "kv_transfer_params": self.transfers.offer(asked, len(prompts[0])),
                }
            ),
            content_type="application/json",
            headers={"X-Engine-Pid": str(os.getpid())},
        )

    async def _fetch(self, asked: dict, tokens: list[int]) -> None:
        """Take over what another engine has read of a prompt: then it is in the cache."""
        try:
            if await self.transfers.fetch(asked, len(tokens)):
                self.cache.read(tokens)
        except TransferFailed as error:
            raise Refusal(500, str(error), "InternalServerError") from None

    def _check_model(self, asked: dict) -> None:
        if self.model and asked.get("model", self.model) != self.model:
            raise Refusal(
                404,
                f"The model `{asked['model']}` does not exist. Valid aliases: {self.model}.",
                "NotFoundError",
                "model",
            )

    def _chat_tokens(self, asked: dict) -> list[int]:
        if not isinstance(asked.get("messages"), list):
            raise Refusal(400, "messages: Field required", param="messages")
        if asked.get("continue_final_message") and asked.get("add_generation_prompt"):
            raise Refusal(400, "Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        more = {key: bool(asked[key]) for key in ("add_generation_prompt", "continue_final_message") if key in asked}
        return tokens_of(chat_prompt(asked["messages"], **more))

    def _sampling(self, asked: dict, longest: int, *, chat: bool) -> Sampling:
        most = asked.get("max_completion_tokens") if chat else None
        most = most if most is not None else asked.get("max_tokens")
        room = self.options.max_model_len - longest
        if most is None:
            most = room if chat else 16
        if most < 1 or asked.get("temperature", 1) < 0:
            raise Refusal(400, f"max_tokens must be at least 1, got {most}.", param="max_tokens")
        if room < 1 or most > room:
            raise Refusal(
                400,
                f"This model's maximum context length is {self.options.max_model_len} tokens. However, you requested {most} output tokens and "
                f"your prompt contains at least {longest} input tokens",
                param="input_tokens",
            )
        stops = asked.get("stop") or ()
        heat = asked.get("temperature")
        return Sampling(
            max_tokens=most,
            temperature=1.0 if heat is None else heat,
            seed=asked.get("seed"),
            n=asked.get("n") or 1,
            stops=(stops,) if isinstance(stops, str) else tuple(stops),
            ignore_end=bool(asked.get("ignore_eos")),
        )

    # ---- vLLM's other routes ----------------------------------------------------------------------------------------

    async def models(self, _request: web.Request) -> web.StreamResponse:
        one = {
            "id": self.model or "any",
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": "fake",
        }
        data = [{**one, "parent": None, "max_model_len": self.options.max_model_len, "permission": []}]
        return web.json_response({"object": "list", "data": data})

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        try:
            asked = await _json(request)
            self._check_model(asked)
            tokens = self._chat_tokens(asked) if "messages" in asked else tokens_of(asked["prompt"])
        except Refusal as refused:
            return web.json_response(refused.body, status=refused.status)
        names = [name_of(one) for one in tokens] if asked.get("return_token_strs") else None
        return web.json_response(
            {"count": len(tokens), "max_model_len": self.options.max_model_len, "tokens": tokens, "token_strs": names}
        )

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        asked = await _json(request)
        return web.json_response({"prompt": b"".join(map(bytes_of, asked["tokens"])).decode(errors="replace")})

    async def scrape(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(body=generate_latest(self.metrics.registry), content_type="text/plain")

    async def load(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response({"server_load": self.now})

    async def version(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response({"version": "0.32.0"})

    async def server_info(self, _request: web.Request) -> web.StreamResponse:
        """SGLang's: the arguments of its command line."""
        options = vars(self.options)
        return web.json_response({**options, "version": "0.5.5", "internal_states": []})

    async def health(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(status=503 if self.faults.dead.is_set() else 200)

    async def sleep(self, request: web.Request) -> web.StreamResponse:
        self.awake.clear()
        self.cache.clear()
        return web.json_response({"status": "sleeping", "level": int(request.query.get("level", "1"))})

    async def wake(self, _request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(self.options.wake)
        self.awake.set()
        return web.json_response({"status": "awake", "tags": None})

    async def sleeping(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response({"is_sleeping": not self.awake.is_set()})

    async def reset(self, _request: web.Request) -> web.StreamResponse:
        self.cache.clear()
        return web.Response()

    # ---- its own ----------------------------------------------------------------------------------------------------

    async def look(self, _request: web.Request) -> web.StreamResponse:
        seen = {
            "seen": self.seen,
            "cancelled": self.cancelled,
            "peak": self.peak,
            "now": self.now,
            "pid": os.getpid(),
            "generated": self.generated,
            "reads": self.transfers.reads,
            "fetched": self.transfers.fetched,
        }
        return web.json_response(seen)

    async def fault(self, request: web.Request) -> web.StreamResponse:
        """Do something wrong: `kind` is one of

        - `crash`: SIGKILL, `after_tokens` more of all answers together.
        - `hang`: no answer goes on; `/health` is well.
        - `dead`: streams end with an error event, as when vLLM's engine process has died; `/health` is 503.
        - `status`: the next `count` requests get `status`.
        - `slow`: everything takes `factor` times as long.
        - `lose`: what is read of the next `count` prompts is gone when another engine fetches it.
        - `none`: all is well again.
        """
        asked = await _json(request)
        kind = asked["kind"]
        if kind == "crash":
            self.faults.crash_at = self.generated + asked.get("after_tokens", 0)
            if not asked.get("after_tokens"):
                os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "hang":
            self.faults.going.clear()
        elif kind == "dead":
            self.faults.dead.set()
        elif kind == "status":
            self.faults.status, self.faults.status_left = asked["status"], asked.get("count", 1)
        elif kind == "slow":
            self.faults.factor = asked["factor"]
        elif kind == "lose":
            self.transfers.loses = asked.get("count", 1)
        elif kind == "none":
            self.faults = Faults()
            self.faults.going.set()
        else:
            return web.Response(status=400)
        return web.Response()


def _prompts(asked: dict) -> list[list[int]]:
    """Return the prompts of a completion: a text, tokens, or a list of either."""
    prompt = asked.get("prompt")
    if isinstance(prompt, str):
        return [tokens_of(prompt)]
    if isinstance(prompt, list) and prompt and all(isinstance(one, int) for one in prompt):
        return [list(prompt)]
    if isinstance(prompt, list) and prompt and all(isinstance(one, str) or _is_tokens(one) for one in prompt):
        return [tokens_of(one) if isinstance(one, str) else list(one) for one in prompt]
    raise Refusal(400, "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, int) for one in value)


def _last_text(asked: dict, *, chat: bool) -> str:
    """Return what `echo` repeats."""
    if not chat:
        prompt = asked["prompt"]
        return prompt if isinstance(prompt, str) else b"".join(map(bytes_of, prompt)).decode(errors="replace")
    last = asked["messages"][-1]
    return _plain(last.get("content")) if last["role"] == "assistant" else ""


def _stream_choice(index: int, text: str, delta: Delta, *, chat: bool, asked: dict) -> dict:
    ids = delta.tokens if asked.get("return_token_ids") else None
    if chat:
        choice = {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": delta.finish}
        return choice | ({"stop_reason": delta.stop} if delta.finish else {}) | {"token_ids": ids}
    shared = {"logprobs": None, "finish_reason": delta.finish, "stop_reason": delta.stop}
    return {"index": index, "text": text, **shared, "prompt_token_ids": None, "token_ids": ids}


def _usage(prompt: int, answer: int, cached: int | None = None) -> dict:
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + answer, "completion_tokens": answer}
    return usage if cached is None else usage | {"prompt_tokens_details": {"cached_tokens": cached}}


def _dump(value: dict) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


async def _json(request: web.Request) -> dict:
    try:
        asked = json.loads(await request.read())
    except ValueError as error:
        raise Refusal(400, f"Invalid JSON: {error}") from None
    if not isinstance(asked, dict):
        raise Refusal(400, "Input should be a valid dictionary")
    return asked


def parser() -> argparse.ArgumentParser:
    """Return the options; those that vLLM has are named as there."""
    options = argparse.ArgumentParser()
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--served-model-name", default="", help="without it, every model is taken")
    options.add_argument("--max-model-len", type=int, default=200_000)
    options.add_argument("--max-num-seqs", type=int, default=256)
    options.add_argument("--enable-prompt-tokens-details", action="store_true")
    options.add_argument("--kv-blocks", type=int, default=100_000)
    options.add_argument(
        "--prefill", type=float, default=0.0, help="seconds for a token of a prompt that is not cached"
    )
    options.add_argument("--pause", type=float, default=0.0, help="seconds for a token of an answer")
    options.add_argument("--chunks", type=int, default=0, help="an answer ends by itself after so many tokens")
    options.add_argument(
        "--ends-every", type=int, default=ENDS_EVERY, help="an answer ends by itself after about so many tokens"
    )
    options.add_argument("--odd", action="store_true", help="answers have tokens that a tokenizer would join")
    options.add_argument("--wake", type=float, default=0.0, help="seconds to wake up")
    options.add_argument("--fail-share", type=float, default=0.0, help="share of the requests that get status 500")
    add_options(options)
    options.add_argument("--start", type=float, default=0.0, help="seconds before it listens")
    return options


def application(engine: Engine) -> web.Application:
    """Return the routes."""
    app = web.Application(client_max_size=32 << 20)
    get, post = app.router.add_get, app.router.add_post
    post("/v1/chat/completions", engine.complete)
    post("/v1/completions", engine.complete)
    get("/v1/models", engine.models)
    post("/tokenize", engine.tokenize)
    post("/detokenize", engine.detokenize)
    for path in ("/health", "/ping"):
        get(path, engine.health)
    get("/metrics", engine.scrape)
    get("/load", engine.load)
    get("/version", engine.version)
    get("/get_server_info", engine.server_info)
    get("/seen", engine.look)
    get("/is_sleeping", engine.sleeping)
    post("/sleep", engine.sleep)
    post("/wake_up", engine.wake)
    post("/reset_prefix_cache", engine.reset)
    post("/fault", engine.fault)
    return app


def main() -> None:
    options = parser().parse_args()
    time.sleep(options.start)

    async def made() -> web.Application:
        engine = Engine(options)
        await engine.transfers.listen()
        return application(engine)

    web.run_app(made(), host="127.0.0.1", port=options.port, print=None, handler_cancellation=True, access_log=None)


if __name__ == "__main__":
    main()

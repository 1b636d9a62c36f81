"""Goes on with a stream on another replica after its own has failed."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp

from phalanx.gateway.stream_records import (
    RECORD_MAX,
    NotExact,
    SeenStream,
    StreamRecord,
    are_same_tokens,
    events_in,
    text_of,
    with_text,
)

TOKENIZE_S: Final = 30.0
COMMENT_S: Final = 5.0  # between comments to the client while an answer is repeated
_DONE: Final = b"data: [DONE]\n\n"


class ReplicaFailed(Exception):
    """The new replica failed as well; yet another one may go on."""


class StreamContinuation:
    """One stream that goes on.

    Args:
        session: connections to replicas.
        record: what the client has got; the rest is added.
        headers: of the request, as a replica gets them.
        write: sends bytes to the client.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        record: StreamRecord,
        headers: list[tuple[str, str]],
        write: Callable[[bytes], Awaitable[object]],
    ) -> None:
        self._session, self._record, self._terms = session, record, record.terms
        self._headers = [(name, value) for name, value in headers if name.lower() != "content-type"]
        self._headers.append(("Content-Type", "application/json"))
        self._write = write
        self._written_s = time.monotonic()

    async def run(self, url: str) -> str:
        """Go on at the replica with this URL until the end of the stream. Returns how: `tokens`, `repetition` or `end`.

        Raises:
            NotExact: the text could not stay the same.
            ReplicaFailed: the replica failed; what it gave is in the record.
        """
        self._record.resume()
        seen = self._record.seen()
        wants_usage = bool((self._terms.asked.get("stream_options") or {}).get("include_usage"))
        if seen.finished and (seen.counted or not wants_usage):
            await self._send(_DONE)
            return "end"
        try:
            found = await self._tokens(url, seen) if self._terms.from_tokens and not seen.finished else None
            if found is not None:
                await self._from_tokens(url, seen, *found)
                return "tokens"
            await self._by_repetition(url, seen)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ReplicaFailed(type(error).__name__) from None
        return "repetition"

    # ---- from tokens ------------------------------------------------------------------------------------------------

    async def _tokens(self, url: str, seen: SeenStream) -> tuple[list[int], int] | None:
        """Return the tokens of the prompt and the answer so far, and how many are the answer's; None if they are not known for sure."""
        asked, limit = self._terms.asked, self._terms.token_limit
        prompt = asked.get("prompt")
        if self._terms.chat:
            first = await self._tokenize(url, {"messages": asked["messages"], "add_generation_prompt": True})
        elif isinstance(prompt, str):
            first = await self._tokenize(url, {"prompt": prompt})
        else:
            first = {"tokens": prompt}
        more = {"prompt": seen.text, "add_special_tokens": False, "return_token_strs": True}
        answer = await self._tokenize(url, more) if seen.text else {"tokens": [], "token_strs": []}
        if first is None or answer is None or limit is None:
            return None
        names, tokens = answer.get("token_strs"), answer["tokens"]
        if not isinstance(names, list) or len(names) != len(tokens) or not are_same_tokens(names, seen.texts):
            return None
        if len(tokens) >= limit:
            return None
        return [*first["tokens"], *tokens], len(tokens)

    async def _tokenize(self, url: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Ask a replica for the tokens of a text, by the route that vLLM has; None if it has none."""
        data = json.dumps({"model": self._terms.asked.get("model"), **body}).encode()
        timeout = aiohttp.ClientTimeout(total=TOKENIZE_S)
        async with self._session.post(url + "/tokenize", data=data, headers=self._headers, timeout=timeout) as answer:
            if answer.status != 200:
                return None
            try:
                found = json.loads(await answer.read())
            except ValueError:
                return None
        tokens = found.get("tokens") if isinstance(found, dict) else None
        return found if isinstance(tokens, list) and all(type(one) is int for one in tokens) else None

    async def _from_tokens(self, url: str, seen: SeenStream, tokens: list[int], answered: int) -> None:
        left = (self._terms.token_limit or 0) - answered
        body = json.dumps(self._terms.continued(tokens, left)).encode()
        async with self._stream(url + "/v1/completions", body) as events:
            async for event in events:
                more = self._as_first(seen, event) if event.get("choices") else {}
                if event.get("usage"):
                    more["usage"] = _summed(event["usage"], answered)
                await self._send_event(seen, {**event, **more})
        await self._send(_DONE)

    def _as_first(self, seen: SeenStream, event: dict[str, Any]) -> dict[str, Any]:
        """Return the choices of an event in the layout of the first replica's."""
        text, finish, _ = text_of(event, chat=False)
        if not self._terms.chat:
            return {}
        choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}
        if finish is not None:
            choice["stop_reason"] = event["choices"][0].get("stop_reason")
        if "token_ids" in (seen.layout.get("choices") or [{}])[0]:
            choice["token_ids"] = None
        return {"choices": [choice]}

    # ---- by repetition ----------------------------------------------------------------------------------------------

    async def _by_repetition(self, url: str, seen: SeenStream) -> None:
        path = "/v1/chat/completions" if self._terms.chat else "/v1/completions"
        known, at, skipping = seen.text, 0, True
        async with self._stream(url + path, json.dumps(self._terms.asked).encode()) as events:
            async for event in events:
                cut = event
                if event.get("choices") and skipping:
                    text, finish, role_only = text_of(event, chat=self._terms.chat)
                    covered = min(len(text), len(known) - at)
                    at += covered
                    if text[:covered] != known[at - covered : at] or (finish is not None and at < len(known)):
                        raise NotExact("another replica answers otherwise")
                    skipping = at < len(known)
                    if role_only or (covered and covered == len(text) and finish is None):
                        skipping = skipping or role_only
                        await self._comment()
                        continue
                    cut = with_text(event, text[covered:], chat=self._terms.chat)
                if not (event.get("choices") and seen.finished):
                    await self._send_event(seen, cut)
        await self._send(_DONE)

    # ---- both -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _stream(self, url: str, body: bytes) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        async with self._session.post(url, data=body, headers=self._headers, allow_redirects=False) as answer:
            if answer.status >= 500:
                raise ReplicaFailed(f"status {answer.status}")
            if answer.status != 200 or answer.content_type != "text/event-stream":
                raise NotExact(f"the other replica answered with status {answer.status}")
            yield self._events(answer)

    async def _events(self, answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
        rest, ended = b"", False
        async for chunk in answer.content.iter_any():
            rest += chunk
            end = rest.rfind(b"\n\n") + 2
            if end < 2:
                if len(rest) > RECORD_MAX:
                    raise NotExact("an event of the other replica is too long")
                continue
            ended = ended or b"data: [DONE]" in rest[:end]
            for event in events_in(rest[:end]):
                if "error" in event and not event.get("choices"):
                    raise ReplicaFailed("it ended its answer with an error")
                yield event
            rest = rest[end:]
        if not ended:
            raise ReplicaFailed("its answer ended early")

    async def _send_event(self, seen: SeenStream, event: dict[str, Any]) -> None:
        same = {key: seen.first[key] for key in ("id", "object", "created", "model") if key in seen.first}
        await self._send(
            b"data: " + json.dumps({**event, **same}, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
        )

    async def _comment(self) -> None:
        if time.monotonic() - self._written_s > COMMENT_S:
            self._written_s = time.monotonic()
            await self._write(b": another replica repeats the answer\n\n")

    async def _send(self, event: bytes) -> None:
        self._written_s = time.monotonic()
        self._record.take(event)
        await self._write(event)


def _summed(usage: dict[str, Any], answered: int) -> dict[str, Any]:
    """Return a usage in which the tokens that the first replica gave are the answer's, and not the prompt's."""
    prompt, answer = usage.get("prompt_tokens", 0) - answered, (usage.get("completion_tokens") or 0) + answered
    return {**usage, "prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}

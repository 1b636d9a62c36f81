"""Counts the tokens of an answer: by the engine's own `usage`, else by the events of its stream."""

from __future__ import annotations

import re
from typing import Final

TAIL_BYTES: Final = 4096  # of an answer, where its `usage` stands
PARTS_BYTES: Final = 8 << 10  # of an answer, before all but its tail are dropped
_USAGE: Final = re.compile(rb'"usage"\s*:\s*\{')
_COUNTS: Final = re.compile(rb'"(prompt_tokens|completion_tokens|input_tokens|output_tokens)"\s*:\s*(\d{1,12})')


class AnswerTokens:
    """Counts the tokens of an answer without reading its events: by the `usage` at its end, else one for each event."""

    def __init__(self, *, streamed: bool) -> None:
        self.streamed = streamed
        self._events = 0
        self._parts: list[bytes] = []  # the last ones
        self._kept = 0

    def add(self, chunk: bytes) -> None:
        """Take over the next bytes."""
        if self.streamed:
            self._events += chunk.count(b"\n\n")
        self._parts.append(chunk)
        self._kept += len(chunk)
        if self._kept > PARTS_BYTES:
            self._parts = [self._tail]
            self._kept = len(self._parts[0])

    @property
    def _tail(self) -> bytes:
        return b"".join(self._parts)[-TAIL_BYTES:]

    @property
    def empty(self) -> bool:
        """Whether no byte has come."""
        return not self._kept

    def result(self) -> tuple[int, int]:
        """Return the tokens of the prompt and of the answer; the prompt's are 0 where the replica does not say."""
        tail = self._tail
        marks = list(_USAGE.finditer(tail)) if b'"usage"' in tail else ()
        if marks:
            found = {name: int(value) for name, value in _COUNTS.findall(tail[marks[-1].end() :])}
            prompt = found.get(b"prompt_tokens", found.get(b"input_tokens", 0))
            return prompt, found.get(b"completion_tokens", found.get(b"output_tokens", 0))
        return 0, max(0, self._events - 1)  # the last event is [DONE]

"""Ends answers of engines that are silent for too long. aiohttp's own time-out sets a timer for each chunk, a twentieth of all work on a stream."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import aiohttp

LOOKS: Final = 8  # in the time that an answer may be silent


class WatchedAnswer:
    """One answer. `reading`: it is waited for; else its client takes its time. `chunks`: that came."""

    __slots__ = ("_content", "_seen", "_since_s", "chunks", "reading")

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content, self.reading, self.chunks = content, True, 0
        self._seen, self._since_s = -1, 0.0

    def look(self, now_s: float, silent_max_s: float) -> None:
        """End it if it has been silent for this long."""
        if self.chunks != self._seen or not self.reading:
            self._seen, self._since_s = self.chunks, now_s
        elif now_s - self._since_s >= silent_max_s:
            self._content.set_exception(aiohttp.SocketTimeoutError(f"no data for {silent_max_s:g} s"))


class SilenceWatch:
    """Looks at all answers now and then.

    Args:
        silent_max_s: an answer that is silent for this long is ended, up to an eighth later.
    """

    def __init__(self, silent_max_s: float) -> None:
        self._silent_max_s = silent_max_s
        self._answers: set[WatchedAnswer] = set()

    def watch(self, upstream: aiohttp.ClientResponse) -> WatchedAnswer:
        """Watch an answer until `end`, in the place of aiohttp's time-out."""
        if upstream.connection is not None and upstream.connection.protocol is not None:
            upstream.connection.protocol.read_timeout = None
        one = WatchedAnswer(upstream.content)
        self._answers.add(one)
        return one

    def end(self, answer: WatchedAnswer) -> None:
        """Watch it no longer."""
        self._answers.discard(answer)

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(self._silent_max_s / LOOKS)
            now_s = time.monotonic()
            for one in list(self._answers):
                one.look(now_s, self._silent_max_s)

"""The live state of the fleet for all open pages: computed once in each tick, encoded once, and sent to every page as the same bytes.

A page gets a whole frame first, then what changed. A page that reconnects with the id of its last event gets what it missed, or a whole frame
if that is too long ago. Nothing is computed while no page is open. The state of the fleet is the same for all who may see it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final

from phalanx.api.live.event_framing import HEARTBEAT, encode_event
from phalanx.api.live.hub import Broadcast
from phalanx.core.ids import JobId
from phalanx.wire.api.fleet import FleetDelta, FleetFrame

TICK_S: Final = 1.0  # between two states; people see no sooner
_DELTAS_KEPT: Final = 300  # for pages that reconnect: five minutes
_CHANGED_MAX: Final = 200  # jobs named in one delta
_log: Final = logging.getLogger("phalanx.api")


class FleetFeed:
    """The feed of one head. Use it on the event loop only.

    Args:
        read: returns the state of the fleet; called on a thread.
        heartbeat_s: time between comments on an idle stream.
        tick_s: time between two states.
    """

    def __init__(self, read: Callable[[], FleetFrame], *, heartbeat_s: float, tick_s: float = TICK_S) -> None:
        self._read = read
        self._heartbeat_s, self._tick_s = heartbeat_s, tick_s
        self._ticked = Broadcast()
        self._readers = 0
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self._changed: dict[JobId, None] = {}
        self._name, self._seq = "", 0
        self._frame: FleetFrame | None = None
        self._whole = b""
        self._deltas: deque[tuple[int, bytes]] = deque(maxlen=_DELTAS_KEPT)

    @property
    def is_running(self) -> bool:
        """Whether pages are open, or were until a moment ago, so that `note_changes` has a use."""
        return self._task is not None and not self._task.done()

    def note_changes(self, job_ids: Iterable[JobId]) -> None:
        """Remember jobs that a commit touched, for the next delta."""
        if self.is_running:
            self._changed.update(dict.fromkeys(job_ids))

    async def follow(self, last_id: str) -> AsyncIterator[bytes]:
        """Follow the fleet, from the event with the id `last_id` if that is known."""
        self._readers += 1
        try:
            if not self.is_running:
                self._restart()
            while self._frame is None and not self._closing:
                await self._ticked.wait(self._heartbeat_s)
            seq = self._seq_of(last_id)
            while not self._closing:
                if seq is None or (self._deltas and seq < self._deltas[0][0] - 1):
                    seq = self._seq
                    yield self._frame_event()
                for number, event in [pair for pair in self._deltas if pair[0] > seq]:
                    seq = number
                    yield event
                before = self._seq
                await self._ticked.wait(self._heartbeat_s)
                if self._seq == before and not self._closing:
                    yield HEARTBEAT
        finally:
            self._readers -= 1

    def close(self) -> None:
        """End all streams, since the head stops."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
        self._ticked.notify_all()

    def _restart(self) -> None:
        """Begin again after a time without pages: ids of that time are no longer known."""
        self._name, self._seq, self._frame = secrets.token_hex(4), 0, None
        self._deltas.clear()
        self._changed.clear()
        self._task = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        while self._readers:
            changed, self._changed = self._changed, {}
            try:
                frame = await asyncio.to_thread(self._read)
            except Exception:  # noqa: BLE001  the stream of all pages must outlive it
                _log.exception("the state of the fleet could not be read")
                self._changed = {**changed, **self._changed}
            else:
                self._advance(frame, list(changed))
            await asyncio.sleep(self._tick_s)

    def _advance(self, frame: FleetFrame, changed: list[JobId]) -> None:
        """Make an event of what differs from the frame before; none if nothing does."""
        before, self._frame = self._frame, frame
        if (
            before is None
            or (before.nodes, before.places) != (frame.nodes, frame.places)
            or before.sizes != frame.sizes
        ):
            self._seq += 1
            self._whole = b""
            self._deltas.clear()
            self._deltas.append((self._seq, self._frame_event()))
            self._ticked.notify_all()
            return
        nodes = [
            (at, frame.states[at], frame.cells[at], frame.jobs[at])
            for at in range(len(frame.nodes))
            if (frame.cells[at], frame.states[at], frame.jobs[at])
            != (before.cells[at], before.states[at], before.jobs[at])
        ]
        if not nodes and not changed and frame.counts == before.counts:
            return
        self._seq += 1
        self._whole = b""
        delta = FleetDelta(
            now_s=frame.now_s,
            nodes=nodes,
            counts=frame.counts,
            changed=changed[:_CHANGED_MAX],
            changed_more=len(changed) > _CHANGED_MAX,
        )
        self._deltas.append((self._seq, encode_event("delta", delta, self._id())))
        self._ticked.notify_all()

    def _frame_event(self) -> bytes:
        """Return the whole frame as an event, encoded once for each state."""
        if not self._whole:
            self._whole = encode_event("frame", self._frame, self._id())
        return self._whole

    def _id(self) -> str:
        return f"{self._name}-{self._seq}"

    def _seq_of(self, last_id: str) -> int | None:
        """Return the number in an event's id, if the events after it are all kept."""
        name, _, number = last_id.rpartition("-")
        if name != self._name or not number.isdecimal() or len(number) > 15:
            return None
        oldest = self._deltas[0][0] if self._deltas else self._seq
        return int(number) if oldest - 1 <= int(number) <= self._seq else None

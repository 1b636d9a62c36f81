"""Output of ended attempts that their nodes still send: devices are free once no process is left, and the last lines follow.

What is missing stands in the record of the attempt, as the length of each stream that its node reported. What has arrived is the length of
the stored stream. A node that sends nothing for `SILENT_MAX_S` counts as unable to: its disk was lost, or it left for good.
One that is down sends nothing since it went down, and an attempt without a stored byte (its logs were removed) has received none since its
end, so that the first reader after a restart of the head does not wait again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from phalanx.core.fleet.node import NodeState
from phalanx.core.ids import Epoch, JobId
from phalanx.core.state.records import NODES
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.states import AttemptState
from phalanx.ports.logs import Logs, StreamKey, stream_key
from phalanx.ports.store import Store
from phalanx.store.logs.names import STREAM

SILENT_MAX_S: Final = (
    120.0  # a killed supervisor of a local node sent again after 21 s, measured; a connected one sends at once
)
_WATCHED_MAX: Final = 4_096  # attempts of which the last progress is known


class PendingOutput:
    """Tells which output is still being sent. Calls come from the event loop and read file lengths only."""

    def __init__(self, store: Store, logs: Logs) -> None:
        self._store, self._logs = store, logs
        self._progress: OrderedDict[tuple[JobId, Epoch], tuple[int, float]] = OrderedDict()  # bytes, and since when

    def streams(self, attempts: Iterable[Attempt], now_s: float, unix_s: float) -> list[StreamKey]:
        """The streams of ended attempts whose rest is expected to arrive. `now_s`: monotonic; `unix_s`: the same instant."""
        return [key for attempt in attempts for key in self._of_attempt(attempt, now_s, unix_s)]

    def _of_attempt(self, attempt: Attempt, now_s: float, unix_s: float) -> list[StreamKey]:
        if attempt.state is not AttemptState.ENDED or not any(member.unsent for member in attempt.members):
            return []
        missing: list[StreamKey] = []
        stored = 0
        silent_s = math.inf  # of the node that was silent for the shortest time, as far as its state tells
        for member in attempt.members:
            if not member.unsent:
                continue
            node = self._store.record(NODES, member.node_id)
            for stream, length in member.unsent:
                if not STREAM.fullmatch(stream):
                    continue
                key = stream_key(attempt, stream)
                end = self._logs.end(key)
                stored += end
                if node is not None and end < length:  # also if it is down: its supervisor may start again
                    missing.append(key)
                    silent_s = min(silent_s, unix_s - node.changed_s if node.state is NodeState.DOWN else 0.0)
        place = (attempt.job_id, attempt.epoch)
        if not missing:
            self._progress.pop(place, None)
            return []
        if not stored and attempt.ended_s is not None:
            silent_s = max(silent_s, unix_s - attempt.ended_s)
        known, since_s = self._progress.get(place, (stored, now_s - max(0.0, silent_s)))
        if known != stored:
            since_s = now_s
        self._progress[place] = (stored, since_s)
        self._progress.move_to_end(place)
        while len(self._progress) > _WATCHED_MAX:
            self._progress.popitem(last=False)
        return missing if now_s - since_s < SILENT_MAX_S else []

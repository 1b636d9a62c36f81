"""Queues of commands for supervisors: one ordered, bounded mailbox for each node, in memory.

The controller's thread posts, the API's threads take. Nothing here is durable: a command may be lost with the head, and the lifecycle sends
it again when the supervisor registers. Sequence numbers start again with each incarnation of the head (`CommandsReply.head_id`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from phalanx.core.ids import NodeId
from phalanx.core.state.commands import Command
from phalanx.wire.supervisor import Envelope, OpenExec, encode_envelope

BOX_COMMANDS_MAX: Final = 10_000  # a node holds some hundred tasks at most; more means that no supervisor reads the box
TAKE_COMMANDS_MAX: Final = 500  # bounds one reply; the next long poll returns the rest at once


@dataclass(slots=True)
class _Box:
    last: int = 0
    waiting: deque[tuple[int, Command | OpenExec]] = field(default_factory=deque)
    listeners: dict[int, Callable[[], None]] = field(default_factory=dict)


class Mailboxes:
    """All boxes. Every method may be called from any thread; `wake` callbacks run on the poster's thread and must not block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._boxes: dict[NodeId, _Box] = {}
        self._forgotten = (
            0  # highest seq of a removed box: new ones continue from it, so that no old `after` exceeds them
        )
        self._next_listener = 0

    def post(self, node_id: NodeId, *commands: Command | OpenExec) -> None:
        """Append commands to the node's box and wake its listeners once. A full box drops its oldest commands."""
        with self._lock:
            box = self._box(node_id)
            for command in commands:
                box.last += 1
                box.waiting.append((box.last, command))
            while len(box.waiting) > BOX_COMMANDS_MAX:
                box.waiting.popleft()
            listeners = tuple(box.listeners.values())
        for wake in listeners:
            wake()

    def take(self, node_id: NodeId, after: int) -> tuple[list[Envelope], int]:
        """Return commands with seq > `after`, in order, and the next `after`; drop those up to `after`.

        An `after` from another incarnation of the head (past the last seq) returns nothing and drops nothing.
        """
        with self._lock:
            box = self._boxes.get(node_id)
            if box is None:
                return [], self._forgotten
            if after > box.last:
                return [], box.last
            while box.waiting and box.waiting[0][0] <= after:
                box.waiting.popleft()
            taken = list(islice(box.waiting, TAKE_COMMANDS_MAX))
            last = taken[-1][0] if taken else box.last
        # Encoded on the caller's thread: a gang of a thousand nodes must not cost the controller a thousand encodings.
        return [encode_envelope(seq, command) for seq, command in taken], last

    def listen(self, node_id: NodeId, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` at every post to this node until the returned function is called, which is idempotent."""
        with self._lock:
            self._next_listener += 1
            number = self._next_listener
            box = self._box(node_id)
            box.listeners[number] = wake

        def stop() -> None:
            with self._lock:
                box.listeners.pop(number, None)

        return stop

    def last(self, node_id: NodeId) -> int:
        """The last seq: a supervisor that registers starts after it. Its first `take` drops older commands."""
        with self._lock:
            box = self._boxes.get(node_id)
            return self._forgotten if box is None else box.last

    def remove(self, node_id: NodeId) -> None:
        """Remove the box of a supervisor that is gone for good, unless it has listeners."""
        with self._lock:
            box = self._boxes.get(node_id)
            if box is not None and not box.listeners:
                del self._boxes[node_id]
                self._forgotten = max(self._forgotten, box.last)

    def waiting(self) -> dict[NodeId, int]:
        """Number of queued commands for each node, for metrics; without nodes that have none."""
        with self._lock:
            return {node_id: len(box.waiting) for node_id, box in self._boxes.items() if box.waiting}

    def _box(self, node_id: NodeId) -> _Box:
        return self._boxes.setdefault(node_id, _Box(last=self._forgotten))

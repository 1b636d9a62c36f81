"""Reservations: nodes set aside for a time, for some users or queues, or for maintenance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phalanx.core.fleet.node import Cordon
from phalanx.core.ids import NodeId, QueueId, ReservationId, UserId

NO_USER: Final = UserId("")
OPEN_ENDED_S: Final = 365 * 86_400.0  # how long the nodes of an open-ended window are kept from other reservations


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A claim on whole nodes from `start_s` up to `end_s`, Unix seconds. No two claim the same node at the same time.

    Attributes:
        users, queues: who may use the nodes meanwhile; both empty for maintenance: no one.
        open_ended: for maintenance: at its start the nodes are drained until an operator returns them, and the reservation ends. `end_s`
            is then a year later, so that no other is planned after it.
        open_cordoned: nodes that an operator cordoned are open, as for a test, and cordoned again at its end. Only jobs of its holders that name it
            may use its nodes.
        cordons: those that it lifted, by node.
        begun: its start was handled: jobs that may not use the nodes were asked to stop.
        ended: ended early or over; kept for the history.
    """

    id: ReservationId
    nodes: tuple[NodeId, ...]
    start_s: float
    end_s: float
    users: frozenset[UserId] = frozenset()
    queues: frozenset[QueueId] = frozenset()
    why: str = ""
    by: UserId = NO_USER
    open_ended: bool = False
    open_cordoned: bool = False
    cordons: tuple[tuple[NodeId, Cordon], ...] = ()
    begun: bool = False
    ended: bool = False

    @property
    def maintenance(self) -> bool:
        """Whether no job may use the nodes."""
        return not self.users and not self.queues

    @property
    def holders_text(self) -> str:
        """The users and queues it is for, in words: `ada and queue nlp`, or `maintenance`."""
        names = [*sorted(self.users), *(f"queue {queue}" for queue in sorted(self.queues))]
        return " and ".join(names) or "maintenance"

    def admits(self, user: UserId, queue: QueueId) -> bool:
        """Whether a job of this user in this queue may use the nodes during the reservation."""
        return user in self.users or queue in self.queues

    def is_active(self, now_s: float) -> bool:
        """Whether the reservation is active now."""
        return not self.ended and self.start_s <= now_s < self.end_s

    def interrupts(self, user: UserId, queue: QueueId, end_s: float) -> bool:
        """Whether its start stops a job of this user in this queue that is on its nodes and runs until `end_s` at the latest."""
        return not (self.begun or self.ended or self.admits(user, queue)) and end_s > self.start_s

    def conflicting_nodes(self, other: Reservation) -> tuple[NodeId, ...]:
        """Nodes that both would claim at the same time, in the order of this one."""
        if self.ended or other.ended or self.start_s >= other.end_s or other.start_s >= self.end_s:
            return ()
        others = frozenset(other.nodes)
        return tuple(node_id for node_id in self.nodes if node_id in others)

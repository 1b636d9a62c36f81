"""Nodes set aside for a time: for some users or queues, or for nobody (maintenance)."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.ids import NodeId, QueueId, ReservationId, UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A claim on whole nodes from `start_s` up to `end_s`, Unix seconds.

    Attributes:
        users, queues: who may use the nodes meanwhile; both empty for maintenance: nobody.
        ended: given back early or over; kept for the story.
    """

    id: ReservationId
    nodes: tuple[NodeId, ...]
    start_s: float
    end_s: float
    users: frozenset[UserId] = frozenset()
    queues: frozenset[QueueId] = frozenset()
    why: str = ""
    by: UserId = UserId("")
    ended: bool = False

    @property
    def maintenance(self) -> bool:
        """Whether nobody may use the nodes."""
        return not self.users and not self.queues

    def admits(self, user: UserId, queue: QueueId) -> bool:
        """Whether a job of this user in this queue may use the nodes while the reservation holds."""
        return user in self.users or queue in self.queues

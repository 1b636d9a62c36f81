"""One life of the head in a drill: the real controller and mailboxes, and what a shell would remember of supervisors."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.controller.controller import Controller
from phalanx.controller.mailboxes import Mailboxes
from phalanx.core.errors import TryLater
from phalanx.core.ids import NodeId, SupervisorId


class Unanswered(TryLater):
    """The head died, or there is none: whoever asked does not know whether it was done."""

    code = "unanswered"


@dataclass
class Head:
    """One life.

    Attributes:
        greeted: who speaks for each node in this life (`api.supervisors`).
        acked: up to which number each supervisor's events are durable.
        busy_until_s: a slow disk holds its one thread up until then, on CLOCK_BOOTTIME.
    """

    number: int
    controller: Controller
    mailboxes: Mailboxes = field(default_factory=Mailboxes)
    greeted: dict[NodeId, SupervisorId] = field(default_factory=dict)
    acked: dict[SupervisorId, int] = field(default_factory=dict)
    wake: int = 0
    busy_until_s: float = 0.0

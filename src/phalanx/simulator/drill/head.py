"""One incarnation of the head: the real controller and mailboxes, and the shell's state of supervisors."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.controller.audit_trail import AuditTrail
from phalanx.controller.controller import Controller
from phalanx.controller.mailboxes import Mailboxes
from phalanx.core.errors import TryLater
from phalanx.core.ids import NodeId, SupervisorId


class NoAnswer(TryLater):
    """The head died or is down; the caller does not know whether the request was executed."""

    code = "unanswered"


@dataclass
class DrillHead:
    """One incarnation.

    Attributes:
        registered: registered supervisor of each node (`api.supervisors`).
        acked: last durable event number of each supervisor.
        busy_until_s: CLOCK_BOOTTIME until which a slow disk blocks its thread.
    """

    incarnation: int
    controller: Controller
    audit: AuditTrail
    mailboxes: Mailboxes = field(default_factory=Mailboxes)
    registered: dict[NodeId, SupervisorId] = field(default_factory=dict)
    acked: dict[SupervisorId, int] = field(default_factory=dict)
    wake_number: int = 0
    busy_until_s: float = 0.0

"""The result of one step of the controller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.access.audit import AuditCall, AuditLine
from phalanx.core.errors import PhalanxError
from phalanx.core.ids import NodeId
from phalanx.core.state.commands import Command, ProviderCall
from phalanx.core.state.world import WorldChange
from phalanx.ports.store import Batch

IDLE_WAKE_S: Final = 1.0
Answer = object  # of the type that the request declares; None for a report


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerTime:
    """The two clocks of one step: Unix seconds for records, CLOCK_BOOTTIME seconds (monotonic) for leases and limits."""

    wall_s: float
    boot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of a step. Nothing of it may be sent before `change` is committed.

    Attributes:
        answers: one for each event of the inbox, in order; an error for a refused one.
        commands: for supervisors, in order.
        provider_calls: for the providers of node pools, in order.
        audit_calls: what the head decided by itself, for the audit trail.
        lost: nodes whose leases end with this commit.
        due_in_s: time until the next deadline; infinite if only an event can change anything.
    """

    change: WorldChange
    answers: Sequence[Answer | PhalanxError]
    commands: Sequence[Command]
    lost: Sequence[NodeId]
    due_in_s: float
    provider_calls: Sequence[ProviderCall] = ()
    audit_calls: Sequence[AuditCall] = ()

    @property
    def wake_in_s(self) -> float:
        """Step again after at most this long, even with an empty inbox: a longer gap counts as a suspended head."""
        return min(IDLE_WAKE_S, self.due_in_s)

    def batch(self, audit: Sequence[AuditLine] = ()) -> Batch:
        """The batch to commit, with these lines of the audit trail."""
        change = self.change
        return Batch(
            records=change.records,
            removed=list(change.removed),
            history=change.history,
            audit=audit,
            epochs=change.epochs,
            archived=change.archived,
        )

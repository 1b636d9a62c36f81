"""Writes the audit trail of a head: one line for each call, chained to the line before. Called by the driver and by the drill."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from phalanx.controller.requests.registry import describe_request
from phalanx.controller.step_result import Answer
from phalanx.core.access.audit import AuditCall, AuditLine, ChainTip, next_line
from phalanx.core.errors import PhalanxError
from phalanx.core.state.events import Event, Request

AnsweredCalls = tuple[Sequence[AuditCall], Sequence[Event], Sequence[Answer | PhalanxError]]
"""Calls with the events that they caused and the answers to these, in the same order; without events, each call is written by itself."""


@dataclass(slots=True)
class AuditTrail:
    """The end of the trail.

    Attributes:
        key: see `core.access.audit`.
        tip: the newest durable line.
    """

    key: bytes = b""
    tip: ChainTip = field(default_factory=ChainTip)

    def resume_after(self, newest: AuditLine | None) -> None:
        """Go on after the newest line of the store; None for an empty trail."""
        self.tip = ChainTip() if newest is None else ChainTip(seq=newest.seq, mac=newest.mac)

    def next_lines(self, requests: Iterable[AnsweredCalls], at_s: float) -> list[AuditLine]:
        """The lines of one step, refused calls included. They become the end of the trail only with `resume_after`, once they are durable."""
        lines: list[AuditLine] = []
        tip = self.tip
        for calls, events, answers in requests:
            for number, call in enumerate(calls):
                result, detail = "", call.detail
                if events:
                    answer, event = answers[number], events[number]
                    result = answer.code if isinstance(answer, PhalanxError) else ""
                    detail = describe_request(event, answer) if isinstance(event, Request) else ""
                line = next_line(call, tip, at_s, self.key, detail=detail, result=result)
                lines.append(line)
                tip = ChainTip(seq=line.seq, mac=line.mac)
        return lines

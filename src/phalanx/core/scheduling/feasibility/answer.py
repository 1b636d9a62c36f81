"""The answer to whether a job can start: now, later or never, and why."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import NeverFits
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import NodeId


class Outlook(enum.StrEnum):
    """Whether a job can start: see `checker`."""

    POSSIBLE = "possible"
    NOT_NOW = "not_now"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Feasibility:
    """The outlook of one request.

    Attributes:
        limit: name of the limit that makes it impossible, as in the table of `checker`; empty unless NEVER.
        detail: why it is not possible, with the arithmetic; empty for POSSIBLE.
        hint: what to do next; may be empty.
        nodes: NOT_NOW: the nodes that could hold a part of it once they accept work again.
    """

    outlook: Outlook
    limit: str = ""
    detail: str = ""
    hint: str = ""
    nodes: tuple[NodeId, ...] = ()

    @property
    def never(self) -> bool:
        """Whether the job can never start."""
        return self.outlook is Outlook.NEVER

    def error(self) -> NeverFits:
        """The refusal of a submit."""
        return NeverFits(self.detail, hint=self.hint or Hint(HintCode.ALLOW_NEVER))


FROM_BEST: Final = (Outlook.POSSIBLE, Outlook.NOT_NOW, Outlook.NEVER)
POSSIBLE: Final = Feasibility(outlook=Outlook.POSSIBLE)


def not_now(why: str, shape: str = "") -> Feasibility:
    """The answer that nothing can run the job now. `shape`: its shape in words."""
    what = f" ({shape})" if shape else ""
    return Feasibility(outlook=Outlook.NOT_NOW, detail=f"nothing here now can run this{what}: {why}")


def never(limit: str, detail: str, hint: str = "") -> Feasibility:
    """The answer that nothing can ever run it; arguments as the fields of `Feasibility`."""
    return Feasibility(outlook=Outlook.NEVER, limit=limit, detail=detail, hint=hint)

"""Records of the audit trail."""

from __future__ import annotations

import msgspec

from phalanx.core.ids import TokenId, UserId


class AuditLineView(msgspec.Struct, frozen=True, kw_only=True):
    """One change: who changed what, from where, and the result ("done", or the code of the refusal)."""

    seq: int
    at_s: float
    user: UserId
    token_id: TokenId
    origin: str
    action: str
    target: str = ""
    detail: str = ""
    result: str = ""


class AuditList(msgspec.Struct, frozen=True, kw_only=True):
    """Lines, oldest first. `anchor`: hash of the whole trail now, to be stored elsewhere. `truncated`: fewer lines than asked for fit."""

    lines: list[AuditLineView]
    anchor: str = ""
    truncated: bool = False


class AuditFlaw(msgspec.Struct, frozen=True, kw_only=True):
    """A place where the trail was altered."""

    seq: int
    text: str


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a verification: `lines` read, `anchors` compared; `flaws` is empty for an intact trail."""

    lines: int
    anchors: int
    anchor: str
    flaws: list[AuditFlaw]

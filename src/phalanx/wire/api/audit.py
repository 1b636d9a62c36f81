"""Records of the audit trail."""

from __future__ import annotations

import msgspec

from phalanx.core.ids import TokenId, UserId


class AuditLineView(msgspec.Struct, frozen=True, kw_only=True):
    """Who changed what, from where, and how it ended ("done", or the code of the refusal)."""

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
    """Lines, oldest first. `anchor`: where the whole trail stands now, to be kept elsewhere."""

    lines: list[AuditLineView]
    anchor: str = ""


class AuditFlaw(msgspec.Struct, frozen=True, kw_only=True):
    """Where the trail is not what was written."""

    seq: int
    text: str


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an examination: `lines` read, `anchors` compared; `flaws` is empty for a sound trail."""

    lines: int
    anchors: int
    anchor: str
    flaws: list[AuditFlaw]

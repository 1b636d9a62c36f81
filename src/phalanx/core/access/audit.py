"""The audit trail: who changed what, from where, and how it ended, as a chain that shows tampering.

Each line carries an HMAC-SHA256 over itself and the code of the line before, under a key that only the head has: who can write the
database but not read the key cannot change, add, remove or move a line without breaking the chain. A chain alone does not show that
its newest lines are gone: for that a line's seq and code must be known elsewhere (an *anchor*).
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.ids import TokenId, UserId

DONE: Final = "done"
TEXT_MAX: Final = 400  # characters of a target or a detail: names and numbers, never a job's command or environment
_SECRET_NAMES: Final = frozenset({"session_name"})
_encode: Final = json.JSONEncoder(separators=(",", ":")).encode  # made once: `dumps` with an option makes one each time
_KEY_OF: Final = b"phalanx audit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A changing call, before it is known how it ends.

    Attributes:
        origin: address of the caller's end of the connection; "head" for what the head does by itself.
        action: method and route, as the API declares them.
        target: what it is done to, by name.
        detail: what it is changed to; no secrets.
        result: how it ended; empty as long as that is open.
    """

    user: UserId
    token_id: TokenId
    origin: str
    action: str
    target: str = ""
    detail: str = ""
    result: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditLine:
    """One line of the trail; `seq` is dense from 1, `mac` the code that chains it to the line before (hex)."""

    seq: int
    at_s: float
    user: UserId
    token_id: TokenId
    origin: str
    action: str
    target: str
    detail: str
    result: str
    mac: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tip:
    """Where a chain stands: its newest line's seq and code. An anchor is a tip that was noted elsewhere."""

    seq: int = 0
    mac: str = ""

    def __str__(self) -> str:
        return f"{self.seq}:{self.mac}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """Where the trail is not what was written, and how that shows."""

    seq: int
    text: str


def audit_key(secret: bytes) -> bytes:
    """The key of the chain, from the head's secret."""
    return hmac.new(secret, _KEY_OF, hashlib.sha256).digest()


def line_of(call: Call, tip: Tip, at_s: float, key: bytes, *, detail: str | None = None, result: str = "") -> AuditLine:
    """The line that follows `tip`. `detail` and `result` where only the loop knows them. Made once: it is on the way of every submit."""
    seq, result = tip.seq + 1, result or call.result or DONE
    target, detail = call.target[:TEXT_MAX], (call.detail if detail is None else detail)[:TEXT_MAX]
    words = (tip.mac, seq, at_s, call.user, call.token_id, call.origin, call.action, target, detail, result)
    return AuditLine(
        seq=seq,
        at_s=at_s,
        user=call.user,
        token_id=call.token_id,
        origin=call.origin,
        action=call.action,
        target=target,
        detail=detail,
        result=result,
        mac=_mac(words, key),
    )


def mac_of(line: AuditLine, before: str, key: bytes) -> str:
    """The code of a line whose predecessor has the code `before`; the first line's is empty."""
    words = (
        before,
        line.seq,
        line.at_s,
        line.user,
        line.token_id,
        line.origin,
        line.action,
        line.target,
        line.detail,
        line.result,
    )
    return _mac(words, key)


def _mac(words: tuple[str | int | float, ...], key: bytes) -> str:
    """As a JSON list, so that what moves from one word to the next is another text."""
    return hmac.digest(key, _encode(words).encode(), "sha256").hex()


@dataclass(slots=True)
class Examined:
    """A chain as it is read, line by line. `flaws` holds the first few; `anchors` that were met are taken out.

    After a flaw the chain is taken up at the line found, so that one changed line is one flaw and not all that follow.
    """

    key: bytes
    anchors: dict[int, set[str]]
    flaws: list[Flaw]
    tip: Tip = Tip()
    lines: int = 0

    @classmethod
    def against(cls, key: bytes, anchors: Iterable[Tip]) -> Examined:
        """Nothing read yet."""
        wanted: dict[int, set[str]] = {}
        for anchor in anchors:
            if anchor.seq:
                wanted.setdefault(anchor.seq, set()).add(anchor.mac)
        return cls(key=key, anchors=wanted, flaws=[])

    def read(self, line: AuditLine) -> None:
        """The next line, by seq."""
        wanted = self.tip.seq + 1
        if line.seq > wanted:
            gone = str(wanted) if line.seq == wanted + 1 else f"{wanted} to {line.seq - 1}"
            self.fault(wanted, f"missing: line {gone} was removed")
        elif not hmac.compare_digest(line.mac, mac_of(line, self.tip.mac, self.key)):
            self.fault(line.seq, "changed, or put there by somebody without the head's key")
        if any(line.mac != mac for mac in self.anchors.pop(line.seq, ())):
            self.fault(line.seq, "not the line that its anchor names: the trail was written anew")
        self.tip = Tip(seq=line.seq, mac=line.mac)
        self.lines += 1

    def fault(self, seq: int, text: str) -> None:
        """Note a flaw."""
        self.flaws.append(Flaw(seq=seq, text=text))

    def end(self) -> None:
        """Nothing follows: anchors that were not met are of lines cut off."""
        if self.anchors:
            last = max(self.anchors)
            self.fault(self.tip.seq + 1, f"cut off: the trail once had {last} lines, and ends at {self.tip.seq}")


def anchor_of(text: str) -> Tip:
    """An anchor as `Tip` prints it: SEQ:CODE.

    Raises:
        BadRequest: it is none.
    """
    seq, _, mac = text.strip().partition(":")
    if (
        not seq.isascii()
        or not seq.isdecimal()
        or len(seq) > 15
        or len(mac) != 64
        or set(mac) - set("0123456789abcdef")
    ):
        raise BadRequest(f"{text[:80]!r} is no anchor", hint="SEQ:CODE, as the last line of `phalanx audit` says it")
    return Tip(seq=int(seq), mac=mac)


def target_of(names: Mapping[str, str]) -> str:
    """What a route was called with, as words: `job_id=7`. The name of an exec session is a secret, and not told."""
    return " ".join(f"{name}={value}" for name, value in sorted(names.items()) if name not in _SECRET_NAMES)

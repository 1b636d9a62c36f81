"""The audit trail: who changed what, from where, and with which result, as a tamper-evident chain.

Each line has an HMAC-SHA256 over itself and the code of the previous line, with a key that only the head has. An attacker who can write the
database but not read the key cannot change, add, remove or move a line without breaking the chain. The chain alone does not reveal that its
newest lines were removed: for that, a line's seq and code must be stored elsewhere (an *anchor*).
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import TokenId, UserId

DONE: Final = "done"
TEXT_MAX: Final = 400  # characters of a target or a detail: names and numbers, never a job's command or environment
_NAMED_MAX: Final = 8  # names of a list; the rest as a number
_SECRET_NAMES: Final = frozenset({"session_name"})
_encode: Final = json.JSONEncoder(
    separators=(",", ":")
).encode  # created once: `dumps` with an option creates one per call
_RUN_MAX: Final = 5  # lines in a row without a valid code that are named one by one
_KEY_OF: Final = b"phalanx audit"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditCall:
    """A call that changes something, before its result is known.

    Attributes:
        origin: address of the caller's end of the connection; "head" for the head's own actions.
        action: method and route, as the API declares them.
        target: the object that is changed, by name.
        detail: the change; no secrets.
        result: empty until it is known.
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
    """One line of the trail. `seq` is dense from 1; `mac` is the code that chains it to the previous line (hex)."""

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
class ChainTip:
    """The end of a chain: seq and code of its newest line. An anchor is a tip that is stored elsewhere."""

    seq: int = 0
    mac: str = ""

    def __str__(self) -> str:
        return f"{self.seq}:{self.mac}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFlaw:
    """A place where the trail was tampered with, and the evidence."""

    seq: int
    text: str


def audit_key(secret: bytes) -> bytes:
    """Derive the key of the chain from the head's secret."""
    return hmac.new(secret, _KEY_OF, hashlib.sha256).digest()


def next_line(
    call: AuditCall, tip: ChainTip, at_s: float, key: bytes, *, detail: str | None = None, result: str = ""
) -> AuditLine:
    """The line that follows `tip`. `detail` and `result` override those of the call. On the path of every submit."""
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
    """The code of a line; `before`: its predecessor's code, empty for the first line."""
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
    """Computed over a JSON list, so that text moved from one field to the next changes the code."""
    return hmac.digest(key, _encode(words).encode(), "sha256").hex()


@dataclass(slots=True)
class ChainVerifier:
    """Verifies a chain line by line. `flaws`: those found so far, complete after `finish`; `anchors`: those not reached yet.

    After a flaw, verification continues from the line found, so that one changed line is one flaw. Flaws with one cause are one flaw: lines in
    a row that another key signed, and all anchors of a trail that was replaced by an older copy.
    """

    key: bytes
    anchors: dict[int, set[str]]
    flaws: list[ChainFlaw]
    tip: ChainTip = ChainTip()
    lines: int = 0
    unsigned: list[int] = field(default_factory=list)  # the current run of lines without a valid code
    unmatched: list[int] = field(default_factory=list)  # lines that do not match their anchor

    @classmethod
    def for_anchors(cls, key: bytes, anchors: Iterable[ChainTip]) -> ChainVerifier:
        """A verifier before the first line."""
        wanted: dict[int, set[str]] = {}
        for anchor in anchors:
            if anchor.seq:
                wanted.setdefault(anchor.seq, set()).add(anchor.mac)
        return cls(key=key, anchors=wanted, flaws=[])

    def verify(self, line: AuditLine) -> None:
        """Verify the next line, in order of seq."""
        wanted = self.tip.seq + 1
        signed = line.seq > wanted or hmac.compare_digest(line.mac, mac_of(line, self.tip.mac, self.key))
        if signed:
            self._end_unsigned()
        else:
            self.unsigned.append(line.seq)
        if line.seq > wanted:
            gone = str(wanted) if line.seq == wanted + 1 else f"{wanted} to {line.seq - 1}"
            self.add_flaw(wanted, f"missing: line {gone} was removed")
        if any(line.mac != mac for mac in self.anchors.pop(line.seq, ())):
            self.unmatched.append(line.seq)
        self.tip = ChainTip(seq=line.seq, mac=line.mac)
        self.lines += 1

    def add_flaw(self, seq: int, text: str) -> None:
        """Record a flaw."""
        self._end_unsigned()
        self.flaws.append(ChainFlaw(seq=seq, text=text))

    def finish(self) -> None:
        """Finish after the last line: anchors that were not reached belong to removed lines."""
        self._end_unsigned()
        if len(self.unmatched) > 1:
            first = min(self.unmatched)
            self.add_flaw(
                first,
                f"lines {first} to {self.tip.seq} do not match {len(self.unmatched)} anchors: the records were restored from an older backup and "
                "continued, or the trail was rewritten",
            )
        elif self.unmatched:
            self.add_flaw(self.unmatched[0], "does not match its anchor: the trail was rewritten")
        if self.anchors and len(self.unmatched) <= 1:
            last = max(self.anchors)
            self.add_flaw(
                self.tip.seq + 1, f"truncated: the trail had at least {last} lines and ends at {self.tip.seq}"
            )

    def _end_unsigned(self) -> None:
        """Record the run of lines without a valid code: each line of a short one, a long one as one flaw."""
        run, self.unsigned = self.unsigned, []
        if len(run) <= _RUN_MAX:
            self.flaws += [ChainFlaw(seq=seq, text="changed or inserted without the head's key") for seq in run]
        elif run[0] == 1:
            text = (
                f"lines 1 to {run[-1]} were signed with another key: they come from a backup of another head, or from before its node_secret "
                "was replaced; only that key verifies them"
            )
            self.flaws.append(ChainFlaw(seq=1, text=text))
        else:
            text = f"lines {run[0]} to {run[-1]} were changed or inserted without the head's key"
            self.flaws.append(ChainFlaw(seq=run[0], text=text))


def parse_anchor(text: str) -> ChainTip:
    """Parse an anchor in the format of `ChainTip`: SEQ:CODE.

    Raises:
        BadRequest: not an anchor.
    """
    seq, _, mac = text.strip().partition(":")
    if (
        not seq.isascii()
        or not seq.isdecimal()
        or len(seq) > 15
        or len(mac) != 64
        or set(mac) - set("0123456789abcdef")
    ):
        raise BadRequest(f"{text[:80]!r} is not an anchor", hint=Hint(HintCode.GIVE_ANCHOR))
    return ChainTip(seq=int(seq), mac=mac)


def join_names(names: Sequence[str]) -> str:
    """Join names; of a long list only the first few."""
    shown = ",".join(names[:_NAMED_MAX])
    return shown if len(names) <= _NAMED_MAX else f"{shown} and {len(names) - _NAMED_MAX} more"


def describe_target(names: Mapping[str, str]) -> str:
    """The parameters of a route as text: `job_id=7`. Names of exec sessions are secret and left out."""
    return " ".join(f"{name}={value}" for name, value in sorted(names.items()) if name not in _SECRET_NAMES)

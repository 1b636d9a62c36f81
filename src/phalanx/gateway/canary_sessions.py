"""Divides the sessions of a service between two revisions during a rollout, and counts how their requests fare.

Which sessions go to the new revision is a hash and nothing else, so that a session stays where it is, all gateways agree, and a restart changes nothing. The
share only grows; a session changes over at most once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import msgspec
import xxhash

from phalanx.core.work.services.log_histogram import class_of
from phalanx.wire.api.gateways import FiguresOfRevision
from phalanx.wire.api.services import CanaryShare

SESSION_HEADER: Final = "X-Session-Id"
SESSIONS_MAX: Final = 100_000  # of which it is known that they have been counted; then they may be counted again
SPEED_TOKENS_MIN: Final = 8  # of an answer; the speed of shorter ones is noise
INCIDENT_S: Final = (
    10.0  # requests that a replica fails in this time, without an answer of its own, are one piece of evidence
)
_WHOLE: Final = 1000
_CONVERSATIONS: Final = ("/v1/chat/completions", "/v1/responses")


class _Turn(msgspec.Struct):
    role: msgspec.Raw = msgspec.Raw(b"")


_turns: Final = msgspec.json.Decoder(list[msgspec.Raw])
_turn: Final = msgspec.json.Decoder(_Turn)


@dataclass(frozen=True, slots=True)
class Session:
    """What stays on one revision. `fresh`: this request is the first of a conversation, as far as it shows."""

    key: bytes
    fresh: bool

    def place(self, service: str, revision: int) -> int:
        """Its place among the sessions of a rollout: 0 to 999."""
        salt = f"{service}\0{revision}\0".encode()
        return xxhash.xxh3_64_intdigest(salt + self.key) * _WHOLE >> 64


def session_of(
    path: str, header: str, named: tuple[bytes, ...], prompt: bytes, *, user: str, request_id: str
) -> Session:
    """Return the session of a request.

    Args:
        path: its route.
        header: SESSION_HEADER, "" without one.
        named: JSON of the fields of the body that may name a session or an end user, the best first; empty where a field is missing.
        prompt: JSON of its messages, prompt or input.
        user: of its key.
        request_id: names a request that belongs to no session.
    """
    known = header.encode(errors="surrogateescape") or next(
        (one for one in named if one not in (b"", b"null", b'""')), b""
    )
    start, fresh = _conversation_start(prompt) if path in _CONVERSATIONS else (b"", True)
    return Session(user.encode() + b"\0" + (known or start or request_id.encode()), fresh)


def _conversation_start(prompt: bytes) -> tuple[bytes, bool]:
    """Return the messages up to the first one of the user, which all requests of a conversation share, and whether there are no others."""
    try:
        turns = _turns.decode(prompt)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return prompt, True  # a text, or nonsense
    for number, turn in enumerate(turns, 1):
        try:
            role = bytes(_turn.decode(turn).role)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return b"", True
        if role == b'"user"':
            return b"\0".join(map(bytes, turns[:number])), number == len(turns)
    return prompt, True


@dataclass(slots=True)
class _Counts:
    begun: int = 0
    answered: int = 0
    errors: int = 0
    failing_sessions: int = 0
    first_tokens: Counter[int] = field(default_factory=Counter)
    speeds: Counter[int] = field(default_factory=Counter)


class SessionTrial:
    """One request at one replica. Without an outcome its client has left."""

    __slots__ = ("_began_s", "_first_s", "_meter", "_open", "_replica", "_session", "_streams", "revision")

    def __init__(self, meter: RevisionMeter, revision: int, replica: str, session: Session, *, stream: bool) -> None:
        self._meter, self.revision, self._replica, self._session = meter, revision, replica, session
        self._began_s, self._first_s, self._open = time.monotonic(), 0.0, True
        self._streams = stream and session.fresh

    def first_token(self) -> None:
        """Note the first bytes of the answer; the others change nothing."""
        if not self._first_s:
            self._first_s = time.monotonic()
            self._note_first_token()

    def failed(self, *, alone: bool) -> None:
        """It ended with an error. `alone`: the replica answered with it; else other requests fail with this one."""
        if self._open:
            self._open = False
            self._meter.failed(self.revision, self._session.key if alone else self._replica.encode(), once=alone)

    def done(self, tokens: int) -> None:
        """It has its whole answer, with this many tokens."""
        if not self._open:
            return
        self._open = False
        counts = self._meter.counts(self.revision)
        counts.answered += 1
        seconds = time.monotonic() - ((self._first_s if self._streams else 0.0) or self._began_s)
        long = tokens >= SPEED_TOKENS_MIN and seconds > 0 and self._session.fresh
        if long and self._meter.is_first(self._session.key, "speed"):
            counts.speeds[class_of(tokens / seconds)] += 1

    def unanswered_s(self, now_s: float) -> float | None:
        """How long the stream has waited for its first token; None if it does not."""
        return now_s - self._began_s if self._streams and not self._first_s and self._open else None

    def close(self) -> None:
        """Take over the time that a stream has waited in vain: its first token would have come later still."""
        if self._open and not self._first_s:
            self._note_first_token()

    def _note_first_token(self) -> None:
        if self._streams and self._meter.is_first(self._session.key, "first token"):
            self._meter.counts(self.revision).first_tokens[class_of(time.monotonic() - self._began_s)] += 1


class RevisionMeter:
    """Counts the requests of one service during one rollout.

    Args:
        service: its name.
        share: the rollout as it is now.
    """

    def __init__(self, service: str, share: CanaryShare) -> None:
        self._service, self.share = service, share
        self._counts: dict[int, _Counts] = {}
        self._known: dict[str, set[int]] = {}
        self._incidents_s: dict[bytes, float] = {}
        self._open: set[SessionTrial] = set()

    def takes(self, session: Session | None) -> bool:
        """Whether the new revision gets a session."""
        return session is not None and session.place(self._service, self.share.revision) < self.share.share

    @contextmanager
    def request(self, revision: int, replica: str, session: Session, *, stream: bool) -> Iterator[SessionTrial]:
        """Count a request while it is at a replica."""
        trial = SessionTrial(self, revision, replica, session, stream=stream)
        self.counts(revision).begun += 1
        self._open.add(trial)
        try:
            yield trial
        finally:
            trial.close()
            self._open.discard(trial)

    def counts(self, revision: int) -> _Counts:
        """Return what is counted of a revision."""
        return self._counts.setdefault(revision, _Counts())

    def failed(self, revision: int, key: bytes, *, once: bool) -> None:
        """Count an error. It is evidence `once` for a session, or once in a while for a replica."""
        counts, now_s = self.counts(revision), time.monotonic()
        counts.answered += 1
        counts.errors += 1
        if once:
            counts.failing_sessions += self.is_first(key, "error")
        elif now_s - self._incidents_s.get(key, -INCIDENT_S) >= INCIDENT_S:
            self._incidents_s[key] = now_s
            counts.failing_sessions += 1

    def is_first(self, key: bytes, what: str) -> bool:
        """Whether a session has this for the first time."""
        known, number = self._known.setdefault(what, set()), xxhash.xxh3_64_intdigest(key)
        if number in known:
            return False
        if len(known) >= SESSIONS_MAX:
            known.clear()
        known.add(number)
        return True

    def take(self) -> list[FiguresOfRevision]:
        """Return the figures since the last call and now."""
        now_s, counts, self._counts = time.monotonic(), self._counts, {}
        ages: dict[int, Counter[int]] = {}
        for trial in self._open:
            waited_s = trial.unanswered_s(now_s)
            if waited_s is not None:
                ages.setdefault(trial.revision, Counter())[class_of(waited_s)] += 1
        return [
            _figures(revision, counts.get(revision, _Counts()), ages.get(revision, {}))
            for revision in sorted({*counts, *ages})
        ]


def _figures(revision: int, counts: _Counts, unanswered: Mapping[int, int]) -> FiguresOfRevision:
    return FiguresOfRevision(
        revision=revision,
        begun=counts.begun,
        answered=counts.answered,
        errors=counts.errors,
        failing_sessions=counts.failing_sessions,
        first_tokens=dict(counts.first_tokens),
        speeds=dict(counts.speeds),
        unanswered=dict(unanswered),
    )


class NoTrial:
    """Stands for a trial where nothing is compared."""

    def first_token(self) -> None:
        """Count nothing."""

    def failed(self, *, alone: bool) -> None:
        """Count nothing."""

    def done(self, tokens: int) -> None:
        """Count nothing."""

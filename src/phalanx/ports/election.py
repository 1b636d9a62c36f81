"""Who of several heads leads: what they read and write in the database that they share.

Each call is one statement there. What the numbers mean, and when a head may lead by them, is decided in `controller.leadership`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from phalanx.core.errors import TryLater


class NoElection(TryLater):
    """The shared database did not answer, so nothing is known of who leads."""

    code = "no_election"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """The one row about who leads.

    Attributes:
        term: grows by one with each takeover; every commit is checked against it.
        beat: grows with each renewal and each release.
        holder: the head that leads, by its id; empty where the last one gave it up.
        url: where others reach it; of the last one where nobody holds it.
        lease_s: how long the holder may lead without a renewal.
        grants_s: the longest lease that it grants supervisors, for the fleet of its start.
        since_s, renewed_s: when it took over and renewed last, in Unix seconds by the database's clock; told to people, never judged by.
        long_leases_left_s: how long leases from a planned stop, or of a leader before this one, may still be held, by the database's
            clock; 0 for none.
    """

    term: int
    beat: int
    holder: str = ""
    url: str = ""
    lease_s: float = 0.0
    grants_s: float = 0.0
    since_s: float = 0.0
    renewed_s: float = 0.0
    long_leases_left_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRecord:
    """One head of the cluster, as it says of itself.

    Attributes:
        name: of its machine and state folder; one row for each, whatever life it is in.
        head_id: of this life.
        token_sha256: of the token in its state folder, which the leader lets in as `user`'s.
        seen_ago_s: since it last said so, by the database's clock.
    """

    name: str
    head_id: str
    url: str
    version: str
    user: str = ""
    token_sha256: str = ""
    started_s: float = 0.0
    seen_ago_s: float = 0.0


class Election(Protocol):
    """One head's voice. Not for several threads at once, but for `close`. Every verb raises NoElection where the database does not answer."""

    def prepare(self) -> None:
        """Have the database be such that the other verbs find what they need."""
        ...

    def look(self) -> Leader:
        """The row as it is now."""
        ...

    def claim(self, seen: Leader, mine: HeadRecord, *, lease_s: float, grants_s: float) -> int | None:
        """Take over from what was seen: the new term, or None where anything has moved since. Leases that were granted stay known."""
        ...

    def renew(self, term: int) -> bool:
        """Say that we live; False where the term has passed to another."""
        ...

    def release(self, term: int) -> None:
        """Give it up at once; nothing where the term has passed."""
        ...

    def grant_long(self, term: int, lease_s: float) -> None:
        """Write down, before the first is granted, that supervisors may hold leases of this length."""
        ...

    def say(self, mine: HeadRecord) -> None:
        """Put our own row among the heads."""
        ...

    def leave(self, name: str) -> None:
        """Take it out again: a planned end."""
        ...

    def heads(self) -> list[HeadRecord]:
        """All heads that were seen within a week, by name."""
        ...

    def share(self, secrets: Mapping[str, str]) -> dict[str, str]:
        """Offer secrets by name; those that count for the cluster, which are the first that were ever offered."""
        ...

    def replace_shared(self, name: str, value: str) -> None:
        """Let another value count from now on."""
        ...

    def close(self) -> None:
        """Let go of the database; harmless twice."""
        ...

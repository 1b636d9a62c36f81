"""Leader election among several heads: operations on the database that they share.

Each call is one SQL statement. `controller.leadership` decides from these values when a head may lead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from phalanx.core.errors import TryLater


class ElectionUnavailable(TryLater):
    """The shared database did not answer, so the leader is unknown."""

    code = "no_election"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """The leader's row.

    Attributes:
        term: grows by one with each takeover; every commit is checked against it.
        beat: grows with each renewal and each release.
        holder: id of the leading head; empty after a release.
        url: address of the holder, or of the last one after a release.
        lease_s: how long the holder may lead without a renewal.
        grants_s: the longest lease that it grants supervisors, for the fleet at its start.
        since_s, renewed_s: when it took over and last renewed, in Unix seconds of the database's clock; only for display.
        long_leases_left_s: how long supervisors may still hold leases from a planned stop or of a previous leader, by the database's
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
    """One head of the cluster, as it registered itself.

    Attributes:
        name: of its machine and state folder; one row for each, across restarts.
        head_id: of this incarnation.
        token_sha256: hash of the token in its state folder, which the leader accepts as `user`'s.
        seen_ago_s: time since its last registration, by the database's clock.
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
    """One head's access to the election. Only `close` is thread-safe. Every method raises ElectionUnavailable if the database does not answer."""

    def prepare(self) -> None:
        """Create or upgrade the tables that the other methods need."""
        ...

    def read_leader(self) -> Leader:
        """Read the leader's row."""
        ...

    def claim(self, seen: Leader, mine: HeadRecord, *, lease_s: float, grants_s: float) -> int | None:
        """Take over; return the new term, or None if the row has changed since `seen`. Granted leases stay recorded."""
        ...

    def renew(self, term: int) -> bool:
        """Renew the leader's lease; False if another head has taken over."""
        ...

    def release(self, term: int) -> None:
        """Release the term at once; does nothing if another head has taken over."""
        ...

    def grant_long(self, term: int, lease_s: float) -> None:
        """Record, before the first one is granted, that supervisors may hold leases of this length."""
        ...

    def register(self, mine: HeadRecord) -> None:
        """Register this head."""
        ...

    def unregister(self, name: str) -> None:
        """Remove this head's registration: a planned end."""
        ...

    def heads(self) -> list[HeadRecord]:
        """All heads that registered within a week, by name."""
        ...

    def share(self, secrets: Mapping[str, str]) -> dict[str, str]:
        """Offer secrets by name; return the cluster's, which are the first ones offered."""
        ...

    def replace_shared(self, name: str, value: str) -> None:
        """Replace a shared secret."""
        ...

    def close(self) -> None:
        """Close the connection. Idempotent."""
        ...

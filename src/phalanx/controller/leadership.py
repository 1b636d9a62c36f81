"""When a head may lead and when it must stop, as functions of numbers. Called by the thread that campaigns, renews and watches.

One row in the shared database says who leads (`ports.election.Leader`). Two counts keep two heads from leading at once, and neither
compares the clocks of two machines:

- Who leads counts its lease from *sending* the renewal that was accepted, and stops MARGIN_S before its end.
- Who waits counts from *hearing* the last sign of life: a term and beat that it has not seen before. It takes over a whole lease later.

A sign of life is sent before it is heard, so the first count ends first, whatever the network does between. What could go wrong beyond
this (a head that was stopped in the middle of a write) is refused by the database, which checks the term of every commit.

Times are seconds of CLOCK_BOOTTIME: it goes on while a machine sleeps, and nobody sets it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phalanx.ports.election import Leader

LEASE_S: Final = 3.0  # with the look-out and the loading of 10,000 jobs (2 s) a takeover stays within 5 s
RENEW_EVERY_S: Final = 0.75  # four tries in a lease, as for supervisors
LOOK_EVERY_S: Final = 0.2  # of who waits; a planned handover is seen no later than this
LOOK_LEAST_S: Final = 0.005  # a look is a round trip; and no loop shall spin
MARGIN_S: Final = (
    0.2  # two clocks that run 1 % apart differ by 0.03 s over a lease; the rest is for a reply on its way out
)
SUPERVISORS_LEASE_S: Final = (
    9.0  # the default with several heads: a takeover (5 s) and the way to the new leader fit into it
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What a waiting head knows: the row as last read, and since when it has heard no new sign of life."""

    leader: Leader
    quiet_since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenure:
    """A term that we hold. `asked_s`: when the newest claim or renewal was sent that the database accepted."""

    term: int
    asked_s: float
    lease_s: float = LEASE_S


def watched(before: Watch | None, leader: Leader, heard_s: float) -> Watch:
    """What is known once the row was read; `heard_s` is after the answer came."""
    if before is not None and (before.leader.term, before.leader.beat) == (leader.term, leader.beat):
        return Watch(leader=leader, quiet_since_s=before.quiet_since_s)
    return Watch(leader=leader, quiet_since_s=heard_s)


def may_claim(watch: Watch, now_s: float, own_lease_s: float = LEASE_S) -> bool:
    """Whether to try: nobody holds it, or whoever does has been silent for a whole lease (its own, if that is longer)."""
    if not watch.leader.holder:
        return True
    return now_s - watch.quiet_since_s >= max(own_lease_s, watch.leader.lease_s)


def look_in_s(watch: Watch | None, now_s: float) -> float:
    """How long who waits does so before it looks again: no longer than until it may claim."""
    if watch is None or may_claim(watch, now_s):
        return LOOK_EVERY_S
    left_s = watch.quiet_since_s + max(LEASE_S, watch.leader.lease_s) - now_s
    return min(LOOK_EVERY_S, max(LOOK_LEAST_S, left_s))


def leads_until_s(tenure: Tenure) -> float:
    """The last moment at which we may answer or command."""
    return tenure.asked_s + tenure.lease_s - MARGIN_S


def renewed(tenure: Tenure, asked_s: float) -> Tenure:
    """The tenure after a renewal that was sent then and accepted; answers may overtake each other."""
    return Tenure(term=tenure.term, asked_s=max(tenure.asked_s, asked_s), lease_s=tenure.lease_s)


def granted_s(before: Leader) -> float:
    """How long supervisors may still hold leases of those who led before us, from when the row was read that we took over from.

    Also where the last one gave up its term: what it granted goes on.
    """
    return max(before.grants_s, before.long_leases_left_s)

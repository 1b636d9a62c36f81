"""When a head may lead and when it must stop, as pure functions. Called by the election thread.

One row in the shared database names the leader (`ports.election.Leader`). Two timers prevent two leaders at once; neither compares the
clocks of two machines:

- The leader counts its lease from *sending* the accepted renewal, and stops MARGIN_S before the end.
- A standby counts from *receiving* the last heartbeat: a term and beat that it has not seen before. It takes over one whole lease later.

A heartbeat is sent before it is received, so the leader's timer ends first whatever the network does. The remaining case, a head that was
suspended during a write, is refused by the database, which checks the term of every commit.

Times are seconds of CLOCK_BOOTTIME: it continues while a machine sleeps and ignores changes of the wall clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phalanx.ports.election import Leader

LEASE_S: Final = 3.0  # with polling and the loading of 10,000 jobs (2 s), a takeover stays within 5 s
RENEW_EVERY_S: Final = 0.75  # four attempts per lease, as for supervisors
POLL_EVERY_S: Final = 0.2  # polling interval of a standby; a planned handover is seen within it
POLL_LEAST_S: Final = 0.005  # a poll is a round trip; prevents a busy loop
# Two clocks that run 1 % apart differ by 0.03 s over a lease; the rest is for a reply on its way out.
MARGIN_S: Final = 0.2
# The default with several heads: a takeover (5 s) and reaching the new leader fit into it.
SUPERVISORS_LEASE_S: Final = 9.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderObservation:
    """A standby's view: the leader's row as last read, and since when it has shown no new heartbeat."""

    leader: Leader
    silent_since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenure:
    """A term that this head holds. `sent_s`: when the newest accepted claim or renewal was sent."""

    term: int
    sent_s: float
    lease_s: float = LEASE_S


def observe(before: LeaderObservation | None, leader: Leader, received_s: float) -> LeaderObservation:
    """The view after reading the row; `received_s`: when the answer arrived."""
    if before is not None and (before.leader.term, before.leader.beat) == (leader.term, leader.beat):
        return LeaderObservation(leader=leader, silent_since_s=before.silent_since_s)
    return LeaderObservation(leader=leader, silent_since_s=received_s)


def may_claim(watch: LeaderObservation, now_s: float, own_lease_s: float = LEASE_S) -> bool:
    """Whether to claim: the term has no holder, or its holder was silent for a whole lease (its own, if longer)."""
    if not watch.leader.holder:
        return True
    return now_s - watch.silent_since_s >= max(own_lease_s, watch.leader.lease_s)


def poll_in_s(watch: LeaderObservation | None, now_s: float) -> float:
    """How long a standby waits before it polls again: at most until it may claim."""
    if watch is None or may_claim(watch, now_s):
        return POLL_EVERY_S
    left_s = watch.silent_since_s + max(LEASE_S, watch.leader.lease_s) - now_s
    return min(POLL_EVERY_S, max(POLL_LEAST_S, left_s))


def leads_until_s(tenure: Tenure) -> float:
    """The last moment at which this head may answer or send commands."""
    return tenure.sent_s + tenure.lease_s - MARGIN_S


def renewed(tenure: Tenure, sent_s: float) -> Tenure:
    """The tenure after an accepted renewal that was sent at `sent_s`; answers may arrive out of order."""
    return Tenure(term=tenure.term, sent_s=max(tenure.sent_s, sent_s), lease_s=tenure.lease_s)


def previous_leases_s(before: Leader) -> float:
    """How long supervisors may still hold leases of previous leaders, counted from when the row was read that this head claimed.

    Leases stay valid even if the previous leader released its term.
    """
    return max(before.grants_s, before.long_leases_left_s)

"""Sequential tests that compare two revisions of a service which serve at the same time. Pure.

Chance alone decides which sessions the new revision gets (a hash of the session). If it is no worse, each bad event (an error, a late first token, a slow
answer) is therefore its own with a probability of at most its share of the sessions, whatever the load, the mix of requests and the rate of such events are. Each
test bets against that: `Evidence` holds how much likelier a few alternatives, "the new revision has 2, 5, ... times as many", make what was seen. A mixture of
likelihood ratios is a martingale under the hypothesis, so that by Ville's inequality it ever exceeds 1 / p with a probability of at most p, however often one
looks (Howard, Ramdas, McAuliffe, Sekhon 2021). So no number of requests has to be fixed in advance, and the budget below holds for a whole rollout.

Counted are sessions, as far as gateways can tell: one broken client that repeats its request is one event. An answer is late beyond the ninth tenth of the
stable revision's, as it was known before that answer. The new revision's must be later by `MARGIN_CLASSES`, so that a small difference does not count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from phalanx.core.work.services.canary import Evidence
from phalanx.core.work.services.log_histogram import LogHistogram, class_of, middle_of, quantile

ERRORS: Final = "errors"
FIRST_TOKENS: Final = "first_tokens"
SPEEDS: Final = "speeds"
FALSE_ALARMS: Final[Mapping[str, float]] = {ERRORS: 0.005, FIRST_TOKENS: 0.0025, SPEEDS: 0.0025}
"""Of rollouts of a revision that is no worse, the share that each test may send back: 1 % in all."""
SLOW_SHARE: Final = 0.9
MARGIN_CLASSES: Final = 2  # of 10 %
MARGIN_S: Final = 0.01  # a first token that is later by less is not late
REFERENCE_MIN: Final = 30  # figures of the stable revision without which its quantile is noise
# How many times as many events, and the weight of each. Errors: a broken version has all of them; it shall be seen after two at a share of 5 %.
_ERRORS: Final = ((3.0, 0.15), (10.0, 0.15), (50.0, 0.15), (1000.0, 0.55))
_SLOW: Final = ((1.5, 0.25), (2.5, 0.25), (5.0, 0.25), (10.0, 0.25))  # ten times a tenth is all
_ALTERNATIVES: Final = {ERRORS: _ERRORS, FIRST_TOKENS: _SLOW, SPEEDS: _SLOW}


def with_events(evidence: tuple[float, ...], test: str, new: int, stable: int, share: float) -> tuple[float, ...]:
    """The evidence after more events.

    Args:
        evidence: of this test until now.
        test: ERRORS, FIRST_TOKENS or SPEEDS.
        new: events of the new revision.
        stable: those of the other one.
        share: of the sessions that the new revision had, between 0 and 1.
    """
    if not new and not stable:
        return evidence
    found = []
    for known, (ratio, _) in zip(evidence, _ALTERNATIVES[test], strict=True):
        own = ratio * share / (ratio * share + 1.0 - share)
        found.append(known + new * math.log(own / share) + stable * math.log((1.0 - own) / (1.0 - share)))
    return tuple(found)


def strength(evidence: Evidence, test: str) -> float:
    """How far a test is from sending the revision back: 0 for nothing against it, 1 where it does."""
    logs: tuple[float, ...] = getattr(evidence, test)
    most = max(logs)
    total = sum(weight * math.exp(one - most) for one, (_, weight) in zip(logs, _ALTERNATIVES[test], strict=True))
    return max(0.0, (most + math.log(total)) / -math.log(FALSE_ALARMS[test]))


def late_class(reference: LogHistogram) -> int | None:
    """The class of times above which an answer is late, by the stable revision's; None while too few are known."""
    if sum(reference.values()) < REFERENCE_MIN:
        return None
    return class_of(quantile(reference, SLOW_SHARE))


def slow_class(reference: LogHistogram) -> int | None:
    """The class of speeds below which an answer is slow; None while too few are known."""
    if sum(reference.values()) < REFERENCE_MIN:
        return None
    return class_of(quantile(reference, 1.0 - SLOW_SHARE))


def late(times: LogHistogram, limit: int, *, margin: bool) -> int:
    """How many are late. `margin`: by more than a difference of no importance."""
    least = max(limit + MARGIN_CLASSES, class_of(middle_of(limit) + MARGIN_S)) if margin else limit
    return sum(count for number, count in times.items() if number > least)


def slow(speeds: LogHistogram, limit: int, *, margin: bool) -> int:
    """How many are slow. `margin`: by more than a difference of no importance."""
    most = limit - MARGIN_CLASSES if margin else limit
    return sum(count for number, count in speeds.items() if number < most)

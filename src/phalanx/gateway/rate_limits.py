"""Limits on requests and tokens for each minute, as token buckets. Pure: times are arguments, in monotonic seconds.

A bucket holds the amount of one minute and refills steadily, as OpenAI's own limits do. After a pause a client may therefore use a minute's
amount at once, and in the minute that follows as much again, never more. Tokens are reserved by an estimate when a request begins, and corrected
when it ends: a bucket may go below zero, and then lets no request pass until it is above again. So the average is exact, whatever the estimate.

Several gateways have a share of each limit (`core.work.request_limits.demand_share`). When a share grows, the bucket does not fill by that.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.work.services.request_limits import RequestLimits

MINUTE_S: Final = 60.0
BUCKETS_MAX: Final = 100_000
DEMAND_S: Final = 10.0  # over which demand is averaged
DEMANDS_MAX: Final = 1000  # scopes of one report, those that were asked most
_KINDS: Final = ("requests", "tokens")


class TokenBucket:
    """An amount for each minute.

    Args:
        per_minute: above 0.
        now_s: when it is full.
    """

    __slots__ = ("_at_s", "capacity", "level")

    def __init__(self, per_minute: float, now_s: float) -> None:
        self.capacity = self.level = per_minute
        self._at_s = now_s

    def refill(self, per_minute: float, now_s: float) -> None:
        """Bring it to `now_s`, from when on it has this capacity."""
        passed_s = max(0.0, now_s - self._at_s)
        self.level = min(per_minute, self.level + passed_s * self.capacity / MINUTE_S)
        self.capacity, self._at_s = per_minute, max(self._at_s, now_s)

    def wait_s(self, amount: float) -> float:
        """Return how long until this amount may be taken: it must be there, or the bucket be full."""
        return max(0.0, (min(amount, self.capacity) - self.level) * MINUTE_S / self.capacity)

    def take(self, amount: float) -> None:
        """Take the amount, or return a negative one; it never gets more than full."""
        self.level = min(self.capacity, self.level - amount)

    @property
    def full_in_s(self) -> float:
        """Seconds until it is full."""
        return (self.capacity - self.level) * MINUTE_S / self.capacity


@dataclass(frozen=True, slots=True)
class LimitState:
    """One limit at one moment. `kind`: "requests" or "tokens"; `remaining` of `limit`, both for this gateway; full in `reset_s`."""

    scope: str
    kind: str
    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class LimitReached:
    """A request must wait. `state`: of the limit that makes it wait for longest; `states`: of all that apply."""

    state: LimitState
    states: tuple[LimitState, ...]
    retry_after_s: float


@dataclass(slots=True)
class TokenReservation:
    """Tokens that were taken for a request by an estimate, to be corrected once."""

    limits: Mapping[str, RequestLimits]
    tokens: int
    states: tuple[LimitState, ...]
    settled: bool = False


class RateLimiter:
    """The buckets of one gateway. A scope is "project NAME" or "key ID"."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[tuple[str, str], TokenBucket] = OrderedDict()
        self._shares: Mapping[str, float] = {}
        self._even_share = 1.0
        self._demand: dict[str, tuple[float, float]] = {}  # tokens, fading, and when that was so

    def set_shares(self, shares: Mapping[str, float], even_share: float) -> None:
        """Take over the shares of this gateway by scope; `even_share` for all others."""
        self._shares, self._even_share = dict(shares), even_share

    def reserve(
        self, limits: Mapping[str, RequestLimits], tokens: int, now_s: float
    ) -> TokenReservation | LimitReached:
        """Take one request and an estimate of its tokens from all limits that apply, or from none.

        Args:
            limits: by scope.
            tokens: of prompt and answer.
            now_s: the time.
        """
        found: list[tuple[TokenBucket, float, str, str]] = []
        for scope, limit in limits.items():
            if limit:
                self._note_demand(scope, tokens, now_s)
            for kind, per_minute, amount in zip(
                _KINDS, (limit.requests_per_minute, limit.tokens_per_minute), (1.0, float(tokens)), strict=True
            ):
                if per_minute:
                    found.append((self._bucket(scope, kind, per_minute, now_s), amount, scope, kind))
        longest = max(found, key=lambda one: one[0].wait_s(one[1]), default=None)
        if longest is not None and (wait_s := longest[0].wait_s(longest[1])) > 0.0:
            states = tuple(_state(bucket, scope, kind) for bucket, _, scope, kind in found)
            return LimitReached(_state(longest[0], longest[2], longest[3]), states, wait_s)
        for bucket, amount, _, _ in found:
            bucket.take(amount)
        states = tuple(_state(bucket, scope, kind) for bucket, _, scope, kind in found)
        return TokenReservation(limits if found else {}, tokens, states)

    def settle(self, reservation: TokenReservation, tokens: int, now_s: float) -> None:
        """Correct the tokens of a request that has ended. Idempotent."""
        if reservation.settled:
            return
        reservation.settled = True
        for scope, limit in reservation.limits.items():
            if limit.tokens_per_minute:
                self._bucket(scope, "tokens", limit.tokens_per_minute, now_s).take(tokens - reservation.tokens)

    def demands(self, now_s: float) -> dict[str, float]:
        """Return what was asked of each limit lately; the largest ones if there are many."""
        faded = {scope: value * math.exp((at_s - now_s) / DEMAND_S) for scope, (value, at_s) in self._demand.items()}
        largest = sorted(faded, key=lambda scope: faded[scope], reverse=True)[:DEMANDS_MAX]
        self._demand = {scope: (faded[scope], now_s) for scope in largest if faded[scope] >= 1.0}
        return {scope: value for scope, (value, _) in self._demand.items()}

    def _note_demand(self, scope: str, tokens: int, now_s: float) -> None:
        value, at_s = self._demand.get(scope, (0.0, now_s))
        self._demand[scope] = (value * math.exp((at_s - now_s) / DEMAND_S) + tokens + 1, now_s)

    def _bucket(self, scope: str, kind: str, per_minute: int, now_s: float) -> TokenBucket:
        mine = per_minute * self._shares.get(scope, self._even_share)
        bucket = self._buckets.get((scope, kind))
        if bucket is None:
            bucket = self._buckets[scope, kind] = TokenBucket(mine, now_s)
            if len(self._buckets) > BUCKETS_MAX:
                self._buckets.popitem(last=False)
        else:
            bucket.refill(mine, now_s)
            self._buckets.move_to_end((scope, kind))
        return bucket


def _state(bucket: TokenBucket, scope: str, kind: str) -> LimitState:
    return LimitState(scope, kind, round(bucket.capacity), max(0, int(bucket.level)), bucket.full_in_s)


def limit_headers(states: Iterable[LimitState]) -> dict[str, str]:
    """Return the headers that clients of OpenAI's API know; of several limits of a kind, the one with least left."""
    found: dict[str, str] = {}
    for kind in _KINDS:
        of_kind = [one for one in states if one.kind == kind]
        if of_kind:
            least = min(of_kind, key=lambda one: one.remaining / max(1, one.limit))
            found[f"x-ratelimit-limit-{kind}"] = str(least.limit)
            found[f"x-ratelimit-remaining-{kind}"] = str(least.remaining)
            found[f"x-ratelimit-reset-{kind}"] = duration_text(least.reset_s)
    return found


def duration_text(seconds: float) -> str:
    """Return a duration as OpenAI writes it: `120ms`, `1.5s`, `6m0s`."""
    milliseconds = math.ceil(max(0.0, seconds) * 1000.0 - 1e-6)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{text}s" if minutes else f"{text}s"

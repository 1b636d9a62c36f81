"""Chooses the replica for a request: by what it has read of the prompt, and by its load. Pure.

The best replica has the least load together with `READ_WEIGHT` times what the request costs there: tokens of the prompt that it has not read, and
of the answer. The load is in tokens in flight, because one long prompt is worth many short ones. A replica over `LOAD_BOUND` times the mean, the new
request included, gets nothing, however much it has read: affinity alone piles a popular prompt on one replica (consistent hashing with bounded loads:
Mirrokni, Thorup, Zadimoghaddam 2018). Without the new request, one of two replicas could never have two requests while the other has none.

The tokens in flight are this gateway's own. The share of its KV cache that an engine uses covers all gateways, and how large the cache is. Where it
is above `CACHE_EASY` and the mean, tokens that the engine has not read cost more, up to `CACHE_WEIGHT` times at a full cache. Tokens that it has read
cost no more: requests share their blocks, and another engine would need new ones. To shut out full engines made it worse: requests left the caches
that they shared, and needed more.

The weights and bounds are the best of those tried (`benchmarks/gateway_trace.py`, `gateway_trace_cache.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

READ_WEIGHT: Final = 4.0  # a prompt is read once, and what was read stays in the cache for the next turns
LOAD_BOUND: Final = 1.25
BYTES_PER_TOKEN: Final = 4  # of English text; only the ratio of loads depends on it
ANSWER_TOKENS: Final = 256  # expected where the request has no limit
CACHE_EASY: Final = 0.5  # share of an engine's KV cache in use up to which it makes no difference
CACHE_WEIGHT: Final = 10.0
CACHE_FRESH_S: Final = 5.0  # a figure counts whole for this long, then half as much after each such time


@dataclass(slots=True, kw_only=True, eq=False)
class RoutedReplica:
    """One replica that is ready.

    Attributes:
        slot: its number in the index of prefixes.
        limit: requests that it may have at once.
        revision: of the service, that it runs.
        in_flight: requests that it has; `tokens`: an estimate of the tokens that they still cost.
        cache_use: share of its KV cache in use when it was last read, 0 to 1; 0 if unknown. `cache_read_s`: when that was, in monotonic
            time; `tokens_read`: its tokens in flight then.
        cache_tokens: that its KV cache holds; 0 if unknown.
        avoided_until_s: after a failed connection, until this monotonic time.
        used: number of its last request, which breaks ties.
    """

    job_id: str
    url: str
    slot: int
    limit: int
    in_flight: int = 0
    tokens: int = 0
    revision: int = 0
    cache_use: float = 0.0
    cache_read_s: float = 0.0
    cache_tokens: int = 0
    tokens_read: int = 0
    avoided_until_s: float = 0.0
    used: int = 0

    def begin(self, tokens: int, number: int) -> None:
        """Count a request."""
        self.in_flight += 1
        self.tokens += tokens
        self.used = number

    def end(self, tokens: int) -> None:
        """Count it down, with what `begin` was given."""
        self.in_flight -= 1
        self.tokens -= tokens

    def read_cache(self, use: float, tokens: int, now_s: float) -> None:
        """Take over the share of its KV cache in use, and the tokens that the cache holds; 0 if unknown."""
        self.cache_use, self.cache_tokens, self.cache_read_s, self.tokens_read = use, tokens, now_s, self.tokens

    def cache_use_at(self, now_s: float) -> float:
        """Return the share of its KV cache in use: as read, with what was sent and ended since, and less the longer it has not been read."""
        use = self.cache_use
        if not use > 0.0:
            return 0.0
        if self.cache_tokens > 0:
            use += (self.tokens - self.tokens_read) / self.cache_tokens
        use = 0.0 if use < 0.0 else min(use, 1.0)
        late_s = now_s - self.cache_read_s - CACHE_FRESH_S
        return use if late_s <= 0.0 else use * math.exp2(-min(late_s / CACHE_FRESH_S, 1000.0))


def expected_tokens(prompt_bytes: int, read_share: float, answer_tokens: int | None) -> int:
    """Return about how many tokens a request costs a replica that has read this share of its prompt."""
    prompt = prompt_bytes * (1.0 - read_share) / BYTES_PER_TOKEN
    return 1 + int(prompt) + (ANSWER_TOKENS if answer_tokens is None else max(0, answer_tokens))


def choose_replica(
    replicas: Iterable[RoutedReplica],
    matches: Mapping[int, int],
    blocks: int,
    now_s: float,
    *,
    prompt_tokens: int = 0,
    excluded: frozenset[str] = frozenset(),
) -> RoutedReplica | None:
    """Return the best replica; None if each is at its limit, avoided or excluded.

    Args:
        replicas: those that are ready.
        matches: blocks of the prompt that each has read, by slot.
        blocks: of the whole prompt.
        now_s: monotonic time.
        prompt_tokens: of the prompt, which count in the bound too.
        excluded: jobs that have failed this request.
    """
    usable = [
        one
        for one in replicas
        if one.in_flight < one.limit and one.avoided_until_s <= now_s and one.job_id not in excluded
    ]
    if not usable:
        return None
    bound = LOAD_BOUND * (sum([one.tokens for one in usable]) + prompt_tokens) / len(usable)
    allowed = [one for one in usable if one.tokens <= bound]
    if not allowed:  # rounding alone
        least = min(one.tokens for one in usable)
        allowed = [one for one in usable if one.tokens == least]
    read = READ_WEIGHT * prompt_tokens / max(1, blocks)  # the rest of the cost is the same everywhere
    fulls = _fullness(allowed, now_s)
    if not fulls:

        def rank(one: RoutedReplica) -> tuple[float, int, int]:
            return (one.tokens - read * matches.get(one.slot, 0), one.in_flight, one.used)

        return min(allowed, key=rank)
    new, share = CACHE_WEIGHT * (prompt_tokens + ANSWER_TOKENS), CACHE_WEIGHT / READ_WEIGHT

    def rank_with_caches(one: RoutedReplica) -> tuple[float, int, int]:
        saved = read * matches.get(one.slot, 0)
        full = fulls.get(one.slot)
        cost = one.tokens - saved
        return (cost + full * (new - share * saved) if full else cost, one.in_flight, one.used)

    return min(allowed, key=rank_with_caches)


def _fullness(replicas: Sequence[RoutedReplica], now_s: float) -> dict[int, float]:
    """Return how much fuller than the others the caches of some replicas are, by slot: 1 is the most."""
    uses = [(one.slot, one.cache_use_at(now_s)) for one in replicas if one.cache_use]
    if not uses or max(use for _, use in uses) <= CACHE_EASY:
        return {}
    easy = max(
        CACHE_EASY, sum([use for _, use in uses]) / len(replicas)
    )  # where all are nearly full, none is to be avoided
    return {slot: (use - easy) / (1.0 - CACHE_EASY) for slot, use in uses if use > easy}

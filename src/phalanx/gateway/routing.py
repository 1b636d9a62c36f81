"""Chooses the replica for a request: by what it has read of the prompt, and by its load. Pure.

The best replica has the least load together with `READ_WEIGHT` times what the request costs there: tokens of the prompt that it has not read, and
of the answer. The load is in tokens in flight, because one long prompt is worth many short ones. A replica over `LOAD_BOUND` times the mean gets
nothing, however much it has read: affinity alone piles a popular prompt on one replica (consistent hashing with bounded loads: Mirrokni, Thorup,
Zadimoghaddam 2018). The weight and the bound are the best of those tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

READ_WEIGHT: Final = 3.0  # a prompt is read once, and what was read stays in the cache for the next turns
LOAD_BOUND: Final = 1.5
BYTES_PER_TOKEN: Final = 4  # of English text; only the ratio of loads depends on it
ANSWER_TOKENS: Final = 256  # expected where the request has no limit
FULL_CACHE: Final = 0.95  # share of an engine's KV cache in use above which it preempts requests


@dataclass(slots=True, kw_only=True, eq=False)
class RoutedReplica:
    """One replica that is ready.

    Attributes:
        slot: its number in the index of prefixes.
        limit: requests that it may have at once.
        revision: of the service, that it runs.
        in_flight: requests that it has; `tokens`: an estimate of the tokens that they still cost.
        cache_use: share of its KV cache in use, 0 to 1; 0 if unknown.
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
        prompt_tokens: of the prompt.
        excluded: jobs that have failed this request.
    """
    usable = [
        one
        for one in replicas
        if one.in_flight < one.limit and one.avoided_until_s <= now_s and one.job_id not in excluded
    ]
    if not usable:
        return None
    bound = LOAD_BOUND * sum([one.tokens for one in usable]) / len(usable)
    allowed = [one for one in usable if one.tokens <= bound and one.cache_use < FULL_CACHE]
    if not allowed:  # as when every cache is full
        least = min(one.tokens for one in usable)
        allowed = [one for one in usable if one.tokens == least]
    read = READ_WEIGHT * prompt_tokens / max(1, blocks)  # the rest of the cost is the same everywhere

    def rank(one: RoutedReplica) -> tuple[float, int, int]:
        return (one.tokens - read * matches.get(one.slot, 0), one.in_flight, one.used)

    return min(allowed, key=rank)

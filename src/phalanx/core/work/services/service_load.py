"""The load of a service, as gateways count it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.core.work.services.log_histogram import LogHistogram, merged
from phalanx.core.work.services.revision_figures import RevisionFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLoad:
    """The load of a service at one moment, by one gateway or several.

    Attributes:
        in_flight: requests that replicas have; `waiting`: those that wait for one.
        oldest_wait_s: the longest time that one of these has waited.
        arrived: requests since the figures before.
        first_tokens: times to the first token in seconds, of streams that began since the figures before.
        unanswered: ages in seconds of streams without a first token, those that wait included.
        kv: mean share of the replicas' KV caches in use; 0 if unknown.
        tokens: of answers that ended since the figures before.
        revisions: figures of each, while two are compared. Sums over gateways leave them out.
    """

    in_flight: int = 0
    waiting: int = 0
    oldest_wait_s: float = 0.0
    arrived: int = 0
    first_tokens: LogHistogram = field(default_factory=dict)
    unanswered: LogHistogram = field(default_factory=dict)
    kv: float = 0.0
    tokens: int = 0
    revisions: Mapping[int, RevisionFigures] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Requests that want an answer now."""
        return self.in_flight + self.waiting

    @property
    def answering(self) -> int:
        """Requests that replicas work on, as far as it shows."""
        return max(0, self.in_flight - max(0, sum(self.unanswered.values()) - self.waiting))


def sum_loads(loads: Sequence[ServiceLoad]) -> ServiceLoad:
    """The load of a service over several gateways."""
    if len(loads) == 1:
        return loads[0]
    return ServiceLoad(
        in_flight=sum(one.in_flight for one in loads),
        waiting=sum(one.waiting for one in loads),
        oldest_wait_s=max((one.oldest_wait_s for one in loads), default=0.0),
        arrived=sum(one.arrived for one in loads),
        first_tokens=merged(one.first_tokens for one in loads),
        unanswered=merged(one.unanswered for one in loads),
        kv=max((one.kv for one in loads), default=0.0),
        tokens=sum(one.tokens for one in loads),
    )

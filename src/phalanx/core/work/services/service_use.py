"""The stored use of services: requests and tokens by hour, service, project and user, as gateways report them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final

from phalanx.core.ids import JobId, ProjectId, ServiceId, UserId

BATCH_SERVICE_LABEL: Final = "batch.service"  # of the job of a batch
KEPT_S: Final = 35 * 86400.0  # the mark of a gateway that sent no report for so long is removed
LATE_S: Final = 31 * 86400.0  # older use is not counted: without the mark, it could be counted twice


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceUse:
    """What a user used of a service for a project in one hour.

    Attributes:
        requests: that were answered; `estimated`: those of them whose replica did not say how many tokens their prompt had.
        stream_ms: the sum of the times that they were at replicas.
        kv_token_ms: tokens held in the KV cache times milliseconds, by estimate: the prompt for all of that time and half of the answer.
    """

    service: ServiceId
    project: ProjectId
    user: UserId
    requests: int = 0
    estimated: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    stream_ms: int = 0
    kv_token_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaUse:
    """A replica in one hour: the thousandths of devices times milliseconds in which it had requests."""

    service: ServiceId
    job: JobId
    busy: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchUse:
    """What a batch has answered in one hour, with an engine of its own. Its job reports whole numbers, so that a repeated report changes nothing."""

    service: ServiceId
    job: JobId
    project: ProjectId
    user: UserId
    requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0

    def at_least(self, other: BatchUse) -> BatchUse:
        """The larger numbers of both: reports of one batch only grow."""
        return replace(
            self,
            requests=max(self.requests, other.requests),
            prompt_tokens=max(self.prompt_tokens, other.prompt_tokens),
            answer_tokens=max(self.answer_tokens, other.answer_tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceUseHour:
    """One hour. `id`: its beginning in Unix seconds, as text, as of the hours of the ledger."""

    id: str
    uses: tuple[ServiceUse, ...] = ()
    replicas: tuple[ReplicaUse, ...] = ()
    batches: tuple[BatchUse, ...] = ()

    def plus(self, other: ServiceUseHour) -> ServiceUseHour:
        """Both together."""
        uses = {(one.service, one.project, one.user): one for one in self.uses}
        for use in other.uses:
            key = (use.service, use.project, use.user)
            uses[key] = _sum(uses[key], use) if key in uses else use
        replicas = {(one.service, one.job): one for one in self.replicas}
        for replica in other.replicas:
            known = replicas.get((replica.service, replica.job))
            busy = replica.busy + (0 if known is None else known.busy)
            replicas[replica.service, replica.job] = replace(replica, busy=busy)
        batches = {one.job: one for one in self.batches}
        for batch in other.batches:
            batches[batch.job] = batch.at_least(batches.get(batch.job, batch))
        return replace(
            self, uses=tuple(uses.values()), replicas=tuple(replicas.values()), batches=tuple(batches.values())
        )


COUNTS: Final = tuple(one.name for one in fields(ServiceUse) if one.name not in ("service", "project", "user"))
"""The names of the numbers of a use."""


def _sum(one: ServiceUse, other: ServiceUse) -> ServiceUse:
    return replace(one, **{name: getattr(one, name) + getattr(other, name) for name in COUNTS})


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayMark:
    """How far the reports of a gateway are counted: up to this sequence number, so that repeated ones change nothing."""

    id: str
    sequence: int
    at_s: float

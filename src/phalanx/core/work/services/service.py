"""A service: replicas of one command that keep running, and the revisions of its template. Each replica is a job with attempts."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import ProjectId, QueueId, ServiceId, UserId
from phalanx.core.work.services.canary import Canary
from phalanx.core.work.services.service_terms import ServiceTerms
from phalanx.core.work.spec import JobSpec

NO_REVISION: Final = 0  # revisions count from 1
REVISIONS_KEPT: Final = 10  # newest ones; older ones are removed, except those in use


class ServiceState(enum.StrEnum):
    """The state of a service. It never ends by itself."""

    STARTING = "starting"  # no revision has served yet
    READY = "ready"  # as many replicas are ready as wanted, all of the newest revision
    DEGRADED = "degraded"  # fewer are ready than wanted
    UPDATING = "updating"  # a rollout replaces the replicas of another revision
    SLEEPING = "sleeping"  # no replica is wanted, or all shall sleep
    STOPPED = "stopped"  # for good; its replicas end


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """One version of a service's template. Immutable: a change makes the next number.

    Attributes:
        spec: of each replica; `spec.service` has the terms.
        created_s: Unix seconds.
    """

    service: ServiceId
    number: int
    spec: JobSpec
    by: UserId
    created_s: float

    @property
    def terms(self) -> ServiceTerms:
        """The terms of the service in this revision."""
        assert self.spec.service is not None  # only specs of services become revisions
        return self.spec.service


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A service. Times are Unix seconds.

    Attributes:
        id: its name, unique among all services of the head.
        revision: the revision that its replicas shall have.
        last_revision: the newest number so far.
        served_revision: the last revision whose rollout was completed, to which a failed rollout returns; NO_REVISION before the first.
        serving_history: the revisions that served, one after the other; the last is `served_revision`. Returning to one removes those after it.
        scale: number of replicas that a user asked for; None for the lower bound of the range. Where the load decides, it decides above it.
        load_replicas: number of replicas that the load needs; None before the load has asked for one, or if it does not decide.
        load_why, load_s: why, and since when.
        desired: number of replicas wanted now, sleeping ones included.
        asleep: how many of them shall sleep; all, if it is larger.
        detail: what it waits for; "" for nothing.
        failure: why the last rollout was stopped; "" if it was not. May quote the program.
        rollout_s: when the current rollout began; None without one.
        canary: of the current rollout, if it goes by shares of the sessions, or of one that was sent back and whose replicas still end.
        stopped_by: set once a stop is acknowledged; its replicas never start again.
    """

    id: ServiceId
    user: UserId
    project: ProjectId
    queue: QueueId
    created_s: float
    revision: int
    last_revision: int
    served_revision: int = NO_REVISION
    serving_history: tuple[int, ...] = ()
    scale: int | None = None
    load_replicas: int | None = None
    load_why: str = ""
    load_s: float | None = None
    desired: int = 0
    asleep: int = 0
    state: ServiceState = ServiceState.STARTING
    detail: str = ""
    failure: str = ""
    rollout_s: float | None = None
    canary: Canary | None = None
    stopped_by: str = ""
    stopped_s: float | None = None


def revision_numbers(service: Service) -> list[int]:
    """The numbers that its stored revisions may have, newest first: the newest ones, and those in use."""
    first = max(NO_REVISION, service.last_revision - REVISIONS_KEPT)
    used = {service.revision, service.served_revision, *service.serving_history[-2:]}
    return sorted({*range(first + 1, service.last_revision + 1), *used} - {NO_REVISION}, reverse=True)


def with_served(history: tuple[int, ...], number: int) -> tuple[int, ...]:
    """The serving history once the rollout of a revision is completed."""
    if number in history:
        return history[: history.index(number) + 1]
    return (*history, number)[-REVISIONS_KEPT:]


def rollback_revision(service: Service) -> int:
    """The revision that served before the current one, to which one command returns; NO_REVISION if none did.

    While a return to an earlier revision is under way, and after a rollout that failed, it is the current one: repeating the command changes nothing.
    """
    current, served = service.revision, service.served_revision
    if service.failure or current in service.serving_history[:-1]:
        return current
    if current != served:
        return served
    return service.serving_history[-2] if len(service.serving_history) > 1 else NO_REVISION

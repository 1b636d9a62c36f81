"""Lets the number of replicas of services follow their load: applies `core.lifecycle.load_scaling` to what gateways report, and keeps its history.

Reports are kept in memory only: one of a gateway each second, which would be too many for the store. Only a decision changes the record of its
service. A starting head keeps the number of the record, and needs a whole window of figures before it decides for fewer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from phalanx.controller.requests.services import add_service_history
from phalanx.controller.services.load_history import LoadHistory
from phalanx.controller.step_context import StepContext
from phalanx.core.errors import TryLater
from phalanx.core.ids import ServiceId, UserId
from phalanx.core.lifecycle.load_scaling import LoadWindow, ScaleDecision
from phalanx.core.lifecycle.service import desired_replicas, replicas_min
from phalanx.core.state.fast_replace import replace
from phalanx.core.state.records import REVISIONS, SERVICES
from phalanx.core.state.reports import LoadObserved
from phalanx.core.state.world import World
from phalanx.core.work.services.scale_terms import ScaleTerms
from phalanx.core.work.services.service import Revision, Service
from phalanx.core.work.services.service_load import ServiceLoad, sum_loads

LOAD: Final = UserId("load")  # `by` of what the load decides
REPORT_LIVES_S: Final = 5.0  # a gateway that is silent for longer counts as dead
NO_TARGETS: Final = ScaleTerms()
GATEWAYS_MAX: Final = 64  # of one user, so that its reports displace none of others


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadNow:
    """The newest load of a service, for readers on other threads. `at_s`: CLOCK_BOOTTIME; `ttft_s`: of 9 of 10 streams."""

    load: ServiceLoad
    gateways: int
    ttft_s: float
    needed: int
    at_s: float


@dataclass(slots=True)
class _GatewayReport:
    at_s: float
    loads: dict[ServiceId, ServiceLoad]


@dataclass(slots=True)
class LoadScaler:
    """See the module.

    Attributes:
        history: how the load was. Written under the controller's guard, as all of this.
        _now: the newest load of each service that was reported; entries are replaced, never changed.
        _reports: the newest report of each gateway.
        _touched: services with new figures.
    """

    world: World
    history: LoadHistory = field(default_factory=LoadHistory)
    _now: dict[ServiceId, LoadNow] = field(default_factory=dict)
    _reports: dict[tuple[UserId, str], _GatewayReport] = field(default_factory=dict)
    _windows: dict[ServiceId, LoadWindow] = field(default_factory=dict)
    _touched: set[ServiceId] = field(default_factory=set)

    def observe(self, report: LoadObserved, boot_s: float) -> None:
        """Take over the report of a gateway.

        Raises:
            TryLater: so many gateways of its user report already that it is not one of them.
        """
        self._reports = {name: one for name, one in self._reports.items() if one.at_s > boot_s - REPORT_LIVES_S}
        own = sum(user == report.user for user, _ in self._reports)
        if own >= GATEWAYS_MAX and (report.user, report.gateway) not in self._reports:
            raise TryLater(f"{GATEWAYS_MAX} gateways of {report.user} report already", hint="stop some of them")
        self._reports[report.user, report.gateway] = _GatewayReport(boot_s, dict(report.loads))
        self._touched.update(name for name, _ in report.loads)

    def update(self, context: StepContext) -> None:
        """Decide for the services that have new figures. Called before services are reconciled."""
        touched, self._touched = sorted(self._touched), set()
        for service_id in touched:
            service = self.world.table(SERVICES).get(service_id)
            if service is None or service.stopped_by:
                self._forget(service_id)
                continue
            self._take_over(context, service, self.world.table(REVISIONS)[service_id, service.revision])

    def load_of(self, service_id: ServiceId, boot_s: float) -> LoadNow | None:
        """The load of a service, unless it is too old to say anything. May be called on any thread."""
        found = self._now.get(service_id)
        return None if found is None or boot_s - found.at_s > REPORT_LIVES_S else found

    def _take_over(self, context: StepContext, service: Service, revision: Revision) -> None:
        terms, now_s = revision.terms, context.now.boot_s
        loads = [load for one in self._reports.values() if (load := one.loads.get(service.id)) is not None]
        load = sum_loads(loads)
        for one in self._reports.values():  # what came since the report before is counted once
            if (seen := one.loads.get(service.id)) is not None:
                one.loads[service.id] = replace(seen, arrived=0, first_tokens={}, tokens=0)
        desired = desired_replicas(service, revision)
        asleep = min(service.asleep, desired) if terms.sleep else 0
        ready = sum(
            job_id in self.world.attempts and self.world.attempts[job_id].serving
            for job_id in self.world.relations.replicas.get(service.id, ())
        )
        wanted = desired - asleep
        self.history.add(service.id, load, context.now.wall_s, ready=ready, wanted=wanted)
        least = 0 if service.scale == 0 else replicas_min(service, revision)
        window = self._windows.setdefault(service.id, LoadWindow())
        targets = terms.scale or NO_TARGETS
        decision = window.decide(targets, load, now_s, ready=ready, wanted=wanted, may_be_zero=least == 0)
        if terms.scale is None:
            decision = None
        needed = wanted if decision is None else decision.replicas
        self._now[service.id] = LoadNow(load=load, gateways=len(loads), ttft_s=window.ttft_s, needed=needed, at_s=now_s)
        if decision is not None:
            number = max(least, min(terms.replicas_max, decision.replicas))
            if number != wanted:
                self._apply(context, service, revision, ScaleDecision(number, decision.why))

    def _apply(self, context: StepContext, service: Service, revision: Revision, decision: ScaleDecision) -> None:
        """Let so many replicas be awake. More wake sleeping ones first; of fewer, one falls asleep instead of ending, if it can."""
        desired, number = desired_replicas(service, revision), decision.replicas
        asleep = min(service.asleep, desired) if revision.terms.sleep else 0
        awake = desired - asleep
        if number > awake:
            asleep = min(max(0, asleep - (number - awake)), revision.terms.replicas_max - number)
        elif revision.terms.sleep:
            asleep = min(desired - number, max(1, asleep))
        after = replace(
            service,
            scale=None if service.scale == 0 else service.scale,
            load_replicas=number + asleep,
            load_why=decision.why,
            load_s=context.now.wall_s,
            asleep=asleep,
        )
        context.change.put(after)
        add_service_history(context, after, f"{awake} -> {number} replicas: {decision.why}", by=LOAD)

    def _forget(self, service_id: ServiceId) -> None:
        self._windows.pop(service_id, None)
        self._now.pop(service_id, None)
        self.history.forget(service_id)

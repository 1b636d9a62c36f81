"""Moves rollouts with a canary from step to step, or back: applies `core.lifecycle.canary` to what gateways report.

Figures are kept in memory. The record of a service changes with each decision, and every few seconds with what was counted, so that a head which starts goes on
with the same share and loses little evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.controller.services.load_scaler import REPORT_LIVES_S
from phalanx.core.ids import ServiceId, UserId
from phalanx.core.lifecycle import canary_tests as tests
from phalanx.core.lifecycle.canary import CanaryMove, CanaryWindow, restored
from phalanx.core.lifecycle.service import Replica, sent_back
from phalanx.core.state.fast_replace import replace
from phalanx.core.state.records import SERVICES
from phalanx.core.state.reports import LoadObserved
from phalanx.core.state.world import World
from phalanx.core.work.services.canary import Canary
from phalanx.core.work.services.revision_figures import RevisionFigures, sum_figures
from phalanx.core.work.services.rollout_terms import WHOLE
from phalanx.core.work.services.service import Revision, Service

CANARY: Final = UserId("canary")  # `by` of what the comparison decides
EXAMINE_S: Final = 1.0
SAVE_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryNow:
    """The newest figures of a rollout, for readers on other threads. `strengths`: of each test, 1 where it sends the revision back."""

    canary: Canary
    strengths: dict[str, float]


@dataclass(slots=True)
class CanaryJudge:
    """See the module.

    Attributes:
        _now: the newest figures of each rollout; entries are replaced, never changed.
        _waiting: streams without a first token, by service and gateway: when they were reported (CLOCK_BOOTTIME), and those of each revision.
    """

    world: World
    _now: dict[ServiceId, CanaryNow] = field(default_factory=dict)
    _windows: dict[ServiceId, CanaryWindow] = field(default_factory=dict)
    _saved_s: dict[ServiceId, float] = field(default_factory=dict)
    _waiting: dict[ServiceId, dict[tuple[UserId, str], tuple[float, dict[int, RevisionFigures]]]] = field(
        default_factory=dict
    )

    def observe(self, report: LoadObserved, boot_s: float) -> list[ServiceId]:
        """Take over the report of a gateway. Returns the services to examine."""
        found = []
        for service_id, load in report.loads:
            service = self.world.table(SERVICES).get(service_id)
            if service is None or service.canary is None or not load.revisions:
                continue
            window = self._window(service.id, service.canary, boot_s)
            none = RevisionFigures()
            canary, figures = service.canary, dict(load.revisions)
            window.observe(figures.get(canary.revision, none), figures.get(canary.stable, none))
            self._waiting.setdefault(service_id, {})[report.user, report.gateway] = (boot_s, figures)
            found.append(service_id)
        return found

    def advance(
        self, service: Service, revision: Revision, replicas: Sequence[Replica], boot_s: float, wall_s: float
    ) -> tuple[Service, str]:
        """Decide for one service with its present revision. Returns its record, the same object if nothing changed, and a line for its history."""
        canary, terms = service.canary, revision.terms.rollout
        if canary is None or terms is None or service.stopped_by or canary.revision != service.revision:
            self._forget(service.id)
            return service, ""
        window = self._window(service.id, canary, boot_s)
        window.observe_waiting(
            self._unanswered(service.id, canary.revision, boot_s), self._unanswered(service.id, canary.stable, boot_s)
        )
        ready = sum(one.serving for one in replicas if one.revision == canary.revision)
        wanted = canary.replicas(max(0, service.desired - service.asleep))
        decision = window.decide(terms, boot_s, ready=ready, wanted=wanted)
        text = ""
        match decision.move:
            case CanaryMove.RETURN:
                text = f"revision {canary.revision} was sent back: {decision.why}"
                self._forget(service.id)
                back = sent_back(replace(service, canary=window.canary), text)
                return back, f"{text}; back to revision {back.revision}"
            case CanaryMove.GROW:
                window.grow(terms)
            case CanaryMove.SHIFT:
                shifted = window.shift(boot_s, wall_s)
                text = f"revision {canary.revision} gets {_percent(shifted.share)} of the sessions"
            case CanaryMove.COMPLETE:
                window.canary = replace(window.canary, completing=True)
                text = (
                    f"revision {canary.revision} replaces all of revision {canary.stable}: {_compared(window.canary)}"
                )
            case CanaryMove.STAY:
                self._follow_replicas(window, replicas, ready)
        self._now[service.id] = CanaryNow(
            canary=window.canary, strengths={one: tests.strength(window.evidence, one) for one in tests.FALSE_ALARMS}
        )
        kept = canary.share == window.canary.share and decision.move is CanaryMove.STAY
        if kept and boot_s - self._saved_s.setdefault(service.id, boot_s) < SAVE_S:
            return service, ""
        self._saved_s[service.id] = boot_s
        return (service if window.canary == canary else replace(service, canary=window.canary)), text

    def canary_of(self, service_id: ServiceId) -> CanaryNow | None:
        """The newest figures of a rollout. May be called on any thread."""
        return self._now.get(service_id)

    def _window(self, service_id: ServiceId, canary: Canary, boot_s: float) -> CanaryWindow:
        found = self._windows.get(service_id)
        if found is None or (found.canary.revision, found.canary.stable) != (canary.revision, canary.stable):
            self._forget(service_id)
            found = self._windows[service_id] = restored(canary, boot_s)
        return found

    def _unanswered(self, service_id: ServiceId, revision: int, boot_s: float) -> RevisionFigures:
        known = self._waiting.get(service_id, {})
        for name in [name for name, (at_s, _) in known.items() if boot_s - at_s > REPORT_LIVES_S]:
            del known[name]
        return sum_figures([figures[revision] for _, figures in known.values() if revision in figures])

    def _follow_replicas(self, window: CanaryWindow, replicas: Sequence[Replica], ready: int) -> None:
        """At the end, let the share follow the replicas that were replaced, so that sessions go over once and never back."""
        if not window.canary.completing:
            return
        serving = sum(one.serving for one in replicas)
        share = WHOLE * ready // serving if serving else 0
        if share > window.canary.share:
            window.canary = replace(window.canary, share=share)

    def _forget(self, service_id: ServiceId) -> None:
        for known in (self._now, self._windows, self._saved_s, self._waiting):
            known.pop(service_id, None)


def _percent(share: int) -> str:
    return f"{share / 10:g} %"


def _compared(canary: Canary) -> str:
    if not canary.answered:
        return "no request came to compare them"
    return f"{canary.errors} errors in {canary.answered} requests against {canary.stable_errors} in {canary.stable_answered}"

"""Decides how a rollout with a canary goes on: more sessions, whole, or back. Pure: figures and their times in, a decision out.

A step lasts at least its time, until enough requests of the new revision were answered. If few come at all, it lasts at most `FEW_FACTOR` times as long. If
they come and are not answered, the share stays. `canary_tests` may end the rollout at any time.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.lifecycle import canary_tests as tests
from phalanx.core.state.fast_replace import replace
from phalanx.core.units import format_latency
from phalanx.core.work.services.canary import Canary, Evidence
from phalanx.core.work.services.log_histogram import quantile
from phalanx.core.work.services.revision_figures import RevisionFigures
from phalanx.core.work.services.rollout_terms import WHOLE, RolloutTerms, share_after

ANSWERED_MIN: Final = 20  # requests of the new revision in a step
FEW_FACTOR: Final = 5.0
WARM_UP: Final = 10  # first answers of new replicas, which compile and fill their caches
_SPILL_MIN: Final = 100  # requests from which on the share that was observed counts, if it is larger


class CanaryMove(enum.Enum):
    """What a rollout does next."""

    STAY = enum.auto()
    GROW = enum.auto()  # start the replicas of the next share
    SHIFT = enum.auto()  # these are ready: the sessions go over
    COMPLETE = enum.auto()  # replace the other replicas
    RETURN = enum.auto()


@dataclass(frozen=True, slots=True)
class CanaryDecision:
    """A move, and why, for operators."""

    move: CanaryMove
    why: str = ""


STAY: Final = CanaryDecision(CanaryMove.STAY)


@dataclass(slots=True)
class CanaryWindow:
    """What is remembered of one rollout with a canary. Bounded: a few counts and histograms. All times are seconds of one monotonic clock.

    Attributes:
        canary: the rollout; its counts and evidence are kept up to date here.
        began_s: since when it has its share, as far as this head knows.
        first_tokens, speeds: of the stable revision and the new one, in the whole rollout.
    """

    canary: Canary
    began_s: float
    first_tokens: tuple[Counter[int], Counter[int]] = field(default_factory=lambda: (Counter(), Counter()))
    speeds: tuple[Counter[int], Counter[int]] = field(default_factory=lambda: (Counter(), Counter()))
    _begun: list[int] = field(default_factory=lambda: [0, 0])  # requests of this step: stable, new
    _answered: int = 0  # of the new revision in this step
    _ready: int = 0
    _warming: int = WARM_UP
    _waiting: Evidence | None = None  # with answers that are late and have not come

    @property
    def evidence(self) -> Evidence:
        """What speaks against the new revision now."""
        return self._waiting or self.canary.evidence

    def observe(self, new: RevisionFigures, stable: RevisionFigures) -> None:
        """Take over the figures of a gateway. `unanswered` is ignored: see `observe_waiting`."""
        canary, evidence, share = self.canary, self.canary.evidence, self._share(new, stable)
        self._answered += new.answered
        warm = self._warming <= 0
        if 0 < share < 1:
            evidence = replace(
                evidence,
                errors=tests.with_events(
                    evidence.errors, tests.ERRORS, new.failing_sessions, stable.failing_sessions, share
                ),
            )
            if warm:
                evidence = replace(
                    evidence,
                    first_tokens=self._late(evidence.first_tokens, new, stable, share),
                    speeds=self._slow(evidence.speeds, new, stable, share),
                )
        self._warming -= sum(new.first_tokens.values()) or new.answered
        for known, figures in zip(self.first_tokens, (stable, new), strict=True):
            known.update(figures.first_tokens)
        for known, figures in zip(self.speeds, (stable, new), strict=True):
            known.update(figures.speeds)
        self._waiting = None
        self.canary = replace(
            canary,
            answered=canary.answered + new.answered,
            errors=canary.errors + new.errors,
            stable_answered=canary.stable_answered + stable.answered,
            stable_errors=canary.stable_errors + stable.errors,
            evidence=evidence,
        )

    def observe_waiting(self, new: RevisionFigures, stable: RevisionFigures) -> None:
        """Take over the streams of all gateways that wait for their first token now. Those that are late already count as late."""
        share = self.canary.share / WHOLE
        self._waiting = None
        limit = tests.late_class(self.first_tokens[0])
        if limit is None or not 0 < share < 1 or self._warming > 0:
            return
        counts = (tests.late(new.unanswered, limit, margin=True), tests.late(stable.unanswered, limit, margin=False))
        logs = tests.with_events(self.canary.evidence.first_tokens, tests.FIRST_TOKENS, *counts, share)
        self._waiting = replace(self.canary.evidence, first_tokens=logs)

    def decide(self, terms: RolloutTerms, now_s: float, *, ready: int, wanted: int) -> CanaryDecision:
        """Decide.

        Args:
            terms: of the new revision.
            now_s: the time.
            ready: replicas of the new revision that serve.
            wanted: replicas that its planned share needs.
        """
        canary = self.canary
        if ready > self._ready:
            self._warming = max(self._warming, WARM_UP)
        self._ready = ready
        if canary.completing:
            return STAY
        if why := self._against():
            return CanaryDecision(CanaryMove.RETURN, why)
        if canary.planned > canary.share:
            return CanaryDecision(CanaryMove.SHIFT) if ready >= wanted > 0 else STAY
        if not self._step_is_over(terms, now_s):
            return STAY
        following = share_after(terms, canary.share)
        return CanaryDecision(CanaryMove.COMPLETE if following is None else CanaryMove.GROW)

    def grow(self, terms: RolloutTerms) -> Canary:
        """Plan the next share."""
        self.canary = replace(self.canary, planned=share_after(terms, self.canary.share) or WHOLE)
        return self.canary

    def shift(self, now_s: float, wall_s: float) -> Canary:
        """Begin the step that was planned."""
        self.canary = replace(self.canary, share=self.canary.planned, step_s=wall_s)
        self.began_s, self._begun, self._answered = now_s, [0, 0], 0
        return self.canary

    def _step_is_over(self, terms: RolloutTerms, now_s: float) -> bool:
        passed_s = now_s - self.began_s
        if passed_s < terms.step_s:
            return False
        if terms.blue_green or self._answered >= ANSWERED_MIN:
            return True
        return self._begun[1] < ANSWERED_MIN and passed_s >= FEW_FACTOR * terms.step_s

    def _share(self, new: RevisionFigures, stable: RevisionFigures) -> float:
        """The share of the sessions that the new revision has: as planned, or more if the other one had no room."""
        self._begun[0] += stable.begun
        self._begun[1] += new.begun
        planned, total = self.canary.share / WHOLE, sum(self._begun)
        return max(planned, self._begun[1] / total) if planned and total >= _SPILL_MIN else planned

    def _late(
        self, logs: tuple[float, ...], new: RevisionFigures, stable: RevisionFigures, share: float
    ) -> tuple[float, ...]:
        limit = tests.late_class(self.first_tokens[0])
        if limit is None:
            return logs
        counts = (
            tests.late(new.first_tokens, limit, margin=True),
            tests.late(stable.first_tokens, limit, margin=False),
        )
        return tests.with_events(logs, tests.FIRST_TOKENS, *counts, share)

    def _slow(
        self, logs: tuple[float, ...], new: RevisionFigures, stable: RevisionFigures, share: float
    ) -> tuple[float, ...]:
        limit = tests.slow_class(self.speeds[0])
        if limit is None:
            return logs
        counts = (tests.slow(new.speeds, limit, margin=True), tests.slow(stable.speeds, limit, margin=False))
        return tests.with_events(logs, tests.SPEEDS, *counts, share)

    def _against(self) -> str:
        """Why the new revision is to be sent back; "" if nothing is certain."""
        canary, evidence = self.canary, self.evidence
        of_new, of_stable = f"of revision {canary.revision}", f"of revision {canary.stable}"
        if tests.strength(evidence, tests.ERRORS) >= 1:
            own, other = (
                _percent(canary.errors, canary.answered),
                _percent(canary.stable_errors, canary.stable_answered),
            )
            return f"{own} errors {of_new} against {other} {of_stable} after {canary.answered} requests"
        if tests.strength(evidence, tests.FIRST_TOKENS) >= 1:
            other, own = (format_latency(quantile(one, tests.SLOW_SHARE)) for one in self.first_tokens)
            if evidence is self._waiting:
                own = f"{own}, and streams without any"
            return f"first token of 9 of 10 streams {own} {of_new} against {other} {of_stable} after {canary.answered} requests"
        if tests.strength(evidence, tests.SPEEDS) >= 1:
            other, own = (f"{quantile(one, 1 - tests.SLOW_SHARE):.3g}" for one in self.speeds)
            return f"9 of 10 answers with {own} tokens/s {of_new} against {other} {of_stable} after {canary.answered} requests"
        return ""


def restored(canary: Canary, now_s: float) -> CanaryWindow:
    """What a starting head knows of a rollout: its share and evidence. The time of the step counts from now."""
    return CanaryWindow(canary=canary, began_s=now_s if canary.share else math.inf)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.1f} %"

"""One rollout with a canary, request by request in virtual time: sessions, two gateways, and the decision of the head once a second."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

from phalanx.core.lifecycle.canary import CanaryMove, CanaryWindow
from phalanx.core.work.services.canary import Canary
from phalanx.core.work.services.log_histogram import class_of
from phalanx.core.work.services.revision_figures import RevisionFigures
from phalanx.core.work.services.rollout_terms import WHOLE, RolloutTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionModel:
    """How a revision behaves.

    Attributes:
        errors: share of its requests that fail; `broken_sessions`: of the sessions of which every request fails.
        first_token_s: median time to the first token; `spread`: of its logarithm between sessions, and again between requests.
        speed: median tokens per second of an answer.
        hangs: share of the streams that never get a first token.
    """

    errors: float = 0.0
    broken_sessions: float = 0.0
    first_token_s: float = 0.2
    spread: float = 0.4
    speed: float = 40.0
    hangs: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """How a rollout ended.

    Attributes:
        move: COMPLETE or RETURN; STAY if it went on to the end of the simulation. `why`: of a return.
        seconds: until then. `requests`: in all; `hurt`: those that failed at the new revision.
    """

    move: CanaryMove
    why: str
    seconds: int
    requests: int
    hurt: int


@dataclass(slots=True)
class _Counts:
    begun: int = 0
    errors: int = 0
    failing: int = 0


def simulate_rollout(
    terms: RolloutTerms,
    stable: RevisionModel,
    new: RevisionModel,
    dice: Random,
    *,
    rate: float,
    turns: float = 4.0,
    longest_s: int = 600,
) -> RolloutResult:
    """Run one rollout.

    Args:
        terms: its steps.
        stable: the revision before.
        new: the one that replaces it.
        dice: draws everything.
        rate: requests a second.
        turns: mean of the requests of a session, geometrically distributed.
        longest_s: the simulation ends then.
    """
    window = CanaryWindow(canary=Canary(revision=2, stable=1, planned=terms.first), began_s=0.0)
    window.shift(0.0, 0.0)
    sessions: list[tuple[float, float, float]] = []  # its place in the hash, its own factor, whether it is broken
    failed: set[int] = set()
    hanging: list[list[int]] = [[], []]
    requests = hurt = 0
    for second in range(1, longest_s + 1):
        counts = (_Counts(), _Counts())
        first: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
        speeds: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
        for _ in range(_poisson(rate, dice)):
            fresh = not sessions or dice.random() < 1.0 / turns
            if fresh:
                sessions.append((dice.random(), dice.lognormvariate(0.0, stable.spread), dice.random()))
            number = len(sessions) - 1 if fresh else dice.randrange(len(sessions))
            place, factor, broken = sessions[number]
            own = int(place < window.canary.share / WHOLE)
            model, found = (stable, new)[own], counts[own]
            found.begun += 1
            requests += 1
            if broken < model.broken_sessions or dice.random() < model.errors:
                found.errors += 1
                hurt += own
                if number not in failed:
                    failed.add(number)
                    found.failing += 1
            elif model.hangs and dice.random() < model.hangs:
                hanging[own].append(second)
            elif fresh:
                first[own][class_of(model.first_token_s * factor * dice.lognormvariate(0.0, model.spread))] += 1
                speeds[own][class_of(model.speed * dice.lognormvariate(0.0, 0.2))] += 1
        figures = [
            RevisionFigures(
                begun=one.begun,
                answered=one.begun,
                errors=one.errors,
                failing_sessions=one.failing,
                first_tokens=first[at],
                speeds=speeds[at],
                unanswered=Counter(class_of(float(second - since_s)) for since_s in hanging[at] if second > since_s),
            )
            for at, one in enumerate(counts)
        ]
        window.observe(figures[1], figures[0])
        window.observe_waiting(figures[1], figures[0])
        decision = window.decide(terms, float(second), ready=1, wanted=1)
        if decision.move is CanaryMove.GROW:
            window.grow(terms)
            window.shift(float(second), float(second))
        elif decision.move is not CanaryMove.STAY:
            return RolloutResult(move=decision.move, why=decision.why, seconds=second, requests=requests, hurt=hurt)
    return RolloutResult(move=CanaryMove.STAY, why="", seconds=longest_s, requests=requests, hurt=hurt)


def _poisson(mean: float, dice: Random) -> int:
    count, left = 0, dice.expovariate(mean)
    while left < 1.0:
        count += 1
        left += dice.expovariate(mean)
    return count

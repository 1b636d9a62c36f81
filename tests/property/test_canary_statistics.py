"""How often rollouts are sent back by chance, and how soon where they should be: simulated request by request."""

from random import Random

import pytest

from phalanx.core.lifecycle.canary import CanaryMove
from phalanx.core.work.services.rollout_terms import RolloutTerms
from phalanx.simulator.serving.simulated_rollout import RevisionModel, simulate_rollout

TERMS = RolloutTerms(first=50, last=500)
SAME = {
    "no errors": RevisionModel(),
    "1 % errors": RevisionModel(errors=0.01),
    "10 % errors": RevisionModel(errors=0.1),
    "broken sessions": RevisionModel(errors=0.001, broken_sessions=0.01),
    "very different requests": RevisionModel(spread=1.0),
}


def rollouts(count, new, stable=None, *, rate=20.0, seed=0):
    stable = stable or RevisionModel()
    return [simulate_rollout(TERMS, stable, new, Random(seed + one), rate=rate) for one in range(count)]


def returned(results, within_s=10_000):
    return sum(one.move is CanaryMove.RETURN and one.seconds <= within_s for one in results)


def hurt_share(one, rate):
    """Of the requests of the first minute."""
    return one.hurt / (60 * rate)


def test_a_revision_that_is_no_worse_is_rolled_out():
    for model in SAME.values():
        assert returned(rollouts(5, model, model, rate=10.0)) == 0


def test_a_revision_with_5_percent_errors_is_back_within_a_minute():
    results = rollouts(50, RevisionModel(errors=0.05), rate=40.0)
    assert returned(results) == 50
    assert returned(results, 60) >= 47
    assert max(hurt_share(one, 40.0) for one in results) <= 0.01


def test_a_revision_that_hangs_or_is_twice_as_slow_is_sent_back():
    assert returned(rollouts(10, RevisionModel(hangs=0.5))) == 10
    assert returned(rollouts(10, RevisionModel(speed=20.0))) == 10
    assert returned(rollouts(10, RevisionModel(first_token_s=0.5))) >= 9


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SAME)
def test_at_most_1_percent_of_1000_rollouts_without_a_difference_are_sent_back(name):
    results = rollouts(1000, SAME[name], SAME[name], seed=100_000)
    assert returned(results) <= 10
    assert returned(results) + sum(one.move is CanaryMove.COMPLETE for one in results) == 1000


@pytest.mark.parametrize(
    ("rate", "within", "share"), [(20.0, 60, 0.65), (20.0, 90, 0.9), (40.0, 60, 0.97), (100.0, 30, 0.97)]
)
def test_how_soon_5_percent_errors_are_seen(rate, within, share):
    results = rollouts(500, RevisionModel(errors=0.05), rate=rate, seed=200_000)
    assert returned(results) >= 499
    assert returned(results, within) >= share * 500
    assert max(hurt_share(one, rate) for one in results) <= 0.01

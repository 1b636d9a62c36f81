"""The scheduler's settings of a live head: which policies it takes, and what the next head remembers."""

import argparse

import pytest

from phalanx.app.scheduling import add_arguments, policy_of, remembered_of
from phalanx.core.errors import BadRequest
from phalanx.core.scheduling.policies import Knobs
from phalanx.core.scheduling.settings import LIVE, live_policy


def given(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_head_told_nothing_follows_the_default_policy():
    kept = remembered_of(given(), None)
    assert kept == {"policy": "default"}
    assert (policy_of(kept).name, policy_of(kept).knobs) == ("default", Knobs())


def test_what_was_told_is_kept_for_the_next_head():
    kept = remembered_of(given("--min-run", "45s", "--no-preemption"), None)
    again = remembered_of(given("--min-stay", "2m"), kept)
    knobs = policy_of(again).knobs
    assert (knobs.run_min_s, knobs.move_min_s, knobs.grow_min_s) == (45.0, 120.0, 240.0)
    assert not knobs.stops
    assert not knobs.moves
    assert policy_of(remembered_of(given("--preemption"), again)).knobs.stops


def test_another_policy_begins_with_its_own_constants():
    kept = remembered_of(given("--min-run-by-right", "5s"), None)
    assert policy_of(kept).knobs.right_min_s == 5.0
    assert remembered_of(given("--policy", "fifo"), kept) == {"policy": "fifo"}
    assert remembered_of(given("--policy", "default"), kept) == kept


@pytest.mark.parametrize("name", ["sjf", "srtf"])
def test_policies_that_need_exact_durations_are_refused_with_the_reason(name):
    with pytest.raises(BadRequest, match="exact run times, which are unknown for live jobs"):
        live_policy(name)
    assert name not in LIVE


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--policy", "best"], "unknown policy 'best'"),
        (["--min-run", "30"], "--min-run: '30' has no unit"),
        (["--min-run-by-right", "0s"], "--min-run-by-right 0.0s: must be between 1 s and"),
        (["--policy", "las", "--no-preemption"], "work only with the default policy, not with las"),
    ],
)
def test_wrong_settings_are_refused(words, told):
    with pytest.raises(BadRequest) as refused:
        policy_of(remembered_of(given(*words), None))
    assert told in refused.value.message

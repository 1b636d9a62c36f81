"""The scheduler's settings of a live head: which policies it takes, and what the next head remembers."""

import argparse
import math
from dataclasses import replace

import pytest

from phalanx.app.scheduler_options import add_scheduler_arguments, build_policy, scheduler_settings
from phalanx.core.errors import BadRequest
from phalanx.core.scheduling.policies import PolicyParameters, policy_named
from phalanx.core.scheduling.policies.default import DefaultPolicy
from phalanx.core.scheduling.settings import LIVE_POLICIES, live_policy_settings


def given(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_scheduler_arguments(parser)
    return parser.parse_args(words)


def test_head_told_nothing_follows_the_default_policy():
    kept = scheduler_settings(given(), None)
    assert kept == {"policy": "default"}
    assert (build_policy(kept).name, build_policy(kept).parameters) == ("default", PolicyParameters())


def test_what_was_told_is_kept_for_the_next_head():
    kept = scheduler_settings(given("--min-run", "45s", "--no-preemption"), None)
    again = scheduler_settings(given("--min-stay", "2m"), kept)
    knobs = build_policy(again).parameters
    assert (knobs.run_min_s, knobs.move_min_s, knobs.grow_min_s) == (45.0, 120.0, 240.0)
    assert not knobs.allow_stops
    assert not knobs.allow_moves
    assert build_policy(scheduler_settings(given("--preemption"), again)).parameters.allow_stops


def test_another_policy_begins_with_its_own_constants():
    kept = scheduler_settings(given("--min-run-by-right", "5s"), None)
    assert build_policy(kept).parameters.run_min_by_right_s == 5.0
    assert scheduler_settings(given("--policy", "fifo"), kept) == {"policy": "fifo"}
    assert scheduler_settings(given("--policy", "default"), kept) == kept


def test_throughput_is_the_default_policy_without_a_limit_on_waits():
    kept = scheduler_settings(given("--policy", "throughput", "--min-run", "45s"), None)
    made = [build_policy(kept).create_policy(), policy_named("throughput")()]
    for policy, run_min_s in zip(made, (45.0, 1800.0), strict=True):
        assert isinstance(policy, DefaultPolicy)
        assert policy.parameters == replace(PolicyParameters(), overdue_s=math.inf, run_min_s=run_min_s)


@pytest.mark.parametrize("name", ["sjf", "srtf"])
def test_policies_that_need_exact_durations_are_refused_with_the_reason(name):
    with pytest.raises(BadRequest, match="exact run times, which are unknown for live jobs"):
        live_policy_settings(name)
    assert name not in LIVE_POLICIES


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--policy", "best"], "unknown policy 'best'"),
        (["--min-run", "30"], "--min-run: '30' has no unit"),
        (["--min-run-by-right", "0s"], "min_run_by_right: 0.0s is not between 1 s and"),
        (["--policy", "las", "--no-preemption"], "work only with the policies default and throughput, not with las"),
    ],
)
def test_wrong_settings_are_refused(words, told):
    with pytest.raises(BadRequest) as refused:
        build_policy(scheduler_settings(given(*words), None))
    assert told in refused.value.message

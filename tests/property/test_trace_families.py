"""Every family of generated traces keeps what it states, for any seed."""

import math
import statistics
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import BadRequest
from phalanx.simulator.report import LARGE_GPUS
from phalanx.simulator.simulation import simulate_board
from phalanx.simulator.trace_families import FAMILIES, LONGEST_S, draw_trace, family_named

SEEDS = st.integers(0, 2**32)


@settings(max_examples=20, deadline=None)
@given(name=st.sampled_from(sorted(FAMILIES)), seed=SEEDS)
def test_count_share_of_large_gangs_load_and_order_are_as_stated(name, seed):
    family = FAMILIES[name]
    jobs = draw_trace(family, seed).jobs
    gpus = sum(node.gpus for node in family.fleet)
    assert len(jobs) == family.jobs
    assert sum(job.gpus >= LARGE_GPUS for job in jobs) == round(family.large_share * family.jobs)
    assert jobs[0].submit_s == 0.0
    assert all(before.submit_s <= after.submit_s for before, after in pairwise(jobs))
    assert all(1.0 <= job.duration_s <= LONGEST_S and job.gpus <= gpus for job in jobs)
    load = sum(job.gpus * job.duration_s for job in jobs) / (gpus * jobs[-1].submit_s)
    assert math.isclose(load, family.load, rel_tol=0.001)
    assert len({job.id for job in jobs}) == len(jobs)
    assert len({job.virtual_cluster for job in jobs}) <= family.users


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_equal_seeds_give_equal_traces_and_others_do_not(name):
    family = FAMILIES[name]
    assert draw_trace(family, 5) == draw_trace(family, 5)
    assert draw_trace(family, 5) != draw_trace(family, 6)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_run_times_vary_less_within_a_user_only_where_users_repeat_themselves(name):
    """Share of the variance of log run times that user and GPUs explain."""
    family = FAMILIES[name]
    within, overall = 0.0, 0.0
    for seed in range(5):
        logs: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        for job in draw_trace(family, seed).jobs:
            if job.gpus < LARGE_GPUS:
                logs[job.virtual_cluster, job.gpus].append(math.log(job.duration_s))
        groups = [group for group in logs.values() if len(group) > 9]
        mean = statistics.fmean(one for group in groups for one in group)
        overall += sum((one - mean) ** 2 for group in groups for one in group)
        within += sum((len(group) - 1) * statistics.variance(group) for group in groups)
    explained = 1.0 - within / overall
    assert explained > 0.3 if family.repeats else explained < 0.1, explained


def test_nights_weekends_and_bursts_are_drawn():
    office = [job for seed in range(5) for job in draw_trace(FAMILIES["office"], seed).jobs]
    by_day = sum(8 <= job.submit_s % 86_400 / 3600 < 20 for job in office) / len(office)
    assert by_day > 0.85
    together = {
        name: statistics.fmean(
            after.submit_s - before.submit_s < 60.0
            for seed in range(3)
            for before, after in pairwise(draw_trace(FAMILIES[name], seed).jobs)
        )
        for name in ("sweeps", "steady")
    }
    assert together["sweeps"] > 0.9
    assert together["steady"] < 0.7


@pytest.mark.parametrize(("name", "alike"), [("sweeps", True), ("mixed-bursts", False)])
def test_a_burst_is_of_one_user_and_script(name, alike):
    """Neighbours in a burst have one user, and run times as similar as those of one script; others rarely."""
    pairs = [
        (before, after)
        for seed in range(3)
        for before, after in pairwise(draw_trace(FAMILIES[name], seed).jobs)
        if after.submit_s - before.submit_s < 60.0 and before.gpus == after.gpus
    ]
    assert statistics.fmean(before.virtual_cluster == after.virtual_cluster for before, after in pairs) > 0.85
    apart = statistics.median(abs(math.log(after.duration_s / before.duration_s)) for before, after in pairs)
    # The median difference of two normal values is 0.954 deviations.
    assert math.isclose(apart, 0.954 * FAMILIES[name].own_deviation, rel_tol=0.2)
    assert (apart < 0.2) == alike


def test_heavy_tail_has_the_index_it_states():
    """Hill's estimate over the run times past ten times the median, below the longest."""
    family = FAMILIES["heavy-tail"]
    begin_s = 10 * family.median_s
    logs = [
        math.log(job.duration_s / begin_s)
        for seed in range(10)
        for job in draw_trace(family, seed).jobs
        if job.gpus < LARGE_GPUS and begin_s < job.duration_s
    ]
    capped = sum(begin_s * math.exp(one) >= LONGEST_S for one in logs)
    assert math.isclose((len(logs) - capped) / sum(logs), family.tail, rel_tol=0.15)


def test_families_cover_the_loads_and_shares_of_gangs():
    loads, shares = zip(*((family.load, family.large_share) for family in FAMILIES.values()), strict=True)
    assert (min(loads), max(loads)) == (0.6, 1.4)
    assert min(shares) <= 0.02
    assert max(shares) == 0.6
    assert {family.repeats for family in FAMILIES.values()} == {True, False}


def test_a_drawn_trace_runs_on_its_fleet():
    family = FAMILIES["few-classes"]
    (part,) = simulate_board(draw_trace(family, 1), family.fleet, "fifo")
    assert all(job.end_s >= job.job.submit_s + job.job.duration_s for job in part.jobs)


def test_an_unknown_family_is_refused_with_the_list():
    with pytest.raises(BadRequest, match="unknown family") as refused:
        family_named("calm")
    assert "steady" in (refused.value.hint or "")

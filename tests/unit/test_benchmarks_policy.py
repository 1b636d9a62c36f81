"""The benchmark of policies: what it compares, what it counts as missed, and its picture. What it measures is for the benchmark to say."""

import json

import pytest

from benchmarks import policy
from benchmarks.policy import PolicyReplay, compare, draw_front, misses, pareto_front
from phalanx.simulator.trace_families import FAMILIES, draw_trace


def replayed(name, trace="steady", **figures):
    usual = {
        "avg_jct_s": 1000.0,
        "p99_jct_s": 9000.0,
        "avg_wait_large_s": 300.0,
        "max_wait_s": 8000.0,
        "stops_per_job": 0.2,
        "moves_per_job": 0.1,
        "cpu_s": 1.0,
    }
    return PolicyReplay(trace=trace, half="judged on", seed=1, policy=name, **{**usual, **figures})


def test_each_family_is_in_one_half_and_both_halves_have_users_of_both_kinds():
    assert sorted(policy.CHOSEN_ON + policy.JUDGED_ON) == sorted(FAMILIES)
    assert len(policy.CHOSEN_ON) == len(policy.JUDGED_ON)
    for half in (policy.CHOSEN_ON, policy.JUDGED_ON):
        assert {FAMILIES[name].repeats for name in half} == {True, False}


def test_what_is_missed_names_figure_and_limit():
    own = replayed("default", avg_jct_s=1200.0, max_wait_s=13_000.0, stops_per_job=0.36)
    peers = [own, replayed("srtf"), replayed("las"), replayed("backfill")]
    assert misses(own, peers) == [
        "steady, seed 1: avg_jct_s 1200, wanted at most 1100",
        "steady, seed 1: max_wait_s 13000, wanted at most 12000",
        "steady, seed 1: stops_per_job 0.36, wanted at most 0.35",
    ]


def test_where_users_do_not_repeat_themselves_the_best_that_knows_less_is_the_measure():
    own = replayed("default", trace="half-gangs", avg_jct_s=1200.0)
    peers = [own, *(replayed(name, trace="half-gangs", avg_jct_s=1300.0) for name in ("las", "backfill", "srtf"))]
    best = replayed("throughput", trace="half-gangs", avg_jct_s=1190.0)
    assert misses(own, peers) == []
    assert misses(own, [*peers, best]) == ["half-gangs, seed 1: avg_jct_s 1200, wanted at most 1190"]


def test_figures_are_compared_by_geometric_means():
    rows = [
        replayed("srtf", avg_jct_s=940.0),
        replayed("default", avg_jct_s=1940.0),
        replayed("srtf", trace="office", avg_jct_s=940.0),
        replayed("default", trace="office", avg_jct_s=440.0, stops_per_job=0.4),
    ]
    found = compare(rows)
    assert found["default"]["avg_jct_to_srtf"] == 1.0  # twice as long and half as long
    assert (found["default"]["stops_per_job"], found["default"]["stops_per_job_worst"]) == (0.3, 0.4)
    assert "max_wait_to_las" not in found["default"]


def test_front_has_the_points_that_no_other_beats_in_both():
    assert pareto_front([(2.0, 1.0), (1.0, 3.0), (1.5, 3.5), (3.0, 1.0), (1.2, 2.0)]) == [
        (1.0, 3.0),
        (1.2, 2.0),
        (2.0, 1.0),
    ]


@pytest.mark.parametrize(("kind", "begin"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_picture_is_drawn_and_names_the_policies(kind, begin):
    rows = [replayed(name, avg_jct_s=jct_s) for name, jct_s in (("srtf", 900.0), ("las", 1200.0), ("default", 950.0))]
    found = {half: compare(rows) for half in ("chosen on", "judged on", "public")}
    drawn = draw_front(found, kind)
    assert drawn.startswith(begin)
    if kind == "svg":
        assert all(name in drawn.decode() for name in ("srtf", "las", "default", "largest wait"))


def test_a_run_prints_one_object_with_all_replays(capsys):
    policy.main(
        ["--json", "--seeds", "3", "--traces", "few-classes", "--policies", "default,fifo,srtf", "--workers", "1"]
    )
    shown = json.loads(capsys.readouterr().out)
    assert [(one["trace"], one["seed"], one["policy"]) for one in shown["replays"]] == [
        ("few-classes", 3, name) for name in ("default", "fifo", "srtf")
    ]
    assert set(shown["halves"]) == {"chosen on", "judged on", "public"}
    assert shown["halves"]["chosen on"]["srtf"]["avg_jct_to_srtf"] == 1.0
    assert shown["halves"]["chosen on"]["fifo"]["avg_jct_to_srtf"] > 1.0


def test_a_misled_policy_expects_run_times_that_are_wrong_by_its_factor():
    trace = draw_trace(FAMILIES["few-classes"], 1)
    means = {}
    for factor in (1.0, *policy.MISLED.values()):
        table = policy.misled_policy(trace, factor).table
        assert table.events == -(-len(trace.jobs) // policy.MISLED_SHARE)
        means[factor] = table.served_s / table.events
    assert means == pytest.approx({factor: factor * means[1.0] for factor in means})
    label = {job.virtual_cluster: None for job in trace.jobs}
    groups = policy.misled_policy(trace, 10.0).table._groups
    assert set(groups) == set(range(len(label)))  # those of the replay, so that it believes them

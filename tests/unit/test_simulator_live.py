"""The replay through the lifecycle: the same decisions as on the bare board, and every job lives as it would live."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from phalanx.core.errors import BadRequest, NeverFits
from phalanx.core.ids import JobId
from phalanx.core.scheduling.policies import policy_named
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.work.states import JobState
from phalanx.simulator.board_replay import replay_board
from phalanx.simulator.cluster import ReplayCluster
from phalanx.simulator.fleet import equal_nodes
from phalanx.simulator.lifecycle_replay import _Replay, replay_lifecycle
from phalanx.simulator.report import build_report
from phalanx.simulator.results import ReplayEvent
from phalanx.simulator.run_times import RunTimeKnowledge, run_times_for
from phalanx.simulator.simulation import (
    SimulationSettings,
    check_settings,
    shuffle_ties,
    simulate,
    simulate_lifecycle,
)
from phalanx.simulator.trace import Trace, TraceJob
from tests.builders import queue


def jobs_of(*rows):
    """Jobs from (submit, duration, GPUs)."""
    return [
        TraceJob(id=f"j{number}", submit_s=float(submit), duration_s=float(duration), gpus=gpus, line=number + 2)
        for number, (submit, duration, gpus) in enumerate(rows)
    ]


def crowd(jobs, seed=7):
    """A trace that overfills four nodes of 8 for a while."""
    chance = random.Random(seed)
    return jobs_of(
        *(
            (at * 40, chance.choice((60, 300, 900, 7200)), chance.choice((1, 1, 1, 2, 4, 8, 12, 16)))
            for at in range(jobs)
        )
    )


def exact(jobs):
    known = {job.id: job.duration_s for job in jobs}
    return lambda job: known[job.spec.name]


@pytest.mark.parametrize(
    "name", ["fifo", "skip", "backfill", "sjf", "las", "srtf", "fair", "makespan", "default", "throughput"]
)
def test_lifecycle_replay_ends_every_job_when_the_board_alone_says(name):
    jobs, nodes = crowd(80 if name == "makespan" else 250), equal_nodes(4, 8)
    bare = replay_board(jobs, nodes, policy_named(name))
    live = replay_lifecycle(jobs, nodes, PolicySettings(name=name, run_time_of=exact(jobs)))
    assert [outcome.first_start_s for outcome in live.jobs] == [outcome.first_start_s for outcome in bare.jobs]
    assert [outcome.end_s for outcome in live.jobs] == [outcome.end_s for outcome in bare.jobs]
    assert [outcome.longest_wait_s for outcome in live.jobs] == [outcome.longest_wait_s for outcome in bare.jobs]
    assert (live.preemptions, live.moves, live.lost_gpu_s) == (bare.preemptions, bare.moves, bare.lost_gpu_s)
    assert max(outcome.wait_s for outcome in live.jobs) > 0.0


def test_both_replays_read_the_same_of_jobs_that_report_their_progress():
    """A third of the jobs reports no progress; half of the others state it wrongly."""
    silent = crowd(250)
    factors = (None, 1.0, 0.2, None, 1.0, 5.0)
    jobs = [
        job if (factor := factors[n % 6]) is None else replace(job, stated_s=factor * job.duration_s)
        for n, job in enumerate(silent)
    ]
    bare = replay_board(jobs, equal_nodes(4, 8), policy_named("default"))
    live = replay_lifecycle(jobs, equal_nodes(4, 8), PolicySettings())
    ends = [outcome.end_s for outcome in bare.jobs]
    assert [outcome.end_s for outcome in live.jobs] == ends
    assert (live.preemptions, live.moves) == (bare.preemptions, bare.moves)
    assert [one.end_s for one in replay_board(silent, equal_nodes(4, 8), policy_named("default")).jobs] != ends


def test_default_policy_ends_every_job_and_gives_every_device_back():
    run = _Replay(crowd(200), equal_nodes(4, 8), PolicySettings(), 60.0, skip_never=False)
    run.run(0.0, None)
    world = run.cluster.controller.world
    assert (world.pending, world.attempts) == ({}, {})
    assert all(not usage.devices for usage in world.usage.values())
    assert {job.state for job in world.jobs.values()} == {JobState.SUCCEEDED}
    assert run.result.preemptions + run.result.moves > 0
    assert (run.held, run.cluster.supervisors.gangs) == (0, {})


def test_preempted_job_saves_pays_the_restart_and_says_so_in_its_record():
    # The long job has used its 18,000 GPU-seconds of the first queue when the short one comes: las stops it at the next round.
    run = _Replay(
        jobs_of((0, 9000, 8), (6030, 100, 8)), equal_nodes(1, 8), PolicySettings(name="las"), 60.0, skip_never=False
    )
    run.run(0.0, None)
    long, short = run.result.jobs
    assert (long.preemptions, run.result.preemptions, run.result.lost_gpu_s) == (1, 1, 480.0)
    assert short.first_start_s == 6060.0
    assert long.end_s == 6180.0 + (9000.0 - 6060.0) + 60.0  # placed again at the round after the short one's end
    record = run.cluster.controller.world.jobs[JobId("1")]
    assert (record.preemptions, record.epoch, len(record.checkpoints)) == (1, 2, 1)


def test_gang_larger_than_a_node_holds_whole_nodes_and_the_rest_on_one_more():
    run = _Replay(
        jobs_of((0, 10, 12), (0, 10, 4)), equal_nodes(2, 8), PolicySettings(name="fifo"), 60.0, skip_never=False
    )
    held = []
    instant = run.cluster.run_instant

    def watched(now_s, inbox):
        turned = instant(now_s, inbox)
        held.append(sorted(len(usage.devices) for usage in run.cluster.controller.world.usage.values()))
        return turned

    run.cluster.run_instant = watched  # type: ignore[method-assign]  # a look at each instant
    run.run(0.0, None)
    assert held[0] == [8, 8]
    assert [outcome.end_s for outcome in run.result.jobs] == [10.0, 10.0]


def test_job_that_no_empty_fleet_holds_is_named_by_line_or_left_out():
    jobs, nodes = jobs_of((0, 10, 4), (5, 10, 99)), equal_nodes(2, 8)
    with pytest.raises(NeverFits, match=r"job j1 \(line 3\)"):
        replay_lifecycle(jobs, nodes, PolicySettings(name="fifo"))
    left = replay_lifecycle(jobs, nodes, PolicySettings(name="fifo"), skip_unplaceable=True)
    assert [outcome.job.id for outcome in left.jobs] == ["j0"]
    assert [job.id for job, _ in left.unplaceable] == ["j1"]


def test_same_trace_and_seed_give_the_same_replay_and_another_seed_another_order():
    trace = Trace(jobs=tuple(jobs_of(*((0, 100 + at, 8) for at in range(20)))))
    assert shuffle_ties(trace, 0) is trace
    assert shuffle_ties(trace, 3) == shuffle_ties(trace, 3) != shuffle_ties(trace, 4)
    figures = [
        build_report(
            simulate_lifecycle(trace, equal_nodes(1, 8), SimulationSettings(policy="fifo", seed=seed)), wall_s=0.0
        )
        for seed in (3, 3, 4)
    ]
    assert figures[0] == figures[1] != figures[2]


def test_both_replays_say_the_same_events_and_leave_out_the_same_jobs():
    trace = Trace(jobs=(*crowd(150), *jobs_of((7000, 10, 99))))
    setting = SimulationSettings(skip_unplaceable=True)
    said = []
    for lifecycle in (False, True):
        events: list[tuple[object, ...]] = []
        (done,) = simulate(
            trace,
            equal_nodes(4, 8),
            replace(setting, lifecycle=lifecycle),
            on_event=lambda *event: events.append((*event[:2], event[2].id, event[3])),
        )
        said.append((sorted(events, key=str), done.unplaceable))
    assert said[0] == said[1]
    assert {event for _, event, _, _ in said[0][0]} == set(ReplayEvent)
    assert len(said[0][1]) == 1
    with pytest.raises(NeverFits, match="99 GPUs"):
        simulate(trace, equal_nodes(4, 8), SimulationSettings())


def test_limits_are_what_sjf_may_not_and_backfill_may_know():
    rows = jobs_of((0, 100, 8), (1, 50, 8), (2, 10, 8))
    trace = Trace(
        jobs=tuple(
            TraceJob(id=job.id, submit_s=job.submit_s, duration_s=job.duration_s, gpus=8, limit_s=500.0) for job in rows
        )
    )
    (done,) = simulate_lifecycle(
        trace, equal_nodes(1, 8), SimulationSettings(policy="backfill", run_times=RunTimeKnowledge.LIMIT)
    )
    assert [outcome.end_s for outcome in done.jobs] == [100.0, 150.0, 160.0]


def test_predictions_know_what_has_ended_before_and_nothing_else():
    # Team red's jobs have run 100 s and blue's 10 s. Then both hand in the contrary, behind a job that holds all devices.
    lesson = [(f"{team}{at}", 0, run_s, 1, team) for team, run_s in (("red", 100), ("blue", 10)) for at in range(20)]
    rows = [*lesson, ("all", 100, 50, 40, ""), ("short", 101, 10, 40, "red"), ("long", 102, 100, 40, "blue")]
    jobs = tuple(
        TraceJob(id=name, submit_s=float(at), duration_s=float(run_s), gpus=gpus, virtual_cluster=team)
        for name, at, run_s, gpus, team in rows
    )
    known = run_times_for(jobs, RunTimeKnowledge.PREDICTED)
    short, long = "short", "long"
    assert known.run_time_s(short) == float("inf")  # nothing has ended
    known.record_end(jobs[20])
    assert known.run_time_s(short) == 10.0  # the only end there is, though another team's
    for taught in jobs[:40]:
        known.record_end(taught)
    assert (known.run_time_s(short), known.run_time_s(long)) == (100.0, 10.0)
    for durations, first in ((RunTimeKnowledge.PREDICTED, "long"), (RunTimeKnowledge.EXACT, "short")):
        (live,) = simulate_lifecycle(
            Trace(jobs=jobs), equal_nodes(1, 40), SimulationSettings(policy="sjf", run_times=durations)
        )
        starts = {outcome.job.id: outcome.first_start_s for outcome in live.jobs}
        assert min(("long", "short"), key=starts.__getitem__) == first


def test_prediction_never_passes_the_time_limit():
    jobs = (
        TraceJob(id="a", submit_s=0.0, duration_s=900.0, gpus=1),
        TraceJob(id="b", submit_s=0.0, duration_s=1.0, gpus=1, limit_s=60.0),
    )
    known = run_times_for(jobs, RunTimeKnowledge.PREDICTED)
    assert known.run_time_s("b") == 60.0
    known.record_end(jobs[0])
    assert known.run_time_s("b") == 60.0


@pytest.mark.parametrize("policy", ["backfill", "sjf", "fifo", "default"])
def test_every_job_ends_under_predictions(policy):
    trace = Trace(jobs=tuple(crowd(120)))
    (done,) = simulate_lifecycle(
        trace, equal_nodes(4, 8), SimulationSettings(policy=policy, run_times=RunTimeKnowledge.PREDICTED)
    )
    assert all(outcome.end_s >= outcome.job.submit_s + outcome.job.duration_s for outcome in done.jobs)


def test_srtf_knows_no_predictions_for_a_job_outlives_its_own():
    with pytest.raises(BadRequest, match="srtf needs exact durations"):
        check_settings(
            SimulationSettings(policy="srtf", run_times=RunTimeKnowledge.PREDICTED), Trace(jobs=tuple(crowd(3)))
        )


def test_job_that_never_fits_is_refused_before_anything_is_replayed():
    told = []
    jobs = jobs_of(*((at, 10, 1) for at in range(3000)), (5000, 10, 99))
    with pytest.raises(NeverFits, match=r"job j3000 \(line 3002\)"):
        replay_lifecycle(
            jobs, equal_nodes(2, 8), PolicySettings(name="fifo"), on_progress=lambda *seen: told.append(seen)
        )
    assert told == []


def test_curve_keeps_the_last_point_of_each_step():
    live = replay_lifecycle(
        jobs_of((0, 100, 8), (1, 100, 8)), equal_nodes(1, 8), PolicySettings(name="fifo"), curve_step_s=50.0
    )
    assert (live.curve[0], live.curve[-1]) == ((0.0, 8, 0), (200.0, 0, 0))
    assert (1.0, 8, 1) in live.curve


@pytest.mark.parametrize("again", [lambda *_: None, lambda _, now_s: now_s + 600.0], ids=["asleep", "awake"])
def test_jobs_that_wait_for_ever_end_the_replay_by_name(monkeypatch, again):
    monkeypatch.setattr("phalanx.core.scheduling.policies.baselines.StrictPolicy.decide", again)
    with pytest.raises(NeverFits, match=r"job j0 \(line 2\) waits forever"):
        replay_lifecycle(jobs_of((0, 10, 1)), equal_nodes(1, 8), PolicySettings(name="fifo"))


@pytest.mark.parametrize("name", ["default", "fifo"])
@pytest.mark.parametrize(
    ("limits", "left", "why"),
    [
        ({"gpus_per_user": 6}, ["j1"], "8 GPUs asked; queue nlp allows 6 a user"),
        ({"quota_gpus": 4, "borrow_gpus": 2}, ["j1"], "8 GPUs asked; queue nlp can get at most 6 (quota 4, borrow 2)"),
        ({"budget_gpu_h": 0.0}, ["j0", "j1", "j2"], "2 GPUs asked; the budget of queue nlp is 0 GPU-hours"),
    ],
)
def test_what_its_queue_can_never_admit_is_left_out_by_name(name, limits, left, why):
    """The replay went on for ever, as the policy looked at the job in every round."""
    jobs = [replace(one, virtual_cluster="nlp") for one in jobs_of((0, 10, 2), (1, 10, 8), (2, 10, 1))]
    settings, queues = PolicySettings(name=name), (queue("nlp", **limits),)
    done = replay_lifecycle(jobs, equal_nodes(1, 8), settings, queues=queues, skip_unplaceable=True)
    assert [job.id for job, _ in done.unplaceable] == left
    assert done.unplaceable[0][1] == why
    assert [outcome.end_s for outcome in done.jobs] == ([] if len(left) == 3 else [10.0, 12.0])
    with pytest.raises(NeverFits, match=rf"^job {left[0]} \(line .\): "):
        replay_lifecycle(jobs, equal_nodes(1, 8), settings, queues=queues)


def test_a_job_that_waits_for_the_next_budget_period_is_not_given_up():
    period_s = 40 * 86_400.0
    jobs = [replace(one, virtual_cluster="nlp") for one in jobs_of((0, 7200, 1), (1, 7200, 8))]
    limited = (queue("nlp", budget_gpu_h=1.0, budget_period_s=period_s),)
    done = replay_lifecycle(jobs, equal_nodes(1, 8), PolicySettings(name="fifo"), queues=limited)
    assert [outcome.end_s for outcome in done.jobs] == [7200.0, period_s + 7200.0]


def test_cluster_says_when_it_has_something_due_and_never_when_idle():
    cluster = ReplayCluster(equal_nodes(2, 8), PolicySettings(name="fifo"), users=[], start_s=0.0)
    assert cluster.run_instant(10.0, []).due_in_s == float("inf")

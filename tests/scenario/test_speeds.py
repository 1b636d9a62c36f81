"""Fleets of several models: where jobs start, when they move to a faster model, who makes room, and what the move says."""

import random

import pytest

from phalanx.core.errors import BadFile
from phalanx.core.scheduling.device_speeds import speeds_on
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.work.request import spec_from_mapping
from phalanx.simulator.fleet import parse_fleet
from phalanx.simulator.lifecycle_replay import replay_lifecycle
from phalanx.simulator.report import build_report
from phalanx.simulator.trace import read_trace
from tests.builders import job as a_job
from tests.builders import make_fleet
from tests.cell import Cell

FAST_AND_SLOW = "r: fast=h100:1 slow=a100:1"
TWICE = (("h100", 2.0), ("a100", 1.0))


def job(name, **fields):
    """A job that loses no work when it is stopped, unless `fields` say otherwise."""
    return a_job(name, **{"saves_on_stop": True, **fields})


def played(fleet, *rounds):
    """Submits the jobs of one round after the other, ten minutes apart: jobs that run for so long may move."""
    cell = Cell(make_fleet(fleet))
    for jobs in rounds:
        cell.submit(*jobs)
        cell.go_on(600.0)
    return cell


def moved(cell, seconds):
    """Lets time pass; the reasons of all stops and moves until then, by job."""
    cell.go_on(seconds)
    return {stop.job_id: stop.why for plan in cell.plans for stop in plan.stops}


STARTS = [
    ("the fastest that is free", "h100,a100:1", (("h100", 1.0), ("a100", 3.0)), "slow:0"),
    ("in the order asked for without speeds", "h100,a100:1", (), "fast:0"),
    ("in the order asked for at equal speeds", "a100,h100:1", (("h100", 2.0), ("a100", 2.0)), "slow:0"),
    (
        "a model that the table does not name is as slow as its slowest",
        "a100,h100:1",
        (("h100", 2.0), ("v100", 1.0)),
        "fast:0",
    ),
    ("only accepted models", "a100:1", TWICE, "slow:0"),
]


@pytest.mark.parametrize(("gpus", "speeds", "where"), [row[1:] for row in STARTS], ids=[row[0] for row in STARTS])
def test_where_a_job_starts(gpus, speeds, where):
    assert played(FAST_AND_SLOW, [job("a", gpus=gpus, speeds=speeds)]).place_of("a") == where


def test_a_job_moves_to_the_faster_model_when_it_comes_free_and_says_why():
    cell = played(FAST_AND_SLOW, [job("first", gpus="h100:1")], [job("a", gpus="h100,a100:1", speeds=TWICE)])
    assert cell.place_of("a") == "slow:0"
    cell.end("first")
    moves = moved(cell, 600.0)
    assert cell.place_of("a") == "fast:0"
    assert moves == {"a": "moved to fast; 2x faster on h100"}


def test_a_job_stays_if_the_move_costs_more_than_it_gains():
    nearly = (("h100", 1.001), ("a100", 1.0))
    cell = played(FAST_AND_SLOW, [job("first", gpus="h100:1")], [job("a", gpus="h100,a100:1", speeds=nearly)])
    cell.end("first")
    assert moved(cell, 3600.0) == {}


def test_a_job_stays_while_the_move_would_lose_too_much_unsaved_work():
    cell = played(
        FAST_AND_SLOW,
        [job("first", gpus="h100:1")],
        [job("a", gpus="h100,a100:1", speeds=TWICE, saves_on_stop=False)],
    )
    cell.end("first")
    assert moved(cell, 60.0) == {}


def test_a_job_that_must_not_be_stopped_is_not_moved():
    cell = played(
        FAST_AND_SLOW,
        [job("first", gpus="h100:1")],
        [job("a", gpus="h100,a100:1", speeds=TWICE, preemptible=False)],
    )
    cell.end("first")
    assert moved(cell, 3600.0) == {}


def test_jobs_exchange_their_places_if_one_gains_more_than_the_other_loses():
    slight = (("h100", 1.2), ("a100", 1.0))
    cell = played(
        FAST_AND_SLOW,
        [job("little", gpus="h100,a100:1", speeds=slight)],
        [job("much", gpus="h100,a100:1", speeds=(("h100", 5.0), ("a100", 1.0)))],
    )
    moves = moved(cell, 3600.0)
    assert (cell.place_of("much"), cell.place_of("little")) == ("fast:0", "slow:0")
    assert "5x faster on h100" in moves["much"]
    assert "make room for job much, which gains more there than this job loses; 1.2x slower on a100" in moves["little"]


def test_the_job_that_gains_less_never_takes_the_place_of_the_one_that_gains_more():
    much = (("h100", 5.0), ("a100", 1.0))
    cell = played(
        FAST_AND_SLOW,
        [job("much", gpus="h100,a100:1", speeds=much)],
        [job("little", gpus="h100,a100:1", speeds=TWICE)],
    )
    assert moved(cell, 7200.0) == {}


def test_a_gang_changes_places_with_several_small_jobs():
    steep, slight = (("h100", 5.0), ("a100", 1.0)), (("h100", 1.1), ("a100", 1.0))
    small = [job(f"s{number}", gpus="h100,a100:1", speeds=slight) for number in range(4)]
    cell = played("r: fast=h100:4 slow=a100:4", small, [job("gang", gpus="h100,a100:4", speeds=steep)])
    moved(cell, 3600.0)
    assert cell.place_of("gang") == "fast:0,1,2,3"
    assert sorted(cell.place_of(f"s{number}") for number in range(4)) == ["slow:0", "slow:1", "slow:2", "slow:3"]


def test_speeds_are_shares_of_the_fastest_model_of_the_fleet():
    assert speeds_on(["a100", "h100"], TWICE) == (0.5, 1.0)
    assert speeds_on(["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"], TWICE) == (0.5, 1.0)
    assert speeds_on(["h100"], TWICE) == ()
    assert speeds_on(["a100", "v100"], (("h100", 2.0),)) == ()


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "fast", "", "1e9"])
def test_a_speed_is_a_number_above_zero(text):
    with pytest.raises(BadFile, match="speeds: h100"):
        spec_from_mapping({"run": "true", "speeds": {"h100": text}}, workdir="/w")


def test_speeds_of_a_job_file():
    spec = spec_from_mapping({"run": "true", "gpus": "h100,a100:8", "speeds": {"H100": 2.1, "a100": 1}}, workdir="/w")
    assert spec.speeds == (("h100", 2.1), ("a100", 1.0))


# ---- replays ---------------------------------------------------------------------------------------------------------

HEADER = "job_id,submit_s,duration_s,num_gpus,gpu_type,duration_p100_s"


def replayed(rows, fleet, policy="default"):
    trace = read_trace([HEADER, *rows])
    return replay_lifecycle(trace.jobs, parse_fleet(fleet) or (), PolicySettings(name=policy))


def test_a_job_runs_as_long_as_the_trace_says_for_its_model():
    (one,) = replayed(["a,0,1000,1,v100|p100,2500"], "1xp100:1").jobs
    assert (one.end_s, one.ran_s, one.wait_s) == (2500.0, 2500.0, 1500.0)


def test_a_blank_run_time_means_that_the_job_cannot_run_there():
    first, second = replayed(["a,0,1000,1,v100|p100,", "b,0,1000,1,v100|p100,"], "1xv100:1,1xp100:1").jobs
    assert sorted((first.end_s, second.end_s)) == [1000.0, 2000.0]


def test_a_moved_job_keeps_its_work_and_repeats_only_the_cost_of_the_move():
    rows = ["first,0,5000,1,v100,", "a,0,10000,1,v100|p100,40000"]
    one = replayed(rows, "1xv100:1,1xp100:1").jobs[1]
    assert one.moves == 1
    # Until t it did t / 4 of the work at the rate of the fast model; the rest and 60 s followed there.
    slow_s = (10000 + 60 - one.end_s) / (1 / 4 - 1)
    assert 5000 <= slow_s <= 5400
    assert one.ran_s == pytest.approx(one.end_s - 60)


def test_a_mixed_fleet_ends_jobs_sooner_than_the_first_place_that_fits():
    chance = random.Random(3)
    rows = []
    for number in range(30):
        fast_s = chance.randint(600, 9000)
        slow_s = int(fast_s * chance.uniform(1, 6))
        rows.append(f"j{number},{number * 600},{fast_s},{chance.choice((1, 1, 2))},p100|v100,{slow_s}")
    default, first_fit = (
        build_report([replayed(rows, "4xv100:1,8xp100:1", policy)], wall_s=0.0) for policy in ("default", "fifo")
    )
    assert default.avg_jct_s < 0.9 * first_fit.avg_jct_s


MEMORY = [
    ("of all models with so much, one of the fewest nodes", "any-60gb:2", (), "big:0,1"),
    ("the fastest of these", "any-60gb:1", (("h100", 1.0), ("h200", 3.0)), "two:0"),
    ("also beside a model by name", "a100,any-100gb:1", (), "small:0"),
    ("no such memory on that fleet", "any-200gb:1", (), ""),
]


@pytest.mark.parametrize(("gpus", "speeds", "where"), [row[1:] for row in MEMORY], ids=[row[0] for row in MEMORY])
def test_any_model_of_a_memory(gpus, speeds, where):
    cell = played("r: small=a100-40gb:8 big=h100-80gb:2 two=h200-141gb:1", [job("a", gpus=gpus, speeds=speeds)])
    assert cell.place_of("a") == where

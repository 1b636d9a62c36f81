"""Fleets of several models: where jobs start, when they move to a faster model, who makes room, and what the move says."""

import dataclasses
import random

import pytest

from phalanx.core.errors import BadFile
from phalanx.core.ids import Epoch
from phalanx.core.scheduling.estimates.device_speeds import SpeedEvidence, SpeedFacts, SpeedSource, by_table, combined
from phalanx.core.scheduling.scheduler import Scheduler
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.pace import MeasuredPace, StepPace, with_pace
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


# ---- sources ---------------------------------------------------------------------------------------------------------

MODELS = ("a100", "h100", "v100")
OBSERVED, CALIBRATED, PLANNED, STATED, PEAK = SpeedSource


def evidence(source, *speeds, runs=0):
    return SpeedEvidence(source=source, speeds=speeds, runs=runs)


# sources -> speeds, sources of each, models between which a running job may not move
SOURCES = [
    ("nothing", (), (), (), ()),
    ("observed on one model only", (evidence(OBSERVED, 3.0, None, None, runs=1),), (), (), ()),
    (
        "observed on all",
        (evidence(OBSERVED, 1.0, 2.0, 0.5, runs=3),),
        (0.5, 1.0, 0.25),
        (OBSERVED, OBSERVED, OBSERVED),
        (),
    ),
    (
        "the table adds the models that were not observed, by their ratio to one that was",
        (evidence(OBSERVED, 30.0, None, 10.0, runs=2), evidence(STATED, 1.0, 2.0, 1 / 3)),
        (0.5, 1.0, 0.17),
        (OBSERVED, STATED, OBSERVED),
        (),
    ),
    (
        "a calibration beside an observation",
        (evidence(OBSERVED, 30.0, None, None), evidence(CALIBRATED, 1.0, 2.0)),
        (0.5, 1.0, 0.5),
        (OBSERVED, CALIBRATED, None),
        (2,),
    ),
    (
        "a calibration alone",
        (evidence(CALIBRATED, 1.0, 2.0, 1.0),),
        (0.5, 1.0, 0.5),
        (CALIBRATED, CALIBRATED, CALIBRATED),
        (0, 1, 2),
    ),
    ("peaks alone", (evidence(PEAK, 1.0, 2.0, 0.4),), (0.5, 1.0, 0.2), (PEAK, PEAK, PEAK), (0, 1, 2)),
    (
        "peaks beside a plan",
        (evidence(PLANNED, 1.0, 2.0), evidence(PEAK, 1.0, 3.0, 0.4)),
        (0.5, 1.0, 0.17),
        (PLANNED, PLANNED, PEAK),
        (2,),
    ),
    (
        "a source without a common model",
        (evidence(OBSERVED, 1.0, None, None), evidence(PLANNED, None, 2.0, 1.0)),
        (),
        (),
        (),
    ),
    ("equal speeds", (evidence(STATED, 1.0, 1.0, 1.0),), (), (STATED, STATED, STATED), ()),
]


@pytest.mark.parametrize(
    ("given", "speeds", "sources", "guessed"), [row[1:] for row in SOURCES], ids=[row[0] for row in SOURCES]
)
def test_the_surest_source_of_each_model_counts(given, speeds, sources, guessed):
    found = combined(len(MODELS), given)
    assert found.speeds == pytest.approx(speeds, abs=0.006)
    assert (found.sources, tuple(sorted(found.guessed))) == (sources, guessed)


def test_a_table_names_models_as_a_request_does():
    assert by_table(["a100", "h100"], TWICE) == (1.0, 2.0)
    assert by_table(["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"], TWICE) == (1.0, 2.0)
    assert by_table(["h100", "v100"], TWICE) == (2.0, 1.0)
    assert by_table(["h100", "v100"], TWICE, rest=False) == (2.0, None)
    assert by_table(["h100"], ()) == ()


# ---- what attempts reported ------------------------------------------------------------------------------------------


def pace(model, step_s, *, steps=100, ranks=1, tokens=0, epoch=1):
    return MeasuredPace(
        epoch=Epoch(epoch),
        model=model,
        ranks=ranks,
        devices=ranks,
        pace=StepPace(steps=steps, step_s=step_s, tokens=tokens),
    )


def reports(cell, name, *paces):
    cell.put(dataclasses.replace(cell.world.jobs[name], paces=paces))


def test_a_job_that_ran_faster_elsewhere_moves_back_there_and_says_how_that_is_known():
    cell = played(FAST_AND_SLOW, [job("first", gpus="h100:1")], [job("a", gpus="h100,a100:1")])
    reports(cell, "a", pace("h100", 0.1), pace("a100", 0.21, epoch=2))
    cell.end("first")
    assert moved(cell, 600.0) == {"a": "moved to fast; 2.1x faster on h100 (observed, 2 runs)"}


def named(one, name):
    return dataclasses.replace(one, spec=dataclasses.replace(one.spec, name=name))


def test_jobs_exchange_places_by_what_was_observed():
    cell = played(FAST_AND_SLOW, [job("little", gpus="h100,a100:1")], [job("much", gpus="h100,a100:1")])
    reports(cell, "little", pace("h100", 0.1), pace("a100", 0.12, epoch=2))
    reports(cell, "much", pace("h100", 0.1), pace("a100", 0.5, epoch=2))
    moves = moved(cell, 3600.0)
    assert (cell.place_of("much"), cell.place_of("little")) == ("fast:0", "slow:0")
    assert moves["much"] == "moved to fast; 5x faster on h100 (observed, 2 runs)"
    assert moves["little"].endswith(
        "which gains more there than this job loses; 1.2x slower on a100 (observed, 2 runs)"
    )


OTHERS = [
    ("the same name", [("h100", 0.5), ("a100", 0.2)], {}, "slow:0"),
    ("another owner", [("h100", 0.5), ("a100", 0.2)], {"user": "bob"}, "fast:0"),
    ("another name", [("h100", 0.5), ("a100", 0.2)], {"name": "other"}, "fast:0"),
]


@pytest.mark.parametrize(("runs", "other", "where"), [row[1:] for row in OTHERS], ids=[row[0] for row in OTHERS])
def test_what_similar_jobs_reported_holds_for_a_new_one(runs, other, where):
    name = other.pop("name", "train")
    cell = played(FAST_AND_SLOW, [named(job("old", gpus="h100,a100:1", **other), name)])
    reports(cell, "old", *[pace(model, step_s, epoch=epoch) for epoch, (model, step_s) in enumerate(runs, start=1)])
    cell.end("old")
    cell.submit(named(job("new", gpus="h100,a100:1"), "train"))
    cell.go_on(120.0)
    assert cell.place_of("new") == where


def test_runs_of_several_jobs_with_one_command_are_compared():
    cell = played("r: fast=h100:2 slow=a100:2", [named(job(name, gpus="h100,a100:1"), "train") for name in "xyz"])
    for name, model, step_s in (("x", "h100", 0.5), ("y", "h100", 0.4), ("z", "a100", 0.2)):
        reports(cell, name, pace(model, step_s))
        cell.end(name)
    cell.submit(named(job("new", gpus="h100,a100:1"), "train"))
    cell.go_on(120.0)
    assert cell.place_of("new") == "slow:0"


def test_what_was_learned_survives_a_restart_of_the_head():
    cell = played(FAST_AND_SLOW, [job("first", gpus="h100:1")], [job("a", gpus="h100,a100:1")])
    reports(cell, "a", pace("h100", 0.1), pace("a100", 0.3, epoch=2))
    cell.scheduler = Scheduler(cell.policy)
    cell.end("first")
    assert moved(cell, 1200.0) == {"a": "moved to fast; 3x faster on h100 (observed, 2 runs)"}


def test_of_jobs_that_ended_nothing_is_kept():
    cell = played(FAST_AND_SLOW, [job("a", gpus="h100:1")])
    reports(cell, "a", pace("h100", 0.1))
    speeds = cell.scheduler.speeds
    assert list(speeds._learned) == ["a"]
    cell.end("a")
    cell.go_on(60.0)
    assert speeds._learned == {}


FEW = [
    ("too few steps", (pace("h100", 0.1, steps=19), pace("a100", 0.3, steps=19, epoch=2))),
    ("steps of different numbers of ranks", (pace("h100", 0.1), pace("a100", 0.3, ranks=2, epoch=2))),
    ("one model only", (pace("a100", 0.3, epoch=2),)),
]


@pytest.mark.parametrize("paces", [row[1] for row in FEW], ids=[row[0] for row in FEW])
def test_runs_that_cannot_be_compared_move_nothing(paces):
    cell = played(FAST_AND_SLOW, [job("first", gpus="h100:1")], [job("a", gpus="h100,a100:1")])
    kept: tuple[MeasuredPace, ...] = ()
    for one in paces:
        kept = with_pace(kept, one)
    reports(cell, "a", *kept)
    cell.end("first")
    assert moved(cell, 3600.0) == {}


def test_tokens_make_different_numbers_of_ranks_comparable():
    cell = played(FAST_AND_SLOW, [job("first", gpus="h100:1")], [job("a", gpus="h100,a100:1")])
    # 4,000 tokens a second on two devices, and 1,000 on one
    reports(cell, "a", pace("h100", 0.5, ranks=2, tokens=2000), pace("a100", 1.0, tokens=1000, epoch=2))
    cell.end("first")
    assert moved(cell, 600.0) == {"a": "moved to fast; 2x faster on h100 (observed, 2 runs)"}


def test_one_slow_run_of_three_does_not_count():
    cell = played(FAST_AND_SLOW, [job("first", gpus="h100:1")], [job("a", gpus="h100,a100:1")])
    runs = [pace("h100", step_s, epoch=epoch) for epoch, step_s in enumerate((0.1, 9.0, 0.1), start=2)]
    reports(cell, "a", *runs, pace("a100", 0.2))
    cell.end("first")
    assert moved(cell, 600.0) == {"a": "moved to fast; 2x faster on h100 (observed, 4 runs)"}


@pytest.mark.parametrize(
    "told",
    [
        StepPace(steps=100, step_s=0.0),
        StepPace(steps=100, step_s=-1.0),
        StepPace(steps=100, step_s=float("inf")),
        StepPace(steps=100, step_s=float("nan")),
        StepPace(steps=100, step_s=0.1, tokens=-1),
        StepPace(steps=100, step_s=0.1, tokens=10**400),
        StepPace(steps=10**400, step_s=0.1),
    ],
)
def test_a_pace_that_no_job_has_is_dropped(told):
    assert with_pace((), dataclasses.replace(pace("h100", 0.1), pace=told)) == ()


def test_a_job_that_accepts_one_model_is_not_tried_again_and_again():
    cell = played(
        FAST_AND_SLOW, [job("one", gpus="a100:1", speeds=TWICE), job("two", gpus="h100,a100:1", speeds=TWICE)]
    )
    assert list(cell.scheduler.board.uneven_speeds) == [2]


def test_a_run_writes_its_pace_as_often_as_its_steps_double():
    first = with_pace((), pace("h100", 0.1, steps=20))
    assert with_pace(first, pace("h100", 0.2, steps=39)) is first
    assert with_pace(first, pace("h100", 0.2, steps=40)) == (pace("h100", 0.2, steps=40),)
    assert with_pace((), pace("h100", 0.1, steps=19)) == ()
    many: tuple[MeasuredPace, ...] = ()
    for epoch in range(1, 12):
        many = with_pace(many, pace("h100", 0.1, epoch=epoch))
    assert [one.epoch for one in many] == list(range(4, 12))


# ---- guesses ---------------------------------------------------------------------------------------------------------

PEAKS = SpeedFacts(peak={"h100": 3.0, "a100": 1.0})
MEASURED = SpeedFacts(calibrated={"h100": 3.0, "a100": 1.0})


def knowing(cell, facts):
    cell.scheduler.set_speed_facts(facts)
    return cell


@pytest.mark.parametrize("facts", [PEAKS, MEASURED], ids=["peaks", "a calibration"])
def test_a_bare_script_never_moves_for_guessed_speeds(facts):
    cell = knowing(Cell(make_fleet(FAST_AND_SLOW)), facts)
    cell.submit(job("first", gpus="h100:1"))
    cell.go_on(60.0)
    cell.submit(job("a", gpus="h100,a100:1"))
    cell.go_on(600.0)
    cell.end("first")
    assert moved(cell, 7200.0) == {}


def test_a_job_whose_speeds_are_unknown_is_not_moved_to_make_room():
    cell = played(FAST_AND_SLOW, [job("bare", gpus="h100,a100:1")], [job("much", gpus="h100,a100:1", speeds=TWICE)])
    assert moved(cell, 7200.0) == {}


def test_a_job_whose_speeds_are_known_to_be_equal_makes_room():
    equal = (("h100", 1.0), ("a100", 1.0))
    cell = played(
        FAST_AND_SLOW, [job("any", gpus="h100,a100:1", speeds=equal)], [job("much", gpus="h100,a100:1", speeds=TWICE)]
    )
    moved(cell, 3600.0)
    assert (cell.place_of("much"), cell.place_of("any")) == ("fast:0", "slow:0")


def test_the_plan_of_a_job_moves_it():
    planned = (("h100", 2.5), ("a100", 1.0))
    cell = played(FAST_AND_SLOW, [job("first", gpus="h100:1")], [job("a", gpus="h100,a100:1", planned_speeds=planned)])
    cell.end("first")
    assert moved(cell, 600.0) == {"a": "moved to fast; 2.5x faster on h100 (by its plan)"}


def test_a_calibration_says_how_much_faster_the_other_model_is_once_the_job_reports_steps():
    cell = knowing(played(FAST_AND_SLOW, [job("first", gpus="h100:1")], [job("a", gpus="h100,a100:1")]), MEASURED)
    reports(cell, "a", pace("a100", 0.3))
    cell.end("first")
    assert moved(cell, 1200.0) == {"a": "moved to fast; 3x faster on h100 (by the calibration)"}


# request -> place with peaks that favour h100, on an idle fleet
GUESSED_STARTS = [
    ("any model", "1", "fast:0"),
    ("any of a memory", "any-10gb:1", "fast:0"),
    ("an order that the user states", "a100,h100:1", "slow:0"),
    ("alternatives that the user orders", "a100:1|h100:1", "slow:0"),
    ("no device", "0", "slow:"),
]


@pytest.mark.parametrize(("gpus", "where"), [row[1:] for row in GUESSED_STARTS], ids=[row[0] for row in GUESSED_STARTS])
def test_peaks_order_models_that_the_user_did_not_order(gpus, where):
    cell = knowing(Cell(make_fleet("r: fast=h100-80gb:1 slow=a100-80gb:1")), PEAKS)
    cell.submit(job("a", gpus=gpus))
    cell.go_on(60.0)
    assert cell.place_of("a") == where


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

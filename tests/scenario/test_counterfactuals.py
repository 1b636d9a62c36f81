"""When a waiting job is expected to start, and the smallest changes that start it now: fleets drawn in a line."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined, index"

import gc
from dataclasses import replace

import pytest

from phalanx.core.fleet.node import Cordon, ForeignUsage
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import Epoch
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import JobEntry
from phalanx.core.scheduling.estimates.hazard_table import SimilarJobs
from phalanx.core.scheduling.estimates.run_time_prediction import RunTimePredictor, traits_of
from phalanx.core.scheduling.outlook.counterfactuals import CounterfactualSearch
from phalanx.core.scheduling.outlook.forecast import Forecast
from phalanx.core.scheduling.outlook.what_if import plan_snapshot, trim_snapshot, what_if
from phalanx.core.scheduling.policies import PolicyParameters
from phalanx.core.scheduling.policy import Policy
from phalanx.core.scheduling.scheduler import Scheduler
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.state.snapshot import Snapshot
from phalanx.core.state.world import World, WorldChange
from phalanx.core.work.dependency import ArrayPosition, Dependency, DependencyKind
from phalanx.core.work.pace import MeasuredPace, StepPace
from phalanx.core.work.queue import Queue, QueueUsage
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.spec import TopologyConstraint
from phalanx.core.work.states import WaitReasonCode
from tests.builders import PLAIN, T, job, make_fleet, placed

# Nobody is stopped for another's value: what these tests change shall be all that changes.
CALM = PolicySettings(parameters=PolicyParameters(allow_stops=False, allow_moves=False))
TWO = "r0: n0=4 n1=4"


def snapshot(fleet, runs=(), waits=(), queues=(PLAIN,), reservations=()):
    """`runs`: (job, "n0:0,1", seconds it has run)."""
    world = World()
    change = WorldChange(world=world)
    nodes = fleet.nodes if not isinstance(fleet, str) else make_fleet(fleet).nodes
    for record in (*nodes.values(), *queues, *reservations):
        change.put(record)
    for seq, (one, on, ran_s) in enumerate(runs, start=1):
        case = placed(replace(one, seq=seq), on, now_s=-ran_s)
        change.put(case.job)
        change.put(case.attempt)
    for seq, one in enumerate(waits, start=100):
        change.put(replace(one, seq=seq))
    return Snapshot(
        version=1,
        now_s=T,
        nodes=world.nodes,
        usage=world.usage,
        queues=world.queues,
        reservations=world.reservations,
        attempts=world.attempts,
        jobs=world.jobs,
        queue_usage=world.queue_usage,
    )


class Asked:
    """What is found for the job called x."""

    def __init__(self, seen, *, policy=CALM, history=(), go_on=lambda: True):
        like, predictor = Scheduler(policy), RunTimePredictor()
        for one, run_s in history:
            predictor.record_end(traits_of(one), run_s)
        x = seen.jobs["x"]
        self.seen, self.policy = seen, policy
        self.forecast = Forecast(what_if(trim_snapshot(seen, x), like), predictor)
        self.search = CounterfactualSearch(self.forecast, x, like, go_on)
        self.expected = self.forecast.start_of(x)
        self.changes = self.search.find()

    @property
    def told(self):
        return [
            (change.kind.value, f"{change.key} {change.value}" if change.key else str(change.hint or ""))
            for change in self.changes
        ]

    @property
    def range_s(self):
        return self.expected.earliest_s, self.expected.latest_s


HOUR = {"time_limit_s": 3600.0}


def test_one_job_in_the_way_and_its_limit_bounds_the_start():
    seen = snapshot(
        TWO,
        [(job("a", gpus=4, **HOUR), "n0:0,1,2,3", 600.0), (job("b", gpus=4), "n1:0,1,2,3", 60.0)],
        [job("x", gpus=4)],
    )
    found = Asked(seen)
    assert found.search.blockers == ["a"]
    assert found.range_s == (0.0, 3000.0)
    assert found.told == [("wait", "")]


def test_history_narrows_the_range():
    a, b = job("a", gpus=4), job("b", gpus=4)
    seen = snapshot(TWO, [(a, "n0:0,1,2,3", 500.0), (b, "n1:0,1,2,3", 100.0)], [job("x", gpus=8)])
    found = Asked(seen, history=[(a, 1000.0 + number) for number in range(9)])
    assert found.range_s == (900.0, 908.0)  # the later of the two, each ending after 1000 to 1008 s in all


def test_devices_in_use_by_others_are_free_at_an_unknown_time():
    """Found live: beside a placement group of others that held all GPUs, a job was expected to start now."""
    fleet = make_fleet("r0: n0=4")
    held = replace(fleet.nodes["n0"], foreign_usage=ForeignUsage(devices=(0, 1, 2), owners=("others",)))
    shared = replace(fleet, nodes={"n0": held})
    expected = Asked(snapshot(shared, waits=[job("x", gpus="2")])).expected
    assert (expected.earliest_s, expected.latest_s) == (None, None)
    assert expected.unknown == "it waits for devices in use outside Phalanx, whose end is unknown"
    assert Asked(snapshot(shared, waits=[job("x", gpus="1")])).expected.latest_s == 0.0


def test_nothing_known_is_told_as_unknown():
    seen = snapshot(TWO, [(job("a", gpus=8), "n0:0,1,2,3 n1:0,1,2,3", 60.0)], [job("x", gpus=8)])
    expected = Asked(seen).expected
    assert expected.latest_s is None
    assert expected.unknown == "job a has no time limit, and too few similar jobs have finished"


def test_jobs_before_it_get_their_places_first():
    runs = [(job("a", gpus=8, **HOUR), "n0:0,1,2,3 n1:0,1,2,3", 0.0)]
    seen = snapshot(TWO, runs, [job("first", gpus=8, time_limit_s=600.0), job("x", gpus=8)])
    assert Asked(seen).range_s == (0.0, 4200.0)


def test_other_shape_starts_now():
    seen = snapshot(TWO, [(job("a", gpus=2), "n0:0,1", 0.0), (job("b", gpus=2), "n1:0,1", 0.0)], [job("x", gpus=4)])
    found = Asked(seen)
    assert found.told == [("shape", "gpus 2x2"), ("fewer", "gpus 2"), ("wait", "")]
    assert found.search.blockers == ["a"]


def test_any_model_and_fewer_nodes():
    fleet = "r: n0=h200:4 n1=a100:4 n2=a100:4"
    seen = snapshot(fleet, [(job("a", gpus=1), "n0:0", 0.0)], [job("x", gpus="1xh200:4")])
    assert Asked(seen).told[0] == ("model", "gpus 1x4")
    seen = snapshot(TWO, [(job("a", gpus=1), "n0:0", 0.0)], [job("x", gpus="2x4")])
    assert ("fewer", "gpus 2x3") in Asked(seen).told


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        (HOUR, "also accept a100: 2.1x slower, but up to 50m00s earlier"),
        ({}, "also accept a100: 2.1x slower, but it would start now"),
    ],
)
def test_a_slower_model_whose_speed_is_known_and_how_much_earlier(ends, text):
    fleet = "r: n0=h200:4 n1=a100:4"
    x = job("x", gpus="h200:4", speeds=(("h200", 2.1), ("a100", 1.0), ("b200", 5.0)))
    found = Asked(snapshot(fleet, [(job("a", gpus=4, **ends), "n0:0,1,2,3", 600.0)], [x]))
    assert found.told[0] == ("model", "gpus h200,a100:4")
    assert found.changes[0].text == text


def test_a_slower_model_on_which_its_earlier_attempts_were_observed():
    paces = tuple(
        MeasuredPace(epoch=Epoch(epoch), model=model, ranks=4, devices=4, pace=StepPace(steps=200, step_s=step_s))
        for epoch, model, step_s in ((1, "h200", 0.1), (2, "h200", 0.1), (3, "a100", 0.21))
    )
    x = job("x", gpus="h200:4", paces=paces)
    found = Asked(snapshot("r: n0=h200:4 n1=a100:4", [(job("a", gpus=4, **HOUR), "n0:0,1,2,3", 600.0)], [x]))
    assert found.changes[0].text == "also accept a100: 2.1x slower (observed, 3 runs), but up to 50m00s earlier"


def test_required_level_becomes_a_wish():
    x = job("x", gpus="2x4", topology=TopologyConstraint(within="rack", required=True))
    seen = snapshot(
        "r0: n0=4 n1=4 | r1: n2=4 n3=4", [(job("a", gpus=1), "n0:0", 0.0), (job("b", gpus=1), "n2:0", 0.0)], [x]
    )
    assert Asked(seen).told[0] == ("level", "prefer rack")


def test_least_priority_that_starts_it():
    runs = [
        (job("low", gpus=4, priority=1), "n0:0,1,2,3", 7200.0),
        (job("high", gpus=4, priority=7), "n1:0,1,2,3", 7200.0),
    ]
    found = Asked(
        snapshot(TWO, runs, [job("x", gpus=4)]),
        policy=PolicySettings(parameters=PolicyParameters(run_min_s=1e9, allow_moves=False)),
    )
    assert ("priority", "priority 2") in found.told


@pytest.mark.parametrize(
    ("ran_s", "text"),
    [
        (61.0, ["set priority 1 instead of 0"]),
        (12.5, ["set priority 1 instead of 0, which starts it in 48s"]),
    ],
)
def test_priority_that_helps_within_a_minute_is_offered_with_the_time(ran_s, text):
    """Found live: the guaranteed run of the job in the way had 48 s left, and why offered only to wait for its end."""
    policy = PolicySettings(parameters=PolicyParameters(run_min_s=1e9, allow_moves=False))
    runs = [(job("low", gpus=4), "n0:0,1,2,3", ran_s)]
    found = Asked(snapshot("r0: n0=4", runs, [job("x", gpus=4)]), policy=policy)
    assert [change.text for change in found.changes if change.key == "priority"] == text
    longer = PolicySettings(parameters=PolicyParameters(run_min_s=1e9, run_min_by_right_s=600.0, allow_moves=False))
    later = Asked(snapshot("r0: n0=4", [(job("low", gpus=4), "n0:0,1,2,3", 12.5)], [job("x", gpus=4)]), policy=longer)
    assert not [change for change in later.changes if change.key == "priority"]


def test_held_queue_closed_and_begin():
    assert Asked(snapshot(TWO, (), [job("x", gpus=4, held=True)])).told == [("release", "release job x")]
    assert Asked(snapshot(TWO, (), [job("x", gpus=4, begin_s=T + 60.0)])).told == [("begin", "begin now")]
    excluded = [replace(PLAIN, open=False), Queue(id="free")]
    assert Asked(snapshot(TWO, (), [job("x", gpus=4)], excluded)).told == [
        ("queue", "queue free"),
        ("open", "open queue default"),
    ]


def test_begin_and_parents_are_the_least_that_it_waits():
    assert Asked(snapshot(TWO, (), [job("x", gpus=4, begin_s=T + 600.0)])).range_s == (600.0, 600.0)


def test_quota_another_queue_or_more_of_it():
    queues = [Queue(id="default", quota_gpus=4, borrow_gpus=0), Queue(id="other", quota_gpus=4)]
    seen = snapshot(TWO, [(job("a", gpus=2, **HOUR), "n0:0,1", 600.0)], [job("x", gpus=4)], queues)
    found = Asked(seen)
    assert [kind for kind, _ in found.told] == ["queue", "fewer", "wait", "quota"]
    assert found.range_s == (0.0, 3000.0)
    assert "quota_gpus: 6" in found.changes[-1].text


def test_shorter_limit_ends_before_the_nodes_are_set_aside():
    window = Reservation(id="w", nodes=("n0", "n1"), start_s=T + 3600.0, end_s=T + 7200.0, why="firmware", by="op")
    seen = snapshot(TWO, (), [job("x", gpus=8, time_limit_s=7200.0)], reservations=[window])
    assert Asked(seen).told[0] == ("time", "time 58m")


@pytest.mark.parametrize(
    ("window", "start_s"),
    [
        ({"start_s": T - 60.0, "end_s": T + 300.0}, 300.0),  # now
        ({"start_s": T + 60.0, "end_s": T + 300.0}, 300.0),  # soon: it would still run then
    ],
)
def test_a_job_kept_out_by_a_reservation_starts_at_its_end(window, start_s):
    """Found live: the time was unknown for a job without a limit on the other node, and nothing was offered."""
    kept = Reservation(id="w", nodes=("n1",), why="upkeep", by="op", **window)
    seen = snapshot(TWO, [(job("a", gpus=4), "n0:0,1,2,3", 30.0)], [job("x", gpus=4)], reservations=[kept])
    found = Asked(seen)
    assert found.range_s == (0.0, start_s)
    assert found.search.blockers == ["a"]
    assert found.told[-1] == ("wait", "")
    urgent = Asked(seen, policy=PolicySettings(parameters=PolicyParameters(run_min_s=1e9, allow_moves=False)))
    assert next(one.text for one in urgent.changes) == "set priority 1 instead of 0, which starts it in 30s"
    elsewhere = snapshot(
        TWO, [(job("a", gpus=4), "n0:0,1,2,3", 30.0)], [job("x", gpus=4, exclude=("n1",))], reservations=[kept]
    )
    assert Asked(elsewhere).expected.latest_s is None, "the reserved node is none of its own"


def test_node_taken_back_into_work():
    fleet = make_fleet(TWO)
    cordon = Cordon(by="op", why="disk", since_s=T, drain=True)
    fleet = replace(fleet, nodes={**fleet.nodes, "n1": replace(fleet.nodes["n1"], cordon=cordon)})
    seen = snapshot(fleet, (), [job("x", gpus="2x4")])
    assert ("undrain", "return n1 to service") in Asked(seen).told


def test_node_that_its_engine_has_out_of_service_is_returned_there():
    fleet = make_fleet(TWO)
    known = fleet.nodes["n1"]
    cordon = Cordon(by=known.engine, why="bad fan", since_s=T, remedy="resume n1")
    seen = snapshot(
        replace(fleet, nodes={**fleet.nodes, "n1": replace(known, cordon=cordon)}), (), [job("x", gpus="2x4")]
    )
    (change,) = [one for one in Asked(seen).changes if one.kind == "undrain"]
    assert change.hint == Hint(HintCode.UNDRAIN_IN_ENGINE, command="resume n1")
    assert change.text == f"return node n1 to service in {known.engine} (bad fan)"


@pytest.mark.parametrize("gpus", ["4", "2x4", "8"])
def test_every_change_told_starts_it_in_a_plan(gpus):
    runs = [(job("a", gpus=3, **HOUR), "n0:0,1,2", 600.0), (job("b", gpus=1), "n1:0", 60.0)]
    seen = snapshot(TWO, runs, [job("x", gpus=gpus)])
    assert plan_snapshot(seen, CALM).placement("x") is None
    found = Asked(seen)
    assert found.told
    for change in found.changes:
        if change.key == "gpus":
            asked = replace(job("x", gpus=change.value), seq=100)
            assert plan_snapshot(replace(seen, jobs={**seen.jobs, "x": asked}), CALM).placement("x") is not None, change


def test_board_is_left_as_it_was_by_the_search():
    seen = snapshot(TWO, [(job("a", gpus=4), "n0:0,1,2,3", 0.0), (job("b", gpus=2), "n1:0,1", 0.0)], [job("x", gpus=8)])
    found = Asked(seen)
    assert found.search.blockers == ["a", "b"]
    assert found.forecast.trial.scheduler.board.free_total == 2
    never = Asked(snapshot(TWO, [(job("a", gpus=4), "n0:0,1,2,3", 0.0)], [job("x", gpus="2x4", cpus=9999)]))
    assert never.search.blockers == []


def test_search_ends_when_its_time_is_over():
    seen = snapshot(TWO, [(job("a", gpus=4), "n0:0,1,2,3", 0.0)], [job("x", gpus=8)])
    assert Asked(seen, go_on=lambda: False).changes == []


def test_only_the_first_in_line_are_tried_beside_it():
    waits = [job(f"w{number}", gpus=1, priority=number) for number in range(50)]
    small = trim_snapshot(snapshot(TWO, (), [*waits, job("x", gpus=8)]), job("x", gpus=8), others_max=10)
    assert sorted(small.jobs) == sorted(["x", *(f"w{number}" for number in range(40, 50))])


def test_of_several_ways_to_wait_the_shortest_is_named():
    runs = [
        (job("later", gpus=4, time_limit_s=7200.0), "n0:0,1,2,3", 0.0),
        (job("soon", gpus=4, time_limit_s=600.0), "n1:0,1,2,3", 0.0),
        (job("middle", gpus=4, time_limit_s=3600.0), "n2:0,1,2,3", 0.0),
    ]
    assert Asked(snapshot("r0: n0=4 n1=4 n2=4", runs, [job("x", gpus=8)])).search.blockers == ["soon", "middle"]


def test_array_limit_and_parents_bound_the_start():
    place = {"array_id": "7", "size": 3, "running_max": 1, "lowest": 0, "highest": 2}
    first = job("7_0", gpus=1, array=ArrayPosition(index=0, **place), **HOUR)
    seen = snapshot(TWO, [(first, "n0:0", 600.0)], [job("x", gpus=1, array=ArrayPosition(index=1, **place))])
    found = Asked(seen)
    assert (found.search.reason.value, found.search.blockers, found.range_s) == ("array_limit", ["7_0"], (0.0, 3000.0))
    parent = Dependency(kind=DependencyKind.AFTER_OK, job_id="a")
    seen = snapshot(TWO, [(job("a", gpus=1, **HOUR), "n0:0", 600.0)], [job("x", gpus=1, unmet_dependencies=(parent,))])
    assert Asked(seen).range_s == (0.0, 3000.0)
    alone = Dependency(kind=DependencyKind.SINGLETON)
    expected = Asked(snapshot(TWO, (), [job("x", gpus=1, unmet_dependencies=(alone,))])).expected
    assert (expected.latest_s, expected.unknown) == (None, "it waits for singleton, whose time is unknown")


def test_budget_waits_for_its_next_period():
    queue = Queue(id="default", budget_gpu_h=1.0, budget_period_s=86_400.0)
    seen = snapshot(TWO, (), [job("x", gpus=1)], [queue])
    seen = replace(
        seen, queue_usage={"default": QueueUsage(queue="default", at_s=T, period_s=T - T % 86_400.0, gpu_s=7200.0)}
    )
    left_s = 86_400.0 - T % 86_400.0
    assert Asked(seen).range_s == (left_s, left_s)


def test_change_of_a_job_that_can_never_start_is_not_told():
    seen = snapshot(TWO, (), [job("x", gpus=4)], [Queue(id="default", quota_gpus=0, borrow_gpus=2)])
    found = Asked(seen)
    assert found.search.reason is WaitReasonCode.NEVER
    assert found.expected.unknown == "4 GPUs asked; queue default can get at most 2 (quota 0, borrow 2)"
    assert [kind for kind, _ in found.told] == ["fewer", "quota"]


def test_answers_boards_go_with_it_without_the_garbage_collector():
    """`why` makes a dozen boards; in a head the collector comes by so seldom that they would be hundreds of MiB."""
    seen = snapshot(
        "r0: n0=4 n1=4 n2=4",
        [(job("a", gpus=4), "n0:0,1,2,3", 10.0), (job("b", gpus=2), "n1:0,1", 1000.0)],
        [job("x", gpus=8), job("y", gpus=4)],
    )

    def answer():
        Asked(seen, policy=PolicySettings()).forecast.trial.release()

    assert rings(answer) == []


def test_live_schedulers_old_board_goes_when_it_makes_another():
    seen = snapshot(TWO, [(job("a", gpus=2), "n0:0,1", 10.0)], [job("x", gpus=8), job("y", gpus=4)])
    scheduler = Scheduler(PolicySettings())
    scheduler.plan(seen, T)

    def another():
        scheduler.stale = True
        scheduler.plan(seen, T + 1.0)

    assert rings(another) == []


def rings(work):
    """What of a board is left after `work` for the collector alone to find."""
    work()  # what is made once stays out
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        work()
        gc.collect()
        return [one for one in gc.garbage if isinstance(one, (Board, JobEntry, SimilarJobs, Policy, Scheduler))]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()

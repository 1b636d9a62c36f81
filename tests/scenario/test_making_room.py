"""Making room, drawn: who must go so that another may start, by what right, and who is left alone. A job drawn without more has run two hours.

A plan in a line: `b stops for a` or `moves`, placements, then who waits. A job that waits for its room to be left is `claimed`.
"""

from typing import Any

import pytest

from phalanx.core.ids import Epoch, JobId
from phalanx.core.scheduling.policies import PolicyParameters
from phalanx.core.work.job import PublishedCheckpoint
from phalanx.core.work.spec import TopologyConstraint
from phalanx.core.work.states import WaitReasonCode
from tests.builders import T, drawn, job, lined, make_fleet, plan_of, queue

HIGH: dict[str, Any] = {"priority": 5}
SAVES: dict[str, Any] = {"saves_on_stop": True}
STAYS: dict[str, Any] = {"preemptible": False}
WHOLE = "0-7"


def busy(fleet, *running):
    """A fleet, drawn or made, on which these run: (name, where, GPUs and more)."""
    fleet = make_fleet(fleet) if isinstance(fleet, str) else fleet
    for name, on, fields in running:
        has = {"gpus": sum(1 for _ in devices(on)), "for_s": 7200.0, **fields}
        for_s = has.pop("for_s")
        fleet = fleet.runs(job(name, **has), on, for_s=for_s)
    return fleet


def devices(on):
    for word in on.split():
        for span in word.partition(":")[2].split(","):
            first, _, last = span.partition("-")
            yield from range(int(first), int(last or first) + 1)


def saved(ago_s):
    """Its newest checkpoint."""
    return (PublishedCheckpoint(epoch=Epoch(1), step=1, path="/ckpt", digest="sha", saved_s=T - ago_s),)


# ---- by priority ----------------------------------------------------------------------------------------------------

# what runs, who comes -> the plan. Everything else about the fleet is in the drawing.
PRIORITY = [
    ("lower goes", "r: n0=8", [("l", "n0:0-7", {})], {"gpus": 8, **HIGH}, "l stops for a | a claimed"),
    ("equal stays", "r: n0=8", [("l", "n0:0-7", {"for_s": 300, **HIGH})], {"gpus": 8, **HIGH}, "a resources"),
    ("higher stays", "r: n0=8", [("l", "n0:0-7", {"priority": 6})], {"gpus": 8, **HIGH}, "a resources"),
    ("guaranteed run", "r: n0=8", [("l", "n0:0-7", {"for_s": 59})], {"gpus": 8, **HIGH}, "a resources"),
    ("past it", "r: n0=8", [("l", "n0:0-7", {"for_s": 61})], {"gpus": 8, **HIGH}, "l stops for a | a claimed"),
    (
        "budget of stops is spent",
        "r: n0=8",
        [("l", "n0:0-7", {"preemptions": PolicyParameters().stops_max})],
        {"gpus": 8, **HIGH},
        "a resources",
    ),
    (
        "one stop is left",
        "r: n0=8",
        [("l", "n0:0-7", {"preemptions": PolicyParameters().stops_max - 1})],
        {"gpus": 8, **HIGH},
        "l stops for a | a claimed",
    ),
    ("not preemptible", "r: n0=8", [("l", "n0:0-7", {"preemptible": False})], {"gpus": 8, **HIGH}, "a resources"),
    (
        "the lowest first, dear or not",
        "r: n0=8 n1=8",
        [("l", "n0:0-7", {"priority": 1, "for_s": 90}), ("m", "n1:0-7", {"priority": 0})],
        {"gpus": 8, **HIGH},
        "m stops for a | a claimed",
    ),
    (
        "who has lost least",
        "r: n0=8 n1=8",
        [("l", "n0:0-7", {}), ("m", "n1:0-7", {"for_s": 3600})],
        {"gpus": 8, **HIGH},
        "m stops for a | a claimed",
    ),
    (
        "who saves when asked loses nothing",
        "r: n0=8 n1=8",
        [("l", "n0:0-7", {"saves_on_stop": True}), ("m", "n1:0-7", {"for_s": 600})],
        {"gpus": 8, **HIGH},
        "l stops for a | a claimed",
    ),
    (
        "work since the checkpoint counts",
        "r: n0=8 n1=8",
        [("l", "n0:0-7", {"checkpoints": saved(100)}), ("m", "n1:0-7", {"for_s": 600})],
        {"gpus": 8, **HIGH},
        "l stops for a | a claimed",
    ),
    (
        "only as many as needed",
        "r: n0=8",
        [(f"l{at}", f"n0:{at}", {"saves_on_stop": True}) for at in range(8)],
        {"gpus": 2, **HIGH},
        "l0 stops for a | l1 stops for a | a claimed",
    ),
    (
        "what is free counts",
        "r: n0=8 n1=8",
        [("l", "n0:0-5", {"for_s": 100}), ("m", "n1:0-7", {"for_s": 100})],
        {"gpus": 8, **HIGH},
        "l stops for a | a claimed",
    ),
    (
        "a gang goes whole, and is not touched for a part",
        "r: n0=8 n1=8",
        [("g", "n0:0-3 n1:0-3", {"gpus": "2x4"}), ("s", "n1:4-7", {}), ("h", "n0:4-7", {"priority": 9})],
        {"gpus": 4, **HIGH},
        "s stops for a | a claimed",
    ),
    (
        "CPUs are room too",
        "r: n0=8",
        [("l", "n0:0", {"cpus": 30})],
        {"gpus": 1, "cpus": 8, **HIGH},
        "l stops for a | a claimed",
    ),
    (
        "the preferred model first",
        "r: n0=h200:4 n1=a100:4",
        [("l", "n0:0-3", {"gpus": "h200:4"})],
        {"gpus": "h200,a100:4", **HIGH},
        "a n1:0,1,2,3",
    ),
]


@pytest.mark.parametrize(
    ("fleet", "running", "wanted", "plan"), [row[1:] for row in PRIORITY], ids=[row[0] for row in PRIORITY]
)
def test_priority_makes_room(fleet, running, wanted, plan):
    found = plan_of(busy(fleet, *running).with_jobs(job("a", **wanted)), parameters=PolicyParameters(allow_moves=False))
    assert lined(found) == plan


def test_four_nodes_with_two_free_each_cost_a_gang_the_jobs_of_one_node():
    """Eight are free, and freeing eight scattered ones more would not do: the gang needs one node."""
    running = [
        (f"s{node}{part}", f"n{node}:{2 * part},{2 * part + 1}", {"for_s": 7200 - node})
        for node in range(4)
        for part in range(3)
    ]
    plan = plan_of(
        busy("r: n0=8 n1=8 n2=8 n3=8", *running).with_jobs(job("a", gpus=8, **HIGH)),
        parameters=PolicyParameters(allow_moves=False),
    )
    assert lined(plan) == "s30 stops for a | s31 stops for a | s32 stops for a | a claimed"
    assert plan.waiting("a").detail == "waits for running jobs on n3 to save and stop"


def test_topology_that_is_required_is_cleared_in_one_domain():
    fleet = busy(
        "r0: n0=8 n1=8 | r1: n2=8 n3=8",
        ("w", "n0:0-7", {"for_s": 300}),
        ("x", "n1:0-7", {}),
        ("y", "n2:0-7", {"for_s": 400}),
    )
    wanted = job("a", gpus="2x8", topology=TopologyConstraint(within="rack", required=True), **HIGH)
    assert (
        lined(plan_of(fleet.with_jobs(wanted), parameters=PolicyParameters(allow_moves=False)))
        == "y stops for a | a claimed"
    )


def test_who_is_stopped_is_told_by_whom_and_by_what_right():
    plan = plan_of(busy("r: n0=8", ("l", "n0:0-7", {})).with_jobs(job("a", gpus=8, **HIGH)))
    (stop,) = plan.stops
    assert (stop.preempted_by, stop.why) == ("a", "preempted by job a, which has a higher priority")


def test_a_stopped_job_does_not_pass_the_stop_on_to_a_like_that_has_more_to_lose():
    """It lost an hour's work and is not young for it: else it would cost its neighbour two."""
    fleet = busy("r: n0=8 n1=8", ("l", "n0:0-7", {}), ("m", "n1:0-7", {"for_s": 3600}))
    assert lined(plan_of(fleet.with_jobs(job("a", gpus=8, **HIGH)))) == "m stops for a | a claimed"


# ---- moves before stops ---------------------------------------------------------------------------------------------

MOVES = [
    (
        "into the hole beside",
        "r: n0=8 n1=8",
        [("six", "n0:0-5", {}), ("one", "n1:0", SAVES)],
        {"gpus": 8},
        "one moves for a | a claimed",
    ),
    (
        "it has saved lately",
        "r: n0=8 n1=8",
        [("six", "n0:0-5", {}), ("one", "n1:0", {"checkpoints": saved(1700)})],
        {"gpus": 8},
        "one moves for a | a claimed",
    ),
    (
        "who saves moves as soon as it has run for as long as a restart takes",
        "r: n0=8 n1=8",
        [("six", "n0:0-5", STAYS), ("one", "n1:0", {"for_s": 61, **SAVES})],
        {"gpus": 8},
        "one moves for a | a claimed",
    ),
    (
        "not sooner",
        "r: n0=8 n1=8",
        [("six", "n0:0-5", STAYS), ("one", "n1:0", {"for_s": 59, **SAVES})],
        {"gpus": 8},
        "a resources",
    ),
    (
        "it moved four minutes ago",
        "r: n0=8 n1=8",
        [("six", "n0:0-5", STAYS), ("one", "n1:0", {"for_s": 240, "moves": 1, **SAVES})],
        {"gpus": 8},
        "a resources",
    ),
    (
        "by right it moves however lately it started",
        "r: n0=8 n1=8",
        [("six", "n0:0-5", {}), ("one", "n1:0", {"for_s": 70})],
        {"gpus": 8, **HIGH},
        "one moves for a | a claimed",
    ),
    (
        "a right to stop is no need to",
        "r: n0=8 n1=8",
        [("six", "n0:0-5", {}), ("one", "n1:0", {})],
        {"gpus": 8, **HIGH},
        "one moves for a | a claimed",
    ),
    (
        "no hole: by right it stops",
        "r: n0=8 n1=8",
        [("six", "n0:0-7", {"gpus": 8, **HIGH}), ("one", "n1:0", {})],
        {"gpus": 8, **HIGH},
        "one stops for a | a claimed",
    ),
    (
        "no hole, no right: it stays",
        "r: n0=8 n1=8",
        [("six", "n0:0-7", {"for_s": 300}), ("one", "n1:0", {"for_s": 300})],
        {"gpus": 8},
        "a resources",
    ),
    (
        "moved a moment ago",
        "r: n0=8 n1=8",
        [("six", "n0:0-5", {"for_s": 200}), ("one", "n1:0", {"for_s": 200})],
        {"gpus": 8},
        "a resources",
    ),
    (
        "not preemptible",
        "r: n0=8 n1=8",
        [("six", "n0:0-5", {"preemptible": False}), ("one", "n1:0", {"preemptible": False})],
        {"gpus": 8},
        "a resources",
    ),
]


@pytest.mark.parametrize(
    ("fleet", "running", "wanted", "plan"), [row[1:] for row in MOVES], ids=[row[0] for row in MOVES]
)
def test_small_jobs_move_into_holes_before_anybody_stops(fleet, running, wanted, plan):
    assert lined(plan_of(busy(fleet, *running).with_jobs(job("a", **wanted)))) == plan


def test_who_holds_a_sick_device_moves_into_no_hole_that_is_smaller_than_its_gang():
    """It asked for four and three of them are well: the three that are free on n0 are not its place."""
    fleet = busy("r: n0=8 n1=4", ("five", "n0:0-4", {"cpus": 30, "priority": 9}), ("four", "n1:0-3", {})).sick("n1", 0)
    plan = plan_of(fleet.with_jobs(job("a", gpus=3, cpus=8, **HIGH)))
    assert lined(plan) == "four stops for a | a claimed"


def test_a_move_says_where_to_and_for_whom():
    plan = plan_of(busy("r: n0=8 n1=8", ("six", "n0:0-5", {}), ("one", "n1:0", SAVES)).with_jobs(job("a", gpus=8)))
    assert (
        plan.stop("one").why == "moved to n0 to make room for job a, which is expected to end sooner on the same GPUs"
    )


def test_a_wait_for_a_move_says_how_long_the_job_stays():
    fleet = busy("r: n0=8 n1=8", ("six", "n0:0-5", STAYS), ("one", "n1:0", {"for_s": 200, **SAVES, "moves": 1}))
    assert reason(fleet).endswith(
        "at most 7 on one node; it fits when job one moves, which may be 5m00s after a start or move"
    )
    own = fleet.with_queues(queue("default", min_stay_s=3600.0))
    assert reason(own).endswith("; it fits when job one moves, which may be 1h00m after a start or move")
    assert (
        lined(plan_of(fleet.with_queues(queue("default", min_stay_s=100.0)).with_jobs(job("a", gpus=8))))
        == "one moves for a | a claimed"
    )
    stuck = busy("r: n0=8 n1=8", ("six", "n0:0-5", STAYS), ("one", "n1:0", {"preemptible": False}))
    assert "moves" not in reason(stuck)


def test_a_queue_below_has_the_least_stay_of_the_nearest_above():
    fleet = busy("r: n0=8 n1=8", ("six", "n0:0-5", STAYS), ("one", "n1:0", {"queue": "nlp", "for_s": 1000, **SAVES}))
    waits = fleet.with_queues(queue("default"), queue("research", min_stay_s=9000.0), queue("nlp", parent="research"))
    assert lined(plan_of(waits.with_jobs(job("a", gpus=8)))) == "a resources"
    assert (
        lined(plan_of(fleet.with_queues(queue("default"), queue("nlp")).with_jobs(job("a", gpus=8)))) != "a resources"
    )


def reason(fleet, parameters=None, **wanted):
    plan = plan_of(fleet.with_jobs(job("a", **{"gpus": 8, **wanted})), parameters=parameters or PolicyParameters())
    assert lined(plan) == "a resources"
    return plan.waits[JobId("a")].detail


# ---- elastic --------------------------------------------------------------------------------------------------------

THREE = "r: n0=4 n1=4 n2=4"
WIDE = ("e", "n0:0-3 n1:0-3 n2:0-3", {"gpus": "1..3x4", "saves_on_stop": True})


def test_elastic_starts_as_wide_as_there_is_room():
    assert (
        drawn(plan_of(make_fleet(THREE).held(n1=[0]).with_jobs(job("e", gpus="1..3x4"))), "e")
        == "n0:0,1,2,3 n2:0,1,2,3"
    )


def test_elastic_shrinks_for_a_newcomer_before_anybody_stops():
    plan = plan_of(busy(THREE, WIDE).with_jobs(job("a", gpus=4)))
    assert lined(plan) == "e moves for a | a claimed"
    assert plan.stop("e").why == "moved to n0, n1 to make room for job a: an elastic job shrinks"


def test_a_wait_for_an_elastic_job_to_give_nodes_back_says_how_long_it_stays():
    """Found live: the only advice was to wait for the end of the job, which gave the node back ten seconds later."""
    young = busy(
        "r: n0=4 n1=4", ("e", "n0:0-3 n1:0-3", {"gpus": "1..2x4", "saves_on_stop": True, "for_s": 10, "moves": 1})
    )
    why = reason(young.with_queues(queue("default", min_stay_s=20.0)), gpus=4)
    assert why.endswith("; it fits when job e gives nodes back, which may be 20s after a start or move")
    least = busy("r: n0=4 n1=4", ("e", "n0:0-3 n1:0-3", {"gpus": "2..3x4", "saves_on_stop": True, "for_s": 10}))
    assert "gives" not in reason(least.with_queues(queue("default", min_stay_s=20.0)), gpus=4)


def test_elastic_shrinks_no_further_than_it_must_and_than_its_least():
    assert "moved to n0 to" in plan_of(busy(THREE, WIDE).with_jobs(job("a", gpus="2x4"))).stop("e").why
    least = busy(THREE, (*WIDE[:2], {**WIDE[2], "gpus": "2..3x4", "for_s": 600, **HIGH}))
    assert lined(plan_of(least.with_jobs(job("a", gpus="2x4")))) == "a resources"


def test_elastic_does_not_shrink_onto_a_drained_node():
    plan = plan_of(busy(THREE, WIDE).drained("n0").with_jobs(job("a", gpus=4)))
    assert plan.stop("e").why == "moved to n1 to make room for job a: an elastic job shrinks"


def test_elastic_does_not_shrink_onto_a_node_with_a_sick_device():
    """Of n0, where it holds all four, three are left: its part there is none of its parts any more."""
    plan = plan_of(busy(THREE, WIDE).sick("n0", 0).with_jobs(job("a", gpus=4)))
    assert plan.stop("e").why == "moved to n1 to make room for job a: an elastic job shrinks"
    two_sick = busy(THREE, WIDE).sick("n0", 0).sick("n1", 1)
    assert "moved to n2 to make room" in plan_of(two_sick.with_jobs(job("a", gpus="2x3"))).stop("e").why


def test_elastic_grows_into_idle_nodes_once_nobody_waits():
    narrow = busy(THREE, ("e", "n1:0-3", WIDE[2]))
    assert plan_of(narrow.with_jobs()).stop("e").why == "moved to n0, n1, n2: more nodes are idle"
    assert plan_of(busy(THREE, ("e", "n1:0-3", {**WIDE[2], "for_s": 119})).with_jobs()).stops == ()
    assert plan_of(busy(THREE, ("e", "n1:0-3", {**WIDE[2], "for_s": 121})).with_jobs()).stops != ()
    moved = {**WIDE[2], "moves": 1}
    assert plan_of(busy(THREE, ("e", "n1:0-3", {**moved, "for_s": 599})).with_jobs()).stops == ()
    assert plan_of(busy(THREE, ("e", "n1:0-3", {**moved, "for_s": 601})).with_jobs()).stops != ()
    unsaved = busy(THREE, ("e", "n1:0-3", {**WIDE[2], "saves_on_stop": False}))
    assert plan_of(unsaved.with_jobs()).stops == (), "only where it costs little: at a checkpoint"


def test_elastic_grows_past_those_whom_their_quota_keeps_out():
    """b's queue holds all it may: that it waits keeps no idle node from others."""
    fleet = make_fleet(THREE).with_queues(queue("default"), queue("small", quota_gpus=4, borrow_gpus=0))
    full = busy(fleet, ("e", "n1:0-3", WIDE[2]), ("a", "n0:0-3", {"queue": "small"}))
    plan = plan_of(full.with_jobs(job("b", gpus=4, queue="small")))
    assert plan.stop("e").why == "moved to n1, n2: more nodes are idle"
    assert plan.waiting("b").reason is WaitReasonCode.QUOTA


# ---- repair ---------------------------------------------------------------------------------------------------------

LOST: dict[str, Any] = {"reason": WaitReasonCode.NODE_FAIL, "attained_s": 3600.0, "submit_s": T - 4000}


def test_a_gang_that_lost_its_node_goes_before_a_newcomer_whatever_its_priority():
    fleet = make_fleet("r: n0=8 n1=8 n2=8").down("n2")
    plan = plan_of(fleet.with_jobs(job("new", gpus="2x8", **HIGH), job("lost", gpus="2x8", **LOST)))
    assert lined(plan, "lost", "new") == "lost n0:0,1,2,3,4,5,6,7 n1:0,1,2,3,4,5,6,7 | new resources"


def test_newcomers_do_not_take_what_is_left_of_a_lost_gangs_place():
    """n2 is gone and one of the two it had is free: small work waits, or the gang would lose that too."""
    fleet = busy("r: n0=8 n1=8 n2=8", ("old", "n1:0-7", {"for_s": 90_000, **HIGH})).down("n2")
    plan = plan_of(fleet.with_jobs(job("lost", gpus="2x8", **LOST), job("small", gpus=1)))
    assert drawn(plan, "small") == ""


def test_who_came_while_the_gang_waited_gives_the_place_back():
    fleet = busy("r: n0=8", ("new", "n0:0-7", {"for_s": 90}))
    plan = plan_of(fleet.with_jobs(job("lost", gpus=8, **LOST)))
    assert lined(plan) == "new stops for lost | lost claimed"
    assert plan.stop("new").why == "preempted by job lost, which lost a node and gets its place back"


@pytest.mark.parametrize("before_s", [0, 9999])
def test_only_a_job_that_lost_its_nodes_is_told_of_its_right_to_them(before_s):
    """Both are of one class; whichever is explained first."""
    running = (("x", "n0:0-7", {"for_s": 30}), ("y", "n1:0-7", {"for_s": 20}))
    wanted = sorted(
        [job("lost", gpus=8, **LOST), job("plain", gpus=8, submit_s=T - before_s)], key=lambda one: one.submit_s
    )
    plan = plan_of(busy("r: n0=8 n1=8", *running).with_jobs(*wanted), parameters=PolicyParameters())
    assert plan.waits[JobId("lost")].detail.endswith("; it may stop job x 1m00s after its start: it lost its nodes")
    assert plan.waits[JobId("plain")].detail.endswith("at most 0 on one node")


def test_the_only_node_that_can_be_freed_is_named_although_it_is_kept_free():
    plan = plan_of(
        busy("r: n0=8", ("x", "n0:0-7", {"for_s": 30})).with_jobs(job("lost", gpus=8, **LOST)),
        parameters=PolicyParameters(),
    )
    assert plan.waits[JobId("lost")].detail.endswith("; it may stop job x 1m00s after its start: it lost its nodes")


# ---- borrowed room --------------------------------------------------------------------------------------------------


def lending(*running):
    """Two queues with a right to eight each, on sixteen."""
    fleet = make_fleet("r: n0=8 n1=8").with_queues(queue("own", quota_gpus=8), queue("loan", quota_gpus=8))
    return busy(fleet, *((name, on, {"queue": "loan", **fields}) for name, on, fields in running))


RECLAIM = [
    (
        "cheapest first",
        [("x", "n0:0-7", {}), ("y", "n1:0-7", {"for_s": 3600})],
        {"gpus": 8},
        "y stops for a | a claimed",
    ),
    (
        "only as many as needed",
        [("x", "n0:0-7", {}), ("y", "n1:0-3", {"for_s": 3600}), ("z", "n1:4-7", {})],
        {"gpus": 4},
        "y stops for a | a claimed",
    ),
    ("within the right alone", [("x", "n0:0-7", {}), ("o", "n1:0-7", {"queue": "own"})], {"gpus": 8}, "a resources"),
    (
        "a loan is a loan, whatever its priority",
        [("x", "n0:0-7", {"priority": 9}), ("y", "n1:0-7", {"priority": 9})],
        {"gpus": 8},
        "x stops for a | a claimed",
    ),
    (
        "even of one never stopped otherwise",
        [("x", "n0:0-7", {"preemptible": False}), ("y", "n1:0-7", {"preemptible": False, "for_s": 600})],
        {"gpus": 8},
        "y stops for a | a claimed",
    ),
    (
        "but for its first minute",
        [("x", "n0:0-7", {"for_s": 30}), ("y", "n1:0-7", {"for_s": 30})],
        {"gpus": 8},
        "a resources",
    ),
]


@pytest.mark.parametrize(("running", "wanted", "plan"), [row[1:] for row in RECLAIM], ids=[row[0] for row in RECLAIM])
def test_an_owner_takes_back_what_was_borrowed(running, wanted, plan):
    found = plan_of(
        lending(*running).with_jobs(job("a", queue="own", **wanted)), parameters=PolicyParameters(allow_moves=False)
    )
    assert lined(found) == plan


def test_free_devices_go_to_their_waiting_owner_before_a_borrower_of_larger_value():
    """The owner would stop the borrower again, after its guaranteed run."""
    fleet = lending(("x", "n0:0-7", {"priority": 9}))
    owner, borrower = job("a", gpus=8, queue="own"), job("b", gpus=8, queue="loan", priority=9)
    assert lined(plan_of(fleet.with_jobs(borrower, owner))) == "a n1:0,1,2,3,4,5,6,7 | b resources"
    within = job("c", gpus=8, queue="loan", priority=9)
    free = make_fleet("r: n0=8").with_queues(queue("own", quota_gpus=8), queue("loan", quota_gpus=8))
    assert lined(plan_of(free.with_jobs(owner, within))) == "c n0:0,1,2,3,4,5,6,7 | a resources", (
        "both within their right"
    )


def test_a_borrower_is_told_that_its_loan_ends():
    plan = plan_of(
        lending(("x", "n0:0-7", {}), ("y", "n1:0-7", {"for_s": 600})).with_jobs(job("a", gpus=8, queue="own"))
    )
    assert plan.stop("y").why == "preempted by job a, whose queue reclaims the GPUs it had lent"


def test_an_owner_is_told_whose_loan_ends_and_when():
    borrowers = (("x", "n0:0-7", {"for_s": 30}), ("y", "n1:0-7", {"for_s": 20}))
    waits = "; it may stop job x 1m00s after its start: its queue takes lent quota back"
    assert reason(lending(*borrowers), queue="own").endswith("at most 0 on one node" + waits)
    longer = PolicyParameters(run_min_by_right_s=3600.0)
    assert "job x 1h00m after its start" in reason(lending(*borrowers), longer, queue="own")
    many = [(f"j{number}", f"n{number // 8}:{number % 8}", {"for_s": number}) for number in range(16)]
    assert reason(lending(*many), queue="own").endswith(
        "; it may stop job j8, job j9, job j10 and 5 more 1m00s after their starts: its queue takes lent quota back"
    )
    never = PolicyParameters(allow_stops=False, allow_moves=False)
    assert "may stop" not in reason(lending(*borrowers), never, queue="own")
    assert "may stop" not in reason(lending(*borrowers), queue="loan"), "it would borrow too"


def test_a_higher_priority_is_told_whom_it_may_stop_later_and_a_job_without_a_right_nothing():
    young = busy("r: n0=8", ("l", "n0:0-3", {"for_s": 10}), ("m", "n0:4-7", {"for_s": 20}))
    assert reason(young, **HIGH).endswith("; it may stop job l, job m 1m00s after their starts: its priority is higher")
    assert "may stop" not in reason(young)
    assert "may stop" not in reason(busy("r: n0=8", ("l", "n0:0-7", {"for_s": 10, "preemptible": False})), **HIGH)


def test_a_lower_job_of_the_own_queue_goes_where_the_quota_is_full():
    fleet = make_fleet("r: n0=8 n1=8").with_queues(queue("own", quota_gpus=8, borrow_gpus=0), queue("default"))
    fleet = fleet.runs(job("mine", gpus=8, queue="own"), "n0:0-7").runs(job("other", gpus=4), "n1:0-3", for_s=100)
    assert lined(plan_of(fleet.with_jobs(job("a", gpus=8, queue="own", **HIGH)))) == "mine stops for a | a claimed"


def test_what_is_cleared_beyond_the_need_is_used_at_once():
    """Found live: a borrower of 12 left for 4, and small jobs saw the other 8 lie idle until the next round."""
    fleet = busy("r: n0=4 n1=4 n2=4", ("wide", "n0:0-3 n1:0-3 n2:0-3", {"gpus": "3x4"}))
    plan = plan_of(fleet.with_jobs(job("high", gpus=4, **HIGH), job("small", gpus=1)))
    assert plan.stop("wide") is not None
    assert plan.waiting("small").reason is WaitReasonCode.CLAIMED

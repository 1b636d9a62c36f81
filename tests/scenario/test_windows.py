"""Reservations and maintenance under the real controller and supervisors, in virtual time: who leaves, who may come, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest

from phalanx.core.errors import BadRequest, Conflict, NotFound, NotPermitted
from phalanx.core.fleet.node import Cordon
from phalanx.core.ids import JobId, NodeId, QueueId, ReservationId, SupervisorId, UserId
from phalanx.core.lifecycle.verify import rejection_reason
from phalanx.core.state.events import CordonNode, EndReservation, PutReservation, UncordonNode
from phalanx.core.state.plan import Placement
from phalanx.core.state.records import NODES, RESERVATIONS
from phalanx.core.state.reports import SupervisorRegistered
from phalanx.core.state.world import World, WorldChange
from phalanx.core.work.attempt import EndCause
from phalanx.core.work.reservation import OPEN_ENDED_S, Reservation
from phalanx.core.work.states import JobState, WaitReasonCode
from phalanx.ports.store import StoreRefused
from tests.builders import PLAIN, T, allocation, make_node
from tests.builders import job as make_job
from tests.harness import Harness
from tests.simulated_node import JobBehaviour

SAVING = JobBehaviour(run_s=60.0, save_every_s=2.0)


@pytest.fixture
def cluster():
    return Harness("r: n0=4 n1=4 n2=4")


@pytest.fixture
def alone():
    return Harness("r: n0=4")


def reserve(cluster: Harness, nodes: str, in_s: float, for_s: float, name: str = "fans", **more: Any) -> Reservation:
    """From `in_s` on, for `for_s`; maintenance unless users or queues are named."""
    start_s = cluster.now.wall_s + in_s
    wanted = Reservation(
        id=ReservationId(name),
        nodes=tuple(map(NodeId, nodes.split())),
        start_s=start_s,
        end_s=start_s + for_s,
        by=UserId("op"),
        **more,
    )
    made: Reservation = cluster.request(PutReservation(reservation=wanted))
    return made


def unreserve(cluster: Harness, name: str = "fans") -> Any:
    return cluster.request(EndReservation(reservation_id=ReservationId(name), by=UserId("op")))


def homes(cluster, job):
    return {grant.node_id for grant in cluster.live(job).allocation.grants}


def history(cluster, kind):
    return [line.text for line in cluster.store.history(limit=10_000) if line.kind == kind]


# ---- who leaves ------------------------------------------------------------------------------------------------------


def test_job_is_saved_and_goes_on_elsewhere_when_maintenance_begins(cluster):
    job = cluster.submit(gpus=4, behaviour=SAVING)
    cluster.runs(job)
    (home,) = homes(cluster, job)
    reserve(cluster, home, in_s=10.0, for_s=300.0)
    cluster.run(9.0)
    assert cluster.job(job).epoch == 1, "not before it begins"
    cluster.until(lambda: cluster.job(job).epoch == 2)
    cluster.runs(job)
    first, second = cluster.attempts(job)
    assert first.causes == (EndCause.DRAINED,)
    assert first.why == "reservation fans begins"
    assert home not in homes(cluster, job)
    assert second.placed_s >= first.ended_s
    assert second.resume_from.step > 0
    assert cluster.job(job).charged_restarts == 0, "nobody's fault"
    assert history(cluster, "maintenance_begun") == [f"reservation fans begins: {home} for maintenance, for 5m00s"]


def notices(cluster, job):
    return [line.text for line in cluster.store.history(job_id=job) if line.kind == "maintenance_notice"]


def test_owners_are_told_when_it_is_planned_when_their_job_starts_there_and_when_it_is_cancelled(alone):
    job = alone.submit(gpus=2, behaviour=SAVING)
    alone.runs(job)
    reserve(alone, "n0", in_s=2 * 86_400.0, for_s=300.0, why="new fans")
    assert len(notices(alone, job)) == 1
    assert "maintenance fans begins in 2d00h" in notices(alone, job)[0]
    assert notices(alone, job)[0].endswith("this job is then saved, stopped and placed elsewhere: new fans")
    assert "it will stop job" in history(alone, "maintenance_planned")[0]
    later = alone.submit(gpus=1, behaviour=SAVING)
    alone.runs(later)
    assert len(notices(alone, later)) == 1
    unreserve(alone)
    for told in (job, later):
        assert notices(alone, told)[-1] == "maintenance fans of n0 is cancelled"


def test_a_job_that_ends_in_time_is_not_told(alone):
    job = alone.submit(gpus=2, behaviour=SAVING, time_limit_s=600.0)
    alone.runs(job)
    reserve(alone, "n0", in_s=3600.0, for_s=300.0)
    assert notices(alone, job) == []
    assert "stop" not in history(alone, "maintenance_planned")[0]


def test_an_open_window_drains_at_its_start_until_the_nodes_are_returned(cluster):
    job = cluster.submit(gpus=4, behaviour=SAVING)
    cluster.runs(job)
    (home,) = homes(cluster, job)
    reserve(cluster, home, in_s=10.0, for_s=OPEN_ENDED_S, open_ended=True, why="new board")
    cluster.until(lambda: cluster.job(job).epoch == 2)
    cluster.runs(job)
    assert home not in homes(cluster, job)
    node = cluster.store.record(NODES, home)
    assert (node.cordon.drain, node.cordon.why) == (True, "new board")
    assert cluster.store.reservations() == []
    cluster.request(UncordonNode(node_id=home, by=UserId("op")))
    assert cluster.store.record(NODES, home).cordon is None


@pytest.mark.parametrize("planned", [False, True])
def test_undrain_returns_a_node_from_its_maintenance_and_only_if_asked_from_a_planned_one(cluster, planned):
    reserve(cluster, "n0 n1", in_s=0.0, for_s=600.0, name="now")
    reserve(cluster, "n0", in_s=3600.0, for_s=600.0, name="later")
    cluster.run(1.0)
    cluster.request(UncordonNode(node_id=NodeId("n0"), by=UserId("op"), planned=planned))
    left = {one.id: one.nodes for one in cluster.store.reservations()}
    assert left == {"now": ("n1",)} if planned else left == {"now": ("n1",), "later": ("n0",)}
    job = cluster.submit(gpus=4, behaviour=SAVING, nodelist=("n0",)) if planned else None
    if job is not None:
        cluster.runs(job)


def test_job_with_nowhere_to_go_waits_for_the_end_and_resumes(alone):
    job = alone.submit(gpus=4, behaviour=SAVING)
    alone.runs(job)
    reserve(alone, "n0", in_s=5.0, for_s=120.0)
    alone.until(alone.is_(job, JobState.PENDING))
    alone.run(30.0)
    assert alone.head.controller.waits[job].reason is WaitReasonCode.RESERVATION
    alone.runs(job)
    assert alone.attempts(job)[1].placed_s >= alone.attempts(job)[0].placed_s + 120.0
    assert history(alone, "maintenance_ended") == ["reservation fans has ended: n0 no longer reserved for maintenance"]
    assert alone.world.reservations == {}
    assert alone.store.record(RESERVATIONS, ReservationId("fans")).ended


def test_whoever_is_admitted_stays_and_who_runs_elsewhere_is_not_touched(cluster):
    ours = [cluster.submit(gpus=4, behaviour=SAVING) for _ in range(3)]
    for job in ours:
        cluster.runs(job)
    reserve(cluster, "n0 n1", in_s=5.0, for_s=300.0, users=frozenset({UserId("ada")}))
    reserve(cluster, "n2", in_s=5.0, for_s=300.0, name="other", queues=frozenset({QueueId("default")}))
    cluster.run(20.0)
    assert [cluster.job(job).epoch for job in ours] == [1, 1, 1]


def test_gang_leaves_whole_when_one_of_its_nodes_is_reserved(cluster):
    job = cluster.submit(gpus="2x4", behaviour=SAVING)
    cluster.runs(job)
    reserve(cluster, min(homes(cluster, job)), in_s=0.0, for_s=300.0)
    cluster.until(lambda: cluster.job(job).epoch == 2)
    assert len(homes(cluster, job)) == 2


def test_the_store_may_refuse_the_step_in_which_it_begins(cluster):
    job = cluster.submit(gpus=4, behaviour=SAVING)
    cluster.runs(job)
    (home,) = homes(cluster, job)
    reserve(cluster, home, in_s=5.0, for_s=300.0)
    cluster.run(4.5)
    cluster.store.full_commits = 3
    cluster.until(lambda: cluster.job(job).epoch == 2)
    assert len(history(cluster, "maintenance_begun")) == 1


def test_head_that_comes_back_inside_a_window_keeps_it_and_says_so_once(cluster):
    reserve(cluster, "n0 n1", in_s=1.0, for_s=300.0)
    cluster.run(3.0)
    cluster.kill_head()
    cluster.run(2.0)
    cluster.start_head()
    jobs = [cluster.submit(gpus=4) for _ in range(2)]
    cluster.run(3.0)
    assert len(history(cluster, "maintenance_begun")) == 1
    assert [homes(cluster, job) for job in jobs if job in cluster.world.attempts] == [{"n2"}]


def test_window_that_passed_while_the_head_was_away_is_over(cluster):
    reserve(cluster, "n0", in_s=1.0, for_s=5.0)
    cluster.kill_head()
    cluster.run(30.0)
    cluster.start_head()
    cluster.run(1.0)
    assert cluster.world.reservations == {}
    assert len(history(cluster, "maintenance_ended")) == 1


def test_clock_set_back_over_the_beginning_opens_the_nodes_until_it_comes_again(cluster):
    reserve(cluster, "n0 n1 n2", in_s=5.0, for_s=300.0)
    job = cluster.submit(gpus=4, time_limit_s=100.0, behaviour=SAVING)
    cluster.run(8.0)
    assert job not in cluster.world.attempts, "its limit crosses the window, then the window holds"
    cluster.jump_clock(-1000.0)
    cluster.runs(job)
    cluster.ends(job)
    cluster.until(lambda: len(history(cluster, "maintenance_begun")) == 2, limit_s=1100.0)


def test_one_window_after_the_other_leaves_no_gap_between():
    cluster = Harness("r: n0=4")
    reserve(cluster, "n0", in_s=1.0, for_s=30.0)
    reserve(cluster, "n0", in_s=31.0, for_s=30.0, name="more")
    job = cluster.submit(gpus=4)
    cluster.run(58.0)
    assert cluster.job(job).epoch == 0
    cluster.runs(job)


# ---- who may come ----------------------------------------------------------------------------------------------------


def test_job_whose_limit_crosses_the_window_goes_elsewhere_or_waits(cluster):
    reserve(cluster, "n0 n1", in_s=100.0, for_s=300.0)
    short, long, longer = (
        cluster.submit(gpus=4, time_limit_s=limit_s, behaviour=SAVING) for limit_s in (90.0, 200.0, 300.0)
    )
    cluster.runs(short)
    cluster.runs(long)
    cluster.run(5.0)
    assert homes(cluster, long) == {"n2"}
    waiting = cluster.head.controller.waits[longer]
    assert waiting.reason is WaitReasonCode.RESERVATION
    assert "2 nodes reserved for maintenance (fans)" in waiting.detail


def test_a_job_that_names_its_node_does_not_wait_for_reservations(cluster):
    named = {"gpus": 4, "nodelist": (NodeId("n0"),), "behaviour": SAVING}
    cluster.runs(cluster.submit(**named))
    waiting = cluster.submit(**named)
    choosy = cluster.submit(gpus=4, exclude=(NodeId("n1"), NodeId("n2")), behaviour=SAVING)
    cluster.run(5.0)
    waits = cluster.head.controller.waits
    assert {waits[job].reason for job in (waiting, choosy)} == {WaitReasonCode.RESOURCES}
    assert {waits[job].detail for job in (waiting, choosy)} == {
        "only nodes that it leaves out have room now; it may use n0"
    }


def test_limit_that_fitted_at_first_crosses_once_the_job_has_waited(cluster):
    reserve(cluster, "n0 n1 n2", in_s=100.0, for_s=50.0)
    full = [cluster.submit(gpus=4, time_limit_s=70.0, behaviour=JobBehaviour(run_s=60.0)) for _ in range(3)]
    waited = cluster.submit(gpus=4, time_limit_s=80.0)
    for job in full:
        cluster.ends(job)
    cluster.runs(waited)
    (attempt,) = cluster.attempts(waited)
    assert attempt.placed_s >= cluster.job(full[0]).submit_s + 150.0, "not started only to be stopped"


def test_job_of_a_reservation_waits_for_it_and_runs_inside_alone(cluster):
    reserve(cluster, "n1", in_s=20.0, for_s=100.0, name="exam", users=frozenset({UserId("ada")}))
    first, second = (cluster.submit(gpus=4, reservation="exam", behaviour=JobBehaviour(run_s=30.0)) for _ in range(2))
    cluster.run(15.0)
    assert first not in cluster.world.attempts
    assert cluster.head.controller.waits[first].reason is WaitReasonCode.RESERVATION
    cluster.runs(first)
    assert homes(cluster, first) == {"n1"}
    assert second not in cluster.world.attempts, "two nodes are free, and are not its"
    cluster.ends(first)
    cluster.runs(second)
    assert homes(cluster, second) == {"n1"}


def test_job_that_names_a_reservation_of_others_or_none_is_refused(cluster):
    reserve(cluster, "n1", in_s=20.0, for_s=100.0, name="exam", users=frozenset({UserId("op")}))
    with pytest.raises(NotPermitted, match="reservation exam is for op, not for ada in queue default"):
        cluster.submit(gpus=4, reservation="exam")
    with pytest.raises(NotFound, match="no reservation 'exams'"):
        cluster.submit(gpus=4, reservation="exams")


def test_plan_that_a_reservation_overtook_is_rejected():
    world = World()
    change = WorldChange(world=world)
    window = Reservation(
        id=ReservationId("fans"), nodes=(NodeId("n1"),), start_s=T, end_s=T + 60.0, users=frozenset({UserId("op")})
    )
    for record in (make_node("n1"), PLAIN, make_job("1", gpus=4), window):
        change.put(record)
    there = Placement(job_id=JobId("1"), allocation=allocation("n1:0,1,2,3"))
    assert rejection_reason(world, there) == "", "not before it begins"
    change.put(replace(window, begun=True))
    assert rejection_reason(world, there) == "n1 is reserved for op (fans)"
    change.put(replace(window, begun=True, users=frozenset({UserId("ada")})))
    assert rejection_reason(world, there) == ""


def test_ended_early_the_nodes_take_work_at_once():
    cluster = Harness("r: n0=4")
    reserve(cluster, "n0", in_s=0.0, for_s=1000.0)
    job = cluster.submit(gpus=4)
    cluster.run(3.0)
    assert job not in cluster.world.attempts
    assert unreserve(cluster).ended
    cluster.runs(job)
    assert history(cluster, "maintenance_ended") == [
        "reservation fans was ended: n0 no longer reserved for maintenance"
    ]
    with pytest.raises(NotFound, match="no reservation 'fans'"):
        unreserve(cluster)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_overlapping_reservations_of_a_node_are_refused_naming_the_other(cluster):
    reserve(cluster, "n0 n1", in_s=3600.0, for_s=3600.0, why="new fans")
    with pytest.raises(
        Conflict,
        match=r"n1 is already reserved at that time: fans, n\[0-1\] for maintenance, in 1h00m, for 1h00m: new fans",
    ):
        reserve(cluster, "n1 n2", in_s=7000.0, for_s=60.0, name="exam")
    reserve(cluster, "n1 n2", in_s=7200.0, for_s=60.0, name="after")
    reserve(cluster, "n2", in_s=3600.0, for_s=60.0, name="beside")
    assert [one.id for one in cluster.store.reservations()] == ["after", "beside", "fans"]


def test_the_same_again_is_harmless_and_another_of_its_name_refused(cluster):
    made = reserve(cluster, "n0", in_s=10.0, for_s=60.0)
    assert cluster.request(PutReservation(reservation=made)) == made
    cluster.run(12.0)
    assert cluster.request(PutReservation(reservation=made)).begun
    assert len(history(cluster, "maintenance_planned")) == 1
    with pytest.raises(Conflict, match="reservation fans already exists"):
        reserve(cluster, "n1", in_s=10.0, for_s=60.0)


@pytest.mark.parametrize(
    ("nodes", "in_s", "for_s", "more", "error", "words"),
    [
        ("n0 n9", 0.0, 60.0, {}, NotFound, "no node 'n9'"),
        ("n0", 0.0, 60.0, {"users": frozenset({UserId("eve")})}, NotFound, "no user 'eve'"),
        ("n0", 0.0, 60.0, {"queues": frozenset({QueueId("nlp")})}, NotFound, "no queue 'nlp'"),
        ("", 0.0, 60.0, {}, BadRequest, "names no node"),
        ("n0 n0", 0.0, 60.0, {}, BadRequest, "names a node twice"),
        ("n0", 0.0, 0.0, {}, BadRequest, "has no duration"),
        ("n0", -120.0, 60.0, {}, BadRequest, "would have ended 1m00s ago"),
        ("n0", 367 * 86400.0, 60.0, {}, BadRequest, "more than 366d00h from now"),
        ("n0", 0.0, 367 * 86400.0, {}, BadRequest, "more than 366d00h from now"),
    ],
)
def test_what_cannot_be_reserved_is_refused_and_changes_nothing(cluster, nodes, in_s, for_s, more, error, words):
    with pytest.raises(error, match=words):
        reserve(cluster, nodes, in_s, for_s, **more)
    assert cluster.store.reservations() == []


def test_reservation_that_the_store_refused_is_not_there(cluster):
    cluster.store.full_commits = 1
    with pytest.raises(StoreRefused):
        reserve(cluster, "n0", in_s=0.0, for_s=60.0)
    assert cluster.world.reservations == {}


# ---- cost ------------------------------------------------------------------------------------------------------------


def test_steps_in_which_nothing_is_due_do_not_look_at_the_reservations(cluster):
    class Counted(dict):
        looks = 0

        def values(self):
            Counted.looks += 1
            return super().values()

    reserve(cluster, "n0", in_s=1000.0, for_s=60.0)
    cluster.run(2.0)
    cluster.world.reservations = Counted(cluster.world.reservations)
    cluster.run(1.5)  # another mapping: looked at once, by whoever builds on it
    before = Counted.looks
    cluster.run(60.0)
    assert Counted.looks == before


# ---- cordoned nodes that are open for a while --------------------------------------------------------------------------


def cordon(cluster, name, *, drain=True, why="a fan"):
    cluster.request(CordonNode(node_id=NodeId(name), by=UserId("op"), why=why, drain=drain))


def open_to(cluster, user="ada", nodes="n0", for_s=600.0):
    return reserve(cluster, nodes, in_s=0.0, for_s=for_s, users=frozenset({UserId(user)}), open_cordoned=True)


def cordons(cluster):
    return {str(node.id): node.cordon for node in cluster.world.nodes.values() if node.cordon is not None}


def test_cordoned_nodes_are_open_to_the_holders_of_a_reservation_and_cordoned_again(alone):
    cordon(alone, "n0")
    before = cordons(alone)["n0"]
    waits = alone.submit(gpus=4, user="bob", behaviour=JobBehaviour(run_s=5.0))
    open_to(alone)
    unnamed = alone.submit(gpus=4, user="ada", behaviour=JobBehaviour(run_s=5.0))
    mine = alone.submit(gpus=4, user="ada", reservation="fans", behaviour=JobBehaviour(run_s=5.0))
    assert alone.ends(mine).state is JobState.SUCCEEDED
    alone.run(5.0)
    assert alone.job(waits).state is JobState.PENDING, "not to others"
    assert alone.job(unnamed).state is JobState.PENDING, "nor to a job that does not name it"
    assert cordons(alone) == {}
    unreserve(alone)
    alone.run(1.0)
    assert cordons(alone) == {"n0": before}
    assert history(alone, "cordon_lifted") == ["n0 is open to ada for reservation fans, and then cordoned again: a fan"]
    assert history(alone, "cordon_restored") == ["n0 is cordoned again: a fan"]
    alone.run(30.0)
    assert alone.job(waits).state is JobState.PENDING


def test_the_cordon_comes_back_when_the_time_is_over_also_after_a_restart_of_the_head(alone):
    cordon(alone, "n0", drain=False)
    open_to(alone, for_s=60.0)
    alone.run(5.0)
    assert cordons(alone) == {}
    alone.kill_head()
    alone.run(5.0)
    alone.start_head()
    alone.run(20.0)
    assert cordons(alone) == {}
    alone.run(60.0)
    assert list(cordons(alone)) == ["n0"]


def test_a_node_that_is_returned_meanwhile_or_cordoned_for_another_reason_keeps_that(cluster):
    for name in ("n0", "n1"):
        cordon(cluster, name)
    open_to(cluster, nodes="n0 n1 n2")
    cluster.run(1.0)
    cluster.request(UncordonNode(node_id=NodeId("n0"), by=UserId("op")))
    cordon(cluster, "n1", why="its test failed")
    unreserve(cluster)
    cluster.run(1.0)
    assert {name: one.why for name, one in cordons(cluster).items()} == {"n1": "its test failed"}


def test_a_node_that_joins_out_of_service_is_cordoned_until_it_is_returned_and_not_again(alone):
    out_of_service = Cordon(by="join", why="to be tested first", since_s=0.0)
    joined = replace(make_node("n9", 4), cordon=out_of_service)

    def registers(life):
        alone.turn([SupervisorRegistered(node=joined, supervisor_id=SupervisorId(life), challenge=None)])
        return alone.world.nodes[NodeId("n9")]

    first = registers("n9-1")
    assert first.cordon == replace(out_of_service, since_s=first.joined_s)
    alone.request(UncordonNode(node_id=NodeId("n9"), by=UserId("op")))
    assert registers("n9-2").cordon is None

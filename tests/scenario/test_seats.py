# mypy: disable-error-code="arg-type, attr-defined, dict-item, index, list-item"
# Drawings name jobs and nodes by plain text.
"""An engine that brings supervisors for each attempt: nodes without supervisors, seats with leases, and others who hold a part of the fleet."""

import threading
from dataclasses import replace

import pytest

from phalanx.controller.controller import SEAT_WAIT_S, Controller
from phalanx.controller.leases import LeaseBook, UnknownSupervisor
from phalanx.controller.reports import SeatEnded
from phalanx.controller.step_context import ControllerSettings
from phalanx.controller.step_result import ControllerTime
from phalanx.core.access.node_tokens import (
    attempt_key,
    node_of_token,
    node_token,
    seat_token,
)
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import (
    Cordon,
    ForeignUsage,
    Node,
    NodeState,
)
from phalanx.core.ids import UserId
from phalanx.core.state.commands import PrepareTasks
from phalanx.core.state.events import CordonNode, PutProject, PutQueue, PutUser, RemoveNode, SubmitJob
from phalanx.core.state.reports import (
    AttemptQueued,
    AttemptReclaimed,
    AttemptWithdrawn,
    MemberReady,
    MemberStopped,
    NodeDied,
    NodeListed,
    SeatLost,
    SupervisorRegistered,
)
from phalanx.core.state.world import World
from phalanx.core.work.attempt import EndCause, MemberState
from phalanx.core.work.queue import Project, Queue
from phalanx.core.work.seats import Seat, parse_seat, supervisor_name_of
from phalanx.core.work.states import AttemptState, JobState, WaitReasonCode
from phalanx.core.work.users import User, UserRole
from tests.builders import T, spec

SEAT = Seat(node_id="h0", job_id="1", epoch=1)


def seen(name, *, others=ForeignUsage(), cordon=None, devices=4):
    found = tuple(Device(index=index, uuid="", model="h100", memory_bytes=0) for index in range(devices))
    return NodeListed(
        node=Node(
            id=name,
            engine="slurm",
            devices=found,
            cpus=16,
            memory_bytes=1 << 34,
            state=NodeState.UP,
            per_attempt=True,
            foreign_usage=others,
            cordon=cordon,
        )
    )


class Head:
    """A controller, a clock, and what it last said."""

    def __init__(self, *nodes):
        self.at_s = 1000.0
        self.controller = Controller(
            world=World(),
            leases=LeaseBook(lease_s=6.0, guard=threading.Lock()),
            settings=ControllerSettings(checkpoint_root="/c", output_root="/o", storage_key="k"),
        )
        self.controller.start(self.now)
        self.hear(
            PutUser(user=User(id="me", role=UserRole.ADMIN)),
            PutProject(project=Project(id="default")),
            PutQueue(queue=Queue(id="default")),
        )
        self.hear(*(seen(name) for name in nodes))

    @property
    def now(self):
        return ControllerTime(wall_s=T + self.at_s, boot_s=self.at_s)

    @property
    def world(self):
        return self.controller.world

    def hear(self, *events, after_s=0.0):
        left_s = after_s
        while left_s > 1.0:  # a head that does not step for long has been away, and presumes every lease live
            self.at_s, left_s = self.at_s + 1.0, left_s - 1.0
            self.controller.committed(self.controller.step(self.now, []), self.now)
        self.at_s += left_s
        outbox = self.controller.step(self.now, events)
        self.controller.committed(outbox, self.now)
        return outbox

    def submit(self, gpus="2x2"):
        self.hear(SubmitJob(spec=spec("job", gpus=gpus), user="me", project="default", queue="default"))

    def renew(self, seat, supervisor="s0"):
        return self.controller.leases.renew(seat.name, supervisor, [(seat.job_id, seat.epoch)], self.at_s, held_s=6.0)

    def take_seats(self):
        for number, name in enumerate(sorted(grant.node_id for grant in self.world.attempts["1"].allocation.grants)):
            seat = Seat(node_id=name, job_id="1", epoch=self.world.attempts["1"].epoch)
            self.hear(SupervisorRegistered(node=seen(name).node, supervisor_id=f"s{number}", seat=seat))


def test_nodes_of_the_inventory_take_work_without_a_supervisor_or_a_lease():
    head = Head("h0", "h1")
    head.submit()
    assert [grant.node_id for grant in head.world.attempts["1"].allocation.grants] == ["h0", "h1"]
    head.hear(after_s=20.0)
    assert {node.state for node in head.world.nodes.values()} == {NodeState.UP}


def test_a_seat_is_kept_for_who_was_brought_and_lost_when_nobody_comes():
    head = Head("h0", "h1")
    head.submit()
    with pytest.raises(UnknownSupervisor):
        head.renew(SEAT)
    head.hear(after_s=SEAT_WAIT_S - 2.0)
    assert head.world.attempts["1"].epoch == 1, "it is asked to stop, and may still come"
    head.hear(after_s=10.0)
    assert head.world.attempts["1"].epoch == 2


def queued(why):
    return AttemptQueued(job_id="1", epoch=1, why=why)


def test_an_attempt_that_waits_in_a_queue_of_its_cluster_loses_no_seat_and_pays_nothing():
    head = Head("h0", "h1")
    head.hear(
        SubmitJob(spec=spec("job", gpus="2x2", time_limit_s=600.0), user="me", project="default", queue="default")
    )
    head.hear(queued("it waits"), after_s=1.0)
    head.hear(queued("2 before it"), after_s=7200.0)
    attempt = head.world.attempts["1"]
    assert (attempt.epoch, attempt.state, attempt.queued_why) == (1, AttemptState.PLACED, "2 before it")
    assert attempt.device_s(head.now.wall_s) == 0.0
    head.hear(queued(""), after_s=1.0)
    attempt = head.world.attempts["1"]
    assert (attempt.queued_why, attempt.placed_s) == ("", head.now.wall_s), "it is billed from now on"
    head.hear(after_s=SEAT_WAIT_S - 2.0)
    assert head.world.attempts["1"].epoch == 1
    head.hear(after_s=10.0)
    assert head.world.attempts["1"].epoch == 2, "its supervisors did not come in time"


def test_the_time_limit_of_an_attempt_begins_when_its_cluster_admits_it():
    head = Head("h0", "h1")
    head.hear(SubmitJob(spec=spec("job", gpus="2x2", time_limit_s=20.0), user="me", project="default", queue="default"))
    head.hear(queued("it waits"))
    head.hear(after_s=100.0)
    head.take_seats()  # its supervisors are there before the engine has noticed
    assert head.world.attempts["1"].queued_why == ""
    for _ in range(9):
        assert head.world.attempts["1"].stop_cause is None
        head.hear(after_s=2.0)
        for number, name in enumerate(("h0", "h1")):
            head.renew(Seat(node_id=name, job_id="1", epoch=1), f"s{number}")
    head.hear(after_s=3.0)
    assert head.world.attempts["1"].stop_cause is EndCause.TIMEOUT


def test_a_head_that_comes_back_waits_for_a_queued_attempt_as_before():
    head = Head("h0", "h1")
    head.submit()
    head.hear(queued("it waits"), after_s=1.0)
    again = Controller(
        world=head.world, leases=LeaseBook(lease_s=6.0, guard=threading.Lock()), settings=head.controller.settings
    )
    head.controller = again
    again.start(head.now)
    head.hear(after_s=3600.0)
    assert (head.world.attempts["1"].epoch, head.world.attempts["1"].queued_why) == (1, "it waits")


def test_a_head_that_comes_back_before_it_knew_of_the_queue_keeps_the_seats_from_then_on():
    head = Head("h0", "h1")
    head.submit()
    again = Controller(
        world=head.world, leases=LeaseBook(lease_s=6.0, guard=threading.Lock()), settings=head.controller.settings
    )
    head.controller = again
    again.start(head.now)
    head.hear(queued("it waits"), after_s=6.0)
    head.hear(after_s=600.0)
    assert head.world.attempts["1"].epoch == 1


def test_an_attempt_that_its_cluster_takes_back_is_preempted_and_saves():
    head = Head("h0", "h1")
    head.submit()
    head.take_seats()
    for number, name in enumerate(("h0", "h1")):
        head.hear(MemberReady(job_id="1", epoch=1, generation=0, node_id=name, port=29500 + number))
    outbox = head.hear(AttemptReclaimed(job_id="1", epoch=1, why="a higher priority"))
    assert [(one.reason, one.grace_s) for one in outbox.commands] == [("preempted", 30.0)] * 2
    for name in ("h0", "h1"):
        head.hear(MemberStopped(job_id="1", epoch=1, generation=0, node_id=name, at_s=T))
    job = head.world.jobs["1"]
    assert (job.preemptions, job.charged_restarts, job.failure_count) == (1, 0, 0)


def test_who_takes_a_seat_is_told_what_to_do_and_renews_its_lease():
    head = Head("h0", "h1")
    head.submit()
    outbox = head.hear(SupervisorRegistered(node=seen("h0").node, supervisor_id="s0", seat=SEAT))
    assert [(type(one).__name__, one.node_id) for one in outbox.commands] == [("PrepareTasks", "h0")]
    assert head.renew(SEAT).superseded == []
    assert head.world.nodes["h0"].supervisor_id is None, "it speaks for its seat, not for the node"


def test_a_silent_seat_ends_its_attempt_and_leaves_the_node_up():
    head = Head("h0", "h1", "h2")
    head.submit()
    head.take_seats()
    for _ in range(3):
        head.hear(after_s=2.0)
        head.renew(Seat(node_id="h1", job_id="1", epoch=1), "s1")
    head.hear(after_s=2.0)
    attempt = head.world.attempts["1"]
    members = {member.node_id: member.state for member in attempt.members}
    assert (attempt.epoch, attempt.state, members["h0"]) == (1, AttemptState.STOPPING, MemberState.LOST)
    assert head.world.nodes["h0"].state is NodeState.UP


def test_who_comes_for_an_attempt_that_is_over_is_sent_away():
    head = Head("h0", "h1")
    head.submit()
    (answer,) = head.hear(
        SupervisorRegistered(node=seen("h0").node, supervisor_id="s9", seat=Seat(node_id="h0", job_id="1", epoch=7))
    ).answers
    assert isinstance(answer, SeatEnded)


def test_a_withdrawn_attempt_is_placed_again_at_once_uncharged_and_not_where_others_are():
    head = Head("h0", "h1")
    head.submit("2")
    assert head.world.attempts["1"].allocation.grants[0].node_id == "h0"
    taken = seen("h0", others=ForeignUsage(devices=(0, 1, 2, 3), owners=("Slurm job 6 of alice",)))
    head.hear(
        taken,
        AttemptWithdrawn(job_id="1", epoch=1, why="job 6 of alice took h0", nodes=("h0",), cause=EndCause.CONTENDED),
    )
    job, attempt = head.world.jobs["1"], head.world.attempts["1"]
    assert (attempt.epoch, attempt.allocation.grants[0].node_id) == (2, "h1")
    assert (job.charged_restarts, job.failure_count) == (0, 0)


def test_what_others_hold_is_not_granted_and_why_names_them():
    head = Head()
    head.hear(seen("h0", others=ForeignUsage(devices=(1, 2, 3), owners=("Slurm job 6 of alice",))))
    head.submit("2")
    waiting = head.controller.waits["1"]
    assert (waiting.reason, waiting.detail) == (
        WaitReasonCode.RESOURCES,
        "needs 1 x 2 GPUs; 1 free in total, at most 1 on one node; 3 in use outside Phalanx by Slurm job 6 of alice",
    )
    head.hear(seen("h0"))
    assert head.world.jobs["1"].state is JobState.RUNNING


def test_a_node_that_was_forgotten_leaves_nothing_of_what_others_held_there():
    """Found by reading: what it had held came back with it, and nobody could give it back."""
    head = Head()
    head.hear(seen("h0", others=ForeignUsage(devices=(1, 2, 3), cpus=8)))
    head.hear(NodeDied(node_id="h0", supervisor_id=None, why="gone from Slurm", confirmed=False))
    head.hear(RemoveNode(node_id="h0", by="me"))
    assert "h0" not in head.world.usage
    head.hear(seen("h0"))
    head.submit("4")
    assert head.world.jobs["1"].state is JobState.RUNNING


def test_devices_that_went_to_others_under_a_grant_are_not_free_when_it_ends():
    head = Head("h0")
    head.submit("2")
    head.hear(seen("h0", others=ForeignUsage(devices=(1, 2, 3))))
    assert head.world.usage["h0"].devices == {0, 1, 2, 3}
    head.hear(AttemptWithdrawn(job_id="1", epoch=1, why="gone", nodes=("h0",), cause=EndCause.FAILED))
    assert head.world.usage["h0"].devices == {1, 2, 3}


def test_a_node_that_the_engine_calls_dead_takes_nothing_new_and_its_seats_live_by_their_leases():
    head = Head("h0", "h1")
    head.submit()
    head.take_seats()
    head.hear(NodeDied(node_id="h0", supervisor_id=None, why="Slurm says down", confirmed=False))
    assert head.world.nodes["h0"].state is NodeState.DOWN
    assert head.world.attempts["1"].state is AttemptState.PLACED
    assert head.renew(SEAT).superseded == []


def test_a_seat_whose_slurm_job_ended_is_lost():
    head = Head("h0", "h1")
    head.submit()
    head.take_seats()
    head.hear(SeatLost(job_id="1", epoch=1, node_ids=("h0", "h1"), why="Slurm job 5 is gone"))
    assert head.world.attempts["1"].epoch == 2


def test_a_cordon_of_the_engine_comes_and_goes_with_it_and_a_persons_stays():
    head = Head("h0")
    drained = Cordon(by="slurm", why="bad fan", since_s=0.0)
    head.hear(seen("h0", cordon=drained))
    assert head.world.nodes["h0"].cordon == drained
    head.hear(seen("h0"))
    assert head.world.nodes["h0"].cordon is None
    head.hear(CordonNode(node_id="h0", by=UserId("me"), why="mine", drain=False))
    head.hear(seen("h0"))
    assert head.world.nodes["h0"].cordon.why == "mine"


def test_a_starting_head_presumes_the_seats_of_live_attempts():
    head = Head("h0", "h1")
    head.submit()
    head.take_seats()
    again = Controller(world=head.world, leases=LeaseBook(lease_s=6.0), settings=head.controller.settings)
    again.start(head.now)
    with pytest.raises(UnknownSupervisor):
        again.leases.renew(SEAT.name, "s0", [], head.at_s)
    again.step(head.now, [SupervisorRegistered(node=seen("h0").node, supervisor_id="s0", seat=SEAT)])
    assert again.leases.renew(SEAT.name, "s0", [("1", 1)], head.at_s).superseded == []


def test_names_and_tokens_of_seats():
    assert parse_seat(SEAT.name) == SEAT
    assert parse_seat("gpu7") is None
    assert supervisor_name_of({"h0": seen("h0").node}, "h0", "1", 1) == "h0@1.1"
    assert supervisor_name_of({}, "n0", "1", 1) == "n0"
    secret = b"s" * 32
    token = seat_token(attempt_key(secret, "1", 1), SEAT)
    assert node_of_token(secret, token) == SEAT.name
    assert node_of_token(secret, token.replace("1.1", "1.2")) is None, "of another attempt"
    assert node_of_token(b"other", token) is None
    assert node_of_token(secret, node_token(secret, "h0")) == "h0"


def test_what_the_first_seats_prove_of_the_heads_folders_counts_from_the_next_attempt_on():
    head = Head("h0", "h1")
    head.submit()
    first = head.world.attempts["1"]
    for name in ("h0", "h1"):
        seat = Seat(node_id=name, job_id="1", epoch=1)
        sees = replace(seen(name).node, shares_head_files=True)
        told = head.hear(SupervisorRegistered(node=sees, supervisor_id=f"life-of-{name}", seat=seat)).commands
        assert [command.kept for command in told if isinstance(command, PrepareTasks)] == [True], (
            "all of a gang are told alike"
        )
    assert first.head_stores_copies
    assert head.world.attempts["1"].head_stores_copies
    head.hear(seen("h0"), seen("h1"))  # the inventory knows nothing of it, and takes nothing away
    why = "Slurm job 7 was lost"
    head.hear(SeatLost(job_id="1", epoch=1, node_ids=("h0", "h1"), why=why), after_s=1.0)
    head.hear(after_s=1.0)
    again = head.world.attempts["1"]
    assert (again.epoch, again.head_stores_copies) == (2, False)

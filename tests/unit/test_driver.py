"""The thread around the controller: answers only what is durable, and dies of nothing."""

import threading

import pytest

from phalanx.controller import controller as controller_module
from phalanx.controller import driver as driver_module
from phalanx.controller import reports
from phalanx.controller.controller import Controller
from phalanx.controller.driver import AWAITED_EVERY_S, DISKS_EVERY_S, ControllerDriver
from phalanx.controller.leases import LeaseBook
from phalanx.controller.mailboxes import Mailboxes
from phalanx.controller.requests import registry
from phalanx.controller.step_context import ControllerSettings
from phalanx.controller.telemetry import Telemetry
from phalanx.core.errors import NeverFits, NotFound, PhalanxError, TryLater
from phalanx.core.fleet.fitness import DISK_FREE_BYTES, FULL_DISK
from phalanx.core.fleet.node import NodeState
from phalanx.core.ids import Epoch, JobId, NodeId, ProjectId, QueueId, SupervisorId, UserId
from phalanx.core.state.events import CancelJob, CordonNode, PutProject, PutQueue, SubmitJob
from phalanx.core.state.reports import MemberStopped, NodeDied, SupervisorRegistered
from phalanx.core.work.attempt import FIRST_GENERATION
from phalanx.core.work.dependency import parse_dependencies
from phalanx.core.work.queue import Project, Queue
from phalanx.core.work.states import AttemptState, JobState
from phalanx.ports.store import StoreRefused
from phalanx.store.memory import MemoryStore
from phalanx.wire.supervisor import SamplesRequest
from tests.builders import T, make_node, spec

GUARD_S = 20.0  # against a hang; no test waits for it
ADA = UserId("ada")


class FakeClock:
    def __init__(self):
        self.boot_s = 1000.0

    def now_s(self):
        return T + self.boot_s

    def boottime_s(self):
        return self.boot_s


class FakeEngine:
    name = "fake"

    def __init__(self):
        self.deaths, self.followed = [], []
        self.expected: list[NodeId] | None = []

    def expected_nodes(self):
        return self.expected

    def observe(self):
        seen, self.deaths = self.deaths, []
        return seen

    def listen(self, wake):
        self.wake = wake

    def follow(self, job, attempt):
        self.followed.append((job.id, job.state, attempt.state))


class Gate(MemoryStore):
    """A store whose commits wait, are counted, and can be refused."""

    def __init__(self):
        super().__init__()
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Semaphore(0)
        self.batches = []
        self.refuse = []

    def commit(self, batch):
        self.entered.release()
        assert self.open.wait(GUARD_S)
        if self.refuse:
            raise self.refuse.pop(0)
        super().commit(batch)
        self.batches.append(batch)


class Rig:
    def __init__(self, engines=()):
        self.clock, self.store, self.mailboxes = FakeClock(), Gate(), Mailboxes()
        controller = Controller(
            world=self.store.load(),
            leases=LeaseBook(guard=threading.Lock()),
            settings=ControllerSettings(checkpoint_root="/ckpt", output_root="/out", storage_key="k"),
        )
        self.driver = ControllerDriver(
            controller=controller,
            store=self.store,
            mailboxes=self.mailboxes,
            telemetry=Telemetry(),
            clock=self.clock,
            head_id="h1",
            engines=engines,
        )
        self.driver.start()
        self.ask(PutProject(project=Project(id=ProjectId("gpt"))))
        self.ask(PutQueue(queue=Queue(id=QueueId("default"))))

    def ask(self, event):
        return self.driver.request(event).result(GUARD_S)

    def hello(self, name="n0"):
        return self.driver.report(
            [SupervisorRegistered(node=make_node(name, 4), supervisor_id=SupervisorId(f"{name}-life1"))]
        )

    def closed(self):
        """No commit passes from now on. Waits until the loop stands in one; answers what it stands for."""
        self.open_later = self.store.open
        self.store.open.clear()
        while self.store.entered.acquire(blocking=False):
            pass
        first = self.driver.request(submit("first", hold=True))
        assert self.store.entered.acquire(timeout=GUARD_S)
        return first


@pytest.fixture
def rig():
    one = Rig()
    yield one
    one.store.open.set()
    one.driver.stop()


def submit(name="a", key="", **fields):
    return SubmitJob(spec=spec(name, **fields), user=ADA, project=ProjectId("gpt"), queue=QueueId("default"), key=key)


def test_answer_comes_only_after_the_commit(rig):
    first = rig.closed()
    assert not first.done()
    assert rig.store.job(JobId("1")) is None
    rig.store.open.set()
    assert first.result(GUARD_S).id == "1"
    assert rig.store.job(JobId("1")) is not None


def test_commands_leave_only_after_the_commit(rig):
    rig.hello().result(GUARD_S)
    rig.store.open.clear()
    while rig.store.entered.acquire(blocking=False):
        pass
    future = rig.driver.request(submit(gpus=4))
    assert rig.store.entered.acquire(timeout=GUARD_S)
    assert rig.mailboxes.take(NodeId("n0"), 0) == ([], 0)
    rig.store.open.set()
    future.result(GUARD_S)
    framed, _ = rig.mailboxes.take(NodeId("n0"), 0)
    assert [one.kind for one in framed] == ["PrepareTasks"]


def test_a_live_attempt_is_kept_as_it_was_committed(rig):
    rig.hello().result(GUARD_S)
    job = rig.ask(submit(gpus=4))
    assert rig.driver.committed_attempt(job.id, Epoch(1)) == rig.driver.controller.world.attempts[job.id]
    rig.ask(CancelJob(job_id=job.id, by=ADA))
    stopped = MemberStopped(job_id=job.id, epoch=Epoch(1), generation=FIRST_GENERATION, node_id=NodeId("n0"), at_s=T)
    rig.driver.report([stopped]).result(GUARD_S)
    assert rig.driver.committed_attempt(job.id, Epoch(1)) is None


def test_what_queues_up_during_a_commit_goes_into_the_next_one(rig):
    rig.closed()
    before = len(rig.store.batches)
    futures = [rig.driver.request(submit(f"j{number}", hold=True)) for number in range(50)]
    rig.store.open.set()
    assert [future.result(GUARD_S).id for future in futures] == [str(number) for number in range(2, 52)]
    assert len(rig.store.batches) == before + 2, "the one under way, and one for all fifty"


def test_reports_wait_for_each_other_after_a_step_and_a_request_ends_the_wait(monkeypatch, rig):
    monkeypatch.setattr(driver_module, "GATHER_S", GUARD_S)
    rig.ask(submit("first", hold=True))
    before = len(rig.store.batches)
    hellos = [rig.hello("n0"), rig.hello("n1")]
    assert len(rig.store.batches) == before
    rig.ask(submit("second", hold=True))
    assert all(hello.done() for hello in hellos)
    assert len(rig.store.batches) == before + 1, "both reports and the request"


def test_a_report_long_after_the_last_step_does_not_wait(monkeypatch, rig):
    monkeypatch.setattr(driver_module, "GATHER_S", 2 * GUARD_S)
    rig.ask(submit("first", hold=True))
    rig.clock.boot_s += 2 * GUARD_S
    rig.hello().result(GUARD_S)


def test_refused_commit_answers_try_later_to_all_and_undoes_the_world(rig):
    rig.closed()
    rig.store.refuse = [StoreRefused("no space left")]
    rig.store.open.set()
    futures = [rig.driver.request(submit(f"j{number}", hold=True)) for number in range(3)]
    done = [future.exception(GUARD_S) for future in futures]
    assert {type(error) for error in done} <= {StoreRefused, type(None)}
    rig.driver.request(submit("after", hold=True)).result(GUARD_S)
    stored = sorted(int(job_id) for job_id in rig.driver.controller.world.jobs)
    assert stored == list(range(1, len(stored) + 1)), "numbers of what was refused went back"
    assert all(rig.store.job(job_id) is not None for job_id in rig.driver.controller.world.jobs)


def test_refusal_of_one_is_not_anothers(rig):
    rig.closed()
    bad = rig.driver.request(CancelJob(job_id=JobId("99"), by=ADA))
    good = rig.driver.request(submit(hold=True))
    rig.store.open.set()
    assert isinstance(bad.exception(GUARD_S), NotFound)
    assert good.result(GUARD_S).id == "2"


def test_nodes_that_an_engine_still_brings_up_are_awaited():
    engine = FakeEngine()
    engine.expected = None
    rig = Rig([engine])
    awaited = lambda: rig.driver.controller.world.awaited_nodes  # noqa: E731
    try:
        assert rig.ask(submit("unlisted", gpus=99)).id == "1"
        assert awaited() == "engine fake has not listed its nodes yet"
        engine.expected = [NodeId("n0"), NodeId("n1"), NodeId("n3")]
        rig.hello("n0").result(GUARD_S)
        assert rig.ask(submit("unregistered", gpus=99)).id == "2"
        assert awaited() == "n[1,3] have not registered yet"
        engine.expected = [NodeId("n0"), NodeId("n1")]
        rig.hello("n1").result(GUARD_S)
        with pytest.raises(NeverFits):
            rig.ask(submit("known", gpus=99))
        assert awaited() == ""
        engine.expected = [NodeId("n9")]  # it brings up another one
        rig.clock.boot_s += AWAITED_EVERY_S
        assert rig.ask(submit("more", gpus=99)).id == "3"
    finally:
        rig.driver.stop()


def test_a_node_with_a_full_disk_returns_with_the_first_later_sample_that_has_room():
    rig = Rig([FakeEngine()])
    free_bytes = DISK_FREE_BYTES

    def sample(at_s):
        rig.driver.telemetry.put_samples(
            SamplesRequest(
                supervisor_id=SupervisorId("s"), node_id=NodeId("n0"), at_s=at_s, devices=[], disk_free_bytes=free_bytes
            )
        )
        for _ in range(2):  # the look, and the step that applies what it saw
            rig.clock.boot_s += DISKS_EVERY_S
            rig.hello("n1").result(GUARD_S)
        return rig.driver.controller.world.nodes[NodeId("n0")].cordon is not None

    try:
        rig.hello().result(GUARD_S)
        sample(1.0)
        rig.ask(CordonNode(node_id=NodeId("n0"), by=UserId(FULL_DISK), why="0 B free", drain=False))
        assert sample(1.0), "it was taken before the disk was full"
        free_bytes = DISK_FREE_BYTES - 1
        assert sample(2.0)
        free_bytes = DISK_FREE_BYTES
        assert not sample(3.0)
    finally:
        rig.driver.stop()


def test_death_is_heard_again_after_a_refused_commit():
    engine = FakeEngine()
    rig = Rig([engine])
    try:
        rig.hello().result(GUARD_S)
        rig.store.refuse = [StoreRefused("no space left"), StoreRefused("no space left")]
        engine.deaths = [NodeDied(node_id=NodeId("n0"), supervisor_id=None, why="it died", confirmed=True)]
        for _ in range(200):
            if rig.store.nodes()[0].state is NodeState.DOWN:
                break
            rig.store.entered.acquire(timeout=0.1)
        assert rig.store.nodes()[0].state is NodeState.DOWN
        assert rig.store.refuse == []
    finally:
        rig.driver.stop()


def test_refused_death_waits_a_moment_before_it_is_heard_again():
    """Found by reading: on a full disk the letter went back into the inbox, and the loop span."""
    engine = FakeEngine()
    rig = Rig([engine])
    rig.hello().result(GUARD_S)
    rig.driver.stop()
    rig.driver._stopping = False  # the test turns the loop from here
    rig.store.refuse = [StoreRefused("no space left")]
    engine.deaths = [NodeDied(node_id=NodeId("n0"), supervisor_id=None, why="it died", confirmed=True)]
    wait_s = rig.driver._run_step(rig.driver._collect(0.0) or [])
    assert wait_s == driver_module.RETRY_WAIT_S
    assert not rig.driver._inbox, "an inbox with something in it is not waited for"
    rig.driver._run_step(rig.driver._collect(0.0) or [])
    assert rig.store.nodes()[0].state is NodeState.DOWN


def test_an_engine_wakes_a_head_that_waits_for_nothing_else(monkeypatch):
    monkeypatch.setattr(driver_module, "IDLE_STEP_S", 10 * GUARD_S)
    engine = FakeEngine()
    rig = Rig([engine])
    try:
        rig.hello().result(GUARD_S)
        engine.deaths = [NodeDied(node_id=NodeId("n0"), supervisor_id=None, why="it died", confirmed=True)]
        engine.wake()
        for _ in range(200):
            if rig.store.nodes()[0].state is NodeState.DOWN:
                break
            rig.store.entered.acquire(timeout=0.1)
        assert rig.store.nodes()[0].state is NodeState.DOWN
    finally:
        rig.driver.stop()


def test_deaths_are_heard_before_the_hello_of_the_next_life():
    engine = FakeEngine()
    rig = Rig([engine])
    rig.driver.stop()
    rig.driver._stopping = False
    engine.deaths = [NodeDied(node_id=NodeId("n0"), supervisor_id=None, why="it died", confirmed=True)]
    rig.hello()
    letters = rig.driver._collect(0.0) or []
    assert [type(event) for letter in letters for event in letter.events] == [NodeDied, SupervisorRegistered]


def test_caller_who_leaves_does_not_take_the_loop_along(rig):
    """Found by reading: a cancelled future (a client that hung up) raised in the controller's thread, and the head was dead."""
    rig.closed()
    report, request = rig.hello(), rig.driver.request(submit(hold=True))
    assert not report.cancel()
    assert not request.cancel()
    rig.store.open.set()
    assert report.result(GUARD_S) == [None]
    assert request.result(GUARD_S).id == "2"


def test_fault_of_ours_is_answered_and_the_others_are_heard(rig, monkeypatch, caplog):
    hear = registry.handle_request

    def broken(context, request):
        if getattr(request, "key", "") == "poison":
            context.change.new_job_seq()
            raise RuntimeError("a fault of ours")
        return hear(context, request)

    rig.closed()
    monkeypatch.setattr(registry, "handle_request", broken)
    before, poison, after = (rig.driver.request(submit(key=key, hold=True)) for key in ("", "poison", "k"))
    rig.store.open.set()
    assert before.result(GUARD_S).id == "2"
    assert type(poison.exception(GUARD_S)) is PhalanxError
    assert after.result(GUARD_S).id == "3"
    assert "internal error" in caplog.text


def test_what_an_engine_saw_beside_a_fault_of_ours_is_heard(monkeypatch):
    """Found by reading: engines say nothing twice, and the whole of what one had seen went with the fault."""
    hear, engine = reports.handle_report, FakeEngine()

    def broken(context, report):
        if getattr(report, "why", "") == "poison":
            raise RuntimeError("a fault of ours")
        return hear(context, report)

    rig = Rig([engine])
    for name in ("n0", "n1"):
        rig.hello(name).result(GUARD_S)
    rig.driver.stop()
    rig.driver._stopping = False  # the test turns the loop from here
    monkeypatch.setattr(reports, "handle_report", broken)
    engine.deaths = [
        NodeDied(node_id=NodeId(name), supervisor_id=None, why=why, confirmed=True)
        for name, why in (("n0", "poison"), ("n1", "it died"))
    ]
    rig.driver._run_step(rig.driver._collect(0.0) or [])
    assert {node.id: node.state for node in rig.store.nodes()} == {"n0": NodeState.UP, "n1": NodeState.DOWN}


def test_job_that_takes_more_along_than_are_kept_ends_like_any_other(monkeypatch):
    """Found by reading: its record had left the world before engines were told, and the head's one thread was dead."""
    monkeypatch.setattr(controller_module, "ENDED_JOBS_KEPT", 2)
    engine = FakeEngine()
    rig = Rig([engine])
    try:
        rig.hello().result(GUARD_S)
        job = rig.ask(submit(gpus=4))
        waiting = [rig.ask(submit(f"d{n}", dependencies=parse_dependencies(f"afterok:{job.id}"))) for n in range(4)]
        rig.ask(CancelJob(job_id=job.id, by=ADA))
        stopped = MemberStopped(
            job_id=job.id, epoch=Epoch(1), generation=FIRST_GENERATION, node_id=NodeId("n0"), at_s=T
        )
        assert rig.driver.report([stopped]).result(GUARD_S) == [None]
        ended = [rig.store.job(one.id) for one in (job, *waiting)]
        assert {one.state for one in ended if one is not None} == {JobState.CANCELLED}
        assert None not in ended
        assert job.id not in rig.driver.controller.world.jobs
        assert engine.followed[-1] == (job.id, JobState.CANCELLED, AttemptState.ENDED)
        assert rig.ask(submit(hold=True)).id == "6"
    finally:
        rig.driver.stop()


def test_fault_after_a_commit_is_answered_and_the_next_are_heard(rig, caplog):
    faults = [RuntimeError("a fault of ours")]
    heard = []

    def listener(touched):
        heard.append(touched)
        if faults:
            raise faults.pop()

    rig.driver.listen(listener)
    assert rig.ask(submit(hold=True)).id == "1"
    assert rig.ask(submit(hold=True)).id == "2"
    assert heard == [{"1"}, {"2"}]
    assert "internal error after a commit" in caplog.text


def test_store_that_fails_as_it_never_should_refuses(rig):
    rig.store.refuse = [OSError("the controller of the disk is gone")]
    with pytest.raises(StoreRefused):
        rig.ask(submit(hold=True))
    assert rig.ask(submit(hold=True)).id == "1"


def test_stop_answers_what_waits(rig):
    first = rig.closed()
    waiting = rig.driver.request(submit("late", hold=True))
    stopper = threading.Thread(target=rig.driver.stop)
    stopper.start()
    while not rig.driver._stopping:
        stopper.join(0.001)
    refused = rig.driver.request(submit("later still", hold=True))
    rig.store.open.set()
    stopper.join(GUARD_S)
    assert first.result(GUARD_S).id == "1", "the step under way is finished"
    assert isinstance(waiting.exception(GUARD_S), TryLater)
    assert isinstance(refused.exception(GUARD_S), TryLater)


def test_full_inbox_says_come_back(rig, monkeypatch):
    first = rig.closed()
    monkeypatch.setattr(driver_module, "INBOX_MAX", 2)
    futures = [rig.driver.request(submit(hold=True)) for _ in range(3)]
    assert isinstance(futures[2].exception(GUARD_S), TryLater)
    rig.store.open.set()
    assert [future.result(GUARD_S).id for future in (first, *futures[:2])] == ["1", "2", "3"]


def test_one_step_takes_a_bounded_number_of_events(rig, monkeypatch):
    rig.closed()
    monkeypatch.setattr(driver_module, "STEP_EVENTS_MAX", 10)
    before = len(rig.store.batches)
    futures = [rig.driver.request(submit(hold=True)) for _ in range(25)]
    rig.store.open.set()
    assert futures[-1].result(GUARD_S).id == "26"
    assert len(rig.store.batches) - before == 4


def test_lease_ends_with_nobody_saying_anything(rig):
    rig.hello().result(GUARD_S)
    rig.driver.stop()  # the test turns the loop from here, as it turns by itself: at least once a second
    for _ in range(7):
        rig.clock.boot_s += 1.0
        assert rig.store.nodes()[0].state is NodeState.UP
        assert rig.driver._run_step([]) <= 1.0
    assert rig.store.nodes()[0].state is NodeState.DOWN


def test_head_that_was_stopped_itself_loses_nobody(rig):
    """SIGSTOP of the head for a minute: nobody could renew."""
    rig.hello().result(GUARD_S)
    rig.clock.boot_s += 60.0
    rig.ask(submit(hold=True))
    assert rig.store.nodes()[0].state is NodeState.UP

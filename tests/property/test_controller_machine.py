"""Random work and random faults on a small cluster in virtual time: the invariants hold after every event, and once healed all work ends.

The controller and the supervisors are the real ones; `tests.harness` has the clocks, the network and the processes. Every fault lasts for
a while and then passes by itself, so that faults overlap while work goes on.
"""

import contextlib
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, precondition, rule

from phalanx.core.errors import BadRequest, Conflict
from phalanx.core.ids import NodeId, ProjectId, QueueId, ReservationId, UserId
from phalanx.core.lifecycle.job import is_parked
from phalanx.core.lifecycle.transitions import AttemptCase
from phalanx.core.scheduling.policies import PolicyParameters
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.state.events import (
    CordonNode,
    EndReservation,
    HoldJob,
    ParkJob,
    PutQueues,
    PutReservation,
    RequeueJob,
    SubmitJob,
    UncordonNode,
)
from phalanx.core.work.attempt import EndCause
from phalanx.core.work.dependency import parse_dependencies
from phalanx.core.work.job import BACKOFF_MAX_S
from phalanx.core.work.queue import Queue
from phalanx.core.work.quotas.quota_tree import QuotaTree
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.states import JobState, WaitReasonCode
from phalanx.ports.store import StoreRefused
from phalanx.simulator.drill.limit_invariants import fleet_capacity
from tests.builders import spec
from tests.effort import examples
from tests.harness import Harness
from tests.simulated_node import JobBehaviour

NAMES = ("n0", "n1", "n2")
ADA, OP = UserId("ada"), UserId("op")


def crash(after_s, code, signal, *, rank=0):
    """This rank ends so in the first generation of the first two attempts."""
    return lambda key, who: (after_s, code, signal) if who == rank and key.generation == 0 and key.epoch <= 2 else None


BEHAVIOURS = {
    "short": JobBehaviour(run_s=2.0),
    "long": JobBehaviour(run_s=25.0),
    "saving": JobBehaviour(run_s=30.0, save_every_s=2.0),
    "stubborn": JobBehaviour(run_s=12.0, ignores_sigterm=True),
    "crashing": JobBehaviour(run_s=8.0, save_every_s=3.0, ends=crash(4.0, None, 11)),
    "failing": JobBehaviour(ends=crash(1.0, 3, None, rank=1)),
    "slow": JobBehaviour(run_s=3.0, prepare_s=4.0),
    "refused": JobBehaviour(run_s=5.0, refuses={"n1": "device 2 is sick"}),
    "bound": JobBehaviour(run_s=6.0, port_taken_generations=2),
}
SHAPES = ("2x4", "2x2", "2x4", "4", "3x4", "2", "1", "6", "0", "1..3x4", "1..2x2")
# Twelve GPUs: some lent, some borrowed, some kept; a limit for users on either side.
TREE = (
    Queue(id=QueueId("default")),
    Queue(id=QueueId("research"), quota_gpus=6),
    Queue(id=QueueId("nlp"), parent=QueueId("research"), quota_gpus=4, lend_gpus=2, gpus_per_user=10),
    Queue(id=QueueId("prod"), quota_gpus=4, borrow_gpus=4, priority=1, jobs_per_user=3),
)
QUEUES = ("default", "default", "research", "nlp", "prod", "prod")
QUOTAS = (None, 0, 2, 4, 6)
# As the defaults stand to each other, but in the seconds in which these jobs live.
QUICK = PolicySettings(
    parameters=PolicyParameters(
        round_s=5.0, run_min_s=6.0, run_min_by_right_s=1.0, move_min_s=2.0, grow_min_s=3.0, stops_max=2
    )
)
KINDS = ("saving", "long", *sorted(BEHAVIOURS))
AFTER = ("afterok:{}", "afterany:{}", "afternotok:{}", "afterany:{},singleton")
LASTING = (0.3, 3.0, 5.5, 9.0, 25.0)  # around the lease of 6 s, and well over it
MOMENTS = (0.005, 0.04, 0.07, 0.11, 0.5, 2.0, 5.0, 8.0)
OF_THE_SCHEDULER = (EndCause.PREEMPTED, EndCause.MOVED)
IDLE_MAX_S = 1.0  # the head looks when something happens, and when it said it would
kinds = st.sampled_from(KINDS)
names = st.sampled_from(NAMES)
lasting = st.sampled_from(LASTING)
moments = st.sampled_from(MOMENTS)


def may_ever_run(world, job):
    """Whether its queue's limits let the job start on an idle fleet."""
    tree = QuotaTree(world.queues.values(), fleet_capacity(world))
    return tree.check_admission(tree.job_node(job.queue), job.user, job.spec.role.asked) is None


class Idle:
    """14: on a healed fleet of which nobody holds anything, a job that may start does so at once."""

    def __init__(self, harness):
        self.harness = harness
        self.since_s = harness.boot_s

    def look(self):
        world, now = self.harness.world, self.harness.now
        ready = [
            job.id
            for job in world.pending.values()
            if not job.held and not job.unmet_dependencies and not 0 < job.not_before_s - now.wall_s <= BACKOFF_MAX_S
        ]
        if world.attempts or not ready:
            self.since_s = now.boot_s
        assert now.boot_s - self.since_s <= IDLE_MAX_S, f"14: nothing runs, and {ready} do not start"


class Cluster(RuleBasedStateMachine):
    jobs = Bundle("jobs")
    policy = QUICK

    @initialize(first=kinds, second=kinds)
    def begin(self, first, second):
        self.harness = Harness("r: n0=4 n1=4 n2=4", policy=self.policy)
        self.harness.request(PutQueues(queues=TREE))
        self.harness.behaviours.update(BEHAVIOURS)
        self.keys = 0
        self.harness.submit(spec(first, gpus="2x4", collective_timeout_s=20.0))
        self.harness.submit(spec(second, gpus="4"))

    def head_is_up(self):
        return self.harness.head is not None

    def ask(self, event):
        with contextlib.suppress(BadRequest, Conflict, StoreRefused):
            self.harness.request(event)

    def go(self, seconds):
        self.harness.run(seconds)

    # ---- work ---------------------------------------------------------------------------------------------------------

    @precondition(head_is_up)
    @rule(
        target=jobs,
        kind=kinds,
        gpus=st.sampled_from(SHAPES),
        retry=st.integers(0, 1),
        priority=st.integers(0, 2),
        limit_s=st.sampled_from((None, None, 9.0)),
        grace_s=st.sampled_from((1.0, 30.0)),
        queue=st.sampled_from(QUEUES),
        then_s=moments,
    )
    def submit(self, kind, gpus, retry, priority, limit_s, grace_s, queue, then_s):
        wanted = spec(
            kind,
            gpus=gpus,
            retry=retry,
            priority=priority,
            time_limit_s=limit_s,
            grace_s=grace_s,
            collective_timeout_s=20.0,
            allow_never=True,  # quotas change
        )
        self.keys += 1
        self.harness.store.full_commits = 0
        first = self.harness.submit(wanted, key=f"key-{self.keys}", queue=queue)
        assert self.harness.submit(wanted, key=f"key-{self.keys}", queue=queue) == first, "11: submit is idempotent"
        self.go(then_s)
        return first

    @precondition(head_is_up)
    @rule(
        target=jobs, parent=jobs, word=st.sampled_from(AFTER), kind=kinds, queue=st.sampled_from(QUEUES), then_s=moments
    )
    def submit_after(self, parent, word, kind, queue, then_s):
        """7: it starts when its parent has ended as asked, and ends when that can be no more (`tests.invariants`)."""
        self.harness.store.full_commits = 0
        wanted = spec(kind, gpus="2", dependencies=parse_dependencies(word.format(parent)), allow_never=True)
        child = self.harness.submit(wanted, queue=queue)
        self.go(then_s)
        return child

    @precondition(head_is_up)
    @rule(
        target=jobs,
        kind=kinds,
        size=st.integers(1, 4),
        running_max=st.sampled_from((None, 1, 2)),
        queue=st.sampled_from(QUEUES),
        then_s=moments,
    )
    def submit_array(self, kind, size, running_max, queue, then_s):
        self.harness.store.full_commits = 0
        wanted = spec(kind, gpus="2", array=f"0-{size - 1}", array_max=running_max, allow_never=True)
        made = self.harness.request(SubmitJob(spec=wanted, user=ADA, project=ProjectId("gpt"), queue=QueueId(queue)))
        self.go(then_s)
        return multiple(*(job.id for job in made))

    @precondition(head_is_up)
    @rule(which=st.sampled_from(TREE[1:]), quota=st.sampled_from(QUOTAS), then_s=moments)
    def change_quota(self, which, quota, then_s):
        """6: what runs goes on, also past a right that has shrunk; nothing new starts past it."""
        self.ask(PutQueues(queues=(replace(self.harness.world.queues[which.id], quota_gpus=quota),)))
        self.go(then_s)

    @precondition(head_is_up)
    @rule(job=jobs, then_s=moments)
    def cancel(self, job, then_s):
        with contextlib.suppress(StoreRefused):
            once = self.harness.cancel(job)
            assert self.harness.cancel(job).state in (once.state, JobState.CANCELLED), "11: cancel is idempotent"
        self.go(then_s)

    @precondition(head_is_up)
    @rule(job=jobs, then_s=moments)
    def requeue(self, job, then_s):
        self.ask(RequeueJob(job_id=job, by=ADA))
        self.go(then_s)

    @precondition(head_is_up)
    @rule(job=jobs, held=st.booleans())
    def hold(self, job, held):
        self.ask(HoldJob(job_id=job, held=held, by=ADA))

    @precondition(head_is_up)
    @rule(job=jobs, parked=st.booleans(), then_s=moments)
    def park(self, job, parked, then_s):
        self.ask(ParkJob(job_id=job, parked=parked, by=ADA))
        self.go(then_s)

    @precondition(head_is_up)
    @rule(name=names, drain=st.booleans(), then_s=moments)
    def cordon(self, name, drain, then_s):
        for _ in range(2):  # 11: idempotent
            self.ask(CordonNode(node_id=NodeId(name), by=OP, why="disk", drain=drain))
        self.go(then_s)

    @precondition(head_is_up)
    @rule(name=names)
    def uncordon(self, name):
        self.ask(UncordonNode(node_id=NodeId(name), by=OP))

    @precondition(head_is_up)
    @rule(name=names, ours=st.booleans(), for_s=lasting, then_s=moments)
    def reserve(self, name, ours, for_s, then_s):
        """From now on: a window that a jump of the clock could begin would end what `jump_clock` says it must not."""
        self.keys += 1
        now_s, users = self.harness.now.wall_s, frozenset({ADA}) if ours else frozenset()
        window = Reservation(
            id=ReservationId(f"window-{self.keys}"),
            nodes=(NodeId(name),),
            start_s=now_s,
            end_s=now_s + for_s,
            users=users,
        )
        self.ask(PutReservation(reservation=window))
        self.go(then_s)

    @precondition(head_is_up)
    @rule(then_s=moments)
    def unreserve(self, then_s):
        for name in sorted(self.harness.world.reservations)[:1]:
            self.ask(EndReservation(reservation_id=name, by=OP))
        self.go(then_s)

    # ---- time and faults ----------------------------------------------------------------------------------------------

    @rule(seconds=moments)
    def wait(self, seconds):
        self.go(seconds)

    @rule(name=names, silent=st.booleans(), for_s=lasting, then_s=moments)
    def kill_node(self, name, silent, for_s, then_s):
        self.harness.kill_node(name, silent=silent)
        self.harness.call_after(for_s, lambda: self.harness.revive_node(name))
        self.go(then_s)

    @rule(name=names, for_s=lasting, then_s=moments)
    def pause_node(self, name, for_s, then_s):
        node = self.harness.nodes[NodeId(name)]
        node.pause()
        self.harness.call_after(for_s, node.resume)
        self.go(then_s)

    @rule(name=names, for_s=lasting, then_s=moments)
    def cut_node_off(self, name, for_s, then_s):
        node = self.harness.nodes[NodeId(name)]
        node.cut = True
        self.harness.call_after(for_s, lambda: setattr(node, "cut", False))
        self.go(then_s)

    @rule(name=names, latency_s=st.sampled_from((0.3, 1.5)), for_s=lasting)
    def slow_network(self, name, latency_s, for_s):
        node = self.harness.nodes[NodeId(name)]
        node.latency_s = latency_s
        self.harness.call_after(for_s, lambda: setattr(node, "latency_s", 0.01))

    @rule(keeps_every=st.integers(1, 3), for_s=lasting, then_s=moments)
    def lose_commands(self, keeps_every, for_s, then_s):
        count = iter(range(1, 100_000))
        self.harness.drop_command = lambda _: next(count) % (keeps_every + 1) != 0
        self.harness.call_after(for_s, lambda: setattr(self.harness, "drop_command", lambda _: False))
        self.go(then_s)

    @precondition(head_is_up)
    @rule(for_s=lasting, then_s=moments)
    def kill_head(self, for_s, then_s):
        self.harness.kill_head()
        self.harness.call_after(for_s, self.bring_head_back)
        self.go(then_s)

    def bring_head_back(self):
        if not self.head_is_up():
            self.harness.start_head()

    @rule(commits=st.integers(1, 4), then_s=moments)
    def fill_disk(self, commits, then_s):
        self.harness.store.full_commits = commits
        self.go(then_s)

    @precondition(head_is_up)
    @rule(pick=st.integers(0, 60), many=st.integers(1, 8))
    def hear_something_old_again(self, pick, many):
        """Late and doubled."""
        reports = [event for event in self.harness.committed_events if hasattr(event, "generation")]
        with contextlib.suppress(StoreRefused):
            self.harness.turn(reports[-pick - many : len(reports) - pick])

    @precondition(head_is_up)
    @rule(seconds=st.sampled_from((-86400.0, -3.0, 3.0, 86400.0)))
    def jump_clock(self, seconds):
        """15: nobody ends by it. Not while Prepare travels, whose deadline is Unix time."""
        self.go(0.05)
        if not self.head_is_up() or self.harness.world.reservations:
            return
        try:
            self.harness.turn([])  # what is due at this moment in any case
            before = self.endings()
            self.harness.jump_clock(seconds)
            self.harness.turn([])
        except StoreRefused:
            return
        after = self.endings()
        assert {job: after.get(job, "gone") for job in before} == before

    def endings(self):
        """The scheduler's are left out: a jump makes it look anew, and what it finds may have been due in any case."""
        endings = {job: attempt.stop_cause for job, attempt in self.harness.world.attempts.items()}
        return {job: None if ending in OF_THE_SCHEDULER else ending for job, ending in endings.items()}

    # ---- the end ------------------------------------------------------------------------------------------------------

    def teardown(self):
        if not hasattr(self, "harness"):
            return
        harness = self.harness
        harness.heal()
        for node in harness.nodes.values():
            node.latency_s = 0.01
        harness.run(26.0)  # until every fault still to pass has passed
        for name in NAMES:
            self.ask(UncordonNode(node_id=NodeId(name), by=OP))
        for name in list(harness.world.reservations):
            self.ask(EndReservation(reservation_id=name, by=OP))
        for job in list(harness.world.jobs.values()):
            if is_parked(AttemptCase(job=job, attempt=harness.world.attempts.get(job.id))):
                self.ask(ParkJob(job_id=job.id, parked=False, by=OP))
            elif job.held:
                self.ask(HoldJob(job_id=job.id, held=False, by=OP))
        self.ask(PutQueues(queues=TREE))
        assert harness.head is not None
        for job in list(harness.world.jobs.values()):
            never, wait = not may_ever_run(harness.world, job), harness.head.controller.waits.get(job.id)
            if job.state is JobState.PENDING:
                assert never == (wait is not None and wait.reason is WaitReasonCode.NEVER), f"job {job.id}: {wait}"
            if never and not job.state.terminal:
                harness.cancel(job.id)
        # 14: every job left fits the whole fleet; 30 s of work, budgets of restarts and stops, and backoffs bound the rest.
        idle = Idle(harness)
        for _ in harness.events(
            lambda: any(not job.state.terminal for job in harness.world.jobs.values()),
            limit_s=120.0 * len(harness.world.jobs),
        ):
            idle.look()
        harness.run(10.0)
        harness.invariants.check_settled()


# An example costs some 40 ms.
Cluster.TestCase.settings = settings(max_examples=examples(200))
test_random_faults_break_no_invariant_and_healed_work_ends = Cluster.TestCase

"""Random work and random faults on a small cluster in virtual time: the invariants hold after every event, and once healed all work ends.

The controller and the supervisors are the real ones; `tests.harness` has the clocks, the network and the processes.
"""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, multiple, precondition, rule

from phalanx.core.errors import Conflict, NeverFits
from phalanx.core.ids import NodeId, UserId
from phalanx.core.state.events import CordonNode, Hello, Hold, NodeDead, Requeue, UncordonNode
from phalanx.ports.store import StoreRefused
from tests.builders import spec
from tests.harness import Harness
from tests.simulated_node import Behaviour

NAMES = ("n0", "n1", "n2")
OP = UserId("op")


def crash_once(after_s, code, signal):
    """Rank 0 of the first generation of every attempt ends so."""
    return lambda key, rank: (after_s, code, signal) if rank == 0 and key.generation == 0 and key.epoch <= 2 else None


BEHAVIOURS = {
    "short": Behaviour(run_s=2.0),
    "long": Behaviour(run_s=25.0),
    "saving": Behaviour(run_s=30.0, save_every_s=2.0),
    "stubborn": Behaviour(run_s=12.0, stubborn=True),
    "crashing": Behaviour(run_s=8.0, save_every_s=3.0, ends=crash_once(4.0, None, 11)),
    "failing": Behaviour(ends=lambda _key, rank: (1.0, 3, None) if rank == 0 else None),
    "slow": Behaviour(run_s=3.0, prepare_s=4.0),
    "refused": Behaviour(refuses={"n1": "device 2 is sick"}),
    "bound": Behaviour(run_s=6.0, port_taken=2),
}
SHAPES = ("1", "2", "2x2", "4", "2x4", "3x4", "0", "6")


class Cluster(RuleBasedStateMachine):
    jobs = Bundle("jobs")

    @initialize()
    def begin(self):
        self.harness = Harness("r: n0=4 n1=4 n2=4")
        self.harness.behaviours.update(BEHAVIOURS)
        self.submitted = 0

    def head_is_up(self):
        return self.harness.head is not None

    def ask(self, event):
        try:
            self.harness.ask(event)
        except (Conflict, StoreRefused):
            pass

    # ---- work ---------------------------------------------------------------------------------------------------------

    @precondition(head_is_up)
    @rule(target=jobs, kind=st.sampled_from(sorted(BEHAVIOURS)), gpus=st.sampled_from(SHAPES), retry=st.integers(0, 1),
          priority=st.integers(0, 2), limit_s=st.sampled_from((None, None, 9.0)), grace_s=st.sampled_from((1.0, 30.0)))  # fmt: skip
    def submit(self, kind, gpus, retry, priority, limit_s, grace_s):
        self.submitted += 1
        wanted = spec(kind, gpus=gpus, retry=retry, priority=priority, time_limit_s=limit_s, grace_s=grace_s)
        try:
            first = self.harness.submit(wanted, key=f"key-{self.submitted}")
        except StoreRefused:
            return multiple()
        except NeverFits:
            raise AssertionError(f"{gpus} fits this fleet") from None
        try:
            assert self.harness.submit(wanted, key=f"key-{self.submitted}") == first, "11: submit is idempotent"
        except StoreRefused:
            pass
        return first

    @precondition(head_is_up)
    @rule(job=consumes(jobs))
    def cancel(self, job):
        try:
            once = self.harness.cancel(job)
            assert self.harness.cancel(job).state in (once.state, "cancelled"), "11: cancel is idempotent"
        except StoreRefused:
            pass

    @precondition(head_is_up)
    @rule(job=jobs)
    def requeue(self, job):
        self.ask(Requeue(job_id=job, by=UserId("ada")))

    @precondition(head_is_up)
    @rule(job=jobs, held=st.booleans())
    def hold(self, job, held):
        self.ask(Hold(job_id=job, held=held, by=UserId("ada")))

    @precondition(head_is_up)
    @rule(name=st.sampled_from(NAMES), drain=st.booleans())
    def cordon(self, name, drain):
        for _ in range(2):  # 11: idempotent
            self.ask(CordonNode(node_id=NodeId(name), by=OP, why="disk", drain=drain))

    @precondition(head_is_up)
    @rule(name=st.sampled_from(NAMES))
    def uncordon(self, name):
        self.ask(UncordonNode(node_id=NodeId(name), by=OP))

    # ---- time and faults ----------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from((0.005, 0.03, 0.1, 0.5, 2.0, 8.0)))
    def wait(self, seconds):
        self.harness.run(seconds)

    @rule(name=st.sampled_from(NAMES), silent=st.booleans())
    def kill_node(self, name, silent):
        self.harness.kill_node(name, silent=silent)

    @rule(name=st.sampled_from(NAMES))
    def revive_node(self, name):
        self.harness.revive_node(name)

    @rule(name=st.sampled_from(NAMES))
    def pause_node(self, name):
        self.harness.nodes[NodeId(name)].pause()

    @rule(name=st.sampled_from(NAMES))
    def resume_node(self, name):
        self.harness.nodes[NodeId(name)].resume()

    @rule(name=st.sampled_from(NAMES), cut=st.booleans())
    def partition(self, name, cut):
        self.harness.nodes[NodeId(name)].cut = cut

    @rule(name=st.sampled_from(NAMES), latency_s=st.sampled_from((0.01, 0.3, 1.5)))
    def slow_network(self, name, latency_s):
        self.harness.nodes[NodeId(name)].latency_s = latency_s

    @rule(keeps=st.integers(0, 3))
    def lose_commands(self, keeps):
        count = iter(range(10_000))
        self.harness.drop_command = (lambda _: next(count) % (keeps + 1) != 0) if keeps else (lambda _: False)

    @rule()
    def kill_head(self):
        self.harness.kill_head()

    @precondition(lambda self: self.harness.head is None)
    @rule()
    def start_head(self):
        self.harness.start_head()

    @rule(commits=st.integers(1, 4))
    def fill_disk(self, commits):
        self.harness.store.refuse_next = commits

    @precondition(head_is_up)
    @rule(data=st.data())
    def hear_something_old_again(self, data):
        reports = [
            event
            for event in self.harness.heard
            if not isinstance(event, (Hello, NodeDead)) and hasattr(event, "generation")
        ]
        if reports:
            self.ask(data.draw(st.sampled_from(reports[-40:])))

    @precondition(head_is_up)
    @rule(seconds=st.sampled_from((-86400.0, -3.0, 3.0, 86400.0)))
    def jump_clock(self, seconds):
        """15: nobody ends by it."""
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
        return {job: attempt.ending for job, attempt in self.harness.world.attempts.items()}

    # ---- the end ------------------------------------------------------------------------------------------------------

    def teardown(self):
        if not hasattr(self, "harness"):
            return
        harness = self.harness
        harness.heal()
        for node in harness.nodes.values():
            node.latency_s = 0.01
        harness.run(10.0)
        for name in NAMES:
            self.ask(UncordonNode(node_id=NodeId(name), by=OP))
        for job in list(harness.world.jobs.values()):
            if job.held:
                self.ask(Hold(job_id=job.id, held=False, by=OP))
        # 14: every job here fits the whole fleet; 40 s of work, budgets of restarts, and backoffs bound the rest.
        harness.until(
            lambda: all(job.state.terminal for job in harness.world.jobs.values()),
            limit_s=120.0 * (1 + len(harness.world.jobs)),
        )
        harness.run(10.0)
        harness.watch.settled()


Cluster.TestCase.settings = settings(stateful_step_count=40, deadline=None)
test_random_faults_break_no_invariant_and_healed_work_ends = Cluster.TestCase

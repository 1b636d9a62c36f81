"""Commands lost, doubled and reordered, leases that come and go, hands that take their time: what must hold all the same."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from phalanx.core.state import commands
from phalanx.core.state.reports import MemberStopped
from phalanx.node.logic import events as hap
from phalanx.node.logic.actions import CallSleepHook
from phalanx.node.logic.events import GenerationId
from tests.scenario.supervisor_world import LEASE_S, World, forget, prepare, sleep_hook, start, stop

JOBS = st.sampled_from(["1", "2"])
EPOCHS = st.integers(1, 3)
GENERATIONS = st.integers(0, 2)


class Chaos(RuleBasedStateMachine):
    """The head's commands in any order whatever; the network may do no worse."""

    @initialize(leased=st.booleans(), deaf=st.booleans())
    def begin(self, leased, deaf):
        self.world = World(auto=False, leased=leased, deaf=deaf)
        self.stops: set[tuple[str, int, int]] = set()
        self.newest: dict[str, tuple[int, int]] = {}
        self.told = 0

    @rule(job=JOBS, epoch=EPOCHS, generation=GENERATIONS, collective_timeout_s=st.sampled_from([1.0, 20.0]))
    def prepare(self, job, epoch, generation, collective_timeout_s):
        self.world.tell(prepare(job, epoch, generation, collective_timeout_s=collective_timeout_s))

    @rule(job=JOBS, epoch=EPOCHS, generation=GENERATIONS)
    def start(self, job, epoch, generation):
        self.world.tell(start(job, epoch, generation))

    @rule(back=st.integers(1, 12))
    def the_network_repeats(self, back):
        """A command sent before arrives once more."""
        if back <= len(self.world.sent):
            self.world.tell(self.world.sent[-back])

    @rule(job=JOBS, epoch=EPOCHS, generation=GENERATIONS, grace_s=st.sampled_from([0.0, 3.0]))
    def stop(self, job, epoch, generation, grace_s):
        self.stops.add((job, epoch, generation))
        self.world.tell(stop(job, epoch, generation, grace_s=grace_s))

    @rule(job=JOBS, epoch=EPOCHS, generation=GENERATIONS, turn=st.integers(1, 4))
    def run_sleep_hook(self, job, epoch, generation, turn):
        """Odd turns sleep, even ones wake, as the head has it."""
        self.world.tell(sleep_hook(job, epoch, generation, turn=turn, sleep=turn % 2 == 1))

    @rule(job=JOBS, epoch=EPOCHS)
    def forget(self, job, epoch):
        self.world.tell(forget(job, epoch))

    @rule(job=JOBS, fresh=st.booleans(), finished=st.booleans())
    def a_good_head(self, job, fresh, finished):
        """What makes progress, so that chaos meets more than refusals: the next generation is brought up under a lease."""
        epoch, generation = self.newest.get(job, (1, -1))
        epoch, generation = (epoch + 1, 0) if fresh else (epoch, generation + 1)
        self.newest[job] = (epoch, generation)
        self.world.renew()
        self.world.tell(prepare(job, epoch, generation))
        for _ in range(6 if finished else 1):
            self.world.do_work()
        self.world.tell(start(job, epoch, generation))
        if finished:
            self.world.do_work()

    @rule()
    def work(self):
        self.world.do_work()

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, LEASE_S + 1.0, 30.0]))
    def wait(self, seconds):
        self.world.wait(seconds)

    @rule(sent_ago_s=st.sampled_from([0.0, 1.0, LEASE_S]), stale=st.booleans())
    def renew(self, sent_ago_s, stale):
        superseded = [(key.job_id, key.epoch) for key in self.world.carried[:1]] if stale else []
        self.world.renew(sent_ago_s=sent_ago_s, superseded=superseded)

    @rule(rank=st.integers(0, 1), code=st.sampled_from([0, 1]), daemon=st.booleans())
    def task_ends(self, rank, code, daemon):
        for key in [key for key, ranks in self.world.alive.items() if rank in ranks and key not in self.world.frozen]:
            self.world.end(rank, code=code, key=key, leaving=(99,) if daemon else ())

    @invariant()
    def never_two_generations_of_a_job(self):
        for job in ("1", "2"):
            assert len(self.world.living(job)) <= 1

    @invariant()
    def nothing_runs_past_the_lease(self):
        if self.world.supervisor.lease.over(self.world.now_ns):
            assert {key for key, ranks in self.world.alive.items() if ranks} <= self.world.frozen

    @invariant()
    def each_hook_of_a_generation_is_called_once_and_none_after_a_later_one(self):
        calls = self.world.did(CallSleepHook)
        for key in {call.key for call in calls}:
            turns = [call.turn for call in calls if call.key == key]
            assert turns == sorted(set(turns))

    @invariant()
    def no_page_is_good_for_longer_than_the_lease(self):
        for page in self.world.pages.values():
            if "deadline_ns" in page and page["deadline_ns"] > self.world.now_ns:
                assert page["deadline_ns"] - self.world.now_ns <= LEASE_S * 1e9

    @invariant()
    def stopped_is_said_only_when_true_and_for_good(self):
        for report in self.world.reports[self.told :]:
            if isinstance(report, MemberStopped):
                place = GenerationId(report.epoch, report.generation)
                assert not [k for k in self.world.living(report.job_id) if GenerationId(k.epoch, k.generation) <= place]
        opened = self.world.opened
        for job in ("1", "2"):
            mine = [GenerationId(key.epoch, key.generation) for key in opened if key.job_id == job]
            assert mine == sorted(set(mine)), "a generation starts once, and never after a later one"
        assert self.world.started_after_stopped == []
        self.told = len(self.world.reports)

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        for _ in range(400):  # the network heals: hands finish, leases hold
            world.do_work()
            world.wait(1.0, renewing=True)
            if not world.work and all(self._answered(stopped) for stopped in self.stops):
                break
        unanswered = [stopped for stopped in self.stops if not self._answered(stopped)]
        assert unanswered == []
        world.hear(hap.TerminationRequested()).hear(hap.TerminationRequested())
        for _ in range(50):
            world.do_work()
        assert world.exited
        assert not any(world.alive.values())

    def _answered(self, stopped) -> bool:
        return any(
            isinstance(r, MemberStopped) and (r.job_id, r.epoch, r.generation) == stopped for r in self.world.reports
        )


TestChaos = Chaos.TestCase
TestChaos.settings = settings(settings(), stateful_step_count=40)


def test_every_kind_of_command_is_obeyed_or_named():
    """A new command must be given a meaning here before it is sent."""
    kinds = set(commands.Command.__args__)
    assert kinds == {
        commands.PrepareTasks,
        commands.StartTasks,
        commands.StopTasks,
        commands.CleanUpAttempt,
        commands.DeleteCheckpoints,
        commands.SaveNow,
        commands.RunSleepHook,
        commands.LimitPower,  # of the devices of a node, whatever runs there
    }

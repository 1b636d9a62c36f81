"""From samples to alarms and idle policies, behind the real controller in virtual time: who is warned, released and stopped, and who never is."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined, assignment, index"

import pytest

from phalanx.controller.host_activity import HostActivityTracker
from phalanx.controller.idle_jobs import ENDED, IDLE_POLICY, NOTICE, NOTIFY_FACT, WARNING
from phalanx.controller.usage.usage_accounting import UsageAccountant
from phalanx.controller.usage.usage_resume import resume_ledger
from phalanx.controller.usage.waste_monitor import WasteMonitor
from phalanx.core.ids import NodeId, SupervisorId, UserId
from phalanx.core.state.events import CordonNode, HoldJob, PutQueue, SubmitService
from phalanx.core.state.records import SERVICES
from phalanx.core.work.attempt import EndCause
from phalanx.core.work.queue import Queue
from phalanx.core.work.services.service import ServiceState
from phalanx.core.work.states import AttemptState, JobState, WaitReasonCode
from phalanx.core.work.usage.waste_terms import IdleAction, IdlePolicy, WasteKind
from phalanx.wire.supervisor import DeviceSample, JobSample, SamplesRequest
from tests.harness import Harness
from tests.scenario.test_sleeping_replicas import SERVES, web
from tests.simulated_node import JobBehaviour

LONG = JobBehaviour(run_s=1e6)
FAILING = JobBehaviour(run_s=1e6, ends=lambda _key, _rank: (8.0, 1, None))
BUSY = 0.9


class Watched:
    """A cluster whose devices are sampled every five seconds, with the ledger and the monitor behind it.

    `use`: utilization of each job's devices; a job that is not in it is busy. `cpus`: that each job keeps busy, 0 for one that is not in it.
    `unsampled`: jobs of which no sample comes.
    `busy_first`: the first device of each job is busy in any case.
    """

    def __init__(self, fleet="r: n0=4 n1=4", **policy):
        self.cluster = Harness(fleet, lease_s=300.0)  # hours pass: few renewals keep the test short
        self.use = {}
        self.cpus, self.cpu_s = {}, {}
        self.unsampled = set()
        self.busy_first = False
        self.audits = []
        self._start()
        self.cluster.on_turn = self._on_turn
        if policy:
            self.set_policy(**policy)

    @property
    def now_ms(self):
        return int(self.cluster.now.wall_s * 1000)

    def set_policy(self, **policy):
        fields = {"action": IdleAction.RELEASE, "after_s": 200.0, "grace_s": 60.0, **policy}
        self.cluster.request(PutQueue(queue=Queue(id="default", idle=IdlePolicy(**fields))))

    def _start(self):
        """As a head that starts: from what its store has."""
        world = self.cluster.world
        self.accountant = UsageAccountant(lambda _: "")
        resume_ledger(self.accountant, world, self.cluster.store, None, self.now_ms)
        self.hosts = HostActivityTracker(self.accountant.live_attempt)
        self.monitor = WasteMonitor(self.accountant, self.hosts)
        self.monitor.apply((*world.queues.values(), *world.jobs.values()), (), self.now_ms, stored=True)
        self.sent = ((), ())

    def restart_head(self):
        self.cluster.kill_head()
        self.cluster.start_head()
        self._start()

    def _apply(self, records, removed):
        self.accountant.apply(records, removed, self.now_ms)
        self.monitor.apply(records, removed, self.now_ms)
        self.accountant.update(self.now_ms)

    def _on_turn(self, outbox):
        self.audits += outbox.audit_calls
        self._apply(tuple(outbox.change.records), tuple(outbox.change.removed))

    def run(self, seconds):
        for _ in range(int(seconds / 5)):
            self.cluster.run(5.0)
            for attempt in list(self.cluster.world.attempts.values()):
                if attempt.state is AttemptState.RUNNING and attempt.job_id not in self.unsampled:
                    self._sample(attempt)
            self.accountant.update(self.now_ms)
            idle = self.monitor.look(self.now_ms)
            if idle is not None and (idle.jobs, idle.quiet) != self.sent:
                self.sent = idle.jobs, idle.quiet
                self.cluster.turn([idle])
        return self

    def _sample(self, attempt):
        for grant in attempt.allocation.grants:
            devices = [
                DeviceSample(
                    index=index,
                    uuid="",
                    counter="",
                    utilization=BUSY
                    if self.busy_first and index == grant.devices[0]
                    else self.use.get(attempt.job_id, BUSY),
                    job_id=attempt.job_id,
                    processes=1,
                )
                for index in grant.devices
            ]
            self.cpu_s[attempt.job_id] = self.cpu_s.get(attempt.job_id, 0.0) + 5.0 * self.cpus.get(attempt.job_id, 0.0)
            host = JobSample(
                job_id=attempt.job_id,
                epoch=attempt.epoch,
                generation=attempt.generation,
                cpu_s=self.cpu_s[attempt.job_id],
                memory_peak_bytes=0,
            )
            request = SamplesRequest(
                supervisor_id=SupervisorId("s"), node_id=grant.node_id, at_s=0.0, devices=devices, jobs=[host]
            )
            self.accountant.add_samples(request, self.now_ms)
            self.hosts.add_samples(request, self.now_ms)

    def busy_then_idle(self, **fields):
        """A job that has computed for a minute, and does nothing from now on."""
        one = self.cluster.submit(behaviour=LONG, **fields)
        self.cluster.runs(one)
        self.run(60.0)
        self.use[one] = 0.0
        return one

    def lines(self, job_id, kind):
        return [line for line in self.cluster.store.history(job_id=job_id, limit=1000) if line.kind == kind]

    def alarms(self):
        return {spell.newest.key for spell in self.monitor.now.spells if spell.alarmed}


def test_an_idle_job_is_an_alarm_within_a_minute_of_its_threshold_and_a_computing_one_never():
    one = Watched()
    idle = one.busy_then_idle(gpus=2)
    busy = one.cluster.submit(gpus=1, behaviour=LONG)
    one.run(890.0)
    assert one.alarms() == set()
    one.run(60.0)
    assert one.alarms() == {(WasteKind.IDLE, idle)}
    (spell,) = one.monitor.now.spells
    assert (spell.newest.milli, spell.newest.node_gpus) == (2000, 4)
    assert spell.lost == pytest.approx(950 * 2 * 1e6, rel=0.02)
    one.use[idle] = BUSY
    one.run(120.0)
    assert one.monitor.now.spells == ()
    assert one.cluster.job(busy).state is JobState.RUNNING


def test_a_broken_node_and_a_crash_loop_are_alarms():
    one = Watched("r: n0=4 n1=4")
    failing = one.cluster.submit(gpus=1, retry=100, behaviour=FAILING)
    refused = one.cluster.submit(gpus=1, behaviour=JobBehaviour(refuses={"n0": "no such library"}))
    one.cluster.request(CordonNode(node_id=NodeId("n1"), by=UserId("preflight"), why="GPU 3 is lost", drain=False))
    one.run(60.0)
    assert {(WasteKind.CRASH_LOOP, failing), (WasteKind.CRASH_LOOP, refused)} <= one.alarms()
    one.run(600.0)
    assert (WasteKind.BROKEN, "n1") in one.alarms()
    assert one.cluster.job(refused).state is JobState.FAILED
    assert one.monitor.now.begun["crash_loop"] == 2, "the pauses between two starts end no alarm"
    (broken,) = [spell.newest for spell in one.monitor.now.spells if spell.newest.kind is WasteKind.BROKEN]
    assert (broken.milli, broken.why, broken.cordoned) == (4000, "GPU 3 is lost", True)


@pytest.mark.parametrize(
    ("action", "kind", "notify"), [(IdleAction.WARN, WARNING, None), (IdleAction.NOTIFY, NOTICE, "owner")]
)
def test_warn_and_notify_write_one_line_and_leave_the_job_alone(action, kind, notify):
    one = Watched(action=action)
    idle = one.busy_then_idle(gpus=2)
    one.run(180.0)
    assert one.lines(idle, kind) == []
    one.run(300.0)
    (line,) = one.lines(idle, kind)
    assert "its processes have not used its 2 GPUs for 3m20s" in line.text
    assert line.facts.get(NOTIFY_FACT) == notify
    assert line.facts["state"] == "idle"
    assert line.by == IDLE_POLICY
    assert one.cluster.job(idle).state is JobState.RUNNING
    assert one.audits == []


def test_a_released_job_saves_gives_its_gpus_back_and_is_held_until_its_user_releases_it():
    one = Watched(action=IdleAction.RELEASE)
    idle = one.busy_then_idle(gpus=2)
    one.run(170.0)
    (warning,) = one.lines(idle, WARNING)
    assert warning.text.endswith("in 1m00s its GPUs are taken back and it is held")
    assert one.cluster.job(idle).state is JobState.RUNNING
    one.run(60.0)
    job = one.cluster.job(idle)
    assert (job.state, job.held, job.reason) == (JobState.PENDING, True, WaitReasonCode.HELD)
    assert one.cluster.attempts(idle)[0].causes == (EndCause.IDLE,)
    wait = one.cluster.head.controller.waits[idle]
    assert wait.detail.startswith("its processes have not used its 2 GPUs for 3m20s")
    (audit,) = one.audits
    assert (audit.user, audit.origin, audit.target) == (IDLE_POLICY, "head", f"job {idle}")
    one.run(60.0)
    assert one.cluster.job(idle).state is JobState.PENDING, "it does not start by itself"
    one.use[idle] = BUSY
    one.cluster.request(HoldJob(job_id=idle, held=False, by=UserId("ada")))
    one.run(60.0)
    assert one.cluster.job(idle).state is JobState.RUNNING


def test_a_stopped_job_ends_with_the_reason():
    one = Watched(action=IdleAction.STOP)
    idle = one.busy_then_idle(gpus=1)
    one.run(240.0)
    job = one.cluster.job(idle)
    assert (job.state, job.cancelled_by) == (JobState.CANCELLED, IDLE_POLICY)
    assert job.detail == "its processes have not used its 1 GPU for 3m20s (idle policy of queue default)"
    assert [call.detail.split(":")[0] for call in one.audits] == ["stop"]


def test_work_after_the_warning_saves_the_job():
    one = Watched(action=IdleAction.RELEASE)
    idle = one.busy_then_idle(gpus=1)
    one.run(170.0)
    one.use[idle] = BUSY
    one.run(300.0)
    assert one.cluster.job(idle).state is JobState.RUNNING
    assert len(one.lines(idle, WARNING)) == len(one.lines(idle, ENDED)) == 1


def test_a_policy_that_is_removed_after_its_warning_withdraws_it():
    one = Watched(action=IdleAction.RELEASE)
    idle = one.busy_then_idle(gpus=1)
    one.run(170.0)
    one.set_policy(action=IdleAction.OFF)
    one.run(120.0)
    assert one.cluster.job(idle).state is JobState.RUNNING
    (line,) = one.lines(idle, ENDED)
    assert line.text == "it no longer counts as idle: the warning of the idle policy is withdrawn"


def test_a_policy_that_comes_late_gives_the_whole_grace():
    one = Watched()
    one.set_policy(action=IdleAction.OFF)
    idle = one.busy_then_idle(gpus=1)
    one.run(600.0)
    one.set_policy()
    one.run(50.0)
    assert one.cluster.job(idle).state is JobState.RUNNING
    assert len(one.lines(idle, WARNING)) == 1
    one.run(60.0)
    assert one.cluster.job(idle).held


def test_a_policy_that_becomes_stricter_warns_and_acts_again():
    one = Watched(action=IdleAction.WARN)
    idle = one.busy_then_idle(gpus=1)
    one.run(300.0)
    one.set_policy(action=IdleAction.STOP)
    one.run(50.0)
    assert [line.text.rpartition(";")[2] for line in one.lines(idle, WARNING)][1:] == [" in 1m00s it is cancelled"]
    one.run(30.0)
    assert one.cluster.job(idle).state is JobState.CANCELLED


def test_a_later_step_that_is_undone_repeats_no_warning():
    one = Watched(action=IdleAction.STOP)
    idle = one.busy_then_idle(gpus=1)
    follow = one.cluster.on_turn

    def on_turn(outbox):
        follow(outbox)
        if any(line.kind == WARNING for line in outbox.change.history):
            one.cluster.head.controller._undone()  # as after an exception in the next step, before policies are judged

    one.cluster.on_turn = on_turn
    one.run(180.0)
    assert len(one.lines(idle, WARNING)) == 1


@pytest.mark.parametrize("why", ["computes without reports", "no samples", "one GPU of two", "exempt", "low"])
def test_a_job_that_may_be_at_work_is_never_touched(why):
    one = Watched(action=IdleAction.STOP, exempt="keep-gpus=yes")
    labels = (("keep-gpus", "yes"),) if why == "exempt" else ()
    job = one.busy_then_idle(gpus=2, labels=labels)
    if why == "computes without reports":
        one.use[job] = BUSY
    elif why == "no samples":
        one.unsampled.add(job)
    elif why == "low":
        one.use[job] = 0.05
    elif why == "one GPU of two":
        one.busy_first = True
    one.run(300.0)
    assert one.cluster.job(job).state is JobState.RUNNING
    assert one.lines(job, WARNING) == []


def test_a_policy_may_count_low_use_too():
    one = Watched(action=IdleAction.STOP, states=(WasteKind.IDLE, WasteKind.LOW))
    job = one.busy_then_idle(gpus=1)
    one.use[job] = 0.05
    one.run(240.0)
    assert one.cluster.job(job).state is JobState.CANCELLED


def service_of(cluster):
    return cluster.world.table(SERVICES)["web"]


@pytest.mark.parametrize(("replicas", "hooks", "asleep"), [(3, True, 2), (1, True, 0), (3, False, 0)])
def test_idle_replicas_fall_asleep_if_they_can_and_the_last_one_keeps_serving(replicas, hooks, asleep):
    one = Watched("r: n0=4", action=IdleAction.RELEASE)
    one.cluster.behaviours["web"] = SERVES
    spec = web(replicas, 4, hooks=hooks)
    one.cluster.request(SubmitService(spec=spec, user=UserId("ada"), project="gpt", queue="default"))
    one.cluster.until(lambda: service_of(one.cluster).state is ServiceState.READY)
    jobs = sorted(one.cluster.world.relations.replicas["web"])
    one.run(60.0)
    one.use = dict.fromkeys(jobs, 0.0)
    one.run(400.0)
    service = service_of(one.cluster)
    assert (service.asleep, service.state) == (asleep, ServiceState.READY)
    assert sum(one.cluster.world.attempts[job].serving for job in jobs) == replicas - asleep
    assert all(one.cluster.job(job).state is JobState.RUNNING for job in jobs)


def test_a_head_that_starts_again_counts_no_retries_before_a_progress_that_it_does_not_know():
    one = Watched("r: n0=4")
    failing = one.cluster.submit(gpus=1, retry=100, behaviour=FAILING)
    one.run(60.0)
    assert one.alarms() == {(WasteKind.CRASH_LOOP, failing)}
    assert one.cluster.job(failing).user_retries >= 3
    one.restart_head()
    one.run(5.0)
    assert one.alarms() == set()
    one.run(60.0)
    assert one.alarms() == {(WasteKind.CRASH_LOOP, failing)}, "it fails again"


def test_a_head_that_starts_again_counts_from_its_own_start():
    one = Watched(action=IdleAction.RELEASE)
    idle = one.busy_then_idle(gpus=1)
    one.run(170.0)
    one.restart_head()
    one.run(170.0)
    assert one.cluster.job(idle).state is JobState.RUNNING
    assert len(one.lines(idle, WARNING)) == 2, "one by each head"
    one.run(70.0)
    assert one.cluster.job(idle).held

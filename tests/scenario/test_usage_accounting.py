"""The ledger of states behind the real controller, in virtual time: nodes that die, shares, heads that crash; and what samples and steps show."""

from dataclasses import replace

import pytest

from phalanx.controller.telemetry import ReportedSteps
from phalanx.controller.usage.usage_accounting import UsageAccountant
from phalanx.controller.usage.usage_resume import resume_ledger, usage_hour
from phalanx.core.accounting.usage_report import UsageKey, sum_usage
from phalanx.core.accounting.usage_states import UNOBSERVED, StepActivity
from phalanx.core.fleet.node import NodeState
from phalanx.core.ids import Generation, NodeId, SupervisorId, UserId
from phalanx.core.state.events import CordonNode, RemoveNode
from phalanx.core.state.reports import UsageCounted
from phalanx.core.work.states import AttemptState
from phalanx.core.work.usage.usage_hour import USAGE_MARK, UsageMark
from phalanx.wire.supervisor import DeviceSample, SamplesRequest
from tests.builders import job, make_node, placed
from tests.harness import Harness
from tests.simulated_node import JobBehaviour

LONG = JobBehaviour(run_s=1000.0)
N0, N1 = NodeId("n0"), NodeId("n1")


class Accounted:
    """A cluster with its accountant, and the GPU time of the fleet as counted from the head's world at each turn."""

    def __init__(self, fleet="r: n0=4 n1=4 n2=4"):
        self.cluster = Harness(fleet)
        self.fleet_us = 0
        self._counted_ms = self.now_ms
        self._devices = sum(len(node.devices) for node in self.cluster.world.nodes.values())
        self.accountant = self._fresh(None)
        self.cluster.on_turn = self._on_turn

    @property
    def now_ms(self):
        return int(self.cluster.now.wall_s * 1000)

    def _fresh(self, mark):
        accountant = UsageAccountant(self._wait_word)
        resume_ledger(accountant, self.cluster.world, self.cluster.store, mark, self.now_ms)
        return accountant

    def _wait_word(self, job_id):
        head = self.cluster.head
        found = None if head is None else head.controller.waits.get(job_id)
        return "" if found is None else found.reason.value

    def _on_turn(self, outbox):
        now_ms = self.now_ms
        self.fleet_us += self._devices * 1000 * (now_ms - self._counted_ms)
        self._counted_ms = now_ms
        self._devices = sum(len(node.devices) for node in self.cluster.world.nodes.values())
        self.accountant.apply(tuple(outbox.change.records), tuple(outbox.change.removed), now_ms)
        self.accountant.update(now_ms)

    def hours(self):
        self.fleet_us += self._devices * 1000 * (self.now_ms - self._counted_ms)
        self._counted_ms = self.now_ms
        self.accountant.update(self.now_ms)
        self.accountant.ledger.settle(self.now_ms)
        return [usage_hour(hour, found) for hour, found in sorted(self.accountant.ledger.hours.items())]

    def store_hours(self):
        """What the recorder stores once a minute."""
        nodes = tuple(map(self.accountant.counted_node, self.accountant.ledger.nodes))
        mark = UsageMark(id=USAGE_MARK, until_ms=self.now_ms, nodes=nodes)
        self.cluster.turn([UsageCounted(hours=tuple(self.hours()), mark=mark)])
        return mark

    def crash_and_restart(self, mark, away_s):
        """The head dies with everything that it has not stored, and comes back."""
        self.cluster.kill_head()
        self.cluster.run(away_s)
        self.cluster.start_head()
        self.accountant = self._fresh(mark)

    def totals(self, by=UsageKey.JOB):
        found = sum_usage(self.hours(), by, rows_max=100)
        assert found.fleet == self.fleet_us, "fleet x time"
        assert found.total.total == found.fleet == sum(row.total for row in found.rows)
        assert sum(found.total.by_state.values()) == found.fleet
        return found

    def seconds(self):
        """GPU-seconds of each state."""
        return {state: amount / 1e6 for state, amount in self.totals().total.by_state.items()}


def test_a_death_a_drain_and_shares_sum_to_fleet_times_time():
    one = Accounted()
    cluster = one.cluster
    gang = cluster.submit(gpus="2x4", behaviour=LONG)
    share = cluster.submit(gpus="1/4", behaviour=LONG)
    cluster.runs(gang)
    cluster.run(30.0)
    cluster.kill_node("n1", silent=True)
    cluster.run(60.0)
    cluster.request(CordonNode(node_id=NodeId("n2"), by=UserId("op"), why="fans", drain=True))
    cluster.run(30.0)
    cluster.cancel(gang)
    cluster.cancel(share)
    cluster.run(30.0)
    cluster.request(RemoveNode(node_id=N1, by=UserId("op")))
    cluster.run(30.0)
    found = one.seconds()
    assert {"computing", "broken", "draining"} <= found.keys()
    assert found["broken"] == pytest.approx(4 * 140, rel=0.2), "four GPUs from the end of the lease to the removal"
    rows = {row.key: row for row in one.totals().rows}
    assert {gang, share, ""} == rows.keys()


def test_free_devices_say_whether_a_job_could_use_them_and_why_it_does_not():
    one = Accounted("r: n0=4 n1=4")
    cluster = one.cluster
    cluster.runs(cluster.submit(gpus="1", behaviour=LONG))
    before = one.seconds()
    cluster.submit(gpus="2x4", behaviour=LONG)
    cluster.run(60.0)
    found = one.totals()
    assert "free_demand" not in before
    (why,) = found.total.by_note["free_demand"]
    assert why in ("resources", "priority")
    assert found.total.by_state["free_demand"] == pytest.approx(4 * 60e6, rel=0.15), "the node that is wholly free"
    assert found.total.by_state["free"] >= 3 * 50e6, "the gang cannot use three GPUs of a node"


def test_a_crash_of_the_head_leaves_a_named_gap_and_no_hole():
    one = Accounted()
    cluster = one.cluster
    gang = cluster.submit(gpus="2x4", behaviour=LONG)
    cluster.runs(gang)
    short = cluster.submit(gpus="1", behaviour=JobBehaviour(run_s=15.0))
    cluster.runs(short)
    cluster.run(10.0)
    mark = one.store_hours()
    stored = one.totals().total.total
    cluster.ends(short)  # between the last store and the crash
    cluster.run(5.0)
    one.crash_and_restart(mark, away_s=3.0)
    cluster.run(20.0)
    found = one.totals()
    gap_us = sum(notes.get(UNOBSERVED, 0) for state, notes in found.total.by_note.items() if state != "computing")
    assert found.total.total > stored
    assert gap_us > 0, "what was free in the gap is named too"
    rows = {row.key: row for row in found.rows}
    assert rows[short].by_note["computing"][UNOBSERVED] == pytest.approx(5e6, abs=0.5e6), "its end is in the records"
    assert rows[gang].total > 8 * 30e6


def test_a_node_that_left_while_nothing_was_stored_counts_until_it_left():
    one = Accounted()
    cluster = one.cluster
    cluster.kill_node("n2")
    cluster.run(10.0)
    mark = one.store_hours()
    cluster.run(7.0)
    cluster.request(RemoveNode(node_id=NodeId("n2"), by=UserId("op")))
    cluster.run(20.0)
    one.crash_and_restart(mark, away_s=3.0)
    cluster.run(20.0)
    found = one.totals()  # equal to what the head's world had at each moment
    assert found.total.by_note["draining"][UNOBSERVED] == pytest.approx(4 * 7e6, abs=1e5)


# ---- samples and steps ------------------------------------------------------------------------------------------------

START_MS = 1_700_000_000_000


class OneGpu:
    """A job on one GPU: a second at a time, with a sample, and perhaps a step."""

    def __init__(self, seen=AttemptState.PLACED):
        self.steps: StepActivity | None = None
        self.count = 0
        self.now_ms = START_MS
        self.accountant = UsageAccountant(lambda _: "")
        case = placed(job("1", gpus=1), on="n0:0")
        self.attempt = replace(case.attempt, state=AttemptState.RUNNING, running_s=START_MS / 1000)
        if seen is AttemptState.PLACED:
            self.accountant.apply((case.job, case.attempt), (), START_MS)
        self.accountant.apply((make_node("n0", 1), case.job, self.attempt), (), START_MS)
        self.accountant.update(START_MS)

    def seconds(self, count, utilization, *, step=False, processes=1, sampled=True):
        for _ in range(count):
            self.now_ms += 1000
            if sampled:
                device = DeviceSample(
                    index=0,
                    uuid="",
                    counter="",
                    utilization=utilization,
                    job_id=self.attempt.job_id,
                    processes=processes,
                )
                request = SamplesRequest(supervisor_id=SupervisorId("s"), node_id=N0, at_s=0.0, devices=[device])
                self.accountant.add_samples(request, self.now_ms)
            if step:
                self.count += 1
                self.report()
            self.accountant.update(self.now_ms)
        return self

    def report(self):
        assert self.steps is not None
        steps = ReportedSteps(self.attempt.epoch, self.attempt.generation, self.count, self.steps)
        self.accountant.steps_reported(self.attempt.job_id, steps, self.now_ms)

    def by_state(self):
        self.accountant.ledger.settle(self.now_ms)
        hours = [usage_hour(hour, found) for hour, found in self.accountant.ledger.hours.items()]
        return {
            state: amount // 1_000_000
            for state, amount in sum_usage(hours, UsageKey.JOB, rows_max=9).total.by_state.items()
        }


STEPPING = StepActivity(silent_s=0.0, gap_s=1.0)


def test_quiet_time_counts_from_its_first_second():
    found = OneGpu().seconds(100, 0.9).seconds(100, 0.0).by_state()
    assert found == {"starting": 1, "computing": 99, "idle": 100}, "it starts until the first sample"


def test_a_holder_that_only_sleeps_starts_and_is_then_idle():
    assert OneGpu().seconds(300, 0.0).by_state() == {"starting": 120, "idle": 180}


def test_a_device_without_a_process_is_unoccupied():
    found = OneGpu().seconds(60, 0.9).seconds(60, 0.0, processes=0).by_state()
    assert found == {"starting": 1, "computing": 59, "unoccupied": 60}


def test_a_hang_counts_from_when_the_next_step_was_due_though_the_device_is_busy():
    gpu = OneGpu()
    gpu.steps = STEPPING
    found = gpu.seconds(100, 0.9, step=True).seconds(100, 1.0).by_state()
    assert (found["hung"], sum(found.values())) == (99, 200)


def test_a_hang_that_passes_is_no_longer_one():
    gpu = OneGpu()
    gpu.steps = STEPPING
    found = gpu.seconds(100, 0.9, step=True).seconds(100, 1.0).seconds(100, 0.9, step=True).by_state()
    assert found["hung"] == 100, "from the step that was due to the one that came"


def test_a_job_that_loads_and_compiles_starts_until_its_first_step():
    gpu = OneGpu().seconds(40, 0.9).seconds(20, 0.0)
    gpu.steps = replace(STEPPING, gap_s=0.0)
    found = gpu.seconds(40, 0.9, step=True).by_state()
    assert found == {"starting": 61, "computing": 39}, "also what was active, and idle, before"


def test_steps_of_a_job_that_an_earlier_head_saw_start_say_nothing_of_its_start():
    gpu = OneGpu(seen=AttemptState.RUNNING).seconds(40, 0.9)
    gpu.steps = STEPPING
    assert gpu.seconds(40, 0.9, step=True).by_state() == {"computing": 79, "starting": 1}


def test_steps_before_a_restart_say_nothing_of_the_time_after_it():
    gpu = OneGpu()
    gpu.steps = STEPPING
    gpu.seconds(60, 0.9, step=True)
    gpu.attempt = replace(gpu.attempt, generation=Generation(1), running_s=gpu.now_ms / 1000)
    gpu.accountant.apply((gpu.attempt,), (), gpu.now_ms)
    gpu.accountant.update(gpu.now_ms)
    assert gpu.seconds(100, 0.0).by_state() == {"starting": 101, "computing": 59}, "it loads; it does not hang"


def test_steps_that_begin_to_wait_count_from_the_first_that_waited():
    gpu = OneGpu()
    gpu.steps = STEPPING
    gpu.seconds(50, 0.9, step=True).seconds(5, 0.0, step=True)  # five of ten steps have waited
    gpu.steps = replace(STEPPING, data_share=0.6, share_s=6.0)
    assert gpu.seconds(45, 0.0, step=True).by_state() == {"starting": 1, "computing": 49, "data_bound": 50}


def test_a_node_is_broken_since_it_was_last_heard():
    gpu = OneGpu().seconds(60, 0.9).seconds(45, 0.9, sampled=False)
    gpu.accountant.apply((replace(make_node("n0", 1), state=NodeState.DOWN),), (), gpu.now_ms)
    assert gpu.seconds(15, 0.9, sampled=False).by_state() == {"starting": 1, "computing": 59, "broken": 60}


def test_waits_for_data_saves_and_silence_have_their_states():
    gpu = OneGpu()
    gpu.steps = replace(STEPPING, data_share=0.8)
    gpu.seconds(50, 0.05, step=True)
    gpu.steps = replace(STEPPING, communication_share=0.8)
    gpu.seconds(50, 0.9, step=True)
    gpu.steps = replace(STEPPING, saving=True)
    gpu.report()
    gpu.seconds(50, 0.0)
    found = gpu.by_state()
    assert {state: found[state] for state in ("data_bound", "communicating", "checkpointing")} == pytest.approx(
        {"data_bound": 50, "communicating": 50, "checkpointing": 50}, abs=1
    )


def test_samples_that_stop_coming_make_the_time_unobserved():
    gpu = OneGpu().seconds(60, 0.9).seconds(60, None, sampled=False)
    gpu.accountant.ledger.settle(gpu.now_ms)
    notes = {
        state.note: amount // 1_000_000
        for hour in gpu.accountant.ledger.hours.values()
        for (_, state), amount in hour.amounts.items()
    }
    assert notes[UNOBSERVED] == 50, "ten seconds of silence are not yet one"

"""Bursting in virtual time, through the controller: the wait here against the price there, caps, the way home, and paid hours."""

from dataclasses import replace

import pytest

from phalanx.controller.step_result import ControllerTime
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node_pool import NodePool, NodeTemplate, PaidBy, PoolNodeState
from phalanx.core.ids import Epoch, JobId, NodeId, PoolId, UserId
from phalanx.core.months import month_bounds_s, month_of
from phalanx.core.scheduling.outlook.bursting import BurstRules
from phalanx.core.scheduling.outlook.counterfactuals import ChangeKind, CounterfactualSearch
from phalanx.core.scheduling.outlook.forecast import Forecast
from phalanx.core.scheduling.outlook.what_if import trim_snapshot, what_if
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.state.events import PutNodePool, PutProject, PutQueue, SubmitJob
from phalanx.core.work.burst_rule import parse_burst_rule
from phalanx.core.work.gpus import parse_gpus
from phalanx.core.work.job import PublishedCheckpoint
from phalanx.core.work.queue import Project, Queue
from phalanx.core.work.spec import JobSpec, LaunchMode, Role
from phalanx.core.work.usage.monthly_budget import BudgetWarning, MonthlyBudget
from phalanx.simulator.cluster import PROJECT, QUEUE, ReplayCluster
from phalanx.simulator.fleet import equal_nodes
from phalanx.simulator.rented_nodes import RentedPool

HOUR = 3600.0
BEGIN = month_bounds_s("2026-11")[0] + 10 * 86400.0
BOOT = 300.0
RULE = "when wait > 2h and price < 40"
ADA = UserId("ada")


def pool(**fields):
    own = tuple(Device(index=index, uuid="", model="", memory_bytes=80 << 30) for index in range(8))
    return NodePool(
        id=PoolId("cloud"),
        provider="simulated",
        template=NodeTemplate(text="8", devices=own, cpus=1 << 20, memory_bytes=1 << 50, apart=True),
        by=UserId("op"),
        **{"price_per_h": 16.0, "min_nodes": 0, "max_nodes": 4, "idle_s": 300.0, "start_limit_s": HOUR, **fields},
    )


class Burst:
    """One own node of 8 GPUs and a pool of such nodes at $16 an hour that boot in 5 minutes."""

    def __init__(self, rule=RULE, nodes=1, begin_s=BEGIN, **fields):
        queue = Queue(id=QUEUE, burst=None if rule is None else parse_burst_rule(rule))
        self.now_s = begin_s
        self.cluster = ReplayCluster(
            equal_nodes(nodes, 8),
            PolicySettings(),
            users=[ADA],
            start_s=begin_s,
            queues=[queue],
            pools=[RentedPool(pool=pool(**fields), boot_s=BOOT)],
        )
        self.world = self.cluster.controller.world

    def run(self, for_s, *events):
        """Run on; events happen now."""
        until_s, inbox = self.now_s + for_s, list(events)
        while True:
            turned = self.cluster.run_instant(self.now_s, inbox)
            assert not [answer for answer in turned.answers if isinstance(answer, Exception)], turned.answers
            inbox = []
            next_s = min(self.now_s + max(turned.due_in_s, 1e-3), self.cluster.provider.next_boot_s())
            if next_s > until_s:
                break
            self.now_s = max(self.now_s, next_s)
        self.now_s = until_s

    def submit(self, hours, gpus=8, **fields):
        role = Role(argv=("train",), gpus=parse_gpus(str(gpus)), tasks_per_node=1, launch=LaunchMode.FIXED)
        limit_s = None if hours is None else hours * HOUR
        spec = JobSpec(name="train", role=role, workdir="/", saves_on_stop=True, time_limit_s=limit_s, **fields)
        return SubmitJob(spec=spec, user=ADA, project=PROJECT, queue=QUEUE)

    def end(self, number):
        self.run(1.0, *self.cluster.supervisors.finish_job(JobId(str(number)), self.now_s))

    def where(self, number):
        attempt = self.world.attempts.get(JobId(str(number)))
        return None if attempt is None else str(attempt.allocation.grants[0].node_id)

    def why(self, number):
        return self.cluster.controller.waits[JobId(str(number))].detail

    @property
    def rented(self):
        return sorted(self.world.pool_nodes)

    @property
    def own_pool(self):
        return self.world.node_pools[PoolId("cloud")]


def test_a_job_rents_if_the_wait_here_is_longer_and_the_run_there_is_cheaper_than_the_rule_says():
    burst = Burst()
    burst.run(60.0, burst.submit(10))
    burst.run(30.0, burst.submit(1), burst.submit(3))
    assert burst.rented == ["cloud-0"]
    assert "pool cloud is starting 1 node for it; here in about 9h58m, free; there (1 x cloud)" in burst.why(2)
    assert "$16.00: chosen there (burst when wait > 2h and price < 40)" in burst.why(2)
    assert burst.why(3).endswith("$48.00: chosen here (burst when wait > 2h and price < 40; price < 40 does not hold)")
    burst.run(BOOT)
    assert [burst.where(number) for number in (1, 2, 3)] == ["n0", "cloud-0", None]
    assert burst.own_pool.boot_s == pytest.approx(BOOT, abs=2.0)
    assert burst.rented == ["cloud-0"]


def test_a_job_that_starts_here_soon_enough_rents_nothing():
    burst = Burst()
    burst.run(60.0, burst.submit(1.9))
    burst.run(600.0, burst.submit(1))
    assert burst.rented == []
    assert "chosen here" in burst.why(2)
    assert "wait > 2h does not hold" in burst.why(2)


def test_jobs_ahead_in_line_count_in_the_wait_here():
    burst = Burst("when wait > 2h", max_nodes=1)
    burst.run(60.0, burst.submit(1.5))
    burst.run(60.0, burst.submit(1), burst.submit(1))  # here in 1.5 h, and in 2.5 h
    assert "chosen here" in burst.why(2)
    assert "chosen there" in burst.why(3)


def test_an_unknown_start_here_counts_as_far_ahead_as_the_job_has_waited():
    burst = Burst("when wait > 2h")
    burst.run(60.0, burst.submit(None, preemptible=False))
    burst.run(1.9 * HOUR, burst.submit(1))
    assert "here at an unknown time (it has waited 1h" in burst.why(2)
    assert burst.rented == []
    burst.run(0.2 * HOUR)
    assert burst.where(2) == "cloud-0" or burst.rented == ["cloud-0"]


def test_a_job_of_unknown_run_time_rents_only_if_the_rule_names_no_price():
    for rule, expected in ((RULE, []), ("when wait > 2h", ["cloud-0"])):
        burst = Burst(rule)
        burst.run(60.0, burst.submit(10))
        burst.run(60.0, burst.submit(None))
        assert burst.rented == expected
        assert "$16.00 an hour, its run time unknown" in burst.why(2)


def test_without_a_rule_a_pool_orders_for_every_waiting_job_and_never_for_none():
    for rule, expected in ((None, ["cloud-0"]), ("always", ["cloud-0"]), ("never", [])):
        burst = Burst(rule)
        burst.run(60.0, burst.submit(0.1))
        burst.run(60.0, burst.submit(1))
        assert burst.rented == expected


def test_egress_of_the_checkpoint_counts_in_the_price():
    burst = Burst("when wait > 2h and price < 20", egress_per_gb=0.1)
    burst.run(60.0, burst.submit(10))
    waiting = burst.submit(1, hold=True)
    burst.run(1.0, waiting)
    job = burst.world.jobs[JobId("2")]
    saved = PublishedCheckpoint(epoch=Epoch(1), step=1, path="/c", digest="d", bytes=40_000_000_000)
    burst.world.jobs[job.id] = replace(job, checkpoints=(saved,), spec=replace(job.spec, hold=False), held=False)
    burst.cluster.controller.scheduler.stale = True
    burst.run(60.0)
    assert "$24.00: chosen here" in burst.why(2)  # an hour at $16, and 40 GB there and back


def test_a_job_comes_home_when_the_fleet_frees_up_and_its_node_is_released():
    burst = Burst()
    burst.run(60.0, burst.submit(10))
    burst.run(2 * BOOT, burst.submit(2))
    assert burst.where(2) == "cloud-0"
    burst.end(1)
    burst.run(60.0)
    assert burst.where(2) == "n0"
    assert burst.world.jobs[JobId("2")].moves == 1
    assert burst.world.jobs[JobId("2")].checkpoints  # it goes on from what it saved
    burst.run(400.0)
    assert burst.rented == []


def test_a_job_that_has_just_started_there_stays_for_as_long_as_its_queue_says():
    burst = Burst()
    rule = parse_burst_rule(RULE)
    burst.run(60.0, PutQueue(queue=Queue(id=QUEUE, burst=rule, min_stay_s=360.0)), burst.submit(10))
    burst.run(BOOT + 60.0, burst.submit(2))
    assert burst.where(2) == "cloud-0"
    burst.end(1)
    burst.run(60.0)
    assert burst.where(2) == "cloud-0"
    burst.run(300.0)
    assert burst.where(2) == "n0"


def test_a_job_near_its_end_stays():
    burst = Burst()
    burst.run(60.0, burst.submit(10))
    burst.run(2 * BOOT, burst.submit(2))
    burst.run(2 * HOUR - 330.0)  # 30 s left of its limit: less than a restart
    burst.end(1)
    burst.run(20.0)
    assert burst.where(2) == "cloud-0"
    assert burst.world.jobs[JobId("2")].moves == 0


def test_a_waiting_job_takes_the_free_own_node_before_one_that_comes_home():
    burst = Burst()
    burst.run(60.0, burst.submit(10))
    burst.run(2 * BOOT, burst.submit(2), burst.submit(9))
    burst.end(1)
    burst.run(60.0)
    assert [burst.where(number) for number in (2, 3)] == ["cloud-0", "n0"]


def test_own_nodes_are_taken_before_rented_ones():
    burst = Burst("always", nodes=2, min_nodes=1)
    burst.run(2 * BOOT)
    assert burst.rented == ["cloud-0"]
    burst.run(10.0, burst.submit(1), burst.submit(1))
    assert sorted(filter(None, (burst.where(1), burst.where(2)))) == ["n0", "n1"]


# ---- caps -------------------------------------------------------------------------------------------------------------


def test_a_cap_of_nothing_orders_nothing_and_says_so():
    burst = Burst("always", cap_per_month=0.0)
    burst.run(60.0, burst.submit(10))
    burst.run(60.0, burst.submit(1))
    assert burst.rented == []
    assert "pool cloud orders no node: its cap is $0 a month" in burst.why(2)


def test_the_cap_of_a_month_counts_released_and_running_nodes_and_ends_with_the_month():
    december_s = month_bounds_s("2026-12")[0]
    burst = Burst("always", cap_per_month=49.0, idle_s=60.0, begin_s=december_s - 1.5 * HOUR)
    burst.run(60.0, burst.submit(None))
    burst.run(HOUR + BOOT, burst.submit(1))
    burst.end(2)
    burst.run(120.0)
    spent = burst.own_pool.charged
    assert (spent.month, spent.usd) == ("2026-11", pytest.approx(16.0 * (HOUR + BOOT + 60.0) / HOUR, rel=0.02))
    burst.run(60.0, burst.submit(1), burst.submit(1))
    assert burst.rented == ["cloud-1"]  # $17.60 are spent; an hour of two nodes would make $49.60
    assert "of its $49.00 a month are spent in 2026-11, and 1 of its nodes run" in burst.why(4)
    burst.run(december_s - burst.now_s - 60.0)
    burst.end(3)
    assert month_of(burst.now_s) == "2026-11"
    burst.run(60.0)
    burst.run(600.0)
    assert month_of(burst.now_s) == "2026-12"
    assert burst.where(4) is not None


@pytest.mark.parametrize(("of_queue", "rents"), [(None, ["cloud-0"]), ("never", [])])
def test_the_rule_of_a_project_holds_where_its_queue_says_nothing(of_queue, rents):
    burst = Burst(rule=of_queue)
    burst.run(1.0, PutProject(project=Project(id=PROJECT, burst=parse_burst_rule(RULE))))
    burst.run(60.0, burst.submit(10))
    burst.run(30.0, burst.submit(1), burst.submit(3))
    assert burst.rented == rents
    assert ("chosen there (burst when wait > 2h and price < 40)" in burst.why(2)) == bool(rents)
    assert ("price < 40 does not hold" if rents else "its queue or project rents nothing (burst never)") in burst.why(3)


def test_a_project_that_has_spent_its_budget_rents_nothing_this_month():
    burst = Burst("always")
    budget = MonthlyBudget(cents=100_000, currency="USD")
    spent = BudgetWarning(month="2026-11", percent=100)
    project = Project(id=PROJECT, budget=budget, budget_warned=spent)
    burst.run(60.0, PutProject(project=project), burst.submit(10))
    burst.run(60.0, burst.submit(1))
    assert burst.rented == []
    assert f"project {PROJECT} has spent its budget of 1000 USD/month: it rents no node" in burst.why(2)


# ---- paid hours ---------------------------------------------------------------------------------------------------------


def test_an_idle_node_is_kept_until_the_last_minute_of_its_paid_hour():
    burst = Burst("always", billed=PaidBy.HOUR, idle_s=60.0)
    burst.run(60.0, burst.submit(10))
    burst.run(2 * BOOT, burst.submit(1))
    burst.end(2)
    burst.run(0.5 * HOUR)
    assert burst.world.pool_nodes[NodeId("cloud-0")].state is PoolNodeState.UP
    burst.run(1.0, burst.submit(1))
    assert burst.where(3) == "cloud-0"  # the paid hour is used
    burst.end(3)
    burst.run(0.5 * HOUR)
    assert burst.rented == []
    (machine,) = burst.cluster.provider.nodes
    assert HOUR - 61.0 <= machine.until_s - machine.since_s <= HOUR
    assert machine.cost == 16.0
    assert burst.own_pool.charged.usd == 16.0


def test_terms_of_a_pool_may_change_while_it_exists():
    burst = Burst()
    burst.run(1.0, PutNodePool(pool=pool(cap_per_month=5.0, egress_per_gb=0.2, billed=PaidBy.HOUR)))
    changed = burst.own_pool
    assert (changed.cap_per_month, changed.egress_per_gb, changed.billed) == (5.0, 0.2, PaidBy.HOUR)


# ---- rented nodes that are there ----------------------------------------------------------------------------------------


def test_a_rented_node_takes_no_job_whose_run_there_costs_too_much_or_that_never_rents():
    for rule, hours in ((RULE, 3), ("never", 0.1)):
        burst = Burst("always", min_nodes=1)
        burst.run(2 * BOOT)
        assert burst.rented == ["cloud-0"]
        queue = Queue(id=QUEUE, burst=parse_burst_rule(rule))
        burst.run(60.0, PutQueue(queue=queue), burst.submit(10, preemptible=False))
        burst.run(60.0, burst.submit(hours))
        assert (burst.where(1), burst.where(2)) == ("n0", None)
        assert "only rented nodes have room now, and the rule of its queue or project keeps it off them" in burst.why(2)
        burst.end(1)
        burst.run(10.0)
        assert burst.where(2) == "n0"


def test_a_cheap_job_takes_a_rented_node_that_is_there_however_short_it_would_wait():
    burst = Burst(RULE, min_nodes=1)
    burst.run(2 * BOOT)
    burst.run(60.0, burst.submit(0.5, preemptible=False))
    burst.run(60.0, burst.submit(1))
    assert (burst.where(1), burst.where(2)) == ("n0", "cloud-0")


def test_a_job_that_is_kept_off_keeps_no_rented_node():
    burst = Burst(RULE)
    burst.run(60.0, burst.submit(10, preemptible=False))
    burst.run(2 * BOOT, burst.submit(1))
    burst.run(60.0, PutQueue(queue=Queue(id=QUEUE, burst=parse_burst_rule("never"))), burst.submit(3))
    burst.end(2)
    burst.run(600.0)
    assert burst.rented == []
    assert burst.where(3) is None


def test_a_job_that_turns_out_to_be_short_may_use_a_rented_node_that_kept_it_off():
    burst = Burst(RULE, min_nodes=1)
    burst.run(60.0, burst.submit(10, preemptible=False))
    burst.run(2 * BOOT, burst.submit(1))
    burst.run(60.0, burst.submit(3))
    assert burst.where(3) is None
    burst.end(2)  # after some minutes: the median of similar jobs is now below the limit
    burst.run(30.0)
    assert burst.where(3) == "cloud-0"


@pytest.mark.parametrize("billed", list(PaidBy))
def test_the_month_of_a_pool_is_what_the_provider_charged(billed):
    burst = Burst("always", billed=billed, idle_s=90.0)
    burst.run(60.0, burst.submit(10, preemptible=False))
    for number, hours in enumerate((1, 2, 3), start=2):
        burst.run(700.0, burst.submit(hours))
        burst.run(400.0)
        burst.end(number)
    burst.run(2 * HOUR)
    assert burst.rented == []
    charged = sum(machine.cost for machine in burst.cluster.provider.nodes)
    assert len(burst.cluster.provider.nodes) >= 1
    assert burst.own_pool.charged.usd == pytest.approx(charged)
    assert charged > 0.0


def test_suggestions_for_a_job_that_is_kept_off_do_not_start_it_on_a_rented_node():
    burst = Burst("always", min_nodes=1)
    burst.run(2 * BOOT)
    burst.run(
        60.0, PutQueue(queue=Queue(id=QUEUE, burst=parse_burst_rule("never"))), burst.submit(10, preemptible=False)
    )
    burst.run(60.0, burst.submit(1))
    job, now = JobId("2"), ControllerTime(wall_s=burst.now_s, boot_s=burst.now_s)
    found = burst.cluster.controller.read_snapshot(now, job_id=job)
    predictor = found.run_times.predictor()
    for rules, starts in ((BurstRules(lambda: predictor), False), (None, True)):
        trial = what_if(trim_snapshot(found.snapshot, burst.world.jobs[job]), found.scheduler, rules)
        assert trial.starts(job) is starts
        if rules is not None:
            search = CounterfactualSearch(
                Forecast(trial, predictor), burst.world.jobs[job], found.scheduler, lambda: True
            )
            assert [change.kind for change in search.find()] == [ChangeKind.WAIT]  # for the job on the own node

"""A month of a fleet in virtual time, with the ledger of states behind the real controller: jobs with shares, failures and stops, nodes that
die, leave and return, a pool, and a head that crashes. The ledger's hours lie in the store; the events of the nodes are its history.
"""

import itertools
from random import Random

from phalanx.controller.usage.usage_accounting import UsageAccountant
from phalanx.controller.usage.usage_resume import resume_ledger, usage_hour
from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.node import NodeState
from phalanx.core.fleet.node_pool import NodePool, NodeTemplate
from phalanx.core.ids import JobId, NodeId, PoolId, ProjectId, QueueId, UserId
from phalanx.core.months import month_bounds_s
from phalanx.core.state.events import (
    CancelJob,
    CordonNode,
    PutNodePool,
    PutProject,
    PutQueue,
    PutUser,
    RemoveNode,
    SubmitJob,
    UncordonNode,
)
from phalanx.core.state.records import USAGE_HOURS
from phalanx.core.state.reports import UsageCounted
from phalanx.core.work.gpus import parse_gpus
from phalanx.core.work.queue import Project, Queue
from phalanx.core.work.usage.usage_hour import USAGE_MARK, UsageMark
from phalanx.core.work.users import User, UserRole
from phalanx.simulator.drill.behaviour import JobBehaviour
from tests.builders import make_node, spec
from tests.harness import Harness

MONTH = "2026-11"
FLEET = "r: n0=h100:8 n1=h100:8 | s: m0=a100:4 m1=a100:4"
SHAPES = ("1", "2", "4", "8", "2x8", "1/4", "1/2", "h100:4", "a100:2", "2xl40s:4", "l40s:1")
USERS = {"ann": ("nlp", "fast"), "bob": ("nlp", "slow"), "eve": ("vision", "slow")}
LEASE_S = 3600.0
STORE_EVERY_S = 1800.0


class SimulatedMonth:
    """See the module. `run` it once."""

    def __init__(self, seed, hours):
        self.dice = Random(seed)
        begin_s, _ = month_bounds_s(MONTH)
        self.cluster = Harness(FLEET, lease_s=LEASE_S)
        # What drills check after each event; here it would take most of the time.
        self.cluster.invariants.check_processes = lambda: None  # type: ignore[method-assign]
        self.cluster.jump_clock(begin_s - 1800.0 - self.cluster.now.wall_s)
        self.end_s = begin_s + 3600.0 * hours
        self.jobs = []
        self.numbers = itertools.count()
        self._people()
        self._pool()
        self.mark = None
        self.accountant = self._fresh()
        self.cluster.on_turn = self._on_turn

    def run(self):
        """Until the end, with something every quarter of an hour or so."""
        while self.cluster.now.wall_s < self.end_s:
            what = self.dice.choices(
                (self._submit, self._cancel, self._kill_node, self._remove_node, self._cordon, self._crash),
                (40, 4, 5, 4, 4, 2),
            )[0]
            try:
                what()
            except PhalanxError:
                pass  # such as a node that cannot be removed now
            end_s = min(self.end_s, self.cluster.now.wall_s + self.dice.uniform(300.0, 5400.0))
            while self.cluster.now.wall_s < end_s:
                self.cluster.run(min(STORE_EVERY_S, end_s - self.cluster.now.wall_s))
                self._store_hours()

    def hours(self):
        """The stored hours of the ledger, oldest first."""
        return sorted(self.cluster.store.records(USAGE_HOURS), key=lambda hour: int(hour.id))

    def events(self):
        """The history as JSON would have it."""
        return [
            {"at_s": line.at_s, "kind": line.kind, "node_id": line.node_id, "facts": line.facts}
            for line in self.cluster.store.history(limit=10_000_000)
        ]

    # ---- the ledger ----

    @property
    def now_ms(self):
        return int(self.cluster.now.wall_s * 1000)

    def _fresh(self):
        accountant = UsageAccountant(lambda _: "resources")
        resume_ledger(accountant, self.cluster.world, self.cluster.store, self.mark, self.now_ms)
        return accountant

    def _on_turn(self, outbox):
        self.accountant.apply(tuple(outbox.change.records), tuple(outbox.change.removed), self.now_ms)
        self.accountant.update(self.now_ms)

    def _store_hours(self):
        ledger, now_ms = self.accountant.ledger, self.now_ms
        self.accountant.update(now_ms)
        ledger.settle(now_ms)
        hours = tuple(usage_hour(hour, found) for hour, found in ledger.hours.items())
        nodes = tuple(map(self.accountant.counted_node, ledger.nodes))
        self.mark = UsageMark(id=USAGE_MARK, until_ms=now_ms, nodes=nodes)
        self.cluster.turn([UsageCounted(hours=hours, mark=self.mark)])
        ledger.drop_hours(now_ms - now_ms % 3_600_000 - 3_600_000)

    # ---- what happens ----

    def _people(self):
        for user, (project, queue) in USERS.items():
            self.cluster.request(PutUser(user=User(id=UserId(user), role=UserRole.USER)))
            self.cluster.request(PutProject(project=Project(id=ProjectId(project))))
            self.cluster.request(PutQueue(queue=Queue(id=QueueId(queue), quota_gpus=8 if queue == "fast" else None)))

    def _pool(self):
        def pooled(name):
            return make_node(name, "l40s:4")

        self.cluster.add_provider(Random(self.dice.random()), pooled)
        offered = pooled("template")
        template = NodeTemplate(
            text="l40s:4", devices=offered.devices, cpus=offered.cpus, memory_bytes=offered.memory_bytes
        )
        pool = NodePool(
            id=PoolId("cloud"),
            provider="drill",
            template=template,
            min_nodes=0,
            max_nodes=3,
            price_per_h=8.0,
            idle_s=900.0,
            start_limit_s=120.0,
            by=UserId("op"),
        )
        self.cluster.request(PutNodePool(pool=pool))

    def _submit(self):
        user = self.dice.choice(list(USERS))
        project, queue = USERS[user]
        run_s, fails = self.dice.uniform(120.0, 12_000.0), self.dice.random() < 0.2
        one = spec(
            name=f"job{next(self.numbers)}",
            gpus=parse_gpus(self.dice.choice(SHAPES)),
            retry=self.dice.choice((0, 2)),
        )
        ends = (run_s / 2, 1, None)
        self.cluster.behaviours[one.name] = (
            JobBehaviour(run_s=run_s, ends=lambda _key, rank: ends if rank == 0 else None)
            if fails
            else JobBehaviour(run_s=run_s)
        )
        job = self.cluster.request(
            SubmitJob(
                spec=one,
                user=UserId(user),
                project=ProjectId(project),
                queue=QueueId(queue),
                key="",
                body_sha256=one.name,
            )
        )
        self.cluster.invariants.record_submit(job.id)
        self.jobs.append(job.id)

    def _cancel(self):
        live = [job_id for job_id in self.jobs if not self.cluster.job(job_id).state.terminal]
        if live:
            answer = self.cluster.request(CancelJob(job_id=JobId(self.dice.choice(live)), by=UserId("ada")))
            self.cluster.invariants.record_cancel(answer)

    def _kill_node(self):
        name = self.dice.choice(sorted(self.cluster.nodes))
        self.cluster.kill_node(name, silent=self.dice.random() < 0.3)
        self.cluster.call_after(self.dice.uniform(30.0, 20_000.0), lambda: self.cluster.revive_node(name))

    def _remove_node(self):
        down = [node.id for node in self.cluster.world.nodes.values() if node.state is not NodeState.UP]
        for node_id in sorted(down):
            self.cluster.request(RemoveNode(node_id=node_id, by=UserId("op")))

    def _cordon(self):
        node_id = NodeId(self.dice.choice(sorted(self.cluster.world.nodes)))
        self.cluster.request(CordonNode(node_id=node_id, by=UserId("op"), why="a fan", drain=self.dice.random() < 0.5))

        def uncordon() -> None:
            self.cluster.try_turn([UncordonNode(node_id=node_id, by=UserId("op"))])

        self.cluster.call_after(self.dice.uniform(600.0, 9000.0), uncordon)

    def _crash(self):
        self.cluster.kill_head()
        self.cluster.run(self.dice.uniform(1.0, 3000.0))
        self.cluster.start_head()
        self.accountant = self._fresh()

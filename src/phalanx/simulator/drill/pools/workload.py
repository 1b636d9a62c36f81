"""Simulated users whose jobs need more nodes than the fleet has, operators who change and remove the pool, and faults of its provider."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final

from phalanx.controller.step_result import StepResult
from phalanx.core.fleet.capacity import nodes_resources
from phalanx.core.fleet.node_pool import BACKOFF_MAX_S, CALL_AGAIN_S, RETURN_WAIT_S, NodePool, NodeTemplate
from phalanx.core.ids import NodeId, PoolId, ProjectId, QueueId, UserId
from phalanx.core.resources import Resources
from phalanx.core.state.events import PutNodePool, RemoveNodePool, SubmitJob, UncordonNode
from phalanx.core.state.records import NODE_POOLS, POOL_NODES
from phalanx.core.work.gpus import GpuRequest, parse_gpus
from phalanx.core.work.quotas.quota_tree import QuotaTree
from phalanx.core.work.share import MILLI_PER_DEVICE
from phalanx.core.work.spec import JobSpec, Role
from phalanx.core.work.states import JobState
from phalanx.simulator.drill.clock import BEGIN_UNIX_S
from phalanx.simulator.drill.disk import CommitCrash
from phalanx.simulator.drill.pools.invariants import ONCE
from phalanx.simulator.drill.pools.provider import CALL_S, LATE_CALL_S, POOL_FAULT_KINDS, DrillProvider
from phalanx.simulator.drill.violations import require
from phalanx.simulator.drill.workload import DEVICES, QUEUE_TREE, SHAPES, UserSimulator, drill_node

if TYPE_CHECKING:
    from phalanx.simulator.drill.cluster import DrillCluster
    from phalanx.simulator.drill.faults import FaultInjector

POOL: Final = PoolId("burst")
NODES_MAX: Final = 3
LARGE_SHAPES: Final = ("4x4", "4x4", "5x4", "4x2")
IDLE_S: Final = 4.0
START_LIMIT_S: Final = 20.0
POOL_SHARE: Final = 0.12  # of all requests; the others are about jobs and nodes
SETTLE_S: Final = IDLE_S + START_LIMIT_S + RETURN_WAIT_S + 3 * CALL_AGAIN_S + 2 * NODES_MAX * max(LATE_CALL_S)
"""Until a healed pool has shrunk, with a late start and a late stop of each node in the queue."""
JOB_S: Final = 120.0  # of a job of 2 s that waits for nodes of the pool
_OP, _ADA = UserId("op"), UserId("ada")


class PoolUserSimulator(UserSimulator):
    """Sends random requests about jobs, nodes and the pool."""

    def __init__(self, cluster: DrillCluster, dice: Random) -> None:
        super().__init__(cluster, dice)
        self.provider = cluster.add_provider(Random(dice.random()), drill_node)

    def start(self) -> None:
        """Create the queue tree, two jobs and the pool."""
        super().start()
        self._put_pool(0, NODES_MAX)

    def send_random_request(self) -> None:
        """Send one random request."""
        if self._dice.random() > POOL_SHARE:
            super().send_random_request()
        elif self._dice.random() < 0.2:
            self._ask(RemoveNodePool(pool_id=POOL, by=_OP))
        else:
            self._put_pool(self._dice.randint(0, 1), self._dice.randint(1, NODES_MAX))

    def draw_gpus(self) -> GpuRequest:
        """The request of a job; some need more nodes than there are without the pool."""
        return parse_gpus(self._dice.choice((*SHAPES, *LARGE_SHAPES)))

    def _put_pool(self, least: int, most: int) -> None:
        offered = drill_node("template")
        self._ask(
            PutNodePool(
                pool=NodePool(
                    id=POOL,
                    provider="drill",
                    template=NodeTemplate(
                        text="4", devices=offered.devices, cpus=offered.cpus, memory_bytes=offered.memory_bytes
                    ),
                    min_nodes=least,
                    max_nodes=most,
                    price_per_h=2.0,
                    idle_s=IDLE_S,
                    start_limit_s=START_LIMIT_S,
                    by=_OP,
                    created_s=BEGIN_UNIX_S,
                )
            )
        )

    def remove_restrictions(self) -> None:
        """As for other users; the pool also returns, with its largest size."""
        cluster = self._cluster
        known = cluster.world.table(NODE_POOLS).get(POOL)
        if known is not None and known.removing:
            cluster.until(lambda: POOL not in cluster.world.table(NODE_POOLS), SETTLE_S)
        self._put_pool(0, NODES_MAX)
        for node_id in set(cluster.nodes) - set(self.fixed_nodes):
            self._ask(UncordonNode(node_id=node_id, by=_OP))  # refused for a node that its pool releases
        super().remove_restrictions()

    def settle_pool(self) -> None:
        """Check on the idle, healed cluster that the pool shrinks to nothing, and then orders for a gang just the nodes that it needs."""
        cluster = self._cluster
        self._wait_until_empty()
        for nodes in (4, 5):
            cluster.run(max(0.0, cluster.world.table(NODE_POOLS)[POOL].waits_s(cluster.now.wall_s)))
            before = self._ordered()
            job = cluster.request(
                SubmitJob(
                    spec=JobSpec(
                        name="short",
                        role=Role(argv=("python", "train.py"), gpus=parse_gpus(f"{nodes}x4")),
                        workdir="/work",
                    ),
                    user=_ADA,
                    project=ProjectId("gpt"),
                    queue=QueueId("default"),
                )
            )
            cluster.invariants.record_submit(job.id)
            end_s = cluster.clock.boot_s + JOB_S
            while (ended := cluster.store.job(job.id)) is None or not ended.state.terminal:
                require(cluster.clock.boot_s < end_s, 14, f"job {job.id} has not ended: {cluster.world.pool_nodes}")
                cluster.run_next()
            wanted = self._needed(nodes)
            require(ended.state is JobState.SUCCEEDED, 14, f"job {job.id} ended as {ended.state}: {ended.detail}")
            ordered = self._ordered() - before
            require(ordered == wanted, ONCE, f"job {job.id} needs {wanted} nodes of the pool, which ordered {ordered}")
            self._wait_until_empty()

    def _needed(self, nodes: int) -> int:
        """The fewest nodes of the pool with which a gang of so many nodes fits, and its queue may use them."""
        for count in range(nodes - len(self.fixed_nodes), NODES_MAX + 1):
            nodes_of_fleet = [drill_node("n")] * (len(self.fixed_nodes) + count)
            tree = QuotaTree(QUEUE_TREE, nodes_resources(nodes_of_fleet))
            asked = Resources(milli=nodes * DEVICES * MILLI_PER_DEVICE)
            if tree.check_admission(tree.job_node(QueueId("default")), _ADA, asked) is None:
                return count
        raise AssertionError(f"{nodes} nodes exceed the quota")

    def _ordered(self) -> int:
        checker = self._cluster.invariants.pools
        assert checker is not None  # this workload has a provider
        return checker.ordered

    def _wait_until_empty(self) -> None:
        cluster = self._cluster
        end_s = cluster.clock.boot_s + SETTLE_S
        while cluster.world.table(POOL_NODES) or self.provider.running or self.provider.busy:
            left = sorted(cluster.world.table(POOL_NODES))
            running = [machine.node_id for machine in self.provider.running]
            require(cluster.clock.boot_s < end_s, ONCE, f"after {SETTLE_S:.0f} s: records of {left}; {running} run")
            cluster.run_next()
        ghosts = sorted(set(cluster.world.nodes) - set(self.fixed_nodes))
        require(not ghosts, 17, f"the head has nodes that were released: {ghosts}")
        checker = cluster.invariants.pools
        assert checker is not None  # this workload has a provider
        checker.check_bill()


class PoolFaultInjector:
    """Injects faults of the provider, and deaths of the head between an order, its call and the record of the answer."""

    def __init__(self, cluster: DrillCluster, provider: DrillProvider, faults: FaultInjector, dice: Random) -> None:
        self._cluster, self._provider, self._faults, self._dice = cluster, provider, faults, dice
        self._aimed = ""

    def inject(self) -> None:
        """Inject one random fault; a death of the head waits for the next call to the provider."""
        provider, many = self._provider, self._dice.randint(1, 2)
        kind = self._dice.choice(POOL_FAULT_KINDS)
        match kind:
            case "provider_fails":
                provider.failing = many
            case "provider_late":
                provider.late, provider.late_s = many, self._dice.choice(LATE_CALL_S)
            case "provider_silent":
                provider.silent = many
            case "provider_twice":
                provider.doubled = many
            case "provider_keeps":
                provider.kept = many
            case "machine_never_up":
                provider.stuck = 1
            case "machine_lost":
                self._lose_machine()
                return
            case _:
                self._aimed = kind
                return
        self._count(kind)

    def after_turn(self, outbox: StepResult) -> None:
        """Kill the head around a call of this turn, if that is planned."""
        if not outbox.provider_calls or not self._aimed or self._cluster.head is None or not self._faults.active:
            return
        kind, self._aimed = self._aimed, ""
        self._count(kind)
        call_s = CALL_S
        match kind:
            case "head_crash_before_call":
                self._cluster.call_after(0.0, self._crash)  # once this turn's answers are read
            case "head_crash_before_answer":
                self._cluster.call_after(call_s * 0.75, self._crash)
            case _:
                crash = self._dice.choice((CommitCrash.BEFORE, CommitCrash.AFTER))
                self._cluster.call_after(call_s * 0.99, lambda: self._crash_in_commit(crash))

    def _crash(self) -> None:
        if self._faults.active:
            self._faults.inject("head_crash")

    def _crash_in_commit(self, crash: CommitCrash) -> None:
        if self._faults.active and self._cluster.head is not None:
            self._cluster.store.next_crash = crash

    def _lose_machine(self) -> None:
        """End a machine, booted or not."""
        running = self._provider.running
        if running:
            self._count("machine_lost")
            self._provider.machine_ended(NodeId(self._dice.choice(running).node_id))

    def _count(self, kind: str) -> None:
        self._cluster.coverage.count_fault(kind, ())
        self._cluster.count_event(f"fault {kind}")


def longest_wait_s(pools: bool) -> float:
    """How long a job may wait because a pool's starts failed."""
    return 2.0 * BACKOFF_MAX_S if pools else 0.0

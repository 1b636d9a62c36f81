"""Run one seed: cluster, users and faults, then healing and final checks. The same seed gives the same trace."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from phalanx.controller.step_result import StepResult
from phalanx.core.errors import NeverFits
from phalanx.core.fleet.capacity import nodes_resources
from phalanx.core.fleet.fitness import RECOVERY
from phalanx.core.ids import JobId, NodeId, UserId
from phalanx.core.resources import NO_RESOURCES, Resources
from phalanx.core.scheduling.shape import acceptable_shapes
from phalanx.core.state.events import CancelJob, UncordonNode
from phalanx.core.state.world import World
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import BACKOFF_MAX_S, Job
from phalanx.core.work.quotas.quota_tree import QuotaTree
from phalanx.core.work.spec import Role
from phalanx.core.work.states import AttemptState, JobState, WaitReasonCode
from phalanx.simulator.drill.clock import BEGIN_BOOT_S
from phalanx.simulator.drill.cluster import DrillCluster
from phalanx.simulator.drill.coverage import Coverage, count_transitions
from phalanx.simulator.drill.disk import DrillMemoryStore, DrillSqliteStore
from phalanx.simulator.drill.faults import FAULT_DURATIONS_S, FAULT_KINDS, FaultInjector
from phalanx.simulator.drill.limit_invariants import fleet_capacity
from phalanx.simulator.drill.mig_workload import MigUserSimulator, divide
from phalanx.simulator.drill.pools.workload import NODES_MAX as MOST_POOL_NODES
from phalanx.simulator.drill.pools.workload import PoolFaultInjector, PoolUserSimulator, longest_wait_s
from phalanx.simulator.drill.resource_workload import ResourceUserSimulator, with_offers
from phalanx.simulator.drill.service_workload import ServiceUserSimulator
from phalanx.simulator.drill.violations import CODE_ERROR, InvariantBroken, Violation
from phalanx.simulator.drill.workload import FAST_POLICY, UserSimulator, drill_node, fleet

EVENTS: Final = 2000  # state changes before the faults are healed
SQLITE_EVERY: Final = 8  # one seed in eight uses the SQLite store on a virtual disk; the others use the memory store
PAUSES_S: Final = (0.005, 0.02, 0.04, 0.07, 0.11, 0.5, 2.0, 5.0)
IDLE_MAX_S: Final = 1.0  # the head acts on events and on its own timers
AIM_WAIT_S: Final = 10.0  # time for an attempt to reach the state in which a fault shall hit it
JOB_MAX_S: Final = 480.0  # six starts of one minute each, their backoffs, and 30 s of work
HISTORY_LINES: Final = 40
POOL_FAULT_SHARE: Final = 0.3  # of the faults, if there is a pool


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedResult:
    """The result of one seed.

    Attributes:
        events_requested: requested events before the healing.
        events: all state changes, including those after the healing.
        faults: injected faults.
        trace: hash of every change in order.
        store: "sqlite" or "memory".
        cpu_s: CPU time.
        history: the last event lines; only for a seed with violations.
    """

    seed: int
    events_requested: int
    events: int
    faults: int
    violations: tuple[Violation, ...]
    trace: str
    store: str
    cpu_s: float
    coverage: Coverage
    history: str = ""


def run_seed(
    seed: int,
    *,
    events: int = EVENTS,
    sqlite: bool | None = None,
    services: bool = False,
    mig: bool = False,
    resources: bool = False,
    pools: bool = False,
) -> SeedResult:
    """Run one seed: `events` state changes with faults, then heal and finish. Stops at the first violation.

    Args:
        seed: determines everything.
        events: state changes before the healing.
        sqlite: whether to use the SQLite store; None lets the seed choose.
        services: whether users have services beside their jobs.
        mig: whether MIG divides devices, and users want slices; without services.
        resources: whether jobs ask for CPUs, extras and licences too, in queues that limit these; not together with services.
        pools: whether there is a node pool, with faults of its provider. Not together with the others.
    """
    begun_s = time.process_time()
    on_sqlite = seed % SQLITE_EVERY == 0 if sqlite is None else sqlite
    store = DrillSqliteStore(Random(seed + 1)) if on_sqlite else DrillMemoryStore()
    drill: SeedRun | None = None
    broken: tuple[int, str] | None = None
    try:
        drill = SeedRun(seed, events, store, services=services, mig=mig, resources=resources, pools=pools)
        with count_transitions(drill.cluster.coverage):
            drill.run()
    except InvariantBroken as error:
        broken = error.invariant, error.text
    except Exception as error:  # noqa: BLE001  # the tested code must not raise any exception
        broken = CODE_ERROR, f"{type(error).__name__}: {error}"
    finally:
        store.release()
    coverage = Coverage() if drill is None else drill.cluster.coverage
    history = "" if drill is None or broken is None else drill.cluster.event_lines(lines=HISTORY_LINES)
    at_s, counted = (
        (0.0, 0) if drill is None else (drill.cluster.clock.boot_s - BEGIN_BOOT_S, drill.cluster.event_count)
    )
    violations = () if broken is None else (Violation(invariant=broken[0], text=broken[1], at_s=at_s, event=counted),)
    return SeedResult(
        seed=seed,
        events_requested=events,
        events=counted,
        faults=sum(sum(counts.values()) for counts in coverage.faults.values()),
        violations=violations,
        trace=coverage.trace,
        store="sqlite" if on_sqlite else "memory",
        cpu_s=time.process_time() - begun_s,
        coverage=coverage.picklable(),
        history=history,
    )


def replay_command(
    seed: int, events: int, *, services: bool = False, mig: bool = False, resources: bool = False, pools: bool = False
) -> str:
    """Return the command that reproduces this seed on the same commit."""
    more = f" --events {events}" if events != EVENTS else ""
    kinds = (" --services" * services) + (" --mig" * mig) + (" --resources" * resources) + (" --pools" * pools)
    return f"phalanx drill --seed {seed}{more}{kinds}"


class SeedRun:
    """One running seed."""

    def __init__(
        self,
        seed: int,
        events: int,
        store: DrillMemoryStore,
        *,
        services: bool = False,
        mig: bool = False,
        resources: bool = False,
        pools: bool = False,
    ) -> None:
        assert services + mig + resources + pools <= 1, "one workload at a time"
        self._dice = Random(seed)
        self._events = events
        nodes = divide(fleet()) if mig else with_offers(fleet()) if resources else fleet()
        self.cluster = DrillCluster(nodes, policy=FAST_POLICY, store=store, rng=Random(seed + 2))
        users = (
            ServiceUserSimulator
            if services
            else MigUserSimulator
            if mig
            else ResourceUserSimulator
            if resources
            else PoolUserSimulator
            if pools
            else UserSimulator
        )
        self._users: UserSimulator = users(self.cluster, self._dice)
        self._faults = FaultInjector(self.cluster, self._dice)
        self._pool_faults = (
            PoolFaultInjector(self.cluster, self._users.provider, self._faults, self._dice)
            if isinstance(self._users, PoolUserSimulator)
            else None
        )
        self._aim: tuple[str, AttemptState, float] | None = None
        self.cluster.on_turn = self._schedule_aimed_fault
        self._fault_rate = self._dice.choice((0.3, 0.5, 0.7))  # fault rates differ between seeds

    def run(self) -> None:
        """Inject faults, heal, and wait until all jobs have ended and all parts agree."""
        self._users.start()
        while self.cluster.event_count < self._events:
            if self._dice.random() < self._fault_rate:
                self._fault()
            else:
                self._users.send_random_request()
            self.cluster.run(self._dice.choice(PAUSES_S))
        self._heal()
        self._finish()

    # ---- faults --------------------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        if self._pool_faults is not None and self._dice.random() < POOL_FAULT_SHARE:
            self._pool_faults.inject()
            return
        kind = self._dice.choice(tuple(FAULT_KINDS))
        if self._dice.random() < 0.3:
            self._faults.inject(kind)
        elif self._aim is None or self._aim[2] < self.cluster.clock.boot_s:
            states = [state for state in AttemptState if state in FAULT_KINDS[kind]]  # a fixed order, unlike a set
            self._aim = kind, self._dice.choice(states), self.cluster.clock.boot_s + AIM_WAIT_S

    def _schedule_aimed_fault(self, outbox: StepResult) -> None:
        """Schedule the planned fault once an attempt reaches the chosen state."""
        if self._pool_faults is not None:
            self._pool_faults.after_turn(outbox)
        if self._aim is None:
            return
        kind, state, until_s = self._aim
        if until_s < self.cluster.clock.boot_s:
            self._aim = None
            return
        hit = next((one for one in outbox.change.records if isinstance(one, Attempt) and one.state is state), None)
        if hit is None:
            return
        self._aim = None
        node_id = self._dice.choice(hit.allocation.grants).node_id
        self.cluster.call_after(
            self._dice.choice((0.0, 0.003, 0.015, 0.04)), lambda: self._inject_if_active(kind, node_id)
        )

    def _inject_if_active(self, kind: str, node_id: NodeId) -> None:
        if self._faults.active:
            self._faults.inject(kind, self.cluster.nodes.get(node_id))

    # ---- the end -------------------------------------------------------------------------------------------------------

    def _heal(self) -> None:
        cluster = self.cluster
        self._faults.active, self._aim = False, None
        cluster.heal()
        cluster.run(max(FAULT_DURATIONS_S) + 1.0)  # until every pending fault has ended
        cluster.heal()
        for node in list(cluster.nodes.values()):
            whole = cluster.original_nodes[node.id].devices
            if node.record.devices != whole:
                cluster.kill_node(node.id)
                node.record = replace(node.record, devices=whole)
                cluster.revive_node(node.id)
        cluster.run(10.0)
        self._users.remove_restrictions()

    def _finish(self) -> None:
        """Check that every remaining job ends (14), and that the final state is consistent (17, 10)."""
        cluster = self.cluster
        if isinstance(self._users, ServiceUserSimulator):
            self._users.settle_services()
        most = MOST_POOL_NODES if isinstance(self._users, PoolUserSimulator) else 0
        for job_id in [*cluster.world.pending, *cluster.world.attempts]:
            job, can_run = cluster.world.jobs[job_id], can_ever_run(cluster.world, cluster.world.jobs[job_id], most)
            self._check_judged(job, can_run=can_run)
            if not job.state.terminal and not can_run:
                cluster.invariants.record_cancel(cluster.request(CancelJob(job_id=job.id, by=UserId("ada"))))
        idle = IdleChecker(cluster, len(self._users.fixed_nodes))
        until_s = (
            cluster.clock.boot_s
            + longest_wait_s(most > 0)
            + JOB_MAX_S * (1 + len(cluster.world.pending) + len(cluster.world.attempts))
        )
        while cluster.world.pending or cluster.world.attempts:
            if cluster.clock.boot_s > until_s:
                raise InvariantBroken(14, f"jobs {[*cluster.world.pending, *cluster.world.attempts]} do not end")
            cluster.run_next()
            idle.check()
        cluster.run(10.0)
        if isinstance(self._users, PoolUserSimulator):
            self._users.settle_pool()
        cluster.invariants.check_settled()
        cluster.invariants.check_store()
        cluster.store.check_contents()

    def _check_judged(self, job: Job, *, can_run: bool) -> None:
        """Check that a waiting job is said to be impossible if and only if it is, on the healed cluster with its first queues."""
        head = self.cluster.head
        wait = None if head is None else head.controller.waits.get(job.id)
        if wait is not None and job.state is JobState.PENDING and can_run == (wait.reason is WaitReasonCode.NEVER):
            word = "can" if can_run else "cannot"
            raise InvariantBroken(14, f"job {job.id} {word} ever start, but waits ({wait.reason}): {wait.detail}")


class IdleChecker:
    """Checks that on a healed, idle fleet a runnable job starts at once (14), unless it needs more than the `nodes` of no pool."""

    def __init__(self, cluster: DrillCluster, nodes: int) -> None:
        self._cluster, self._nodes = cluster, nodes
        self._since_s = cluster.clock.boot_s

    def check(self) -> None:
        """Check after an event."""
        world, now = self._cluster.world, self._cluster.now
        if world.attempts:
            self._since_s = now.boot_s
            return
        ready = [
            job.id
            for job in world.pending.values()
            if sum(role.gpus.nodes or 1 for role in job.spec.role.each) <= self._nodes
            and can_ever_run(world, job, 0)
            and not job.held
            and not job.unmet_dependencies
            and not 0 < job.not_before_s - now.wall_s <= BACKOFF_MAX_S
        ]
        if not ready or self._repaired(ready):
            self._since_s = now.boot_s
        if now.boot_s - self._since_s > IDLE_MAX_S:
            raise InvariantBroken(14, f"nothing runs, but {ready} do not start")

    def _repaired(self, ready: Sequence[JobId]) -> bool:
        """Let an operator return a node that recovery took out after the healing, if the jobs wait for nothing else; whether there was one."""
        cluster, head = self._cluster, self._cluster.head
        out = [
            node.id for node in cluster.world.nodes.values() if node.cordon is not None and node.cordon.by == RECOVERY
        ]
        waits = {} if head is None else head.controller.waits
        if not out or any(job not in waits or waits[job].reason is not WaitReasonCode.NODES_DOWN for job in ready):
            return False
        for node_id in out:
            cluster.request(UncordonNode(node_id=node_id, by=UserId("op")))
        return True


def can_ever_run(world: World, job: Job, pool_nodes: int) -> bool:
    """Return whether its queue's limits admit the job on an idle fleet, to which a pool can bring so many nodes."""
    more = max(0, pool_nodes - sum(member.id in world.nodes for member in world.pool_nodes.values()))
    tree = QuotaTree(world.queues.values(), fleet_capacity(world) + nodes_resources([drill_node("more")] * more))
    roles = [replace(job.spec.role, gpus=one) for one in job.spec.role.gpus.choices]
    node = tree.job_node(job.queue)
    return any(tree.check_admission(node, job.user, _least(role, world)) is None for role in roles)


def _least(role: Role, world: World) -> Resources:
    """Return everything that the role takes on the nodes of the fleet, at least."""
    try:
        parts = min(shape.parts for shape in acceptable_shapes(replace(role, others=()), world.nodes.values()))
    except NeverFits:
        return role.asked
    if role.others:
        return _least(replace(role, others=()), world) + sum((_least(one, world) for one in role.others), NO_RESOURCES)
    cpus = role.cpus or (0 if role.gpus.milli else 1)  # a part without GPUs takes a CPU
    host = Resources(0, cpus, role.memory_bytes, role.extras)
    return host * parts + Resources(role.gpus.milli, extras=role.licences)

"""Invariant 27: a pool orders each node once, stays within its maximum, leaves no machine that is paid for without a record, gives a node that it
releases no further job, and stops no machine under the jobs on it. The ledger has each machine, from when to when the provider charges it.

It compares the committed records with the machines that the provider runs, which no part of the head sees. Called by `invariants` after each
commit, and by the provider for each machine that starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from phalanx.core.fleet.node_pool import COMING_STATES, PoolNode, members_of
from phalanx.core.ids import NodeId
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.records import ATTEMPTS, NODE_POOLS, POOL_NODES, Record
from phalanx.core.state.world import World, WorldChange
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.states import AttemptState
from phalanx.ports.store import Store
from phalanx.simulator.drill.pools.provider import DrillProvider, PoolMachine
from phalanx.simulator.drill.violations import InvariantBroken, require

ONCE: Final = 27
LEDGER_S: Final = 1.0  # how far the ledger may be from the bill, of one machine


class PoolChecker:
    """Records the orders, and checks them and the machines."""

    def __init__(self, provider: DrillProvider, store: Store) -> None:
        self._provider, self._store = provider, store
        self._tokens: dict[NodeId, str] = {}
        self._orders: set[str] = set()
        self._billed: set[str] = set()  # machines with a line in the ledger
        provider.on_start, provider.on_stop = self.check_start, self.check_stop

    @property
    def ordered(self) -> int:
        """How many nodes were ever ordered."""
        return len(self._orders)

    def check_start(self, machine: PoolMachine) -> None:
        """Check a machine that starts: its order is recorded, and its node has no other machine."""
        recorded = {member.token for member in self._store.records(POOL_NODES)}
        require(machine.token in recorded, ONCE, f"{machine.node_id} starts without a recorded order ({machine.token})")
        running = Counter(one.node_id for one in self._provider.running)
        require(
            running[machine.node_id] == 1, ONCE, f"{machine.node_id} was ordered twice: {running[machine.node_id]} run"
        )

    def check_stop(self, machine: PoolMachine) -> None:
        """Check a machine that the head stops: no job is on its node."""
        held = [
            f"{attempt.job_id}.{attempt.epoch}"
            for attempt in self._store.records(ATTEMPTS)
            if attempt.holds_allocation and machine.node_id in {grant.node_id for grant in attempt.allocation.grants}
        ]
        require(not held, ONCE, f"{machine.node_id} is stopped under {', '.join(held)}")

    def check_commit(self, change: WorldChange, world: World) -> None:
        """Check a committed change."""
        self._check_ledger(change.history)
        fresh = [record for record in change.records if isinstance(record, PoolNode)]
        new = [member for member in fresh if member.token not in self._orders]
        for member in new:
            self._orders.add(member.token)
        for name in sorted({member.pool for member in new}):
            members, pool = members_of(name, world.pool_nodes), world.table(NODE_POOLS)[name]
            require(len(members) <= pool.max_nodes, ONCE, f"pool {name} of at most {pool.max_nodes} has {len(members)}")
            coming = [one.id for one in members if one.state in COMING_STATES]
            useful = _parts(change.records, world) + pool.min_nodes
            require(len(coming) <= useful, ONCE, f"{coming} are on their way, but jobs can use only {useful}")
        for member in fresh:
            before = self._tokens.setdefault(member.id, member.token)
            same = before == member.token or member.token in {one.token for one in new}
            require(same, ONCE, f"the order of {member.id} changed from {before} to {member.token}")
            self._tokens[member.id] = member.token
        for attempt in change.records:
            if isinstance(attempt, Attempt) and attempt.state is AttemptState.PLACED and attempt.generation == 0:
                nodes = {grant.node_id for grant in attempt.allocation.grants}
                leaving = sorted(one for one in nodes if one in world.pool_nodes and world.pool_nodes[one].leaving)
                require(not leaving, ONCE, f"{attempt.job_id} is placed on {leaving}, which a pool releases")
        if fresh or change.removed:
            recorded = {member.token for member in self._store.records(POOL_NODES)}
            for machine in self._provider.running:
                if machine.token not in recorded:
                    raise InvariantBroken(ONCE, f"{machine.node_id} runs and is paid for, but has no record")

    def check_bill(self) -> None:
        """Check at the end that each machine that ever ran has a line in the ledger."""
        missing = sorted({one.name for one in self._provider.machines.values()} - self._billed)
        require(not missing, ONCE, f"the ledger has no line of {', '.join(missing)}")

    def _check_ledger(self, lines: Sequence[HistoryLine]) -> None:
        """Check lines of the ledger against the provider's bill, whatever the wall clock of the head was set to."""
        machines = {one.name: one for one in self._provider.machines.values()}
        for line in lines:
            if line.kind != "machine_ended":
                continue
            name, since_s, until_s = (line.facts[key] for key in ("machine", "since_s", "until_s"))
            assert isinstance(name, str)
            assert isinstance(since_s, float)
            assert isinstance(until_s, float)
            bill = machines[name]
            apart_s = (until_s - since_s) - (bill.until_s - bill.since_s)
            require(
                abs(apart_s) <= LEDGER_S, ONCE, f"the ledger charges {name} {apart_s:+.1f} s more than the provider"
            )
            self._billed.add(name)


def _parts(records: Sequence[Record], world: World) -> int:
    """How many nodes the jobs that waited before this commit can use at most."""
    placed = [record.job_id for record in records if isinstance(record, Attempt)]
    jobs = {job_id: world.jobs[job_id] for job_id in (*world.pending, *placed)}
    return sum(_nodes_of(job) for job in jobs.values())


def _nodes_of(job: Job) -> int:
    each = [role.gpus for role in job.spec.role.each]
    return sum(gpus.nodes_max or gpus.nodes or max(1, gpus.total) for gpus in each)

"""Compares what providers list with the records of pooled nodes: machines without a record are stopped, nodes without a machine are lost.

A machine is a stray if its order has no record, if another machine is recorded for the order, or if another offer of it is being tried. It may
be one whose create arrived after its stop, or one of an order that a restored database does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from phalanx.controller.step_context import StepContext
from phalanx.core.fleet.node_pool import ListedMachine, NodePool, PoolNode, PoolNodeState, members_of
from phalanx.core.ids import PoolId
from phalanx.core.state.commands import ProviderAction, ProviderCall
from phalanx.core.state.reports import MachinesListed

STRAY_GRACE_S: Final = 90.0  # from its first appearance in a list
MISSING_LISTS: Final = 2  # a list may be older than a create that was answered already
QUIET_S: Final = 60.0  # a create may arrive so long after the stop of its order


@dataclass(slots=True)
class MachineSweep:
    """What the lists showed. Its memory only delays: a new head starts without it. Times are by CLOCK_BOOTTIME.

    Attributes:
        strays_s: when each stray machine was first listed, by pool and machine.
        recorded: strays whose stop is in the history.
        missing: in how many lists the machine of an order was missing, by token.
        asked_s: when the newest complete list of each pool was asked for; `busy`: the pools with a machine in theirs.
        empty_s: since when each pool that is being removed has had no node.
    """

    strays_s: dict[tuple[PoolId, str], float] = field(default_factory=dict)
    recorded: set[tuple[PoolId, str]] = field(default_factory=set)
    missing: dict[str, int] = field(default_factory=dict)
    asked_s: dict[PoolId, float] = field(default_factory=dict)
    busy: set[PoolId] = field(default_factory=set)
    empty_s: dict[PoolId, float] = field(default_factory=dict)

    def compare(self, context: StepContext, listed: MachinesListed) -> Iterator[tuple[PoolNode, str]]:
        """Stop strays after a grace; yield the nodes whose machine is gone, and why."""
        pool = context.world.node_pools.get(listed.pool)
        if pool is None:
            return
        if listed.why != pool.list_problem:
            context.change.put(replace(pool, list_problem=listed.why))
        if listed.why:
            return
        pools = context.world.node_pools
        # Machines of other pools are in the lists of those.
        own = [one for one in listed.machines if _pool_of(one) == pool.id or _pool_of(one) not in pools]
        members = {member.token: member for member in members_of(pool.id, context.world.pool_nodes)}
        running = [one for one in own if not one.ended]
        self.asked_s[pool.id] = listed.asked_boot_s
        (self.busy.add if running else self.busy.discard)(pool.id)
        self._stop_strays(context, pool, [one for one in running if _is_stray(one, members.get(one.token))])
        by_machine = {one.machine: one for one in own}
        for token, member in members.items():
            if not member.machine or member.leaving or member.state is PoolNodeState.REQUESTED:
                continue
            found = by_machine.get(member.machine)
            self.missing[token] = 0 if found is not None else self.missing.get(token, 0) + 1
            if found is not None and found.ended:
                yield member, f"its machine {member.machine} has ended"
            elif self.missing[token] >= MISSING_LISTS:
                yield member, f"the provider does not list its machine {member.machine}"
        tokens = {member.token for member in context.world.pool_nodes.values()}
        self.missing = {token: count for token, count in self.missing.items() if token in tokens}

    def is_clean(self, pool: NodePool, boot_s: float) -> bool:
        """Whether a pool without nodes may end: its provider has no list, or one that was asked late enough shows no machine of it."""
        if not pool.template.listed:
            return True
        empty_s = self.empty_s.setdefault(pool.id, boot_s)
        clean = self.asked_s.get(pool.id, empty_s) >= empty_s + QUIET_S and pool.id not in self.busy
        if clean:
            del self.empty_s[pool.id]
        return clean

    def _stop_strays(self, context: StepContext, pool: NodePool, strays: list[ListedMachine]) -> None:
        known, boot_s = self.strays_s, context.now.boot_s
        self.strays_s = {key: at_s for key, at_s in known.items() if key[0] != pool.id}
        for one in strays:
            key = (pool.id, one.machine)
            since_s = self.strays_s[key] = known.get(key, boot_s)
            if boot_s - since_s < STRAY_GRACE_S:
                continue
            if key not in self.recorded:
                self.recorded.add(key)
                text = f"pool {pool.id} stops machine {one.machine}, which no record has: order {one.token}"
                context.add_history("machine_stray", text, facts={"machine": one.machine, "order": one.token})
            context.provider_calls.append(
                ProviderCall(
                    provider=pool.provider,
                    action=ProviderAction.STOP,
                    node_id=one.node_id,
                    token=one.token,
                    template=pool.template.text,
                    zone=pool.zone,
                    pool=pool.id,
                    settings=pool.settings,
                    offer=one.offer,
                    machine=one.machine,
                )
            )
        self.recorded &= self.strays_s.keys()


def _pool_of(machine: ListedMachine) -> PoolId:
    return PoolId(machine.node_id.rpartition("-")[0])


def _is_stray(machine: ListedMachine, member: PoolNode | None) -> bool:
    if member is None:
        return True
    if member.machine:
        return member.machine != machine.machine
    return bool(machine.offer) and member.offer != machine.offer

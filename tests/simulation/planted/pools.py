"""Bugs of node pools: orders that are repeated, forgotten or not counted, and nodes that are released too early, under their jobs or not at all."""

import math
from dataclasses import replace
from itertools import count

from phalanx.controller.requests import pools
from phalanx.core.fleet.node_pool import NodePool, PoolNode, PoolNodeState, members_of
from phalanx.core.scheduling import node_demand
from phalanx.core.state.commands import ProviderAction, ProviderCall
from phalanx.core.state.records import POOL_NODES
from tests.simulation.planted.bug import planted


@planted(27, seed=0, pools=True)
def pool_orders_twice(patch):
    """Each call of the provider gets a token of its own, so a call that is repeated after a crash starts another machine."""
    calls = count(1)

    def fresh(**fields):
        if fields["action"] is ProviderAction.START:
            fields["token"] += f"-{next(calls)}"
        return ProviderCall(**fields)

    patch.setattr(pools, "ProviderCall", fresh)


@planted(27, seed=2, pools=True)
def nodes_on_their_way_are_ordered_again(patch):
    """The demand does not count nodes that a pool has ordered, and orders them again each second."""
    patch.setattr(node_demand, "_coming_slots", lambda cluster: [])


@planted(27, seed=9, pools=True)
def released_nodes_leave_the_maximum_at_once(patch):
    """A node that is released does not count towards its pool's maximum, although it still runs."""

    def staying(name, known):
        return [one for one in members_of(name, known) if not one.leaving]

    patch.setattr(pools, "members_of", staying)
    patch.setattr(node_demand, "members_of", staying)


@planted(27, seed=0, pools=True)
def node_is_forgotten_before_it_is_stopped(patch):
    """A node whose start failed is dropped at once, although something of it may run."""
    leave = pools._leave

    def careless(context, member):
        leave(context, member)
        if member.state is PoolNodeState.DOWN and member.id not in context.world.nodes:
            context.change.remove(POOL_NODES, member.id)

    patch.setattr(pools, "_leave", careless)


@planted(14, seed=13, pools=True)
def pool_waits_by_the_wall_clock(patch):
    """A pool whose starts failed waits until a time of the wall clock, also after the clock was set back by a day."""
    patch.setattr(NodePool, "waits_s", lambda self, now_s: max(0.0, self.retry_at_s - now_s))


@planted(27, seed=9, pools=True)
def lost_stop_is_not_called_again(patch):
    """A call whose answer was lost is not repeated, and the order stays for ever."""
    patch.setattr(PoolNode, "call_again_s", property(lambda self: math.inf))


@planted(27, seed=4, pools=True)
def machine_is_stopped_under_its_jobs(patch):
    """A node that is released is stopped at once, before its jobs have saved and left."""

    def hasty(context, member):
        if member.state is PoolNodeState.REQUESTED:
            return ProviderAction.START
        return ProviderAction.STOP if member.leaving else None

    patch.setattr(pools, "_due_action", hasty)


@planted(27, seed=4, pools=True)
def released_node_gets_more_jobs(patch):
    """The jobs of a node that is released are moved away, but nothing keeps others off it."""

    def open_still(context, member):
        context.change.put(member)
        context.stop_jobs_on(member.id, by=f"pool {member.pool}", why=member.why)

    patch.setattr(pools, "_leave", open_still)


@planted(27, seed=0, pools=True)
def ledger_has_the_heads_clock(patch):
    """The ledger has the end of a machine by the wall clock of the head, not by that of the provider."""
    record = pools._record_charges

    def by_own_clock(context, report, member=None):
        stopped = tuple(replace(one, until_s=context.now.wall_s) for one in report.stopped)
        record(context, replace(report, stopped=stopped), member)

    patch.setattr(pools, "_record_charges", by_own_clock)

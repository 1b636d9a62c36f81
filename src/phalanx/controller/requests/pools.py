"""Node pools: their requests, the life of their nodes, and the calls to their providers.

Each order goes through the outbox: the node is recorded with its token (REQUESTED), and only after that commit the provider is called; its
answer is the next record. A head that dies between these repeats the call with the same token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from phalanx.controller.impossible_jobs import record_impossible_jobs
from phalanx.controller.requests.machine_sweep import MachineSweep
from phalanx.controller.requests.request_handlers import RequestHandlers
from phalanx.controller.step_context import StepContext
from phalanx.core.errors import BadRequest, Conflict, NotFound
from phalanx.core.fleet.device import device_facts
from phalanx.core.fleet.node import Cordon, Node
from phalanx.core.fleet.node_console import NodeConsole, surplus_consoles
from phalanx.core.fleet.node_pool import (
    COMING_STATES,
    HOUR_S,
    POOL_NODES_MAX,
    ChargedMachine,
    NodeOffer,
    NodePool,
    PaidBy,
    PoolNode,
    PoolNodeState,
    members_of,
    next_life,
    node_price_per_h,
    template_like,
)
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import NodeId, PoolId
from phalanx.core.months import month_bounds_s, month_of
from phalanx.core.state.commands import ProviderAction, ProviderCall
from phalanx.core.state.events import ImpossibleJob, PutNodePool, RemoveNodePool
from phalanx.core.state.history import HistoryFacts
from phalanx.core.state.plan import Plan, WantedNodes
from phalanx.core.state.records import NODE_CONSOLES, NODE_POOLS, POOL_NODES
from phalanx.core.state.reports import ProviderOutcome, ProviderReported
from phalanx.core.work.users import Action

LAST_MINUTE_S: Final = (
    60.0  # of a paid hour, in which an idle node is released: time for the step and the provider's call
)
LIST_EVERY_S: Final = 60.0  # between two lists of the machines of a pool
handlers: Final = RequestHandlers()
_Call = tuple[str, ProviderAction, str]


@handlers.add(PutNodePool, Action.OPERATE, audit=lambda request, _: f"node pool {request.pool.id}")
def put_pool(context: StepContext, request: PutNodePool) -> NodePool:
    """Add a pool, or change the limits, price and times of one."""
    pool = request.pool
    known = context.world.node_pools.get(pool.id)
    if not 0 <= pool.min_nodes <= pool.max_nodes <= POOL_NODES_MAX:
        raise BadRequest(
            f"node pool {pool.id}: a pool of {pool.min_nodes} to {pool.max_nodes} nodes is not within 0 to {POOL_NODES_MAX}, the minimum first",
            hint=Hint(HintCode.POOL_LIMITS),
        )
    if known is not None:
        if known.removing:
            raise Conflict(f"node pool {pool.id} is being removed", hint="wait until it is gone")
        if _nodes_of(known) != _nodes_of(pool):
            raise Conflict(
                f"node pool {pool.id} has {known.template.text} of provider {known.provider}: its nodes cannot change",
                hint="add a pool with another name",
            )
        pool = replace(
            known,
            template=replace(known.template, mounts_error=""),  # its image may be mended
            min_nodes=pool.min_nodes,
            max_nodes=pool.max_nodes,
            price_per_h=pool.price_per_h,
            cap_per_h=pool.cap_per_h,
            cap_per_month=pool.cap_per_month,
            egress_per_gb=pool.egress_per_gb,
            billed=pool.billed,
            idle_s=pool.idle_s,
            start_limit_s=pool.start_limit_s,
        )
    if pool != known:
        context.change.put(pool)
        text = f"node pool {pool.id}: {pool.min_nodes} to {pool.max_nodes} nodes of {pool.template.text} by {pool.provider}"
        context.add_history("pool_set", text, by=request.pool.by)
    return pool


def _nodes_of(pool: NodePool) -> tuple[object, ...]:
    """What decides what its nodes are. Prices of offers may change: of a pool that exists, those of its start hold."""
    offers = tuple(offer.text for offer in pool.template.offers)
    return pool.provider, pool.template.text, pool.zone, pool.settings, frozenset(offers)


@handlers.add(RemoveNodePool, Action.OPERATE, audit=lambda request, _: f"node pool {request.pool_id}")
def remove_pool(context: StepContext, request: RemoveNodePool) -> tuple[ImpossibleJob, ...]:
    """Release the pool's nodes; the pool ends with the last of them. Returns the waiting jobs made impossible."""
    pool = context.world.node_pools.get(request.pool_id)
    if pool is None:
        raise NotFound(f"no node pool {request.pool_id!r}", hint=Hint(HintCode.LIST_POOLS))
    if pool.removing:
        return ()
    before = context.feasibility
    context.change.put(replace(pool, removing=True))
    context.add_history("pool_removed", f"node pool {pool.id} releases its nodes and ends", by=request.by)
    for member in members_of(pool.id, context.world.pool_nodes):
        _drain(context, member, f"pool {pool.id} is removed")
    return record_impossible_jobs(context, before, f"node pool {pool.id} was removed")


def apply_outcome(context: StepContext, report: ProviderReported) -> None:
    """Apply what a provider reports of an order. Reports of earlier orders change nothing."""
    if report.machine and report.outcome is ProviderOutcome.STOPPED:
        _record_charges(context, report)  # of a machine that no record has; its node is another one, if any
        return
    member = context.world.pool_nodes.get(report.node_id)
    if member is None or member.token != report.token:
        return
    now_s = context.now.wall_s
    match report.outcome:
        case ProviderOutcome.STARTED:
            if member.state is PoolNodeState.REQUESTED and member.offer == report.offer:
                started = replace(member, machine=report.machine, machine_since_s=report.since_s or now_s)
                context.change.put(started.enters(PoolNodeState.PROVISIONING, now_s, member.why))
        case ProviderOutcome.REFUSED:
            if member.state is PoolNodeState.REQUESTED and member.offer == report.offer:
                _take_next_offer(context, member, report.why)
        case ProviderOutcome.UNANSWERED:
            if not report.machine and (member.state is PoolNodeState.REQUESTED or member.leaving):
                context.change.put(
                    replace(
                        member,
                        unanswered=member.unanswered + 1,
                        ever_unanswered=member.ever_unanswered or member.state is PoolNodeState.REQUESTED,
                        problem=report.why,
                    )
                )
        case ProviderOutcome.FAILED:
            if member.state in COMING_STATES:
                _give_up(context, member, f"the provider could not start it: {report.why}")
        case ProviderOutcome.LEAVING:
            if member.state in COMING_STATES:
                _give_up(context, member, report.why)
            else:
                _drain(context, member, report.why)
        case ProviderOutcome.DELAYED:
            if member.state in COMING_STATES and member.problem != report.why:
                context.change.put(replace(member, problem=report.why))
        case ProviderOutcome.CONSOLE:
            if member.leaving:
                _keep_console(context, member, report)
        case ProviderOutcome.LOST:
            # The start of a requested node is repeated anyway.
            if member.state is not PoolNodeState.REQUESTED and not member.given_up:
                _give_up(context, member, report.why)
        case ProviderOutcome.ENDED:
            if not member.given_up:
                _leave(context, member.enters(PoolNodeState.DOWN, now_s, report.why, given_up=True))
        case ProviderOutcome.STOPPED:
            if member.leaving and not context.world.attempts_on(member.id):
                _charge(context, member, report)
                _release(context, member)
                _record_charges(context, report, member)


def as_pool_member(context: StepContext, node: Node) -> Node:
    """The registering node with the labels of its pool, cordoned if the pool already releases it: a late supervisor gets no job."""
    member = context.world.pool_nodes.get(node.id)
    if member is None:
        return node
    pool = context.world.node_pools.get(member.pool)
    if pool is not None and (missing := pool.labels_of(member.offer).items() - node.labels.items()):
        node = replace(node, labels={**dict(missing), **node.labels})
    if not member.leaving or node.cordon is not None:
        return node
    return replace(node, cordon=_cordon_of(member, context.now.wall_s))


def check_not_released(context: StepContext, node_id: NodeId) -> None:
    """Check that a registering node is not one that its pool has released: its supervisor registers too late, and will be ended.

    Raises:
        Conflict: it is.
    """
    world, (name, _, number) = context.world, node_id.rpartition("-")
    pool = world.node_pools.get(PoolId(name))
    named_by_pool = pool is not None and number.isdecimal() and int(number) < pool.next_number
    if named_by_pool and node_id not in world.pool_nodes and node_id not in world.nodes:
        raise Conflict(f"pool {name} has released {node_id}, and uses no name again", hint="join under another name")


def leaving_member(context: StepContext, node_id: NodeId) -> PoolNode | None:
    """The node's record in its pool if the pool releases it; else None."""
    member = context.world.pool_nodes.get(node_id)
    return member if member is not None and member.leaving else None


@dataclass(slots=True)
class PoolKeeper:
    """Orders and releases the nodes of pools. Its memory only delays: a new head starts without it.

    All times are by CLOCK_BOOTTIME, so that a clock that is set gives up and releases nothing.

    Attributes:
        idle_since_s: since when a node of a pool has had no job.
        since_s: since when a node has been in its phase, by token and phase; all states before UP are one phase.
        called_s: when each unanswered call was last sent, by token, action and offer.
        sweep: compares what providers list with the records.
    """

    idle_since_s: dict[NodeId, float] = field(default_factory=dict)
    since_s: dict[tuple[str, PoolNodeState], float] = field(default_factory=dict)
    called_s: dict[_Call, float] = field(default_factory=dict)
    sweep: MachineSweep = field(default_factory=MachineSweep)

    def update(self, context: StepContext, plan: Plan) -> None:
        """Advance the lives of all pooled nodes, order what the plan wants, release what idles, and call the providers."""
        world = context.world
        if not world.node_pools:
            return
        boot_s = context.now.boot_s
        for listed in context.machine_lists:
            for member, why in self.sweep.compare(context, listed):
                _give_up(context, member, why)
        templates = {pool.id: pool.template for pool in world.node_pools.values()}
        for member in sorted(world.pool_nodes.values(), key=lambda member: member.id):
            _advance(context, member, boot_s - self.since_s.get(_phase(member), boot_s))
        for wanted in plan.wanted:
            # What a node turned out to be in this step, the plan did not know.
            if templates[wanted.pool] == world.node_pools[wanted.pool].template:
                _order(context, wanted)
        if plan.needed is not None:
            self._release_idle(context, plan.needed)
        for pool in list(world.node_pools.values()):
            if pool.removing and not members_of(pool.id, world.pool_nodes) and self.sweep.is_clean(pool, boot_s):
                _end_pool(context, pool)
        phases = [_phase(member) for member in world.pool_nodes.values()]
        self.since_s = {phase: self.since_s.get(phase, boot_s) for phase in phases}
        self._call_providers(context)

    def undo(self) -> None:
        """The step was undone: send its calls again with the next one."""
        self.called_s.clear()

    def _release_idle(self, context: StepContext, needed: frozenset[NodeId]) -> None:
        """Drain nodes above the minimum that have idled for long enough, the longest idle first."""
        world, now_s = context.world, context.now.boot_s
        idle = {
            member.id
            for member in world.pool_nodes.values()
            if member.state is PoolNodeState.UP
            and member.id not in needed
            and not world.attempts_by_node.get(member.id)
        }
        self.idle_since_s = {node_id: self.idle_since_s.get(node_id, now_s) for node_id in idle}
        for pool in world.node_pools.values():
            members = members_of(pool.id, world.pool_nodes)
            spare = sum(not member.leaving for member in members) - pool.min_nodes
            due = [
                (member, why)
                for member in members
                if member.id in idle
                and (why := _why_idle_ends(pool, member, now_s - self.idle_since_s[member.id], context.now.wall_s))
            ]
            due.sort(key=lambda each: (self.idle_since_s[each[0].id], each[0].id))
            for member, why in due[: max(0, spare)]:
                _drain(context, member, why)

    def _call_providers(self, context: StepContext) -> None:
        world, boot_s = context.world, context.now.boot_s
        sent: dict[_Call, float] = {}
        for member in sorted(world.pool_nodes.values(), key=lambda member: member.id):
            action = _due_action(context, member)
            if action is None:
                continue
            key = (member.token, action, member.offer)
            at_s = self.called_s.get(key)
            if at_s is None or not at_s <= boot_s < at_s + member.call_again_s:
                pool, at_s = world.node_pools[member.pool], boot_s
                context.provider_calls.append(
                    ProviderCall(
                        provider=pool.provider,
                        action=action,
                        node_id=member.id,
                        token=member.token,
                        template=pool.template.text,
                        zone=pool.zone,
                        pool=pool.id,
                        offer=member.offer,
                        settings=pool.settings,
                        known_machine=member.machine,
                        console=_never_joined(context, member),
                    )
                )
            sent[key] = at_s
        for pool in world.node_pools.values():
            if pool.template.listed:
                key = (pool.id, ProviderAction.LIST, "")
                at_s = self.called_s.get(key)
                if at_s is None or not at_s <= boot_s < at_s + LIST_EVERY_S:
                    at_s = boot_s
                    context.provider_calls.append(
                        ProviderCall(
                            provider=pool.provider,
                            action=ProviderAction.LIST,
                            node_id=NodeId(""),
                            token=pool.id,
                            template=pool.template.text,
                            zone=pool.zone,
                            pool=pool.id,
                            settings=pool.settings,
                        )
                    )
                sent[key] = at_s
        self.called_s = sent


def _why_idle_ends(pool: NodePool, member: PoolNode, idle_s: float, now_s: float) -> str:
    """Why a node that has idled for so long is released now; empty if it is kept: an hour that is paid is used up to its last minute."""
    since_s = member.charged_from_s
    if pool.billed is PaidBy.HOUR and since_s:
        left_s = HOUR_S - max(0.0, now_s - since_s) % HOUR_S
        return "no job in the last minute of a paid hour" if left_s <= LAST_MINUTE_S else ""
    return f"no job for {pool.idle_s:g} s" if idle_s >= pool.idle_s else ""


def _phase(member: PoolNode) -> tuple[str, PoolNodeState]:
    return member.token, PoolNodeState.REQUESTED if member.state in COMING_STATES else member.state


def _due_action(context: StepContext, member: PoolNode) -> ProviderAction | None:
    """The call that the node's state asks for; one that is released is stopped once its jobs have left."""
    if member.state is PoolNodeState.REQUESTED:
        return ProviderAction.START
    if member.leaving and not context.world.attempts_by_node.get(member.id):
        return ProviderAction.STOP
    return None


def _never_joined(context: StepContext, member: PoolNode) -> bool:
    """Whether the node's machine was given up before its supervisor registered, and its console output is not kept yet."""
    world = context.world
    unknown = member.id not in world.nodes and member.id not in world.table(NODE_CONSOLES)
    return member.given_up and bool(member.machine) and unknown


def _advance(context: StepContext, member: PoolNode, waited_s: float) -> None:
    """Follow the node's supervisor and the time limits. `waited_s`: as in `next_life`."""
    world, now_s = context.world, context.now.wall_s
    pool, node = world.node_pools[member.pool], world.nodes.get(member.id)
    after = next_life(member, pool, node, now_s, waited_s)
    if after is member:
        return
    if after.given_up:
        _give_up(context, member, after.why)
        return
    context.change.put(after)
    if after.state is PoolNodeState.UP and node is not None:
        if member.state in COMING_STATES:
            pool = pool.after_boot(waited_s)
        template = replace(template_like(pool.template, node), mounts_error=node.mounts_error)
        proved = replace(pool, failures=0, failure="", retry_at_s=0.0, template=template)
        if proved != world.node_pools[member.pool]:
            context.change.put(proved)


def _order(context: StepContext, wanted: WantedNodes) -> None:
    """Record the intent to start nodes, never more than the pool's maximum and cap; the call follows this commit."""
    pool, now_s = context.world.node_pools[wanted.pool], context.now.wall_s
    members = members_of(pool.id, context.world.pool_nodes)
    room = min(pool.places(members), pool.places_this_month(members, now_s))
    for _ in range(min(wanted.count, room)):
        offer = _next_offer(context, pool)
        if offer is None:
            break
        node_id = NodeId(f"{pool.id}-{pool.next_number}")
        pool = replace(pool, next_number=pool.next_number + 1)
        if node_id in context.world.nodes:  # a server of this name has joined by itself
            continue
        context.change.put(
            PoolNode(
                id=node_id,
                pool=pool.id,
                token=f"{node_id}-{context.settings.storage_key}-{context.world.next_history_seq}",
                state=PoolNodeState.REQUESTED,
                requested_s=now_s,
                changed_s=now_s,
                why=wanted.why,
                offer=offer.text,
                price_per_h=offer.price_per_h,
            )
        )
        text, facts = f"pool {pool.id} starts {node_id}: {wanted.why}", device_facts(pool.template.devices, pool.id)
        context.add_history("node_requested", text, node_id=node_id, facts=facts)
    context.change.put(pool)


def _next_offer(context: StepContext, pool: NodePool, beside: NodeId | None = None) -> NodeOffer | None:
    """The offer to try next, within the cap with all nodes of the pool; those of `beside` are left out."""
    members = members_of(pool.id, context.world.pool_nodes)
    spent_per_h = sum(member.price_per_h for member in members if member.id != beside)
    return pool.next_offer(spent_per_h, context.now.wall_s)


def _take_next_offer(context: StepContext, member: PoolNode, why: str) -> None:
    """Record that the offer was refused, and the next one to try; only after that commit it is tried. Without one the node is given up.

    An earlier call that was not answered, or that an earlier head sent, may still arrive: such an order never goes on to another offer. It is given up, and a new
    one is ordered if the node is still wanted.
    """
    now_s = context.now.wall_s
    pool = context.world.node_pools[member.pool].after_refusal(member.offer, why, now_s)
    if member.ever_unanswered or context.settings.storage_key not in member.token:
        context.change.put(pool)
        _leave(
            context,
            member.enters(PoolNodeState.DOWN, now_s, f"refused after a call without an answer: {why}", given_up=True),
        )
        return
    offer = _next_offer(context, pool, member.id)
    if offer is not None:
        context.change.put(pool)
        context.change.put(replace(member, offer=offer.text, price_per_h=offer.price_per_h, unanswered=0, problem=""))
        return
    where = f"{member.offer}: " if member.offer else ""
    text = f"no offer is left to try, the last: {where}{why}"
    context.change.put(pool.without_offers(f"{member.id}: {text}", now_s))
    _leave(context, member.enters(PoolNodeState.DOWN, now_s, text, given_up=True))


def _give_up(context: StepContext, member: PoolNode, why: str) -> None:
    """Mark a node DOWN for good, to be released. If it did not even start, its pool orders no other for a while."""
    now_s = context.now.wall_s
    if member.state in COMING_STATES:
        pool = context.world.node_pools[member.pool]
        context.change.put(pool.after_failure(f"{member.id}: {why}", now_s))
    _leave(context, member.enters(PoolNodeState.DOWN, now_s, why, given_up=True))


def _keep_console(context: StepContext, member: PoolNode, report: ProviderReported) -> None:
    """Keep what the machine of a node that never joined printed, of the newest nodes of the pool, and say so with the reason of its end."""
    if report.why:
        note = f"its console output could not be read: {report.why}"
    elif not report.console:
        note = "its console has no output"
    else:
        note = "its console output is kept"
        kept = NodeConsole(
            id=member.id, pool=member.pool, machine=member.machine, at_s=context.now.wall_s, text=report.console
        )
        context.change.put(kept)
        for one in surplus_consoles(context.world.table(NODE_CONSOLES).values(), member.pool):
            context.change.remove(NODE_CONSOLES, one.id)
    context.change.put(replace(member, why=f"{member.why}; {note}"))
    pool = context.world.node_pools[member.pool]
    if pool.failure == f"{member.id}: {member.why}":
        context.change.put(replace(pool, failure=f"{pool.failure}; {note}"))
    context.add_history("node_console", f"{member.id}: {note}", node_id=member.id, by=member.pool)


def _drain(context: StepContext, member: PoolNode, why: str) -> None:
    """Take a node out of service: its jobs are saved and moved, then the provider stops it."""
    if not member.leaving:
        _leave(context, member.enters(PoolNodeState.DRAINING, context.now.wall_s, why))


def _leave(context: StepContext, member: PoolNode) -> None:
    """Record a node that will be released, and move its jobs."""
    context.change.put(member)
    text = f"{member.id} is being released: {member.why}"
    context.add_history("node_releasing", text, node_id=member.id, by=member.pool)
    node = context.world.nodes.get(member.id)
    if node is not None:
        context.change.put(replace(node, cordon=_cordon_of(member, context.now.wall_s), changed_s=context.now.wall_s))
        context.stop_jobs_on(member.id, by=f"pool {member.pool}", why=member.why)


def _cordon_of(member: PoolNode, now_s: float) -> Cordon:
    return Cordon(by=f"pool {member.pool}", why=f"is being released: {member.why}", since_s=now_s, drain=True)


def _record_charges(context: StepContext, report: ProviderReported, member: PoolNode | None = None) -> None:
    """Write from when to when each stopped machine is charged: the ledger that a bill is compared with.

    The machine of `member` has a line in any case: if the provider has forgotten it, with the start that it reported, and 0 for an unknown end.
    """
    stopped = {one.machine: one for one in report.stopped}
    if member is not None and member.machine:
        own = stopped.get(member.machine, ChargedMachine(machine=member.machine))
        stopped[own.machine] = own if own.since_s else replace(own, since_s=member.machine_since_s)
    for one in stopped.values():
        text = f"machine {one.machine} of {report.node_id} has ended"
        facts: HistoryFacts = {"machine": one.machine, "since_s": one.since_s, "until_s": one.until_s}
        context.add_history("machine_ended", text, node_id=report.node_id, facts=facts)


def _charge(context: StepContext, member: PoolNode, report: ProviderReported) -> None:
    """Add what the released node cost to its pool's month, by the provider's clock where it says from when to when."""
    now_s, pool = context.now.wall_s, context.world.node_pools[member.pool]
    price_per_h, begin_s = node_price_per_h(member, pool), month_bounds_s(month_of(now_s))[0]
    spans = [(one.since_s, one.until_s) for one in report.stopped if one.since_s and one.until_s]
    since_s = member.charged_from_s or (member.requested_s if member.id in context.world.nodes else 0.0)
    if not spans and since_s:
        spans = [(since_s, now_s)]
    usd = sum(pool.cost(price_per_h, max(begin_s, first_s), last_s) for first_s, last_s in spans)
    if usd > 0.0:
        context.change.put(pool.after_charge(usd, now_s))


def _end_pool(context: StepContext, pool: NodePool) -> None:
    """Remove the record of a pool without nodes, and what was kept of them."""
    for one in list(context.world.table(NODE_CONSOLES).values()):
        if one.pool == pool.id:
            context.change.remove(NODE_CONSOLES, one.id)
    context.change.remove(NODE_POOLS, pool.id)


def _release(context: StepContext, member: PoolNode) -> None:
    """Remove the records of a node of which nothing runs any more."""
    node = context.world.nodes.get(member.id)
    if node is not None:
        context.lost[member.id] = None
        context.change.remove_node(node)
    context.change.remove(POOL_NODES, member.id)
    lived_s = max(0.0, context.now.wall_s - member.requested_s)
    text = f"{member.id} is released after {lived_s:.0f} s: {member.why}"
    context.add_history("node_released", text, node_id=member.id)

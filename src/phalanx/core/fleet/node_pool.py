"""Node pools: nodes that a provider starts when jobs need them, and the life of each such node.

A pooled node has a record of its own from the moment it is wanted, before any machine or supervisor exists. `Node` says what a supervisor
registered; `PoolNode` says what was ordered from the provider, so that nothing is ordered twice and nothing that runs is forgotten.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import SITE_LABEL, Node, NodeState
from phalanx.core.ids import NodeId, PoolId, UserId
from phalanx.core.months import month_bounds_s, month_of

POOL_NODES_MAX: Final = 256  # of one pool
RETURN_WAIT_S: Final = (
    60.0  # a pooled node that is DOWN for longer is released, and ordered again if it is still wanted
)
BACKOFF_S: Final = 30.0  # after the first node that did not come up; doubled by each further one
BACKOFF_MAX_S: Final = 1800.0
HOUR_S: Final = 3600.0  # of a price
REFUSAL_MEMORY_S: Final = 600.0  # an offer that was refused is not tried again for so long
CALL_AGAIN_S: Final = 15.0  # a call without an answer is repeated: it may have been lost with the head that sent it


class PaidBy(enum.StrEnum):
    """How a provider bills a node: each second, or each hour that has begun."""

    SECOND = "second"
    HOUR = "hour"


class PoolNodeState(enum.StrEnum):
    """Life of a pooled node: REQUESTED -> PROVISIONING -> UP -> DRAINING -> RELEASED, and DOWN from anywhere.

    REQUESTED: recorded; the provider has not confirmed the order. PROVISIONING: the provider starts it. UP: its supervisor has registered.
    DRAINING: it takes no new job, and is released once its jobs have left. DOWN: it did not start, or its supervisor is lost.
    RELEASED: the provider has confirmed that nothing of it runs; the record is removed in the same step.
    """

    REQUESTED = "requested"
    PROVISIONING = "provisioning"
    UP = "up"
    DRAINING = "draining"
    DOWN = "down"
    RELEASED = "released"


COMING_STATES: Final = frozenset({PoolNodeState.REQUESTED, PoolNodeState.PROVISIONING})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOffer:
    """One way to get a node: a zone, a type and a kind of price. `text`: all of it, for the provider and people; `price_per_h`: US dollars."""

    text: str
    zone: str = ""
    price_per_h: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferRefusal:
    """The provider refused an offer at `at_s` (Unix seconds), and why."""

    offer: str
    why: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedMachine:
    """A machine that the provider lists for this head.

    Attributes:
        machine: the provider's id of it.
        token: idempotency token of its order.
        offer: the text of the offer that brought it; empty if the provider has none.
        ended: nothing of it runs or is charged any more.
    """

    machine: str
    node_id: NodeId
    token: str
    offer: str = ""
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChargedMachine:
    """A machine that was stopped, and from when to when it is charged: Unix seconds by the provider's clock, 0 if unknown."""

    machine: str
    since_s: float = 0.0
    until_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTemplate:
    """What a node of a pool offers.

    Attributes:
        text: as the operator wrote it, for the provider, such as `h100:8`.
        offers: the ways to get such a node, in the order in which they are tried; empty if there is only one.
        listed: the provider lists its machines, and the sweeper compares them with the records.
        apart: its nodes share no fast network with others: those of one pool and zone are a site of their own.
        mounts_error: why its nodes cannot mount object stores, as the last of them said that came up; until the pool is set again.
    """

    text: str
    devices: tuple[Device, ...]
    cpus: int
    memory_bytes: int
    offers: tuple[NodeOffer, ...] = ()
    listed: bool = False
    apart: bool = False
    mounts_error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonthCharge:
    """What released nodes of a pool cost in a month (UTC, as `2026-11`), in US dollars."""

    month: str = ""
    usd: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePool:
    """A pool. Times are Unix seconds.

    Attributes:
        min_nodes, max_nodes: limits of its size; nodes that are requested or draining count.
        price_per_h: of one node, in US dollars an hour.
        zone: label `zone` of its nodes; empty for none.
        idle_s: a node above the minimum is released after so long without a job.
        start_limit_s: a node that is not up so long after its request is given up.
        next_number: of the next node's name; names are never used again while the pool exists.
        removing: the pool releases all its nodes and then ends.
        failures: nodes given up since the last one that came up.
        failure: why the last one was given up.
        retry_at_s: no node is ordered before.
        settings: of the provider, as the operator wrote them.
        cap_per_h: all its nodes together cost at most so many US dollars an hour; None: no cap.
        refusals: the newest one of each offer.
        list_problem: why the machines could not be listed the last time; empty if they were.
        egress_per_gb: US dollars for each 10^9 bytes that a job copies to its nodes, or back home.
        billed: by the second, or by the hour that has begun.
        cap_per_month: its nodes together cost at most so many US dollars in a month (UTC), as far as orders decide it; None: no cap.
        charged: for the nodes that it has released in the newest month.
        boot_s: how long its nodes took from the request until they were up, smoothed over the last ones; 0 before the first.
    """

    id: PoolId
    provider: str
    template: NodeTemplate
    min_nodes: int
    max_nodes: int
    price_per_h: float
    idle_s: float
    start_limit_s: float
    by: UserId
    created_s: float = 0.0
    zone: str = ""
    next_number: int = 0
    removing: bool = False
    failures: int = 0
    failure: str = ""
    retry_at_s: float = 0.0
    settings: tuple[tuple[str, str], ...] = ()
    cap_per_h: float | None = None
    refusals: tuple[OfferRefusal, ...] = ()
    list_problem: str = ""
    egress_per_gb: float = 0.0
    billed: PaidBy = PaidBy.SECOND
    cap_per_month: float | None = None
    charged: MonthCharge = MonthCharge()
    boot_s: float = 0.0

    @property
    def offers(self) -> tuple[NodeOffer, ...]:
        """The ways to get a node; of a provider without offers, the one."""
        return self.template.offers or (NodeOffer(text="", zone=self.zone, price_per_h=self.price_per_h),)

    def labels_of(self, offer: str) -> dict[str, str]:
        """The labels of a node that an offer brings, given the offer's text: its zone, and its site if it has one of its own."""
        zone = next((one.zone for one in self.offers if one.text == offer), self.zone)
        labels = {"zone": zone} if zone else {}
        if self.template.apart:
            labels[SITE_LABEL] = f"{self.id}/{zone}" if zone else str(self.id)
        return labels

    @property
    def price_per_device_h(self) -> float:
        """Price of one device in US dollars an hour; of the node if it has none."""
        return self.price_per_h / max(1, len(self.template.devices))

    def waits_s(self, now_s: float) -> float:
        """How long it still orders no node, at `now_s`; 0 if it may. A wait beyond the longest one means that the clock was set."""
        wait_s = self.retry_at_s - now_s
        return wait_s if 0.0 < wait_s <= BACKOFF_MAX_S else 0.0

    def refused_until_s(self, offer: NodeOffer, now_s: float) -> float:
        """Until when the offer is not tried again (Unix seconds); 0 if it may be. A refusal in the future means that the clock was set."""
        for refusal in self.refusals:
            if refusal.offer == offer.text and refusal.at_s <= now_s < refusal.at_s + REFUSAL_MEMORY_S:
                return refusal.at_s + REFUSAL_MEMORY_S
        return 0.0

    def cost(self, price_per_h: float, since_s: float, until_s: float) -> float:
        """What a node costs that is charged from when to when, in US dollars."""
        return price_per_h * self.paid_s(max(0.0, until_s - since_s)) / HOUR_S

    def spent_this_month(self, members: Iterable[PoolNode], now_s: float) -> float:
        """What the pool cost since the month began, in US dollars: nodes that it has released, and its nodes `members` until now."""
        month = month_of(now_s)
        begin_s = month_bounds_s(month)[0]
        running = sum(
            self.cost(node_price_per_h(member, self), max(begin_s, member.charged_from_s), now_s)
            for member in members
            if member.charged_from_s
        )
        return running + (self.charged.usd if self.charged.month == month else 0.0)

    def places_this_month(self, members: Iterable[PoolNode], now_s: float) -> int:
        """How many more nodes the cap of the month allows: it must hold if each of them, and of those that run, is used for one more hour."""
        price_per_h = min(offer.price_per_h for offer in self.offers)
        if self.cap_per_month is None or price_per_h <= 0.0:
            return self.max_nodes
        held = list(members)
        committed = self.spent_this_month(held, now_s) + sum(node_price_per_h(member, self) for member in held)
        return max(0, int((self.cap_per_month - committed) / price_per_h + 1e-9))

    def after_charge(self, usd: float, now_s: float) -> NodePool:
        """With one more node released that cost so much."""
        month = month_of(now_s)
        before = self.charged.usd if self.charged.month == month else 0.0
        return replace(self, charged=MonthCharge(month=month, usd=before + usd))

    def next_offer(self, spent_per_h: float, now_s: float) -> NodeOffer | None:
        """The first offer that was not refused of late and that the cap allows beside nodes that cost `spent_per_h` together."""
        for offer in self.offers:
            within = self.cap_per_h is None or spent_per_h + offer.price_per_h <= self.cap_per_h
            if within and not self.refused_until_s(offer, now_s):
                return offer
        return None

    @property
    def most_nodes(self) -> int:
        """How many nodes it can have at once, by its maximum and its cap."""
        price_per_h = min(offer.price_per_h for offer in self.offers)
        if self.cap_per_month is not None and price_per_h > self.cap_per_month:
            return 0
        if self.cap_per_h is None or price_per_h <= 0.0:
            return self.max_nodes
        return _nodes_for(self.cap_per_h, price_per_h, self.max_nodes)

    def places(self, members: Iterable[PoolNode]) -> int:
        """How many more nodes the pool may have beside its nodes `members`, by its maximum and its cap."""
        held = list(members)
        places = 0 if self.removing else max(0, self.max_nodes - len(held))
        price_per_h = min(offer.price_per_h for offer in self.offers)
        if self.cap_per_h is None or price_per_h <= 0.0:
            return places
        left_per_h = self.cap_per_h - sum(member.price_per_h for member in held)
        return _nodes_for(left_per_h, price_per_h, places)

    def after_boot(self, took_s: float) -> NodePool:
        """With the time that one more node took to come up: half its weight lies on this one."""
        return replace(self, boot_s=took_s if self.boot_s <= 0.0 else (self.boot_s + took_s) / 2.0)

    def paid_s(self, used_s: float) -> float:
        """For how many seconds a node is charged that was used for so long."""
        return math.ceil(used_s / HOUR_S) * HOUR_S if self.billed is PaidBy.HOUR else used_s

    def after_refusal(self, offer: str, why: str, now_s: float) -> NodePool:
        """With a refused offer, which is not tried again for a while."""
        others = tuple(refusal for refusal in self.refusals if refusal.offer != offer)
        return replace(self, refusals=(*others, OfferRefusal(offer=offer, why=why, at_s=now_s)))

    def without_offers(self, why: str, now_s: float) -> NodePool:
        """With no offer left: it waits until one may be tried again. A pool whose cap allows no further node keeps its time."""
        until_s = min(filter(None, (self.refused_until_s(offer, now_s) for offer in self.offers)), default=0.0)
        return replace(self, failures=self.failures + 1, failure=why, retry_at_s=max(self.retry_at_s, until_s))

    def after_failure(self, why: str, now_s: float) -> NodePool:
        """With one more node given up: the next order waits longer."""
        wait_s = min(BACKOFF_S * 2.0 ** min(self.failures, 16), BACKOFF_MAX_S)
        return replace(self, failures=self.failures + 1, failure=why, retry_at_s=now_s + wait_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNode:
    """A node of a pool. Times are Unix seconds.

    Attributes:
        token: idempotency token of the order; the provider starts at most one machine for it.
        changed_s: when it entered its state.
        why: why it was ordered, is down, or is released.
        given_up: it is DOWN for good and will be released. A DOWN node that is not may still return.
        offer: the text of the offer that is tried, or that brought it. Another one is tried only after this one was refused for certain.
        price_per_h: of that offer, in US dollars.
        machine: the provider's id of its machine; empty until the provider has confirmed it, and for a provider without ids.
        machine_since_s: since when the machine is charged, by the provider's clock, else since it confirmed the order; 0 before.
        ever_unanswered: the provider did not answer a call to start it, which may still arrive.
        unanswered: calls of its present state that the provider did not answer; `problem`: why the last one, or why the node is not up yet.
    """

    id: NodeId
    pool: PoolId
    token: str
    state: PoolNodeState
    requested_s: float
    changed_s: float
    why: str = ""
    given_up: bool = False
    offer: str = ""
    price_per_h: float = 0.0
    machine: str = ""
    machine_since_s: float = 0.0
    ever_unanswered: bool = False
    unanswered: int = 0
    problem: str = ""

    @property
    def charged_from_s(self) -> float:
        """Since when it is charged; 0 if nothing of it runs as far as is known."""
        if self.machine_since_s or self.state is not PoolNodeState.UP:
            return self.machine_since_s
        return self.requested_s  # it is up, although the provider has not confirmed it

    @property
    def call_again_s(self) -> float:
        """After how long its call is repeated: sooner if the provider could not answer the first ones."""
        return min(CALL_AGAIN_S, 2.0 ** (self.unanswered - 1)) if self.unanswered else CALL_AGAIN_S

    @property
    def reasons(self) -> str:
        """Why it is in its state, and what the provider's last answer adds to that."""
        more = "" if self.problem and self.why.endswith(self.problem) else self.problem
        return "; ".join(filter(None, (self.why, more)))

    @property
    def leaving(self) -> bool:
        """Whether it takes no new job and will be released."""
        return self.state is PoolNodeState.DRAINING or self.given_up

    def enters(self, state: PoolNodeState, now_s: float, why: str = "", *, given_up: bool = False) -> PoolNode:
        """The node in another state."""
        return replace(self, state=state, changed_s=now_s, why=why, given_up=given_up, unanswered=0, problem="")


def _nodes_for(usd_per_h: float, price_per_h: float, most: int) -> int:
    """How many nodes at this price the money is for, at most `most`; a price may be so small that the quotient is infinite."""
    return max(0, int(min(most, usd_per_h / price_per_h + 1e-9)))


def next_life(member: PoolNode, pool: NodePool, node: Node | None, now_s: float, waited_s: float) -> PoolNode:
    """The pooled node after its supervisor's state and the time were looked at; itself if nothing changes.

    Args:
        member: the pooled node.
        pool: its pool.
        node: what its supervisor registered; None before it did.
        now_s: Unix seconds, for the record.
        waited_s: how long it has been starting, or DOWN, by a clock that is never set.
    """
    up = node is not None and node.state is NodeState.UP
    lost = "its record is gone" if node is None else node.down_cause
    match member.state:
        case PoolNodeState.REQUESTED | PoolNodeState.PROVISIONING:
            if up:
                return member.enters(PoolNodeState.UP, now_s)
            if waited_s >= pool.start_limit_s:
                why = f"it was not up {pool.start_limit_s:g} s after its request"
                return member.enters(PoolNodeState.DOWN, now_s, why, given_up=True)
        case PoolNodeState.UP:
            if not up:
                return member.enters(PoolNodeState.DOWN, now_s, lost)
        case PoolNodeState.DOWN if not member.given_up:
            if up:
                return member.enters(PoolNodeState.UP, now_s)
            if waited_s >= RETURN_WAIT_S:
                why = f"down for {RETURN_WAIT_S:g} s: {member.why}"
                return member.enters(PoolNodeState.DOWN, now_s, why, given_up=True)
        case PoolNodeState.DRAINING:
            if node is not None and not up:
                return member.enters(PoolNodeState.DOWN, now_s, f"{member.why}; {lost}", given_up=True)
        case PoolNodeState.DOWN | PoolNodeState.RELEASED:
            pass
    return member


def members_of(pool_id: PoolId, members: Mapping[NodeId, PoolNode]) -> list[PoolNode]:
    """The nodes of a pool, by id."""
    return sorted((member for member in members.values() if member.pool == pool_id), key=lambda member: member.id)


def node_price_per_h(member: PoolNode, pool: NodePool) -> float:
    """What a node of a pool costs an hour, in US dollars."""
    return member.price_per_h if member.offer else pool.price_per_h


def priced_nodes(pools: Mapping[PoolId, NodePool], members: Mapping[NodeId, PoolNode]) -> frozenset[NodeId]:
    """The nodes of pools with a price."""
    priced = {pool.id for pool in pools.values() if pool.price_per_h > 0.0}
    return frozenset(member.id for member in members.values() if member.pool in priced) if priced else frozenset()


def template_node(pool: NodePool, node_id: NodeId, offer: str = "") -> Node:
    """The node as it will register, by the pool's template. `offer`: the text of the one that brings it; the first one if empty."""
    return Node(
        id=node_id,
        engine=pool.provider,
        devices=pool.template.devices,
        cpus=pool.template.cpus,
        memory_bytes=pool.template.memory_bytes,
        state=NodeState.UP,
        labels=pool.labels_of(offer or pool.offers[0].text),
        mounts_error=pool.template.mounts_error,
    )


def startable_nodes(
    pools: Iterable[NodePool], members: Mapping[NodeId, PoolNode], known: Mapping[NodeId, Node]
) -> Iterator[tuple[NodePool, Node]]:
    """Nodes that pools could still bring: ordered ones that have not registered, and one for each further node up to the maximum."""
    for pool in pools:
        if pool.removing:
            continue
        registered = sum(member.id in known for member in members.values() if member.pool == pool.id)
        for number in range(pool.most_nodes - registered):
            yield pool, template_node(pool, NodeId(f"{pool.id}+{number + 1}"))


def mixed_kinds(
    pools: Iterable[NodePool], members: Mapping[NodeId, PoolNode], known: Mapping[NodeId, Node]
) -> Iterator[tuple[NodePool, frozenset[NodeId], list[Node]]]:
    """The kinds of nodes of each pool with a registered node that is not like its template: another system chooses the machines.

    Each kind comes with the pool, its registered nodes, and all nodes that it may have, as nodes of this kind: a node of another one may be
    released, and a later one be of this.
    """
    for pool in pools:
        registered = sorted(name for name, member in members.items() if member.pool == pool.id and name in known)
        kinds = {
            _device_kinds(template.devices): template
            for template in (template_like(pool.template, known[name]) for name in registered)
        }
        kinds[_device_kinds(pool.template.devices)] = pool.template
        for template in kinds.values() if len(kinds) > 1 and not pool.removing else ():
            one = replace(pool, template=template)
            nodes = [template_node(one, NodeId(f"{pool.id}+{number + 1}")) for number in range(pool.most_nodes)]
            yield pool, frozenset(registered), nodes


def template_like(template: NodeTemplate, node: Node) -> NodeTemplate:
    """The template with what a registered node of it has: a provider may know less of its nodes than their supervisors."""
    if _device_kinds(node.devices) == _device_kinds(template.devices):
        return template
    devices = tuple(
        Device(index=one.index, uuid="", model=one.model, memory_bytes=one.memory_bytes, virtual=one.virtual)
        for one in node.devices
    )
    return replace(template, devices=devices, cpus=node.cpus, memory_bytes=node.memory_bytes)


def _device_kinds(devices: Iterable[Device]) -> tuple[tuple[str, int], ...]:
    return tuple((device.model, device.memory_bytes) for device in devices)

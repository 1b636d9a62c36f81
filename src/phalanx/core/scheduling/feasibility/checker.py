"""Whether a job can ever start: judged against the fleet, its queue's quotas and limits, the limits per user, and its reservation.

The job is judged alone on an empty cluster. Other jobs, holds, closed queues, begin times, dependencies and spent budgets delay a job; they do
not make it impossible. The outlook is

- POSSIBLE: the nodes that accept work now can hold it, and every limit admits it;
- NOT_NOW: every limit admits it, but only nodes can hold it that accept no work now, or that are not known yet;
- NEVER: nothing but a change by an operator (other queues, other nodes) or of the job itself would let it start.

The rules, each with the name of its limit:

| limit | NEVER if |
|---|---|
| reservation | the job's reservation has ended, or does not admit its user and queue |
| users.gpus, users.jobs, users.RESOURCE | it alone exceeds the limit per user of its queue or of a queue above |
| licences | it needs more seats of a licence than exist |
| budget | it asks for GPUs, and the queue or a queue above has a budget of 0 GPU-hours |
| borrow | it alone exceeds the quota and borrow limit of its queue or of a queue above |
| nodes | the nodes that it may use cannot hold it: their number, GPUs, CPUs, memory, models, topology |
| mounts | it mounts object stores, and of the nodes that could hold it too few can |
| lend | it alone exceeds its queue's share and what all other queues lend |

Quotas and limits apply to the smallest size of an elastic job. A job with several acceptable models, or
several alternatives, is possible if one of them is.

**Nodes.** A node that is DOWN, cordoned or drained, or that has unhealthy devices, may return: it counts unless it has been DOWN for more than
`NODE_RETURNS_WITHIN_S`. A removed node ("nodes forget") does not count. As long as an engine has not listed all its nodes, and on a fleet
without any node, no job is impossible for want of nodes. Nodes that do not exist yet but that a provider could start belong in
`_Scope.RETURNING`: they make a job NOT_NOW. They are like the pool's template, or, if nodes of the pool turned out to be of several kinds, all
of any one of these.

Called at submit, when queues or nodes change, and by the scheduler for each waiting job. It changes nothing.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

from phalanx.core.errors import NeverFits
from phalanx.core.fleet.fleet_counts import FleetCounts
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.fleet.node_pool import NodePool, PoolNode, mixed_kinds, startable_nodes
from phalanx.core.fleet.summary import FleetSummary, NodeKinds, summary_of
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import NodeId, PoolId, QueueId, ReservationId
from phalanx.core.resources import GPUS, NO_RESOURCES, Resources, extras_of, quantity, quantity_text
from phalanx.core.scheduling.feasibility.answer import FROM_BEST, POSSIBLE, Feasibility, Outlook, never, not_now
from phalanx.core.scheduling.feasibility.request import FeasibilityRequest, feasibility_request
from phalanx.core.scheduling.node_filter import (
    ALL_NODES,
    NodeFilter,
    node_filter_of,
    unmountable_nodes,
    unmountable_text,
)
from phalanx.core.scheduling.shape import Shape, acceptable_shapes, alternatives_text
from phalanx.core.scheduling.submission import check_topology, could_hold_part
from phalanx.core.units import format_duration
from phalanx.core.work.extras import Licence, seats_of
from phalanx.core.work.job import Job, WaitReasonCode
from phalanx.core.work.queue import Queue
from phalanx.core.work.quotas.quota_tree import FLEET, QuotaDimension, QuotaRefusal, QuotaTree
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.share import gpus_of

NODE_RETURNS_WITHIN_S: Final = 30 * 86_400.0  # repairs by a vendor take days to weeks; after a month a node is gone
OUTLOOKS_KEPT: Final = 4096  # distinct requests for one state of fleet and queues; some hundred bytes each
_NAMED_MAX: Final = 3  # nodes named in one sentence


class _Scope(enum.Enum):
    """Which nodes count."""

    NOW = "those that accept work now"
    RETURNING = "these, and those that may accept work again, repaired"
    KNOWN = "all, however long they have been down"


class ClusterLimits(Protocol):
    """The state that requests are judged against: a world, or a snapshot of one."""

    @property
    def nodes(self) -> Mapping[NodeId, Node]: ...  # noqa: D102
    @property
    def queues(self) -> Mapping[QueueId, Queue]: ...  # noqa: D102
    @property
    def reservations(self) -> Mapping[ReservationId, Reservation]: ...  # noqa: D102
    @property
    def awaited_nodes(self) -> str: ...  # noqa: D102
    @property
    def node_pools(self) -> Mapping[PoolId, NodePool]: ...  # noqa: D102
    @property
    def pool_nodes(self) -> Mapping[NodeId, PoolNode]: ...  # noqa: D102
    @property
    def licences(self) -> Mapping[str, Licence]: ...  # noqa: D102
    @property
    def capacity_version(self) -> int | None: ...  # noqa: D102


class FeasibilityChecker:
    """Judges requests against one state of nodes, queues and reservations. Its answers are cached: create another one for another state.

    Safe for several threads: it copies the mappings, and a race only repeats work.

    Attributes:
        now_s: the time of the state, Unix seconds.
        valid_until_s: until when (Unix seconds) the answers hold if nothing changes: then a node has been DOWN for too long. Infinite for never.
    """

    __slots__ = (
        "_awaited",
        "_capped",
        "_counts",
        "_licences",
        "_mixed_kinds",
        "_nodes",
        "_outlooks",
        "_pooled",
        "_queues",
        "_reservations",
        "_scopes",
        "_summaries",
        "_trees",
        "_unmountable",
        "now_s",
        "valid_until_s",
    )

    def __init__(self, cluster: ClusterLimits, now_s: float, node_kinds: NodeKinds | None = None) -> None:
        self._nodes = dict(sorted(cluster.nodes.items()))  # messages must not depend on the order of the nodes
        pools, members = list(cluster.node_pools.values()), dict(cluster.pool_nodes)
        self._pooled = {node.id: (pool, node) for pool, node in startable_nodes(pools, members, self._nodes)}
        self._mixed_kinds = list(mixed_kinds(pools, members, self._nodes))
        coming = [node for _, node in self._pooled.values()] + [node for *_, own in self._mixed_kinds for node in own]
        self._unmountable = unmountable_nodes((*self._nodes.values(), *coming))
        capped = (pool.id for pool in pools if pool.max_nodes and not (pool.removing or pool.most_nodes))
        self._capped = sorted(capped)
        self._queues = dict(cluster.queues)
        self._reservations = cluster.reservations
        self._licences = dict(cluster.licences)
        self._awaited = cluster.awaited_nodes
        self.now_s = now_s
        self._outlooks: dict[FeasibilityRequest, Feasibility] = {}
        self._trees: tuple[QuotaTree, QuotaTree] | None = None
        pooled = [node for _, node in self._pooled.values()]
        self._counts = FleetCounts(self._nodes.values(), pooled, node_kinds or NodeKinds())
        self._scopes: dict[_Scope, dict[NodeId, Node]] = {}
        self._summaries: dict[_Scope, FleetSummary] = {}
        self.valid_until_s = min(
            (_returns_until_s(node) for node in self._nodes.values() if _returns_until_s(node) > now_s),
            default=math.inf,
        )

    def check(self, request: FeasibilityRequest) -> Feasibility:
        """The outlook of the request. Cost: one dictionary access for a request seen before, else linear in the nodes."""
        found = self._outlooks.get(request)
        if found is None:
            found = self._judge(request)
            if len(self._outlooks) >= OUTLOOKS_KEPT:
                self._outlooks.clear()
            self._outlooks[request] = found
        return found

    def check_job(self, job: Job) -> Feasibility:
        """The outlook of a job."""
        return self.check(feasibility_request(job.spec, job.queue, job.user))

    def _judge(self, request: FeasibilityRequest) -> Feasibility:
        if request.role.gpus.alternatives:
            return self._judge_alternatives(request)
        refusal = self._reservation_refusal(request) or self._licence_refusal(request) or self._limit_refusal(request)
        if refusal is not None:
            return refusal
        found = self._fleet_outlook(request)
        return found if found.never else self._lend_outlook(request, found)

    def _judge_alternatives(self, request: FeasibilityRequest) -> Feasibility:
        """The best outlook of an alternative; if all are impossible, the reason of each."""
        role = request.role
        found = [self.check(replace(request, role=replace(role, gpus=one))) for one in role.gpus.choices]
        best = min(found, key=lambda one: FROM_BEST.index(one.outlook))
        if not best.never:
            return best
        return replace(
            best,
            detail=alternatives_text(
                [(str(one), each.detail) for one, each in zip(role.gpus.choices, found, strict=True)]
            ),
        )

    # ---- reservation ---------------------------------------------------------------------------------------------------

    def _reservation_refusal(self, request: FeasibilityRequest) -> Feasibility | None:
        if not request.reservation:
            return None
        reservation = self._reservations.get(ReservationId(request.reservation))
        if reservation is None:
            return never("reservation", f"reservation {request.reservation} has ended")
        if reservation.admits(request.user, request.queue):
            return None
        return never(
            "reservation",
            f"reservation {reservation.id} is for {reservation.holders_text}, not for {request.user} in queue {request.queue}",
        )

    def _licence_refusal(self, request: FeasibilityRequest) -> Feasibility | None:
        for name, seats in request.role.licences:
            licence = self._licences.get(name)
            if licence is None:
                return never("licences", f"the job needs {seats} of licence {name}, which does not exist")
            if seats > licence.total:
                return never(
                    "licences",
                    f"the job needs {seats} of licence {name}; {licence.total} exist{'s' if licence.total == 1 else ''}",
                )
        return None

    # ---- queues --------------------------------------------------------------------------------------------------------

    def _empty_trees(self) -> tuple[QuotaTree, QuotaTree]:
        """The queue tree without any job: on all devices, as placements are verified, and on the healthy ones, as the scheduler counts them."""
        if self._trees is None:
            queues = self._queues.values()
            seats = Resources(extras=extras_of(seats_of(self._licences)))
            whole, healthy = [found + seats for found in self._counts.resources()]
            tree = QuotaTree(queues, whole)
            self._trees = (tree, tree if healthy == whole else QuotaTree(queues, healthy))
        return self._trees

    @property
    def _tree(self) -> QuotaTree:
        return self._empty_trees()[0]

    def _refusal(self, request: FeasibilityRequest, tree: QuotaTree | None = None) -> QuotaRefusal | None:
        """Why the empty tree does not admit the job."""
        if request.queue not in self._queues:
            return None
        tree = tree or self._tree
        return tree.check_admission(tree.job_node(request.queue), request.user, self._least(request))

    def _least(self, request: FeasibilityRequest) -> Resources:
        """Everything that the job takes at least. If queues limit more than GPUs, the number of its nodes matters."""
        asked = request.role.asked
        if not self._tree.others:
            return asked
        shapes = self._shapes(request, self._filter_of(request), _Scope.KNOWN)
        if isinstance(shapes, NeverFits):
            return asked
        host = min(sum((one.host * one.parts for one in shape.each), NO_RESOURCES) for shape in shapes)
        return host + Resources(asked.milli, extras=request.role.licences)

    def _limit_refusal(self, request: FeasibilityRequest) -> Feasibility | None:
        """The limit of a queue that the job alone exceeds, whatever the fleet."""
        gpus = gpus_of(request.role.milli)
        refusal = self._refusal(request)
        if refusal is not None and refusal.reason is WaitReasonCode.USER_LIMIT:
            if refusal.counts_jobs:
                return never("users.jobs", f"queue {refusal.queue} allows 0 running jobs a user")
            most_text = quantity_text(refusal.resource, refusal.limit, unit=False)
            return never(
                f"users.{refusal.resource}",
                f"{refusal.requested_text} asked; queue {refusal.queue} allows {most_text} a user",
                _less_hint(refusal.resource, int(refusal.limit)),
            )
        for queue in self._path(request.queue) if gpus else ():
            if queue.budget_gpu_h is not None and queue.budget_gpu_h <= 0.0:
                return never("budget", f"{_asked(gpus)}; the budget of queue {queue.id} is 0 GPU-hours")
        if refusal is not None and refusal.queue:
            one = self._tree.dimension(refusal.resource)
            most = quantity(one.resource, one.available(self._tree.job_node(request.queue)))
            return never(
                "borrow",
                f"{refusal.requested_text} asked; queue {request.queue} can get at most {quantity_text(one.resource, most, unit=False)}"
                f"{self._borrow_text(request, refusal.queue, one)}",
                _less_hint(one.resource, most),
            )
        return None

    def _lend_outlook(self, request: FeasibilityRequest, found: Feasibility) -> Feasibility:
        """The outlook, given that of the nodes: the fleet less what other queues keep for themselves may be too small."""
        tree, usable = self._empty_trees()
        refusal = self._refusal(request)
        if refusal is None:
            if found.outlook is Outlook.POSSIBLE and self._refusal(request, usable) is not None:
                broken = gpus_of(tree.right[FLEET] - usable.right[FLEET])
                return not_now(
                    f"{broken} of {gpus_of(tree.right[FLEET])} devices are unhealthy, and other queues keep their quotas"
                )
            return found
        if self._awaited or not self._nodes:
            return not_now(self._awaited) if found.outlook is Outlook.POSSIBLE else found
        one = tree.dimension(refusal.resource)
        name, most = one.resource, quantity(one.resource, one.available(tree.job_node(request.queue)))
        whole = quantity_text(name, quantity(name, one.right[FLEET]))
        kept = quantity_text(name, quantity(name, one.right[FLEET] - one.pool[FLEET]), unit=False)
        return never(
            "lend",
            f"{refusal.requested_text} asked; queue {request.queue} can get at most {quantity_text(name, most, unit=False)}:"
            f" of {whole}, queues keep {kept} that they do not lend",
            _less_hint(name, most),
        )

    def _borrow_text(self, request: FeasibilityRequest, limiting: QueueId, one: QuotaDimension) -> str:
        """How the limit comes about: ` (quota 4, borrow 2)`, or that of a queue above."""
        tree, queue = self._tree, self._queues[limiting]
        node, path = tree.subtree_node(limiting), tree.paths[tree.job_node(request.queue)]
        own = path[path.index(node) - 1] if path[0] != node else None  # the branch of the job

        def text_of(amount: int) -> str:
            return quantity_text(one.resource, quantity(one.resource, amount), unit=False)

        terms, right = queue.terms_of(one.resource), one.right[node]
        kept = right - one.pool[node] - (0 if own is None else one.reserved[own])
        quota = (
            f"quota {text_of(right)}"
            if terms.quota is not None
            else f"quotas of {text_of(right)} below it"
            if right
            else "no quota"
        )
        lent = f" of which queues below it do not lend {text_of(kept)}" if kept > 0 else ""
        text = f"{quota}{lent}, borrow {text_of(terms.borrow or 0)}"
        return f" ({text})" if limiting == request.queue else f": queue {limiting} above it has {text}"

    def _path(self, queue_id: QueueId) -> Iterator[Queue]:
        """The queue and those above it."""
        if queue_id in self._queues:
            for node in self._tree.paths[self._tree.subtree_node(queue_id)][:-1]:
                yield self._queues[self._tree.ids[node]]

    # ---- nodes ---------------------------------------------------------------------------------------------------------

    def _fleet_outlook(self, request: FeasibilityRequest) -> Feasibility:
        if not self._nodes and not self._pooled:
            return not_now(self._awaited or "no node has joined")
        chosen = self._filter_of(request)
        if not isinstance(self._shapes(request, chosen, _Scope.NOW), NeverFits):
            return POSSIBLE
        if self._awaited:
            return not_now(self._awaited)
        shapes = self._shapes(request, chosen, _Scope.RETURNING)
        if isinstance(shapes, NeverFits):
            return (
                self._outlook_on_mixed_pools(request, chosen)
                or self._never_mounts(request)
                or self._never_on_fleet(request, chosen, shapes)
            )
        away = [
            (node.id, why)
            for node_id, back in self._scope(_Scope.RETURNING).items()
            if chosen.admits(node_id) and could_hold_part(shapes, back)
            if node_id in self._nodes
            and (why := _why_not_now(node := self._nodes[node_id], holds_now=could_hold_part(shapes, node)))
        ]
        pools = {pool.id: pool for pool, node in self._pooled.values() if could_hold_part(shapes, node)}
        if pools:
            text = [
                f"{name} (at most {pool.most_nodes} node{'' if pool.most_nodes == 1 else 's'})"
                for name, pool in sorted(pools.items())
            ]
            return not_now(f"needs nodes of pool {_listed(text)}", str(shapes[0]))
        why = _listed([f"{node_id} {reason}" for node_id, reason in away])
        return replace(not_now(why, str(shapes[0])), nodes=tuple(node_id for node_id, _ in away))

    def _filter_of(self, request: FeasibilityRequest) -> NodeFilter:
        unmountable = self._unmountable if request.mounts else frozenset[NodeId]()
        return node_filter_of(request.nodelist, request.exclude, request.reservation, self._reservations, unmountable)

    def _never_mounts(self, request: FeasibilityRequest) -> Feasibility | None:
        """The refusal of a job that would fit if its nodes could mount object stores; None if that is not the reason."""
        if not self._unmountable or not request.mounts:
            return None
        without = replace(request, mounts=False)
        chosen = self._filter_of(without)
        shapes = self._shapes(without, chosen, _Scope.RETURNING)
        if isinstance(shapes, NeverFits):
            return None
        known = {name: node for name, node in self._nodes.items() if name in self._unmountable}
        for pool, node in self._pooled.values():
            if node.id in self._unmountable and chosen.admits(node.id):
                known[NodeId(f"nodes of pool {pool.id}")] = replace(node, id=NodeId(f"nodes of pool {pool.id}"))
        nodes = [
            node
            for name, node in sorted(known.items())
            if chosen.admits(node.id) and could_hold_part(shapes, _restored(node))
        ]
        detail = f"too few nodes that fit can mount object stores; it cannot use {unmountable_text(nodes)}"
        pooled = " (of a pool: mend the image, then remove the pool and add it again)" if self._pooled else ""
        return never(
            "mounts", detail, f"copy the data (mode: stage), or mend the nodes and restart their supervisors{pooled}"
        )

    def _outlook_on_mixed_pools(self, request: FeasibilityRequest, chosen: NodeFilter) -> Feasibility | None:
        """The outlook if the nodes of a pool whose nodes are of several kinds were all of one; None if that does not help."""
        for pool, registered, coming in self._mixed_kinds:
            returning = self._scope(_Scope.RETURNING).items()
            nodes = {
                name: node for name, node in returning if name not in registered and self._pool_of(name) != pool.id
            }
            shapes = self._shapes_on(request, chosen, (nodes | {node.id: node for node in coming}).copy)
            if not isinstance(shapes, NeverFits):
                have = coming[0].devices[0].model if coming[0].devices else "no GPUs"
                text = f"needs nodes of pool {pool.id} with {have} (at most {len(coming)}); it also has others"
                return not_now(text, str(shapes[0]))
        return None

    def _pool_of(self, node_id: NodeId) -> PoolId | None:
        """The pool that could start this node; None for a node that exists."""
        found = self._pooled.get(node_id)
        return None if found is None else found[0].id

    def _never_on_fleet(self, request: FeasibilityRequest, chosen: NodeFilter, error: NeverFits) -> Feasibility:
        """With notes on nodes that could hold it but have been DOWN for too long to count on them, and on pools whose cap allows no node."""
        detail = error.message
        long_down = sorted(
            node.id for node in self._nodes.values() if not self._returns(node) and chosen.admits(node.id)
        )
        if long_down and not isinstance(self._shapes(request, chosen, _Scope.KNOWN), NeverFits):
            limit = format_duration(NODE_RETURNS_WITHIN_S)
            detail += f"; it would fit with {_listed(long_down)}, down for more than {limit}"
        detail += "".join(f"; pool {name} orders no node: its cap allows none" for name in self._capped)
        return never("nodes", detail, error.hint)

    def _shapes(self, request: FeasibilityRequest, chosen: NodeFilter, scope: _Scope) -> tuple[Shape, ...] | NeverFits:
        """The request's shapes on the nodes that it may use, or why there are none."""
        if chosen is not ALL_NODES:
            return self._shapes_on(request, chosen, lambda: self._scope(scope))
        summary = self._summaries.get(scope)
        if summary is None:
            # Nodes of the other scopes are restored ones, new each time.
            summary = self._counts.schedulable() if scope is _Scope.NOW else summary_of(self._scope(scope).values())
            self._summaries[scope] = summary
        return self._shapes_on(request, chosen, lambda: self._scope(scope), summary)

    def _shapes_on(
        self,
        request: FeasibilityRequest,
        chosen: NodeFilter,
        nodes_of: Callable[[], Mapping[NodeId, Node]],
        summary: FleetSummary | None = None,
    ) -> tuple[Shape, ...] | NeverFits:
        """The same on these nodes. `summary`: of all of them, where it is known and none is excluded; then few requests need the nodes."""
        if summary is None:
            admitted = {node_id: node for node_id, node in nodes_of().items() if chosen.admits(node_id)}
            nodes_of, summary = lambda: admitted, summary_of(admitted.values())
        if not summary.kinds:
            return _no_node(request, chosen, self._nodes)
        try:
            shapes = acceptable_shapes(request.role, summary, fleet_text=chosen.text)
            if request.topology.required or request.topology.slice_nodes:
                self._check_topology(request, shapes, nodes_of(), chosen)
            if not shapes[0].node_devices and shapes[0].nodes > 1 and not shapes[0].others:
                self._check_one_model(request, shapes, nodes_of(), chosen)
        except NeverFits as error:
            return error
        return shapes

    def _check_topology(
        self,
        request: FeasibilityRequest,
        shapes: tuple[Shape, ...],
        nodes: Mapping[NodeId, Node],
        chosen: NodeFilter,
    ) -> None:
        if request.topology.required or request.topology.slice_nodes:
            check_topology(
                request.topology,
                shapes,
                [
                    *(nodes.get(node_id, node) for node_id, node in self._nodes.items()),
                    *(node for node_id, node in nodes.items() if node_id not in self._nodes),
                ],
                may_use=lambda node: node.id in nodes,
                fleet_text=chosen.text,
            )

    def _check_one_model(
        self,
        request: FeasibilityRequest,
        shapes: tuple[Shape, ...],
        nodes: Mapping[NodeId, Node],
        chosen: NodeFilter,
    ) -> None:
        """Reject a job without GPUs on several nodes if these have no model in common, as the scheduler places a gang on nodes of one model.

        Raises:
            NeverFits: no model has enough nodes.
        """
        groups: dict[str, dict[NodeId, Node]] = {}
        for node_id, node in nodes.items():
            if could_hold_part(shapes, node):
                # As the scheduler numbers them: devices with MIG mode on are a kind of their own.
                kinds = {f"{device.model}{device.divided}" for device in node.devices if device.healthy}
                for model in kinds or {""}:
                    groups.setdefault(model, {})[node_id] = node
        error: NeverFits | None = None
        for group in groups.values():
            try:
                acceptable_shapes(request.role, summary_of(group.values()))
                self._check_topology(request, shapes, group, chosen)
            except NeverFits as refusal:
                error = refusal
            else:
                return
        most = max((len(group) for group in groups.values()), default=0)
        if error is not None and most >= shapes[0].nodes:  # enough nodes, but not near enough to each other
            raise error
        raise NeverFits(
            f"{shapes[0].nodes} nodes can never fit: the nodes of one job have one GPU model, and {chosen.text} has at most {most} such nodes",
            hint=Hint(HintCode.LIST_NODES),
        )

    def _scope(self, scope: _Scope) -> dict[NodeId, Node]:
        """The nodes that count, as they are when they accept work."""
        found = self._scopes.get(scope)
        if found is None:
            nodes = self._nodes.values()
            if scope is _Scope.NOW:
                counted = [node for node in nodes if node.schedulable]
            else:
                counted = [_restored(node) for node in nodes if scope is _Scope.KNOWN or self._returns(node)]
                counted += [node for _, node in self._pooled.values()]
            found = self._scopes[scope] = {node.id: node for node in counted}
        return found

    def _returns(self, node: Node) -> bool:
        return self.now_s < _returns_until_s(node)


def newly_impossible(
    jobs: Iterable[Job], before: FeasibilityChecker, after: FeasibilityChecker
) -> list[tuple[Job, Feasibility]]:
    """The jobs that a change of queues or nodes makes impossible, in the given order, with the reasons."""
    return [(job, found) for job in jobs if (found := after.check_job(job)).never and not before.check_job(job).never]


def _returns_until_s(node: Node) -> float:
    """Until when (Unix seconds) the node is expected back."""
    return math.inf if node.state is NodeState.UP else max(node.changed_s, node.joined_s) + NODE_RETURNS_WITHIN_S


def _restored(node: Node) -> Node:
    """The node once it accepts work again, repaired."""
    if node.schedulable and all(device.healthy for device in node.devices):
        return node
    devices = tuple(device if device.healthy else replace(device, healthy=True) for device in node.devices)
    return replace(node, state=NodeState.UP, cordon=None, devices=devices)


def _why_not_now(node: Node, *, holds_now: bool) -> str:
    """Why the node is no help now; empty if it is. `holds_now`: its healthy devices suffice."""
    if node.state is NodeState.DOWN:
        return "is down"
    if node.cordon is not None:
        why = f" ({node.cordon.why})" if node.cordon.why else ""
        return f"is {'drained' if node.cordon.drain else 'cordoned'}{why}"
    if holds_now:
        return ""
    broken = sum(not device.healthy for device in node.devices)
    return f"has {broken} unhealthy device{'' if broken == 1 else 's'}"


def _no_node(request: FeasibilityRequest, chosen: NodeFilter, nodes: Mapping[NodeId, Node]) -> NeverFits:
    """The error if none of the nodes that the job may use counts."""
    gone = [name for name in request.nodelist if name not in nodes]
    if gone:
        return NeverFits(f"the node list names {gone[0]}, which is not in the fleet", hint=Hint(HintCode.LIST_NODES))
    return NeverFits(f"{chosen.text} has no node that is up or may return", hint=Hint(HintCode.LIST_NODES))


def _listed(words: Sequence[str]) -> str:
    more = len(words) - _NAMED_MAX
    return ", ".join(words[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def _asked(gpus: float) -> str:
    return f"{gpus:g} GPU{'' if gpus == 1 else 's'} asked"


def _less_hint(resource: str, most: float) -> str:
    return Hint(HintCode.REQUEST_LESS, gpus=int(most)) if resource == GPUS and most > 0 else ""

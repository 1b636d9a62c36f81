"""The quotas and limits of queues, for a job that is alone on an empty cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from phalanx.core.errors import NeverFits
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import QueueId
from phalanx.core.resources import GPUS, NO_RESOURCES, Resources, extras_of, quantity, quantity_text
from phalanx.core.scheduling.feasibility.answer import Feasibility, Outlook, never, not_now
from phalanx.core.scheduling.feasibility.node_scopes import NodeScope, ScopedNodes
from phalanx.core.scheduling.feasibility.node_shapes import RequestShapes
from phalanx.core.scheduling.feasibility.request import FeasibilityRequest
from phalanx.core.work.extras import Licence, seats_of
from phalanx.core.work.queue import Queue
from phalanx.core.work.quotas.quota_tree import FLEET, QuotaDimension, QuotaRefusal, QuotaTree
from phalanx.core.work.share import gpus_of
from phalanx.core.work.states import WaitReasonCode


class QueueLimits:
    """Judges requests against the queues of one state of a cluster. Safe for several threads: a race only repeats work."""

    __slots__ = ("_awaited", "_licences", "_nodes", "_queues", "_shapes", "_trees")

    def __init__(
        self,
        queues: Mapping[QueueId, Queue],
        licences: Mapping[str, Licence],
        nodes: ScopedNodes,
        shapes: RequestShapes,
        awaited_nodes: str,
    ) -> None:
        self._queues, self._licences = dict(queues), licences
        self._nodes, self._shapes, self._awaited = nodes, shapes, awaited_nodes
        self._trees: tuple[QuotaTree, QuotaTree] | None = None

    def refusal_alone(self, request: FeasibilityRequest) -> Feasibility | None:
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

    def with_lending(self, request: FeasibilityRequest, found: Feasibility) -> Feasibility:
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
        if self._awaited or not self._nodes.known:
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

    def _empty_trees(self) -> tuple[QuotaTree, QuotaTree]:
        """The queue tree without any job: on all devices, as placements are verified, and on the healthy ones, as the scheduler counts them."""
        if self._trees is None:
            queues = self._queues.values()
            seats = Resources(extras=extras_of(seats_of(self._licences)))
            whole, healthy = [found + seats for found in self._nodes.counts.resources()]
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
        shapes = self._shapes.find(request, self._shapes.filter_of(request), NodeScope.KNOWN)
        if isinstance(shapes, NeverFits):
            return asked
        host = min(sum((one.host * one.parts for one in shape.each), NO_RESOURCES) for shape in shapes)
        return host + Resources(asked.milli, extras=request.role.licences)

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


def _asked(gpus: float) -> str:
    return f"{gpus:g} GPU{'' if gpus == 1 else 's'} asked"


def _less_hint(resource: str, most: float) -> str:
    return Hint(HintCode.REQUEST_LESS, gpus=int(most)) if resource == GPUS and most > 0 else ""

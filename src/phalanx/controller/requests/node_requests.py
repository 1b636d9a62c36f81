"""Requests of operators about one node: cordon or drain it, return it to service, remove it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from phalanx.controller.impossible_jobs import record_impossible_jobs
from phalanx.controller.requests.pools import leaving_member
from phalanx.controller.requests.request_handlers import RequestHandlers
from phalanx.controller.reservation_windows import forget_cordon, release_nodes
from phalanx.controller.step_context import StepContext
from phalanx.core.errors import Conflict, NotFound
from phalanx.core.fleet.fitness import NODE_TEST, NodeFault
from phalanx.core.fleet.node import Cordon, Node, NodeState
from phalanx.core.fleet.node_tests import NodeTestHistory
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import NodeId
from phalanx.core.state.events import CordonNode, ImpossibleJob, PutNodeTests, RemoveNode, UncordonNode
from phalanx.core.state.records import NODE_TESTS
from phalanx.core.work.users import Action

WHY_MAX: Final = 500  # characters of the reason of a cordon
handlers: Final = RequestHandlers()


@handlers.add(
    CordonNode,
    Action.OPERATE,
    audit=lambda request, _: f"node {request.node_id} {'drain' if request.drain else 'cordon'}",
)
def cordon(context: StepContext, request: CordonNode) -> Node:
    """Cordon or drain a node."""
    return _cordon(context, _known(context, request.node_id), request)


@handlers.add(UncordonNode, Action.OPERATE, audit=lambda request, _: f"node {request.node_id}")
def uncordon(context: StepContext, request: UncordonNode) -> Node:
    """Return a node to service, and clear its marks.

    Raises:
        NotFound: no such node.
        Conflict: its engine keeps it out of service, and would do so again; or its pool releases it.
    """
    node = _known(context, request.node_id)
    leaving = leaving_member(context, node.id)
    if leaving is not None:
        raise Conflict(
            f"pool {leaving.pool} is releasing {node.id}: {leaving.why}",
            hint="the pool starts another when a job needs it",
        )
    if node.cordon is not None and node.cordoned_by_engine:
        hint = Hint(HintCode.UNDRAIN_IN_ENGINE, command=node.cordon.remedy) if node.cordon.remedy else ""
        raise Conflict(f"{node.id} is kept out of service by its engine, {node.engine}: {node.cordon.why}", hint=hint)
    release_nodes(context, node.id, planned=request.planned, by=request.by)
    lifted = forget_cordon(context, node.id)
    if node.cordon is not None or node.bad_node_reason or lifted:
        node = replace(node, cordon=None, fault_score=0.0, bad_node_reason="", changed_s=context.now.wall_s)
        context.change.put(node)
        context.add_history("undrained", f"{node.id} is in service again", node_id=node.id, by=request.by)
    return node


@handlers.add(
    PutNodeTests, Action.OPERATE, audit=lambda request, _: f"tests of {', '.join(sorted(request.tests)[:20])}"
)
def put_tests(context: StepContext, request: PutNodeTests) -> None:
    """Store what a test of nodes found, and cordon those that failed.

    Raises:
        NotFound: one of the nodes does not exist.
    """
    nodes = {node_id: _known(context, node_id) for node_id in request.tests}
    for node_id, test in sorted(request.tests.items()):
        known = context.world.table(NODE_TESTS).get(node_id) or NodeTestHistory(id=node_id)
        context.change.put(known.add(test))
        text = (
            f"failed: {test.why}"
            if test.why
            else "passed"
            if test.compared
            else "not compared: too few nodes of its kind"
        )
        context.add_history("tested", f"test of {node_id}: {text}", node_id=node_id, by=request.by)
        if test.why and request.drain:
            context.cordon_faulty(
                NodeFault(node_id=nodes[node_id].id, why=f"test: {test.why}"[:WHY_MAX], cordon=True, by=NODE_TEST)
            )


@handlers.add(RemoveNode, Action.OPERATE, audit=lambda request, _: f"node {request.node_id}")
def remove(context: StepContext, request: RemoveNode) -> tuple[ImpossibleJob, ...]:
    """Remove a node that is down and runs no job. Returns the waiting jobs made impossible."""
    node = _known(context, request.node_id)
    if node.state is NodeState.UP or context.world.attempts_on(node.id):
        raise Conflict(
            f"{node.id} is {node.state.value} or still runs jobs", hint=Hint(HintCode.DRAIN_NODE, node=node.id)
        )
    before = context.feasibility
    context.change.remove_node(node)
    if node.id in context.world.table(NODE_TESTS):
        context.change.remove(NODE_TESTS, node.id)
    context.add_history("node_forgotten", f"{node.id} was removed from the fleet", node_id=node.id, by=request.by)
    return record_impossible_jobs(context, before, f"{node.id} was removed from the fleet")


def _known(context: StepContext, node_id: NodeId) -> Node:
    node = context.world.nodes.get(node_id)
    if node is None:
        raise NotFound(f"no node {node_id!r}", hint=Hint(HintCode.LIST_NODES))
    return node


def _cordon(context: StepContext, node: Node, request: CordonNode) -> Node:
    cordon = Cordon(by=request.by, why=request.why, since_s=context.now.wall_s, drain=request.drain)
    if node.cordon is None or (request.drain and not node.cordon.drain):
        node = replace(node, cordon=cordon, changed_s=context.now.wall_s)
        context.change.put(node)
        word = "drained" if request.drain else "cordoned"
        context.add_history(word, f"{node.id} is {word} by {request.by}: {request.why}", node_id=node.id, by=request.by)
        if request.drain:
            context.stop_jobs_on(NodeId(node.id), by=request.by, why=request.why)
    return node

"""Nodes: list, show, label, drain, remove; and the overview that `phalanx top` shows."""

from __future__ import annotations

from collections.abc import Container

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.bodies import nothing, read_record, reply
from phalanx.api.parts import HeadParts
from phalanx.api.readings import all_seen, live_attempts, nodes_seen
from phalanx.api.routes import Routes, Shown
from phalanx.api.runtime import caller_of, off_loop, runtime_of
from phalanx.core.access.roles import Caller
from phalanx.core.errors import NotFound
from phalanx.core.fleet.node import Node
from phalanx.core.ids import NodeId
from phalanx.core.state.events import CordonNode, ForgetNode, LabelNodes, UncordonNode
from phalanx.core.work.job import TERMINAL, JobState
from phalanx.core.work.people import Action
from phalanx.ports.store import JobFilter
from phalanx.wire.api.head import Overview
from phalanx.wire.api.nodes import DrainBody, LabelsBody, NodeList, NodeReply, NodeView

SHOWN_MAX = 200  # running, and pending, jobs of an overview: more than fit on a screen
RECENT_MAX = 20

routes = Routes()


@routes.get("/v1/nodes", Action.SEE, reply=NodeList)
async def list_nodes(request: Request) -> Response:
    """List all nodes with their devices, the jobs on them, and their newest samples."""
    parts = runtime_of(request).parts
    nodes = await off_loop(lambda: nodes_seen(parts, parts.store.nodes(), live_attempts(parts)))
    return reply(NodeList(nodes=nodes))


@routes.get("/v1/nodes/{node_id}", Action.SEE, reply=NodeReply)
async def show_node(request: Request, node_id: NodeId) -> Response:
    """Show one node."""
    return reply(NodeReply(node=await off_loop(_seen, runtime_of(request).parts, node_id)))


@routes.patch("/v1/nodes", Action.OPERATE, body=LabelsBody, reply=NodeList)
async def label_nodes(request: Request) -> Response:
    """Set labels of nodes, such as their place in the network: of all of them or of none. Idempotent."""
    runtime = runtime_of(request)
    body = await read_record(request, LabelsBody, runtime.parts.limits.body_bytes)
    await runtime.ask(LabelNodes(labels=body.labels, by=caller_of(request).user))
    runtime.hub.tell(())
    parts = runtime.parts
    return reply(NodeList(nodes=await off_loop(_seen_of, parts, body.labels)))


@routes.post("/v1/nodes/{node_id}/drain", Action.OPERATE, body=DrainBody, reply=NodeReply)
async def drain_node(request: Request, node_id: NodeId) -> Response:
    """Cordon a node; without `cordon_only` also save its jobs and move them to other nodes. Idempotent."""
    runtime = runtime_of(request)
    body = await read_record(request, DrainBody, runtime.parts.limits.body_bytes)
    command = CordonNode(node_id=node_id, by=caller_of(request).user, why=body.why[:500], drain=not body.cordon_only)
    await runtime.ask(command)
    runtime.hub.tell(())
    return reply(NodeReply(node=await off_loop(_seen, runtime.parts, node_id)))


@routes.post("/v1/nodes/{node_id}/undrain", Action.OPERATE, body=Shown.NOTHING, reply=NodeReply)
async def undrain_node(request: Request, node_id: NodeId) -> Response:
    """Allow new work on a node again. Idempotent."""
    runtime = runtime_of(request)
    await runtime.ask(UncordonNode(node_id=node_id, by=caller_of(request).user))
    runtime.hub.tell(())
    return reply(NodeReply(node=await off_loop(_seen, runtime.parts, node_id)))


@routes.delete("/v1/nodes/{node_id}", Action.OPERATE)
async def forget_node(request: Request, node_id: NodeId) -> Response:
    """Remove a node that is down and has no jobs."""
    runtime = runtime_of(request)
    await runtime.ask(ForgetNode(node_id=node_id, by=caller_of(request).user))
    runtime.parts.telemetry.forget_node(node_id)
    runtime.supervisors.forget(node_id)
    return nothing()


@routes.get("/v1/overview", Action.SEE, reply=Overview)
async def overview(request: Request) -> Response:
    """Return everything that `phalanx top` and the demo show, in one reply."""
    runtime = runtime_of(request)
    return reply(await off_loop(_overview, runtime.parts, caller_of(request)))


def _overview(parts: HeadParts, caller: Caller) -> Overview:
    store = parts.store
    attempts = live_attempts(parts)
    running = store.jobs(JobFilter(states=frozenset({JobState.RUNNING}), limit=SHOWN_MAX))
    pending = store.jobs(JobFilter(states=frozenset({JobState.PENDING}), limit=SHOWN_MAX))
    recent = store.jobs(JobFilter(states=TERMINAL, limit=RECENT_MAX))
    return Overview(
        now_s=parts.clock.now_s(),
        head_id=parts.driver.head_id,
        version=parts.version,
        nodes=nodes_seen(parts, store.nodes(), attempts),
        running=all_seen(parts, caller, running),
        pending=all_seen(parts, caller, pending),
        recent=all_seen(parts, caller, recent),
        counts=store.job_counts(),
    )


def _seen(parts: HeadParts, node_id: NodeId) -> NodeView:
    return nodes_seen(parts, [_known(parts, node_id)], live_attempts(parts))[0]


def _seen_of(parts: HeadParts, wanted: Container[NodeId]) -> list[NodeView]:
    return nodes_seen(parts, [node for node in parts.store.nodes() if node.id in wanted], live_attempts(parts))


def _known(parts: HeadParts, node_id: NodeId) -> Node:
    for node in parts.store.nodes():
        if node.id == node_id:
            return node
    raise NotFound(f"no node {node_id!r}", hint="phalanx nodes lists them")

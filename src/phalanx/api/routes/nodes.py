"""Nodes: list, show, label, drain, remove; and the overview that `phalanx top` shows."""

from __future__ import annotations

from collections.abc import Container

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.auth.authenticator import reauthorize
from phalanx.api.http.bodies import json_response, read_record
from phalanx.api.http.paging import AfterKey, fitting
from phalanx.api.http.routing import MediaType, RouteTable
from phalanx.api.live.event_streams import EventStream
from phalanx.api.routes.queues import impossible_views
from phalanx.api.runtime import caller_of, run_in_thread, runtime_of
from phalanx.api.services import HeadServices
from phalanx.api.views.fleet import fleet_frame
from phalanx.api.views.live import live_attempts, live_job_views, live_node_views, ordered_node_views
from phalanx.core.access.caller import Caller
from phalanx.core.errors import BadRequest, NotFound
from phalanx.core.fleet.node import Node
from phalanx.core.fleet.power_limits import parse_power_mw
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import NodeId
from phalanx.core.state.events import (
    CapPower,
    CordonNode,
    LabelNodes,
    RemoveNode,
    RestorePower,
    UncordonNode,
)
from phalanx.core.state.records import NODES
from phalanx.core.units import parse_duration_s
from phalanx.core.work.states import TERMINAL_STATES, JobState
from phalanx.core.work.users import Action
from phalanx.ports.store import JobFilter
from phalanx.wire.api.fleet import FleetFrame
from phalanx.wire.api.head import Overview
from phalanx.wire.api.nodes import DrainBody, LabelsBody, NodeList, NodeRemoved, NodeReply, NodeView, PowerBody

OVERVIEW_JOBS_MAX = 200  # running, and pending, jobs of an overview: more than fit on a screen
OVERVIEW_RECENT_MAX = 20
NODES_MAX = 1000  # on one page, if they fit

routes = RouteTable()


@routes.get("/v1/nodes", Action.VIEW, reply=NodeList)
async def list_nodes(request: Request, after: AfterKey = "") -> Response:
    """List nodes by name with their devices, the jobs on them, and their newest samples; on the first page also those that pools have ordered.

    For the next page send `next` of the reply as `after`.
    """
    return json_response(await run_in_thread(read_nodes, runtime_of(request).services, after))


@routes.get("/v1/nodes/{node_id}", Action.VIEW, reply=NodeReply)
async def show_node(request: Request, node_id: NodeId) -> Response:
    """Show one node."""
    return json_response(NodeReply(node=await run_in_thread(read_node, runtime_of(request).services, node_id)))


@routes.patch("/v1/nodes", Action.OPERATE, body=LabelsBody, reply=NodeList)
async def label_nodes(request: Request) -> Response:
    """Set labels of nodes, such as their place in the network: of all of them or of none. Idempotent."""
    runtime = runtime_of(request)
    body = await read_record(request, LabelsBody, runtime.services.limits.body_bytes)
    await runtime.request(LabelNodes(labels=body.labels, by=caller_of(request).user))
    runtime.hub.notify(())
    services = runtime.services
    return json_response(NodeList(nodes=await run_in_thread(_seen_of, services, body.labels)))


@routes.post("/v1/nodes/{node_id}/drain", Action.OPERATE, body=DrainBody, reply=NodeReply)
async def drain_node(request: Request, node_id: NodeId) -> Response:
    """Cordon a node; without `cordon_only` also save its jobs and move them to other nodes. Idempotent."""
    runtime = runtime_of(request)
    body = await read_record(request, DrainBody, runtime.services.limits.body_bytes)
    command = CordonNode(node_id=node_id, by=caller_of(request).user, why=body.why[:500], drain=not body.cordon_only)
    await runtime.request(command)
    runtime.hub.notify(())
    return json_response(NodeReply(node=await run_in_thread(read_node, runtime.services, node_id)))


@routes.post("/v1/nodes/{node_id}/undrain", Action.OPERATE, body=MediaType.NOTHING, reply=NodeReply)
async def undrain_node(request: Request, node_id: NodeId, planned: bool = False) -> Response:
    """Allow new work on a node again, and end its maintenance; with `planned` also cancel its later maintenance windows. Idempotent."""
    runtime = runtime_of(request)
    await runtime.request(UncordonNode(node_id=node_id, by=caller_of(request).user, planned=planned))
    runtime.hub.notify(())
    return json_response(NodeReply(node=await run_in_thread(read_node, runtime.services, node_id)))


@routes.put("/v1/nodes/{node_id}/power", Action.OPERATE, body=PowerBody, reply=NodeReply)
async def cap_node_power(request: Request, node_id: NodeId) -> Response:
    """Cap the power of each GPU of a node, for a time or without an end. Its supervisor does so after the answer: see `power_cap.applied`."""
    runtime = runtime_of(request)
    body = await read_record(request, PowerBody, runtime.services.limits.body_bytes)
    until_s = None
    if body.time:
        lasting_s = parse_duration_s(body.time)
        if lasting_s <= 0:
            raise BadRequest(f"time: {body.time} is not longer than nothing", hint="write how long the cap holds: 8h")
        until_s = runtime.services.clock.now_s() + lasting_s
    milliwatts = parse_power_mw(body.limit)
    await runtime.request(CapPower(node_id=node_id, by=caller_of(request).user, milliwatts=milliwatts, until_s=until_s))
    runtime.hub.notify(())
    return json_response(NodeReply(node=await run_in_thread(read_node, runtime.services, node_id)))


@routes.delete("/v1/nodes/{node_id}/power", Action.OPERATE, reply=NodeReply)
async def restore_node_power(request: Request, node_id: NodeId) -> Response:
    """Restore the power limits that the GPUs of a node had before the cap. Idempotent."""
    runtime = runtime_of(request)
    await runtime.request(RestorePower(node_id=node_id, by=caller_of(request).user))
    runtime.hub.notify(())
    return json_response(NodeReply(node=await run_in_thread(read_node, runtime.services, node_id)))


@routes.delete("/v1/nodes/{node_id}", Action.OPERATE, reply=NodeRemoved)
async def remove_node(request: Request, node_id: NodeId) -> Response:
    """Remove a node that is down and has no jobs. Returns the waiting jobs that can never start without it."""
    runtime = runtime_of(request)
    impossible = await runtime.request(RemoveNode(node_id=node_id, by=caller_of(request).user))
    runtime.services.telemetry.remove_node(node_id)
    runtime.supervisors.remove(node_id)
    views, more = impossible_views(impossible)
    return json_response(NodeRemoved(impossible=views, impossible_more=more))


@routes.get("/v1/overview", Action.VIEW, reply=Overview)
async def show_overview(request: Request) -> Response:
    """Return nodes, the jobs that run, wait and ended last, and the counts in one reply, each list as far as it fits: what a screen shows."""
    runtime = runtime_of(request)
    return json_response(await run_in_thread(_overview, runtime.services, caller_of(request)))


@routes.get("/v1/fleet", Action.VIEW, reply=FleetFrame)
async def show_fleet(request: Request) -> Response:
    """Return the state of every GPU as one letter each, by columns."""
    return json_response(await run_in_thread(fleet_frame, runtime_of(request).services))


@routes.get("/v1/fleet/events", Action.VIEW, reply=MediaType.EVENTS)
async def follow_fleet(request: Request) -> Response:
    """Follow the state of every GPU: a `frame` with all, then a `delta` each second in which something changed. Resume by `Last-Event-ID`."""
    runtime, caller = runtime_of(request), caller_of(request)
    check = reauthorize(runtime.authenticator, runtime.services.store, caller, Action.VIEW)
    source = runtime.fleet_feed.follow(request.headers.get("last-event-id", ""))
    gzip = "gzip" in request.headers.get("accept-encoding", "")
    return EventStream(runtime, caller.user, source, check, gzip=gzip)


def read_nodes(services: HeadServices, after: str = "") -> NodeList:
    """Return the nodes behind one, by name, and on the first page those that pools have ordered. Not on the event loop."""
    nodes, bytes_max = services.store.nodes(), services.limits.answer_bytes
    ordered = [] if after else fitting(ordered_node_views(services, nodes), bytes_max // 3)
    rest = [node for node in nodes if node.id > after]
    views = live_node_views(services, rest[:NODES_MAX], live_attempts(services))
    page = fitting(views, bytes_max if after else bytes_max - bytes_max // 3)
    return NodeList(nodes=page, ordered=ordered, next=page[-1].id if len(page) < len(rest) else "")


def _overview(services: HeadServices, caller: Caller) -> Overview:
    store, part = services.store, services.limits.answer_bytes // 5
    attempts, nodes = live_attempts(services), store.nodes()
    running = store.jobs(JobFilter(states=frozenset({JobState.RUNNING}), limit=OVERVIEW_JOBS_MAX))
    pending = store.jobs(JobFilter(states=frozenset({JobState.PENDING}), limit=OVERVIEW_JOBS_MAX))
    recent = store.jobs(JobFilter(states=TERMINAL_STATES, limit=OVERVIEW_RECENT_MAX))
    counts = store.job_counts()
    shown_nodes = fitting(live_node_views(services, nodes[:NODES_MAX], attempts), part)
    shown = [fitting(live_job_views(services, caller, jobs), part) for jobs in (running, pending, recent)]
    more_jobs = max(counts.get(state, 0) for state in (JobState.RUNNING, JobState.PENDING)) > OVERVIEW_JOBS_MAX
    cut = any(len(fits) < len(jobs) for fits, jobs in zip(shown, (running, pending, recent), strict=True))
    return Overview(
        now_s=services.clock.now_s(),
        head_id=services.controller.head_id,
        version=services.version,
        nodes=shown_nodes,
        running=shown[0],
        pending=shown[1],
        recent=shown[2],
        counts=counts,
        ordered=fitting(ordered_node_views(services, nodes), part),
        truncated=more_jobs or cut or len(shown_nodes) < len(nodes),
    )


def read_node(services: HeadServices, node_id: NodeId) -> NodeView:
    """Return one node. Not on the event loop.

    Raises:
        NotFound: it does not exist.
    """
    return live_node_views(services, [_known(services, node_id)], live_attempts(services))[0]


def _seen_of(services: HeadServices, wanted: Container[NodeId]) -> list[NodeView]:
    return live_node_views(
        services, [node for node in services.store.nodes() if node.id in wanted], live_attempts(services)
    )


def _known(services: HeadServices, node_id: NodeId) -> Node:
    node = services.store.record(NODES, node_id)
    if node is not None:
        return node
    raise NotFound(f"no node {node_id!r}", hint=Hint(HintCode.LIST_NODES))

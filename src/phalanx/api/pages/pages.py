"""The pages: each answers what the API answers the same caller, as HTML."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.auth.authenticator import may_see_all_of, require_action, require_job
from phalanx.api.auth.redaction import JobRedactor
from phalanx.api.http.routing import MediaType, RouteTable, identify_caller
from phalanx.api.live.history_tail import newest_seq
from phalanx.api.pages.responses import error_page, page_response, sign_in_page, viewer_of
from phalanx.api.routes.nodes import read_node
from phalanx.api.routes.queues import read_queues
from phalanx.api.runtime import caller_of, run_in_thread, runtime_of
from phalanx.api.views.fleet import fleet_frame, node_condition
from phalanx.api.views.job_pages import cursor_behind, read_job_cursor
from phalanx.api.views.job_records import attempt_view
from phalanx.api.views.job_usage import job_advice
from phalanx.api.views.live import live_attempts, live_job_view, live_job_views, live_node_views
from phalanx.core.access.caller import may_access_job
from phalanx.core.errors import BadRequest, NotPermitted, NotSignedIn
from phalanx.core.fleet.node import Node
from phalanx.core.ids import JobId, NodeId, QueueId, UserId
from phalanx.core.state.history import HistoryLine
from phalanx.core.work.states import JobState
from phalanx.core.work.users import Action
from phalanx.ports.store import JobFilter, JobOrder
from phalanx.web import pages
from phalanx.web.html import Html
from phalanx.wire.api.jobs import JobDetail

JOBS_SHOWN: Final = 100  # on one page
HISTORY_SHOWN: Final = 1000  # lines of one job, oldest first
NODES_SHOWN: Final = 500  # on one page
NODE_HISTORY_SHOWN: Final = 500  # lines of one node, the newest first
NODE_HISTORY_SEARCHED: Final = 100_000  # newest lines of all nodes and jobs, among which those are looked for

routes = RouteTable()


class NodeSortColumn(enum.Enum):
    """What the list of nodes is sorted by."""

    NAME = "name"
    STATE = "state"
    GPUS = "gpus"
    HELD = "held"
    FAILURES = "failures"


@routes.get("/", Action.VIEW, reply=MediaType.HTML, open_to_all=True, error_page=error_page)
async def show_fleet(request: Request) -> Response:
    """Show the fleet; to a browser that is not signed in, the sign-in page."""
    try:
        caller = identify_caller(request)
        require_action(caller, Action.VIEW)
    except (NotSignedIn, NotPermitted):  # no error, since nothing was asked for
        return sign_in_page(request)
    request.state.caller = caller
    frame = await run_in_thread(fleet_frame, runtime_of(request).services)
    return page_response(request, pages.fleet_page(frame, viewer_of(request)))


@routes.get("/jobs", Action.VIEW, reply=MediaType.HTML, error_page=error_page)
async def show_jobs(
    request: Request,
    state: str = "",
    user: str = "",
    queue: str = "",
    name: str = "",
    sort: JobOrder = JobOrder.NUMBER,
    ascending: bool = False,
    after: str = "",
) -> Response:
    """Show jobs, newest first, or in the order of `sort`."""
    if state and state not in pages.JOB_STATES:
        raise BadRequest(f"state: {state[:60]!r} is not one", hint=f"use one of {', '.join(pages.JOB_STATES)}")
    services, caller, viewer = runtime_of(request).services, caller_of(request), viewer_of(request)
    wanted = JobFilter(
        states=frozenset([JobState(state)] if state else ()),
        user=UserId(user) if user else None,
        queue=QueueId(queue) if queue else None,
        name=name or None,
        order=sort,
        ascending=ascending,
        after=read_job_cursor(after, sort),
        limit=JOBS_SHOWN,
    )

    def read() -> Html:
        jobs = services.store.jobs(wanted)
        asked = {"state": state, "user": user, "queue": queue, "name": name}
        after = cursor_behind(jobs[-1], wanted) if len(jobs) == JOBS_SHOWN else ""
        order = pages.SortOrder(sort.value, ascending=ascending)
        return pages.jobs_page(live_job_views(services, caller, jobs), after, asked, order, viewer)

    return page_response(request, await run_in_thread(read))


@routes.get("/jobs/{job_id}", Action.VIEW, reply=MediaType.HTML, error_page=error_page)
async def show_job_page(request: Request, job_id: JobId) -> Response:
    """Show one job."""
    services, caller, viewer = runtime_of(request).services, caller_of(request), viewer_of(request)

    def read() -> Html:
        job = require_job(services.store, job_id)
        attempts = services.store.attempts(job_id)
        whole = may_see_all_of(caller, job)
        detail = JobDetail(
            job=live_job_view(services, caller, job, attempts),
            attempts=[attempt_view(attempt, show_all=whole) for attempt in attempts],
        )
        lines = services.store.history(job_id=job_id, after=0, limit=HISTORY_SHOWN)
        history = JobRedactor(services.store, caller).redact_all(lines)
        may_change = may_access_job(caller, Action.CHANGE_OWN, owner=job.user, project=job.project)
        advice = job_advice(services, job)
        now_s = services.clock.now_s()
        return pages.job_page(detail, history, viewer, may_change=may_change, now_s=now_s, advice=advice)

    return page_response(request, await run_in_thread(read))


@routes.get("/queues", Action.VIEW, reply=MediaType.HTML, error_page=error_page)
async def show_queues(request: Request) -> Response:
    """Show the tree of queues."""
    queues = await run_in_thread(read_queues, runtime_of(request).services)
    return page_response(request, pages.queues_page(queues, viewer_of(request)))


@routes.get("/nodes", Action.VIEW, reply=MediaType.HTML, error_page=error_page)
async def show_nodes(
    request: Request, sort: NodeSortColumn = NodeSortColumn.NAME, ascending: bool = True, after: str = ""
) -> Response:
    """Show nodes with their health in the order of `sort`, from the first one behind the node `after`."""
    services, viewer = runtime_of(request).services, viewer_of(request)

    def read() -> Html:
        attempts = live_attempts(services)
        held = Counter[NodeId]()
        for grant in (grant for attempt in attempts for grant in attempt.allocation.grants):
            held[grant.node_id] += len(grant.devices)
        every = sorted(
            services.store.nodes(), key=lambda node: (_node_key(node, sort, held), node.id), reverse=not ascending
        )
        begin = 1 + next((at for at, node in enumerate(every) if node.id == after), -1)
        shown = live_node_views(services, every[begin : begin + NODES_SHOWN], attempts)
        order = pages.SortOrder(sort.value, ascending=ascending)
        return pages.nodes_page(shown, len(every) - begin - len(shown), order, viewer)

    return page_response(request, await run_in_thread(read))


def _node_key(node: Node, order: NodeSortColumn, held: Mapping[NodeId, int]) -> int | str:
    """Return what a list of nodes is sorted by; of equal nodes, by name."""
    match order:
        case NodeSortColumn.NAME:
            return node.id
        case NodeSortColumn.STATE:
            return node_condition(node)
        case NodeSortColumn.GPUS:
            return len(node.devices)
        case NodeSortColumn.HELD:
            return held[node.id]
        case NodeSortColumn.FAILURES:
            return node.failure_count


@routes.get("/nodes/{node_id}", Action.VIEW, reply=MediaType.HTML, error_page=error_page)
async def show_node_page(request: Request, node_id: NodeId) -> Response:
    """Show one node, with its history among the newest lines of the head."""
    runtime, caller, viewer = runtime_of(request), caller_of(request), viewer_of(request)
    store = runtime.services.store

    def read() -> Html:
        node = read_node(runtime.services, node_id)
        lines: list[HistoryLine] = []
        after = max(0, newest_seq(runtime.services.store) - NODE_HISTORY_SEARCHED)
        while page := store.history(node_id=node_id, after=after, limit=NODE_HISTORY_SHOWN):
            lines, after = [*lines, *page][-NODE_HISTORY_SHOWN:], page[-1].seq
        return pages.node_page(node, JobRedactor(store, caller).redact_all(lines), viewer)

    return page_response(request, await run_in_thread(read))

"""Tests of nodes: store what a test job measured, judge it, and show the history of a node."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import json_response, read_record
from phalanx.api.http.routing import RouteTable
from phalanx.api.runtime import caller_of, run_in_thread, runtime_of
from phalanx.api.services import HeadServices
from phalanx.core.errors import BadRequest, NotFound
from phalanx.core.fleet.node_tests import NodeTest, NodeTestHistory
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import NodeId, UserId
from phalanx.core.state.events import PutNodeTests
from phalanx.core.state.records import NODE_TESTS, NODES
from phalanx.core.work.users import Action
from phalanx.planner.calibration.node_tests import THRESHOLD, judge_nodes
from phalanx.planner.calibration.profile import parse_profile
from phalanx.wire.api.nodes import NodeRateView, NodeTestsBody, NodeTestsReply, NodeTestsView, NodeTestView

THRESHOLD_MIN, THRESHOLD_MAX = 0.05, 0.95  # healthy nodes differ by less than the first on no rate
_RATES_MAX: Final = 32  # of one node
_NAME_MAX: Final = 40  # characters of a precision

routes = RouteTable()


@routes.get("/v1/nodes/{node_id}/tests", Action.VIEW, reply=NodeTestsReply)
async def show_node_tests(request: Request, node_id: NodeId) -> Response:
    """Show the last 20 tests of a node, oldest first."""
    return json_response(await run_in_thread(_history, runtime_of(request).services, node_id))


@routes.post("/v1/node-tests", Action.OPERATE, body=NodeTestsBody, reply=NodeTestsReply, body_limit="profile_bytes")
async def put_node_tests(request: Request) -> Response:
    """Store what a test job measured, and cordon the nodes that fail. The answer has the new test of each node. Idempotent by job."""
    runtime = runtime_of(request)
    body = await read_record(request, NodeTestsBody, runtime.services.limits.profile_bytes)
    by = caller_of(request).user
    tests = await run_in_thread(_judged, runtime.services, body, by)
    await runtime.request(PutNodeTests(tests=tests, drain=body.drain, by=by))
    runtime.hub.notify(())
    return json_response(await run_in_thread(_newest, runtime.services, tests))


def _judged(services: HeadServices, body: NodeTestsBody, by: UserId) -> dict[NodeId, NodeTest]:
    """Judge the profile.

    Raises:
        BadRequest: it is no profile, or the threshold is out of range.
    """
    threshold = THRESHOLD if body.threshold is None else body.threshold
    if not THRESHOLD_MIN <= threshold <= THRESHOLD_MAX or math.isnan(threshold):
        raise BadRequest(f"threshold must be {THRESHOLD_MIN:g} to {THRESHOLD_MAX:g}, not {threshold:g}")
    profile = replace(parse_profile(body.profile), at_s=services.clock.now_s())
    for node in profile.nodes:
        if len(node.worst_flops) > _RATES_MAX or any(len(name) > _NAME_MAX for name in node.worst_flops):
            raise BadRequest(f"node {node.node}: at most {_RATES_MAX} precisions of {_NAME_MAX} characters")
    fresh = {node.node for node in profile.nodes}
    known = [one.tests[-1] for one in services.store.records(NODE_TESTS) if one.tests and one.id not in fresh]
    found = judge_nodes(profile, known, threshold=threshold, by=by)
    return {NodeId(name): test for name, test in found.items()}


def _history(services: HeadServices, node_id: NodeId) -> NodeTestsReply:
    return NodeTestsReply(nodes=[_view(services, node_id, None)])


def _newest(services: HeadServices, tests: dict[NodeId, NodeTest]) -> NodeTestsReply:
    return NodeTestsReply(nodes=[_view(services, node_id, test) for node_id, test in sorted(tests.items())])


def _view(services: HeadServices, node_id: NodeId, only: NodeTest | None) -> NodeTestsView:
    node = services.store.record(NODES, node_id)
    if node is None:
        raise NotFound(f"no node {node_id!r}", hint=Hint(HintCode.LIST_NODES))
    known = services.store.record(NODE_TESTS, node_id) or NodeTestHistory(id=node_id)
    return NodeTestsView(
        node=node_id,
        tests=[_test(one) for one in (known.tests if only is None else (only,))],
        cordoned="" if node.cordon is None else f"{node.cordon.why} ({node.cordon.by})",
    )


def _test(test: NodeTest) -> NodeTestView:
    return NodeTestView(
        at_s=test.at_s,
        by=test.by,
        job=test.job,
        passed=not test.why if test.compared else None,
        why=test.why,
        threshold=test.threshold,
        peers=test.peers,
        rates=[
            NodeRateView(what=one.what, value=one.value, table=one.table, median=one.median, why=one.why)
            for one in test.rates
        ],
    )

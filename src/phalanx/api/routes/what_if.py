"""What if: the start of a job as things are, and with other nodes or quotas. Each is one trial by the scheduler; nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import json_response, read_record
from phalanx.api.http.routing import RouteTable
from phalanx.api.routes.submit import submit_notes, submit_request, submit_warnings
from phalanx.api.routes.why import forecast_and_project
from phalanx.api.runtime import ApiRuntime, caller_of, runtime_of
from phalanx.api.turns import in_turn
from phalanx.controller.read_snapshot import ReadSnapshot
from phalanx.core.access.caller import Caller
from phalanx.core.errors import BadRequest, NotFound
from phalanx.core.fleet.hostlist import expand_hostlist
from phalanx.core.fleet.node import NO_FOREIGN_USAGE, Cordon, Node, NodeState
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import NodeId, QueueId
from phalanx.core.scheduling.outlook.projection import HORIZON_MAX_S, FleetProjection
from phalanx.core.scheduling.outlook.what_if import OTHER_PENDING_MAX, modified_snapshot
from phalanx.core.work.queue import Queue
from phalanx.core.work.quotas.queue_validation import check_queue_tree
from phalanx.core.work.users import Action
from phalanx.wire.why import WhatIfBody, WhatIfCurves, WhatIfReply

CURVE_POINTS: Final = 97  # of each curve
_LEAST_S: Final = 3600.0  # of the curves
_BEYOND: Final = 1.25  # of the time to the last start
_WITHOUT_STARTS_S: Final = 86400.0
_ADDED: Final = "what-if-"

routes = RouteTable()


@routes.post("/v1/what-if", Action.SUBMIT, body=WhatIfBody, reply=WhatIfReply, transient=True)
async def compare_starts(request: Request) -> Response:
    """Compare when a job would start as things are, and with more nodes, drained nodes or other quotas. Nothing is written."""
    runtime = runtime_of(request)
    body = await read_record(request, WhatIfBody, runtime.services.limits.body_bytes)
    return json_response(await what_if_of(runtime, caller_of(request), body))


async def what_if_of(runtime: ApiRuntime, caller: Caller, asked: WhatIfBody) -> WhatIfReply:
    """Return both forecasts.

    Raises:
        BadRequest: the job or a change is not valid.
        NotFound: a node or queue does not exist.
        TryLater: too many requests wait.
    """
    services = runtime.services
    # A job that can never start as things are may start with the changes.
    command = await submit_request(runtime, caller, msgspec.json.encode({**asked.job, "allow_never": True}))
    found = await runtime.controller_futures.result_of(services.controller.read_snapshot(submission=command))
    changed, changes = _changed(found, asked)
    notes = submit_notes(runtime, command.spec)
    warnings = await submit_warnings(runtime, found.hypothetical_jobs[0])
    left_out = _left_out(found)
    now, use_now = await in_turn(lambda: forecast_and_project(services, found, notes, warnings))
    if not changes:
        return WhatIfReply(now=now, curves=_curves(now.now_s, use_now, None, left_out))
    then, use_then = await in_turn(lambda: forecast_and_project(services, changed, notes, [], suggest=False))
    curves = _curves(now.now_s, use_now, use_then, left_out)
    return WhatIfReply(now=now, then=then, changes=changes, curves=curves)


def _left_out(found: ReadSnapshot) -> int:
    """Return how many waiting jobs a trial leaves out."""
    snapshot = found.snapshot
    waiting = sum(one.id not in snapshot.attempts and not one.state.terminal for one in snapshot.jobs.values())
    return max(0, waiting - OTHER_PENDING_MAX)


def _curves(now_s: float, now: FleetProjection, then: FleetProjection | None, left_out: int) -> WhatIfCurves:
    """Return the curves until the last of the waiting jobs has started, and somewhat further; without starts, until the last job ends."""
    worlds = [now] if then is None else [now, then]
    start_s, end_s = max(one.last_start_s for one in worlds), max(one.last_end_s for one in worlds)
    length_s = _BEYOND * start_s if start_s else min(end_s, _WITHOUT_STARTS_S)
    step_s = min(max(length_s, _LEAST_S), HORIZON_MAX_S) / (CURVE_POINTS - 1)
    times = [step_s * point for point in range(CURVE_POINTS)]
    gpus_now, waiting_now = now.sample(times)
    gpus_then, waiting_then = ([], []) if then is None else then.sample(times)
    return WhatIfCurves(
        begin_s=now_s,
        step_s=step_s,
        fleet_now=now.fleet_gpus,
        gpus_now=gpus_now,
        waiting_now=waiting_now,
        fleet_then=0 if then is None else then.fleet_gpus,
        gpus_then=gpus_then,
        waiting_then=waiting_then,
        left_out=left_out,
    )


def _changed(found: ReadSnapshot, asked: WhatIfBody) -> tuple[ReadSnapshot, list[str]]:
    """Return the snapshot with the changes, and each change in words."""
    snapshot = found.snapshot
    words: list[str] = []
    nodes = [*_added(snapshot.nodes, asked, words), *_drained(snapshot.nodes, asked, words)]
    queues = list(_queues(snapshot.queues, asked, words))
    check_queue_tree({**snapshot.queues, **{queue.id: queue for queue in queues}})
    return replace(found, snapshot=modified_snapshot(snapshot, nodes=nodes, queues=queues)), words


def _added(nodes: Mapping[NodeId, Node], asked: WhatIfBody, words: list[str]) -> Iterator[Node]:
    if not asked.add_nodes:
        return
    if asked.like is not None:
        like = _known(nodes, asked.like)
    else:
        with_gpus = sorted((node for node in nodes.values() if node.devices), key=lambda node: node.id)
        if not with_gpus:
            raise BadRequest("add_nodes: no node of this fleet has GPUs, so none can be copied")
        like = with_gpus[0]
    models = ", ".join(sorted({device.model for device in like.devices})) or "no GPUs"
    many = f"{asked.add_nodes} more {'node' if asked.add_nodes == 1 else 'nodes'}"
    words.append(f"{many} like {like.id} ({len(like.devices)} x {models})")
    for number in range(asked.add_nodes):
        yield replace(
            like,
            id=NodeId(f"{_ADDED}{number}"),
            state=NodeState.UP,
            cordon=None,
            down_cause="",
            foreign_usage=NO_FOREIGN_USAGE,
            devices=tuple(replace(one, uuid=f"{_ADDED}{number}-{one.index}", healthy=True) for one in like.devices),
        )


def _drained(nodes: Mapping[NodeId, Node], asked: WhatIfBody, words: list[str]) -> Iterator[Node]:
    if not asked.drain.strip():
        return
    names = expand_hostlist(asked.drain)
    words.append(f"{asked.drain.strip()} {'takes' if len(names) == 1 else 'take'} no new jobs")
    for name in names:
        yield replace(_known(nodes, NodeId(name)), cordon=Cordon(by="what-if", why="what if", since_s=0.0))


def _queues(queues: Mapping[QueueId, Queue], asked: WhatIfBody, words: list[str]) -> Iterator[Queue]:
    for queue_id, quota in sorted(asked.quotas.items()):
        queue = queues.get(queue_id)
        if queue is None:
            raise NotFound(f"no queue {queue_id[:80]!r}", hint=Hint(HintCode.LIST_QUEUES))
        before = "none" if queue.quota_gpus is None else str(queue.quota_gpus)
        words.append(f"quota of queue {queue_id}: {quota} GPUs instead of {before}")
        yield replace(queue, quota_gpus=quota)


def _known(nodes: Mapping[NodeId, Node], node_id: NodeId) -> Node:
    if node_id not in nodes:
        raise NotFound(f"no node {node_id[:80]!r}", hint=Hint(HintCode.LIST_NODES))
    return nodes[node_id]

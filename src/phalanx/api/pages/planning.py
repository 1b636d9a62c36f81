"""The pages Plan and What if: forms that lead to a page with the answer, so that an answer has an address. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.routing import MediaType, RouteTable
from phalanx.api.pages.responses import error_page, page_response, viewer_of
from phalanx.api.routes.plan import plan_of
from phalanx.api.routes.what_if import what_if_of
from phalanx.api.runtime import ApiRuntime, caller_of, runtime_of
from phalanx.core.access.caller import Caller, may
from phalanx.core.errors import BadRequest, PhalanxError
from phalanx.core.ids import NodeId, QueueId
from phalanx.core.work.users import Action
from phalanx.plans.records import PlanAnswer
from phalanx.web.plan_page import PLAN_FIELDS, plan_page
from phalanx.web.what_if_page import what_if_page
from phalanx.wire.api.plan import PlanBody
from phalanx.wire.why import WhatIfBody, WhatIfReply

T = TypeVar("T")

FIELD_MAX: Final = 4096  # characters of a field
JOB_FIELDS: Final = ("gpus", "time", "queue", "project", "priority")
CHANGE_FIELDS: Final = ("add_nodes", "like", "drain", "quota_queue", "quota_gpus")

routes = RouteTable()


@routes.get("/plan", Action.VIEW, reply=MediaType.HTML, error_page=error_page)
async def show_plan(request: Request) -> Response:
    """Show the form of a plan, and the plan that its fields ask for."""
    runtime, caller, asked = runtime_of(request), caller_of(request), _fields(request, PLAN_FIELDS)
    answer: PlanAnswer | PhalanxError | None = None
    fleet = ""
    if asked.get("model"):
        try:
            answer = await plan_of(runtime, _plan_body(asked))
            fleet = await _fleet_now(runtime, caller, asked, answer)
        except PhalanxError as error:
            answer = error
    status = answer.http_status if isinstance(answer, PhalanxError) else 200
    return page_response(request, plan_page(asked, answer, fleet, _model_names(), viewer_of(request)), status)


@routes.get("/what-if", Action.SUBMIT, reply=MediaType.HTML, error_page=error_page)
async def show_what_if(request: Request) -> Response:
    """Show the form of a job and of changes of the fleet, and when the job would start."""
    runtime, asked = runtime_of(request), _fields(request, (*JOB_FIELDS, *CHANGE_FIELDS))
    found: WhatIfReply | PhalanxError | None = None
    if asked.get("gpus"):
        try:
            found = await what_if_of(runtime, caller_of(request), _what_if_body(asked))
        except PhalanxError as error:
            found = error
    status = found.http_status if isinstance(found, PhalanxError) else 200
    return page_response(request, what_if_page(asked, found, viewer_of(request)), status)


def _fields(request: Request, names: tuple[str, ...]) -> dict[str, str]:
    """Return the fields that were filled in."""
    found = {name: request.query_params.get(name, "").strip()[:FIELD_MAX] for name in names}
    return {name: value for name, value in found.items() if value}


def _plan_body(asked: Mapping[str, str]) -> PlanBody:
    """Return the question; without GPUs it is about this fleet."""
    return _body({**asked, **({} if "gpus" in asked else {"fleet": "here"})}, PlanBody)


def _what_if_body(asked: Mapping[str, str]) -> WhatIfBody:
    job: dict[str, Any] = {"run": ["true"], **{name: asked[name] for name in JOB_FIELDS if name in asked}}
    if "priority" in asked:
        job["priority"] = _whole(asked, "priority")
    if ("quota_queue" in asked) != ("quota_gpus" in asked):
        raise BadRequest("a quota needs a queue and a number of GPUs", hint="fill in both, or none")
    quotas = {QueueId(asked["quota_queue"]): _whole(asked, "quota_gpus")} if "quota_queue" in asked else {}
    fields = {
        "job": job,
        "add_nodes": _whole(asked, "add_nodes") if "add_nodes" in asked else 0,
        "like": NodeId(asked["like"]) if "like" in asked else None,
        "drain": asked.get("drain", ""),
        "quotas": quotas,
    }
    return _body(fields, WhatIfBody)


def _body(fields: Mapping[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error)[:300]) from error


def _whole(asked: Mapping[str, str], name: str) -> int:
    text = asked[name]
    if not text.removeprefix("-").isdecimal() or len(text) > 9:
        raise BadRequest(f"{name.replace('_', ' ')}: {text[:40]!r} is not a whole number")
    return int(text)


async def _fleet_now(runtime: ApiRuntime, caller: Caller, asked: Mapping[str, str], answer: PlanAnswer) -> str:
    """Return whether a job on these GPUs would start here now; empty if the caller may not submit."""
    if not may(caller, Action.SUBMIT):
        return ""
    gpus = asked.get("gpus") or f"{answer.nodes}x{answer.gpus_per_node}"
    try:
        found = await what_if_of(runtime, caller, WhatIfBody(job={"run": ["true"], "gpus": gpus}))
    except PhalanxError as error:
        return error.message
    now = found.now
    if now.starts:
        return f"these {answer.gpus} GPUs are free: a job would start on {', '.join(now.nodes)}."
    return f"a job on them would wait: {now.detail}."


@cache
def _model_names() -> tuple[str, ...]:
    from phalanx.planner.facts.models import read_models

    return tuple(sorted({entry.model.name for entry in read_models()}))

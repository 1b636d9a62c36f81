"""Plans: whether a model fits on GPUs, its best layouts, training time and cost. Pure computation of about a second, on a thread."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import json_response, read_record
from phalanx.api.http.routing import MediaType, RouteTable
from phalanx.api.routes.profile import stored_profile
from phalanx.api.runtime import ApiRuntime, runtime_of
from phalanx.api.services import HeadServices
from phalanx.api.turns import in_turn
from phalanx.api.views.live import live_attempts, live_node_views
from phalanx.core.work.users import Action
from phalanx.plans.records import PlanAnswer, as_json
from phalanx.wire.api.nodes import NodeView, ProfileReply
from phalanx.wire.api.plan import PlanBody

routes = RouteTable()


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The fleet of this head, as the planner asks for it."""

    services: HeadServices

    def nodes(self) -> list[NodeView]:
        """Return all nodes."""
        return live_node_views(self.services, self.services.store.nodes(), live_attempts(self.services))

    def profile(self) -> ProfileReply:
        """Return the last calibration."""
        return stored_profile(self.services)


@routes.post("/v1/plan", Action.VIEW, body=PlanBody, reply=MediaType.ANY_JSON, transient=True)
async def make_plan(request: Request) -> Response:
    """Plan a training, as `phalanx plan --json`: whether the model fits, the best layouts, time, GPU-hours and cost. Nothing is written."""
    runtime = runtime_of(request)
    body = await read_record(request, PlanBody, runtime.services.limits.body_bytes)
    return json_response(as_json(await plan_of(runtime, body)))


async def plan_of(runtime: ApiRuntime, asked: PlanBody) -> PlanAnswer:
    """Return the plan.

    Raises:
        BadRequest: an unknown model or GPU, a wrong amount, or a contradiction.
        NeverFits: this fleet has no such GPUs.
        TryLater: too many requests wait.
    """
    options = {**msgspec.structs.asdict(asked), "prices": (), "explain": False}

    def compute() -> PlanAnswer:
        from phalanx.plans.answer import compute_plan  # the planner: a head that plans nothing does not load it

        return compute_plan(options, fleet=lambda: _Fleet(runtime.services), files=False)

    return await in_turn(compute)

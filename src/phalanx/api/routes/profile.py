"""The fleet's profile: the results of `phalanx calibrate`. All users may read it, for their plans; operators store it."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import decode_body, json_response, read_body
from phalanx.api.http.routing import MediaType, RouteTable
from phalanx.api.runtime import caller_of, run_in_thread, runtime_of
from phalanx.api.services import HeadServices
from phalanx.core.fleet.documents import CALIBRATION_ID, FleetDocument
from phalanx.core.fleet.node import Node
from phalanx.core.state.events import PutCalibration
from phalanx.core.state.records import CALIBRATIONS
from phalanx.core.work.users import Action
from phalanx.planner.calibration.profile import parse_profile, slow_nodes, stale_reasons
from phalanx.planner.calibration.record_codec import encode_record
from phalanx.wire.api.nodes import ProfileReply

routes = RouteTable()


@routes.get("/v1/profile", Action.VIEW, reply=ProfileReply)
async def show_profile(request: Request) -> Response:
    """Show the results of the last calibration, and why they may be out of date."""
    return json_response(await run_in_thread(stored_profile, runtime_of(request).services))


@routes.put("/v1/profile", Action.OPERATE, body=MediaType.ANY_JSON, reply=ProfileReply, body_limit="profile_bytes")
async def put_profile(request: Request) -> Response:
    """Replace the stored profile."""
    runtime = runtime_of(request)
    body = await read_body(request, runtime.services.limits.profile_bytes)
    profile = await run_in_thread(_checked, body)
    stored = FleetDocument(text=profile, by=caller_of(request).user, at_s=runtime.services.clock.now_s())
    await runtime.request(PutCalibration(calibration=stored))
    return json_response(await run_in_thread(stored_profile, runtime.services))


def _checked(body: bytes) -> str:
    """Return the profile in the form in which it is stored.

    Raises:
        BadRequest: it is not a valid profile.
    """
    values: Any = decode_body(body, dict)
    return json.dumps(encode_record(parse_profile(values)), separators=(",", ":"))


def stored_profile(services: HeadServices) -> ProfileReply:
    """Return the last calibration, with the reasons why it may no longer hold."""
    stored = services.store.record(CALIBRATIONS, CALIBRATION_ID)
    if stored is None:
        return ProfileReply()
    values: dict[str, Any] = json.loads(stored.text)
    profile = parse_profile(values)
    fleet = {str(node.id): (_gpu(node), len(node.devices)) for node in services.store.nodes() if node.devices}
    return ProfileReply(
        profile=values,
        by=stored.by,
        stored_s=stored.at_s,
        stale=list(stale_reasons(profile, services.clock.now_s(), fleet)),
        slow=list(slow_nodes(profile)),
    )


def _gpu(node: Node) -> str:
    return node.devices[0].model

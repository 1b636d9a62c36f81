"""The fleet's profile: the results of `phalanx calibrate`. All users may read it, for their plans; operators store it."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.bodies import decoded, read_body, reply
from phalanx.api.parts import HeadParts
from phalanx.api.routes import Routes, Shown
from phalanx.api.runtime import caller_of, off_loop, runtime_of
from phalanx.core.fleet.calibration import Calibration
from phalanx.core.fleet.node import Node
from phalanx.core.performance.plain import to_plain
from phalanx.core.performance.profile import profile_from, slow_nodes, stale_because
from phalanx.core.state.events import PutCalibration
from phalanx.core.work.people import Action
from phalanx.wire.api.nodes import ProfileReply

routes = Routes()


@routes.get("/v1/profile", Action.SEE, reply=ProfileReply)
async def show_profile(request: Request) -> Response:
    """Show the results of the last calibration, and why they may be out of date."""
    return reply(await off_loop(_stored_profile, runtime_of(request).parts))


@routes.put("/v1/profile", Action.OPERATE, body=Shown.ANY_JSON, reply=ProfileReply, body_limit="profile_bytes")
async def put_profile(request: Request) -> Response:
    """Replace the stored profile."""
    runtime = runtime_of(request)
    body = await read_body(request, runtime.parts.limits.profile_bytes)
    profile = await off_loop(_checked, body)
    stored = Calibration(profile=profile, by=caller_of(request).user, at_s=runtime.parts.clock.now_s())
    await runtime.ask(PutCalibration(calibration=stored))
    return reply(await off_loop(_stored_profile, runtime.parts))


def _checked(body: bytes) -> str:
    """Return the profile in the form in which it is stored.

    Raises:
        BadRequest: it is not a valid profile.
    """
    values: Any = decoded(body, dict)
    return json.dumps(to_plain(profile_from(values)), separators=(",", ":"))


def _stored_profile(parts: HeadParts) -> ProfileReply:
    stored = parts.store.calibration()
    if stored is None:
        return ProfileReply()
    values: dict[str, Any] = json.loads(stored.profile)
    profile = profile_from(values)
    fleet = {str(node.id): (_gpu(node), len(node.devices)) for node in parts.store.nodes() if node.devices}
    return ProfileReply(
        profile=values,
        by=stored.by,
        stored_s=stored.at_s,
        stale=list(stale_because(profile, parts.clock.now_s(), fleet)),
        slow=list(slow_nodes(profile)),
    )


def _gpu(node: Node) -> str:
    return node.devices[0].model

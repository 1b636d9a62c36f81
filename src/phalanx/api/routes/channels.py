"""Notification channels: add, list, test and remove them."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import json_response, no_content, read_record
from phalanx.api.http.routing import MediaType, RouteTable
from phalanx.api.routes.access.people import check_name
from phalanx.api.runtime import ApiRuntime, caller_of, run_in_thread, runtime_of
from phalanx.core.errors import BadRequest, NotFound
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import ProjectId
from phalanx.core.state.events import PutChannel, RemoveChannel
from phalanx.core.state.records import CHANNELS
from phalanx.core.work.channel import Channel, ChannelTopic, Message, unknown_topics
from phalanx.core.work.nearest_match import suggestion
from phalanx.core.work.users import Action
from phalanx.wire.api.channels import ChannelBody, ChannelList

URL_MAX: Final = 2000
routes = RouteTable()


@routes.get("/v1/channels", Action.ADMINISTER, reply=ChannelList)
async def list_channels(request: Request) -> Response:
    """List all channels, without the secrets of their URLs."""
    return json_response(ChannelList(channels=await run_in_thread(runtime_of(request).channel_sender.views)))


@routes.put("/v1/channels/{name}", Action.ADMINISTER, body=ChannelBody, reply=ChannelList)
async def put_channel(request: Request, name: str) -> Response:
    """Add a channel, or replace one. A new channel receives what happens from now on."""
    runtime = runtime_of(request)
    body = await read_record(request, ChannelBody, runtime.services.limits.body_bytes)
    wrong = unknown_topics(body.topics)
    known = [topic.value for topic in ChannelTopic]
    if wrong:
        raise BadRequest(f"no topic {wrong[0][:60]!r}", hint=suggestion(wrong[0], known, ", ".join(known)))
    if len(body.url) > URL_MAX:
        raise BadRequest(f"the URL of a channel has at most {URL_MAX} characters")
    if body.project and body.project not in {one.id for one in await run_in_thread(runtime.services.store.projects)}:
        raise NotFound(f"no project {body.project[:60]!r}", hint=Hint(HintCode.LIST_PROJECTS))
    channel = Channel(
        id=check_name(name, "channel"),
        url=body.url,
        shown=await run_in_thread(runtime.channel_sender.notifier.describe, body.url),
        project=ProjectId(body.project),
        topics=tuple(ChannelTopic(topic) for topic in body.topics),
        by=caller_of(request).user,
        created_s=runtime.services.clock.now_s(),
    )
    await runtime.request(PutChannel(channel=channel))
    return json_response(ChannelList(channels=await run_in_thread(runtime.channel_sender.views)))


@routes.delete("/v1/channels/{name}", Action.ADMINISTER)
async def remove_channel(request: Request, name: str) -> Response:
    """Remove a channel."""
    await runtime_of(request).request(RemoveChannel(name=name, by=caller_of(request).user))
    return no_content()


@routes.post("/v1/channels/{name}/test", Action.ADMINISTER, body=MediaType.NOTHING, reply=MediaType.NOTHING, status=204)
async def test_channel(request: Request, name: str) -> Response:
    """Send a test message now. 503 if the service does not accept it."""
    runtime = runtime_of(request)
    await runtime.record_call(f"channel {name[:60]}")
    await run_in_thread(_test, runtime, name, caller_of(request).user)
    return no_content()


def _test(runtime: ApiRuntime, name: str, user: str) -> None:
    channel = runtime.services.store.record(CHANNELS, name)
    if channel is None:
        raise NotFound(f"no channel {name[:60]!r}", hint=Hint(HintCode.LIST_CHANNELS))
    body = f"This is a test of channel {name}, sent by {user}."
    runtime.channel_sender.notifier.send(channel.url, Message(title="Phalanx: test", body=body))

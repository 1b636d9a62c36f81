"""Requests about notification channels."""

from __future__ import annotations

from typing import Final

from phalanx.controller.requests.request_handlers import RequestHandlers
from phalanx.controller.step_context import StepContext
from phalanx.core.errors import Conflict, NotFound
from phalanx.core.hints import Hint, HintCode
from phalanx.core.state.events import MarkChannels, PutChannel, RemoveChannel
from phalanx.core.state.records import CHANNEL_MARKS, CHANNELS
from phalanx.core.work.channel import Channel
from phalanx.core.work.users import Action

CHANNELS_MAX: Final = 200  # each is compared with every line that is delivered
handlers: Final = RequestHandlers()


@handlers.add(PutChannel, Action.ADMINISTER, audit=lambda request, _: describe_channel(request.channel))
def put_channel(context: StepContext, request: PutChannel) -> None:
    """Add a channel, or replace one of that name."""
    channel = request.channel
    known = context.world.table(CHANNELS)
    if channel.id not in known and len(known) >= CHANNELS_MAX:
        raise Conflict(f"there are {CHANNELS_MAX} channels; no more are allowed")
    context.change.put(channel)
    context.add_history("channel_set", describe_channel(channel), by=channel.by)


@handlers.add(RemoveChannel, Action.ADMINISTER, audit=lambda request, _: f"channel {request.name}")
def remove_channel(context: StepContext, request: RemoveChannel) -> None:
    """Remove a channel, and what is recorded of it."""
    if request.name not in context.world.table(CHANNELS):
        raise NotFound(f"no channel {request.name!r}", hint=Hint(HintCode.LIST_CHANNELS))
    context.change.remove(CHANNELS, request.name)
    context.change.remove(CHANNEL_MARKS, request.name)
    context.add_history("channel_removed", f"channel {request.name} was removed", by=request.by)


@handlers.add(MarkChannels, None, audit=lambda request, _: f"{len(request.marks)} channels")
def mark_channels(context: StepContext, request: MarkChannels) -> None:
    """Record what was delivered to channels; not for those that were removed meanwhile."""
    for mark in request.marks:
        if mark.id in context.world.table(CHANNELS):
            context.change.put(mark)


def describe_channel(channel: Channel) -> str:
    """Describe a channel in one line, without its secrets."""
    topics = ", ".join(channel.topics) or "all topics"
    project = f" of project {channel.project}" if channel.project else ""
    return f"channel {channel.id}: {topics}{project}, to {channel.shown}"

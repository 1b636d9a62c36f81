"""Requests about notification channels."""

from __future__ import annotations

from typing import Final

from phalanx.controller.requests.request_handlers import RequestHandlers
from phalanx.controller.requests.secrets import missing_secrets
from phalanx.controller.step_context import StepContext
from phalanx.core.errors import Conflict, NotFound
from phalanx.core.hints import Hint, HintCode
from phalanx.core.state.events import MarkChannels, PutChannel, RemoveChannel, SubmitJob
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.records import CHANNEL_MARKS, CHANNELS
from phalanx.core.work.channel import JOB_MARKS, Channel
from phalanx.core.work.job_file.notify import NotifyTargetKind, may_be_named, target_kind
from phalanx.core.work.nearest_match import suggestion
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
    """Record what was delivered to channels and to targets of jobs; not for channels that were removed meanwhile."""
    for mark in request.marks:
        if mark.id in context.world.table(CHANNELS) or mark.id.startswith(JOB_MARKS):
            context.change.put(mark)
    for mark_id in request.removed:
        context.change.remove(CHANNEL_MARKS, mark_id)
    for job_id, text in request.lines:
        line = HistoryLine(seq=0, at_s=context.now.wall_s, kind="notify_failed", text=text, job_id=job_id)
        context.change.add_history(line)


def check_notified(context: StepContext, request: SubmitJob) -> None:
    """Check that the channels and secrets that a job notifies exist. A mail channel may come later.

    Raises:
        NotFound: one does not.
    """
    terms = request.spec.notify
    if terms is None:
        return
    usable = sorted(one.id for one in context.world.table(CHANNELS).values() if may_be_named(one, request.project))
    for name in terms.to:
        if target_kind(name) is NotifyTargetKind.CHANNEL and name not in usable:
            raise NotFound(
                f"notify: no channel {name!r} for jobs of project {request.project}",
                hint=suggestion(name, usable, ", ".join(usable))
                if usable
                else Hint(HintCode.ADD_JOB_CHANNEL, channel=name),
            )
    missing = missing_secrets(context, terms.secrets, user=request.user, project=request.project)
    if missing:
        raise NotFound(
            f"notify: no secret {missing[0]} of project {request.project}, and none of user {request.user}",
            hint=Hint(HintCode.SET_SECRET, secret=missing[0], project=request.project),
        )


def describe_channel(channel: Channel) -> str:
    """Describe a channel in one line, without its secrets."""
    topics = ", ".join(channel.topics) or "all topics"
    project = f" of project {channel.project}" if channel.project else ""
    return f"channel {channel.id}: {topics}{project}, to {channel.shown}"

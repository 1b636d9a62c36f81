"""Records of notification channels."""

from __future__ import annotations

import msgspec


class ChannelView(msgspec.Struct, frozen=True, kw_only=True):
    """A channel.

    Attributes:
        shown: its URL without secrets.
        project: only messages about this project, its jobs and its budget; "" for all.
        topics: empty for all.
        pending: lines that wait to be sent; `messages`: sent since the head started, the last at `sent_s`.
        error: why the last message was not accepted; "" if it was.
    """

    name: str
    shown: str
    project: str
    topics: list[str]
    by: str
    created_s: float
    pending: int = 0
    messages: int = 0
    sent_s: float | None = None
    error: str = ""


class ChannelList(msgspec.Struct, frozen=True, kw_only=True):
    """All channels by name."""

    channels: list[ChannelView]


class ChannelBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a channel. `url`: of the service, as Apprise reads it; a secret that no reply repeats."""

    url: str
    project: str = ""
    topics: list[str] = []

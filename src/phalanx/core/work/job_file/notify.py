"""The targets of a job's messages, and their events: the key `notify` of a job file.

notify: me@example.org                            a mail address
notify: [team-chat, $CHAT_URL]                    a channel of the project; the URL in a secret
notify: {to: me@example.org, on: [end, failure]}  only of these events

A URL of a service contains a token, so it is never written here: the text after $ is the name of a secret.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.ids import ProjectId
from phalanx.core.work.channel import Channel, ChannelTopic
from phalanx.core.work.names import is_name
from phalanx.core.work.nearest_match import suggestion
from phalanx.core.work.secret import check_secret_name

TARGETS_MAX: Final = 5  # of one job
ADDRESS_CHARS_MAX: Final = 254  # RFC 5321
_ADDRESS: Final = re.compile(r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})+")
_HINT: Final = "write a mail address, the name of a channel, or $NAME of a secret with the URL of a service: notify: me@example.org"
_KEYS: Final = ("to", "on")
_MAIL_SERVICE: Final = re.compile(r"mailtos?://")


class NotifyEvent(enum.StrEnum):
    """What a job can notify of. END: in any state, FAILURE: unsuccessfully, or it can never start. REQUEUE: it waits or starts again."""

    START = "start"
    END = "end"
    FAILURE = "failure"
    STALL = "stall"
    IDLE = "idle"
    REQUEUE = "requeue"


DEFAULT_EVENTS: Final = tuple(event for event in NotifyEvent if event is not NotifyEvent.REQUEUE)
EVENTS_OF_KIND: Final[Mapping[str, frozenset[NotifyEvent]]] = {
    "running": frozenset({NotifyEvent.START}),
    "succeeded": frozenset({NotifyEvent.END}),
    "cancelled": frozenset({NotifyEvent.END}),
    "failed": frozenset({NotifyEvent.END, NotifyEvent.FAILURE}),
    "timeout": frozenset({NotifyEvent.END, NotifyEvent.FAILURE}),
    "never": frozenset({NotifyEvent.FAILURE}),
    "hung": frozenset({NotifyEvent.STALL}),
    "idle_warning": frozenset({NotifyEvent.IDLE}),
    "idle_notice": frozenset({NotifyEvent.IDLE}),
    "idle_ended": frozenset({NotifyEvent.IDLE}),
    "requeued": frozenset({NotifyEvent.REQUEUE}),
    "restart": frozenset({NotifyEvent.REQUEUE}),
}
"""The events that a kind of history line is; one of them is enough for a message."""


class NotifyTargetKind(enum.Enum):
    """How a target is reached."""

    MAIL = "mail"  # an address, by the mail channel of an operator
    CHANNEL = "channel"  # by its name
    SEALED_URL = "url"  # the value of a secret


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifyTerms:
    """Targets as written, and the events, in the order of NotifyEvent."""

    to: tuple[str, ...]
    on: tuple[NotifyEvent, ...] = DEFAULT_EVENTS

    def __str__(self) -> str:
        """In one line for people."""
        return f"{', '.join(self.to)} on {', '.join(self.on)}"

    def wants(self, kind: str) -> bool:
        """Whether a kind of history line is a message for the targets."""
        return not EVENTS_OF_KIND.get(kind, frozenset()).isdisjoint(self.on)

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names of the secrets that contain URLs."""
        return tuple(secret_of(one) for one in self.to if target_kind(one) is NotifyTargetKind.SEALED_URL)


def parse_notify(value: object) -> NotifyTerms:
    """Parse a target, a list of them, or a mapping with `to` and `on`. No error repeats a text that may be a URL.

    Raises:
        BadRequest: an unknown key or event, no target, too many, or an invalid one.
    """
    to, on = value, None
    if isinstance(value, Mapping):
        for key in value:
            if key not in _KEYS:
                raise BadRequest(
                    f"notify: unknown key {str(key)[:40]!r}", hint="write notify: {to: me@example.org, on: [end]}"
                )
        to, on = value.get("to"), value.get("on")
    targets = tuple(dict.fromkeys(_checked_target(one) for one in _texts(to, "to")))
    if not targets:
        raise BadRequest("notify: no target is named", hint=_HINT)
    if len(targets) > TARGETS_MAX:
        raise BadRequest(
            f"notify: {len(targets)} targets; at most {TARGETS_MAX} are allowed",
            hint="name a channel or a mailing list",
        )
    return NotifyTerms(to=targets, on=DEFAULT_EVENTS if on is None else parse_events(_texts(on, "on")))


def parse_events(words: Iterable[str]) -> tuple[NotifyEvent, ...]:
    """Return the events of these words, in order.

    Raises:
        BadRequest: one is unknown, or there are none.
    """
    known = [event.value for event in NotifyEvent]
    found = set()
    for word in words:
        if word not in known:
            raise BadRequest(f"notify: no event {word[:40]!r}", hint=suggestion(word, known, ", ".join(known)))
        found.add(NotifyEvent(word))
    if not found:
        raise BadRequest("notify: on names no event", hint=f"choose among {', '.join(known)}")
    return tuple(event for event in NotifyEvent if event in found)


def target_kind(target: str) -> NotifyTargetKind:
    """How a target of NotifyTerms is reached."""
    if target.startswith("$"):
        return NotifyTargetKind.SEALED_URL
    return NotifyTargetKind.MAIL if "@" in target else NotifyTargetKind.CHANNEL


def secret_of(target: str) -> str:
    """The name of the secret that a target of the kind SEALED_URL names."""
    return target[1:].removeprefix("{").removesuffix("}")


def is_mail_address(text: str) -> bool:
    """Whether messages can be mailed to this text."""
    return len(text) <= ADDRESS_CHARS_MAX and _ADDRESS.fullmatch(text) is not None


def may_be_named(channel: Channel, project: ProjectId) -> bool:
    """Whether jobs of a project may send by a channel: one of that project, or one whose topics name `notify`."""
    return channel.takes(ChannelTopic.NOTIFY, project) and bool(
        channel.project or ChannelTopic.NOTIFY in channel.topics
    )


def mail_channel(channels: Iterable[Channel], project: ProjectId) -> Channel | None:
    """Return the mail channel by which jobs of a project reach the addresses that they name: the project's own before one of all."""
    found = [one for one in channels if _MAIL_SERVICE.match(one.shown) and may_be_named(one, project)]
    return min(found, key=lambda one: (not one.project, one.id), default=None)


def _texts(value: object, key: str) -> list[str]:
    listed = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else None
    if value is None:
        return []
    if listed is None or not all(isinstance(one, str) for one in listed):
        raise BadRequest(f"notify: {key} is not a text or a list of texts", hint=_HINT)
    return [one.strip() for one in listed if one.strip()]


def _checked_target(text: str) -> str:
    if "://" in text:
        raise BadRequest(
            "notify: a URL would lie in clear in the head's database and in the history",
            hint="set it as a secret, and name the secret: notify: $CHAT_URL",
        )
    match target_kind(text):
        case NotifyTargetKind.SEALED_URL:
            check_secret_name(secret_of(text))
            return f"${secret_of(text)}"
        case NotifyTargetKind.MAIL if is_mail_address(text):
            return text
        case NotifyTargetKind.CHANNEL if is_name(text):
            return text
        case _:
            raise BadRequest(f"notify: {text[:60]!r} is not a mail address and not a name of a channel", hint=_HINT)

"""Notification channels: where messages about jobs, nodes, waste, budgets and space for outputs go, and which lines of the history are such messages."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import ProjectId, UserId

JOB_MARKS: Final = "jobs:"
"""Begins the ids of marks that are not of a channel: this itself is how much of the history was read for jobs' messages, the others of one target."""
LINES_MAX: Final = 20  # in one message; a storm of events becomes one message that counts the others


class ChannelTopic(enum.StrEnum):
    """What a channel can receive. DIGEST: the use of the past month, on the first day of the next one. NOTIFY: what jobs send to it by name."""

    JOBS = "jobs"
    NODES = "nodes"
    WASTE = "waste"
    BUDGET = "budget"
    OUTPUTS = "outputs"
    DIGEST = "digest"
    NOTIFY = "notify"


KINDS: Final[Mapping[str, ChannelTopic]] = {
    "failed": ChannelTopic.JOBS,
    "timeout": ChannelTopic.JOBS,
    "never": ChannelTopic.JOBS,
    "node_down": ChannelTopic.NODES,
    "node_up": ChannelTopic.NODES,
    "bad_node": ChannelTopic.NODES,
    "drained": ChannelTopic.NODES,
    "undrained": ChannelTopic.NODES,
    "maintenance_planned": ChannelTopic.NODES,
    "maintenance_begun": ChannelTopic.NODES,
    "maintenance_ended": ChannelTopic.NODES,
    "maintenance_notice": ChannelTopic.NODES,
    "reservation_notice": ChannelTopic.NODES,
    "idle_warning": ChannelTopic.WASTE,
    "idle_notice": ChannelTopic.WASTE,
    "idle_ended": ChannelTopic.WASTE,
    "budget_warning": ChannelTopic.BUDGET,
    "budget_exceeded": ChannelTopic.BUDGET,
    "outputs_warning": ChannelTopic.OUTPUTS,
    "outputs_full": ChannelTopic.OUTPUTS,
}
"""The topic of each kind of history line that is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """One channel.

    Attributes:
        id: its name.
        url: of the service, as Apprise reads it. A secret: most contain a token.
        shown: the URL without its secrets.
        project: only messages about this project, its jobs and its budget; "" for all.
        topics: empty for all.
        created_s: Unix seconds.
    """

    id: str
    url: str
    shown: str
    project: ProjectId
    topics: tuple[ChannelTopic, ...]
    by: UserId
    created_s: float

    def takes(self, topic: ChannelTopic, project: ProjectId) -> bool:
        """Whether it receives this topic. `project`: that the message is about; "" for none."""
        return (not self.topics or topic in self.topics) and self.project in ("", project)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelMark:
    """How much of the history was delivered to a channel, or to a target of jobs (JOB_MARKS). `seq`: of the last line; `digest`: the last month, as 2026-11."""

    id: str
    seq: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """What is sent."""

    title: str
    body: str


def message_of(lines: Sequence[tuple[ChannelTopic, str]]) -> Message:
    """One message of the texts of history lines, the oldest first; of more than LINES_MAX the newest, with the number of the others."""
    shown = lines[-LINES_MAX:]
    hidden = len(lines) - len(shown)
    body = [*([f"{hidden} earlier messages are left out."] if hidden else []), *(text for _, text in shown)]
    return Message(title=f"Phalanx: {_title(lines)}", body="\n".join(body))


def _title(lines: Sequence[tuple[ChannelTopic, str]]) -> str:
    if len(lines) == 1:
        return lines[0][1][:100]
    topics = sorted({topic.value for topic, _ in lines})
    return f"{len(lines)} messages about {' and '.join(topics)}"


def unknown_topics(names: Iterable[str]) -> list[str]:
    """Those names that are no topic."""
    known = {topic.value for topic in ChannelTopic}
    return [name for name in names if name not in known]

"""Records of the head itself: its refusals, who it is, whom it hears, all that runs on it at one moment, and its end."""

from __future__ import annotations

import msgspec

from phalanx.core.ids import ProjectId, TokenId, UserId
from phalanx.core.work.job import JobState
from phalanx.core.work.people import Action, UserRole
from phalanx.wire.api.jobs import JobView
from phalanx.wire.api.nodes import NodeView


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """`code` is that of a class in core.errors; `retry`: the same request may go through later."""

    code: str
    message: str
    hint: str = ""
    retry: bool = False


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """The one shape of every refusal."""

    error: ErrorBody


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Open to all: says that a head answers, and which."""

    status: str
    version: str
    head_id: str


class Me(msgspec.Struct, frozen=True, kw_only=True):
    """Whose token this is and what it may do."""

    user: UserId
    role: UserRole
    token_id: TokenId
    projects: list[ProjectId] = []
    admin_of: list[ProjectId] = []
    scope: list[Action] = []
    actions: list[Action] = []


class StopBody(msgspec.Struct, frozen=True, kw_only=True):
    """Refused while jobs run unless one of the two is set. `cancel_jobs`: ask again until `stopping`."""

    keep_jobs: bool = False
    cancel_jobs: bool = False


class StopReply(msgspec.Struct, frozen=True, kw_only=True):
    """`stopping`: the head exits now. Otherwise `running` jobs are still being cancelled."""

    stopping: bool
    running: int = 0


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """All that `top` and the demo draw, from one moment. `recent` are the newest jobs that ended."""

    now_s: float
    head_id: str
    version: str
    nodes: list[NodeView]
    running: list[JobView]
    pending: list[JobView]
    recent: list[JobView]
    counts: dict[JobState, int]

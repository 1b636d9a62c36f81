"""Records of the head itself: its refusals, who it is, whom it hears, all that runs on it at one moment, and its end."""

from __future__ import annotations

import msgspec

from phalanx.core.ids import ProjectId, TokenId, UserId
from phalanx.core.work.job import JobState
from phalanx.core.work.people import Action, UserRole
from phalanx.wire.api.jobs import JobView
from phalanx.wire.api.nodes import NodeView


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """`code` is that of a class in core.errors; `retry`: the same request may go through later.

    `leader`: of a head that stands by alone, where the one is that leads; empty where none is known.
    """

    code: str
    message: str
    hint: str = ""
    retry: bool = False
    leader: str | msgspec.UnsetType = msgspec.UNSET


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """The one shape of every refusal."""

    error: ErrorBody


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Open to all: says that a head answers, and which.

    `role`: "leader" or "standby" where several heads share a store, else empty; `term` and `leader` (its URL) as that head knows them.
    """

    status: str
    version: str
    head_id: str
    role: str = ""
    term: int = 0
    leader: str = ""


class HeadView(msgspec.Struct, frozen=True, kw_only=True):
    """One of the heads that share a store. `seen_ago_s`: since it last said that it lives; `role`: leader, standby or silent."""

    name: str
    url: str
    role: str
    version: str
    started_s: float
    seen_ago_s: float


class HeadList(msgspec.Struct, frozen=True, kw_only=True):
    """Who leads since when, and who stands by. Of a head that shares its store with none: itself, and term 0."""

    heads: list[HeadView]
    term: int = 0
    since_s: float = 0.0
    renewed_s: float = 0.0


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
    """`stopping`: the head exits now. Otherwise `running` jobs are still being cancelled. `relieved`: another head takes over."""

    stopping: bool
    running: int = 0
    relieved: bool = False


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

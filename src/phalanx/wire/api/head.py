"""Records of the head itself: health, the caller's identity, an overview, and the stop."""

from __future__ import annotations

import msgspec

from phalanx.core.ids import ProjectId, TokenId, UserId
from phalanx.core.work.states import JobState
from phalanx.core.work.users import Action, UserRole
from phalanx.wire.api.jobs import JobView
from phalanx.wire.api.nodes import NodeView, OrderedNodeView


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Health of the head, without authentication.

    `role`: "leader" or "standby" if several heads share a store, else empty; `term` and `leader` (its URL) as this head knows them.
    `sign_in`: host of the sign-in provider, "" without one; None from a standby and from a head of an earlier release.
    """

    status: str
    version: str
    head_id: str
    role: str = ""
    term: int = 0
    leader: str = ""
    sign_in: str | None = None


class HeadView(msgspec.Struct, frozen=True, kw_only=True):
    """One of the heads that share a store. `seen_ago_s`: since its last heartbeat; `role`: leader, standby or silent."""

    name: str
    url: str
    role: str
    version: str
    started_s: float
    seen_ago_s: float


class HeadList(msgspec.Struct, frozen=True, kw_only=True):
    """The leader, since when, and the standbys. A single head lists itself with term 0."""

    heads: list[HeadView]
    term: int = 0
    since_s: float = 0.0
    renewed_s: float = 0.0


class CurrentUser(msgspec.Struct, frozen=True, kw_only=True):
    """The user of the token, and its permissions. `requests_per_minute`, `tokens_per_minute`: the token's limits on requests to services, 0 for none;
    `limited_as`: the token with which it shares them, None if that is itself.
    """

    user: UserId
    role: UserRole
    token_id: TokenId
    projects: list[ProjectId] = []
    admin_of: list[ProjectId] = []
    scope: list[Action] = []
    actions: list[Action] = []
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    limited_as: TokenId | None = None


class StopBody(msgspec.Struct, frozen=True, kw_only=True):
    """Refused while jobs run, unless one of the two is set. `cancel_jobs`: repeat the request until `stopping`."""

    keep_jobs: bool = False
    cancel_jobs: bool = False


class StopReply(msgspec.Struct, frozen=True, kw_only=True):
    """`stopping`: the head exits now. Otherwise `running` jobs are still being cancelled. `relieved`: another head takes over."""

    stopping: bool
    running: int = 0
    relieved: bool = False


class DashboardLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link that signs a browser in once: the path on this head, and how long it is valid."""

    path: str
    lifetime_s: float


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for `top` and the demo. `recent` are the newest ended jobs, `ordered` the nodes that pools have ordered.

    `truncated`: some nodes, or running or waiting jobs, are left out; `counts` has the numbers of all jobs.
    """

    now_s: float
    head_id: str
    version: str
    nodes: list[NodeView]
    running: list[JobView]
    pending: list[JobView]
    recent: list[JobView]
    counts: dict[JobState, int]
    ordered: list[OrderedNodeView] = []
    truncated: bool = False

"""Where jobs wait, and who pays."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.ids import ProjectId, QueueId, UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A queue. `priority` is added to its jobs' own; quotas hang here when they come."""

    id: QueueId
    priority: int = 0
    open: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """Who pays. Only members (and operators) submit for it."""

    id: ProjectId
    members: frozenset[UserId] = frozenset()
    admins: frozenset[UserId] = frozenset()
    created_s: float = 0.0

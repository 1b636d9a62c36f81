"""Records of licences."""

from __future__ import annotations

import msgspec

from phalanx.core.ids import JobId, UserId
from phalanx.wire.api.jobs import ImpossibleJobView


class LicenceHolderView(msgspec.Struct, frozen=True, kw_only=True):
    """A job that holds seats of a licence."""

    job_id: JobId
    user: UserId
    seats: int


class LicenceView(msgspec.Struct, frozen=True, kw_only=True):
    """A licence. `holders`: the jobs that hold its seats, the most seats first; `waiting`: jobs that wait and ask for it."""

    name: str
    seats: int
    used: int = 0
    holders: list[LicenceHolderView] = []
    waiting: int = 0


class LicenceList(msgspec.Struct, frozen=True, kw_only=True):
    """All licences by name."""

    licences: list[LicenceView]
    next: str = ""


class LicenceBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a licence: how many seats the whole fleet shares."""

    seats: int


class LicenceChanged(msgspec.Struct, frozen=True, kw_only=True):
    """A licence was set or removed. `impossible`: the waiting jobs that can never start now, at most 100."""

    impossible: list[ImpossibleJobView] = []
    impossible_more: int = 0

"""Records of the usage report."""

from __future__ import annotations

import msgspec


class UsageRowView(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU-hours of one project, user, queue, GPU model or job, by state.

    Attributes:
        key: "" for time of no job, such as that of free devices, and for the rest of a long list.
        by_state: GPU-hours of each state that occurred.
        by_state_us: the same in GPU-microseconds, as integers that add up exactly.
        by_note: of states with notes, GPU-hours of each: "progress unknown", "unobserved", or why a job waits.
        merged: number of rows that are added up in this one; 0 for a row of its own.
    """

    key: str
    gpu_hours: float
    gpu_us: int
    by_state: dict[str, float]
    by_state_us: dict[str, int]
    by_note: dict[str, dict[str, float]] = {}
    merged: int = 0


class UsageTotalView(msgspec.Struct, frozen=True, kw_only=True):
    """All rows together. `fleet_gpu_hours`: GPUs of the fleet times time; the states, each of which is listed, add up to it."""

    fleet_gpu_hours: float
    fleet_gpu_us: int
    by_state: dict[str, float]
    by_state_us: dict[str, int]
    by_note: dict[str, dict[str, float]] = {}


class UsageReportView(msgspec.Struct, frozen=True, kw_only=True):
    """A usage report. `since_s`: Unix time from which it counts, the beginning of an hour; `until_s`: to which, the end of an hour or now."""

    by: str
    since_s: float
    until_s: float
    rows: list[UsageRowView]
    total: UsageTotalView

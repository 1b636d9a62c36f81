"""Records of the usage report, and of the usage of one job."""

from __future__ import annotations

import msgspec

from phalanx.core.accounting.advice.evidence import Advice
from phalanx.core.accounting.usage_summary import UsageSummary


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


class UsagePeriodView(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet in one hour or day of UTC. `since_s`: Unix time of its beginning; the states add up to `fleet_gpu_us`."""

    since_s: int
    fleet_gpu_us: int
    by_state_us: dict[str, int]


class UsageReportView(msgspec.Struct, frozen=True, kw_only=True):
    """A usage report. `since_s`: Unix time from which it counts, the beginning of an hour; `until_s`: to which, the end of an hour or now.

    `series`: the fleet by hour or day of UTC, in order, if that was asked for; periods in which nothing was counted are left out.
    """

    by: str
    since_s: float
    until_s: float
    rows: list[UsageRowView]
    total: UsageTotalView
    series: list[UsagePeriodView] = []


class MeasuredDeviceView(msgspec.Struct, frozen=True, kw_only=True):
    """One device that an attempt held alone. `mean` and `peak`: utilization, 0 to 1; None for what was not measured."""

    node: str
    index: int
    mean: float | None
    peak: float
    memory_peak_bytes: int | None
    memory_bytes: int


class MeasuredNodeView(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of an attempt on one node. `busy_cpus`: CPU time per second of the run."""

    node: str
    cpu_s: float
    busy_cpus: float | None
    memory_peak_bytes: int


class MeasuredUseView(msgspec.Struct, frozen=True, kw_only=True):
    """What the longest attempt of a job used. Shared devices and what no sample covered are left out.

    Attributes:
        run_s: from the start of its tasks to its end, or to now.
        counter: of the utilization: "gpm_sm", "nvml_gpu" or "rank_cpu".
        mean: utilization over all its devices; None if that of one is unknown.
        devices: at most so many as the head sends, the least used first; `device_count` counts all.
    """

    epoch: int
    run_s: float
    counter: str
    mean: float | None
    device_count: int
    devices: list[MeasuredDeviceView]
    nodes: list[MeasuredNodeView]


class JobUsageView(msgspec.Struct, frozen=True, kw_only=True):
    """What a job held, what it did with it, and advice for the next run.

    Attributes:
        summary: steps, goodput, checkpoints and attempts.
        gpu_hours: held; `by_state` and `by_note`: of these, as in the usage report.
        energy_kwh: of its devices, over the share `energy_share` of these hours; None if none was counted.
        cpus, memory_bytes: requested for each node; 0 for none.
        measured: None if nothing was.
        advice: what would have saved most first.
        no_advice: why advice is missing although the job was not judged; "" if it was.
    """

    summary: UsageSummary
    gpu_hours: float
    by_state: dict[str, float]
    by_note: dict[str, dict[str, float]]
    energy_kwh: float | None
    energy_share: float
    gpus: str
    cpus: int
    memory_bytes: int
    time_limit_s: float | None
    measured: MeasuredUseView | None
    advice: list[Advice]
    no_advice: str


class UsageSpanView(msgspec.Struct, frozen=True, kw_only=True):
    """A time during which a part of a device had one state.

    Attributes:
        device: index of the device.
        job: that held the part; "" if no job did.
        milli: thousandths of the device.
        note: as in `UsageRowView.by_note`.
        begin_s, end_s: Unix seconds.
    """

    device: int
    job: str
    milli: int
    state: str
    note: str
    begin_s: float
    end_s: float


class NodeUsageView(msgspec.Struct, frozen=True, kw_only=True):
    """The newest states of the devices of a node, by device and end; the last one of each part ends now."""

    node: str
    spans: list[UsageSpanView]

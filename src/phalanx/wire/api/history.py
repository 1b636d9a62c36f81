"""Records of the history of nodes, devices and jobs, by columns: a value for each point in time, None where it is unknown."""

from __future__ import annotations

import msgspec

from phalanx.core.ids import JobId

Column = list[float | None]


class HistoryColumn(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of a node or a device.

    Attributes:
        metric: utilization and cpu_utilization are 0 to 1; other names end with their unit. `throttled`: the share of time with lowered clocks.
        device: its index; None for the node as a whole.
        mean, min, max: of the values of ten seconds in each step.
        reasons: of `throttled`, the numbers of the points at which each reason occurred.
    """

    metric: str
    device: int | None
    mean: Column
    min: Column
    max: Column
    reasons: dict[str, list[int]] = {}


class NodeHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of a node, or of the mean of the fleet if `node` is empty. Metrics of which nothing is known are left out.

    Attributes:
        begin_s: Unix time of the first point; each covers `step_s` seconds.
        points: their number.
    """

    node: str
    begin_s: int
    step_s: int
    points: int
    columns: list[HistoryColumn]


class JobCurves(msgspec.Struct, frozen=True, kw_only=True):
    """The course of a job in at most 256 points; a step that was repeated counts as it ran last.

    Attributes:
        steps_per_point: a point covers so many step numbers.
        step: the last step of each point; `end_s`: its Unix time.
        loss_first, loss_last, loss_min, loss_max: over the steps of the point.
        step_s, step_s_min, step_s_max: seconds of a step: mean, least and most.
        goodput: share of the time that the job held its devices until then which became steps of its result.
    """

    job_id: JobId
    steps_per_point: int
    step: list[int]
    end_s: list[float]
    loss_first: Column
    loss_last: Column
    loss_min: Column
    loss_max: Column
    step_s: Column
    step_s_min: Column
    step_s_max: Column
    goodput: Column


class HistoryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Whether history is stored. `problem`: why not, else empty; `lost`: hours of nodes dropped because of it; `stored_s`: the newest write."""

    problem: str
    size_bytes: int
    stored_s: float
    lost: int

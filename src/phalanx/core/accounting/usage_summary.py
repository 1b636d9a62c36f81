"""The usage summary of a job: resources held, use of the time, and the course and end of every attempt.

Built from durable records only, by the head's API and by tests. It reads no clock: live attempts end at `now_s`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.core.accounting.ledger import Ledger, attempt_ledgers, device_ledger, sum_ledgers
from phalanx.core.accounting.lineage import (
    StepLineage,
    overlapping_steps,
    resumed_step,
    split_steps,
)
from phalanx.core.accounting.reports import (
    CheckpointRecord,
    Reports,
    StepRecord,
    read_reports,
)
from phalanx.core.fleet.node import Node
from phalanx.core.ids import Epoch, JobId, NodeId
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.share import MILLI_PER_DEVICE, gpus_of
from phalanx.core.work.states import JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSeconds:
    """GPU-seconds by category (see `ledger.TimeCategory`); zero for a job without GPUs. Exact to the microsecond."""

    productive: float
    lost: float
    saving: float
    restarting: float
    idle: float
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShare:
    """One node's part of an attempt."""

    node: NodeId
    devices: tuple[int, ...]
    first_rank: int
    tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSummary:
    """One generation of an attempt. Steps and times are None for one that made no step."""

    generation: int
    resumed_from_step: int | None
    first_step: int | None
    last_step: int | None
    first_step_s: float | None
    last_step_s: float | None
    load_s: float
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSummary:
    """One attempt. Times are Unix seconds.

    Attributes:
        cause: why it ended; its state while it is live.
        first_step_s, last_step_s: begin of its first step, end of its last.
        kept_until_s: end of its last step that is part of the result; None if none is.
        resumed_from_step: the step from which its first generation resumed; None for a fresh start.
    """

    epoch: Epoch
    cause: str
    why: str
    causes: tuple[str, ...]
    exit_code: int | None
    nodes: tuple[NodeShare, ...]
    gpus: int | float
    placed_s: float
    running_s: float | None
    ended_s: float | None
    first_step_s: float | None
    last_step_s: float | None
    kept_until_s: float | None
    first_step: int | None
    last_step: int | None
    resumed_from_step: int | None
    steps: int
    generations: tuple[GenerationSummary, ...]
    gpu_seconds: GpuSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSummary:
    """Cost and result of a job.

    Attributes:
        virtual: devices were slots on CPUs; the seconds are real, the GPUs are not.
        measured_by: "steps", or "attempts" for a job that reports none: then an attempt counts as kept or lost as a whole.
        goodput: share of the held time that became kept progress, 0 to 1; None before anything was held, and for a job that
            reports no steps, whose use of the time is unknown.
        wall_s: from submission to the end, or to now.
        queued_s: the part of `wall_s` in which the job held nothing.
        steps_lost: steps that are not part of the result; `steps_redone` of them were repeated.
        overlapping_steps: steps that an older attempt began after a newer one had begun its first. Lease and fence keep it 0.
        other_seconds: amount-seconds of CPUs, memory and extras that it asked for and held, by name: CPU-seconds, byte-seconds.
        unread_bytes: size of reports past the limit that is read of one attempt; they are not in these figures. 0 for all but huge ones.
    """

    job_id: JobId
    name: str
    state: str
    gpus: int | float
    virtual: bool
    measured_by: str
    gpu_seconds: GpuSeconds
    goodput: float | None
    wall_s: float
    queued_s: float
    attempts: tuple[AttemptSummary, ...]
    steps_total: int | None
    steps_kept: int
    steps_lost: int
    steps_redone: int
    overlapping_steps: int
    loss_first: float | None
    loss_last: float | None
    tokens_kept: int
    checkpoints: tuple[CheckpointRecord, ...]
    unread_bytes: int = 0
    other_seconds: dict[str, float] = field(default_factory=dict)


def build_usage_summary(
    job: Job,
    attempts: Sequence[Attempt],
    reports: Mapping[Epoch, Iterable[Mapping[str, object]]],
    *,
    nodes: Mapping[NodeId, Node] | None = None,
    now_s: float,
    unread_bytes: int = 0,
) -> UsageSummary:
    """The usage summary of `job`.

    Args:
        job: the job as it is now.
        attempts: all of its attempts, in any order.
        reports: the reports of its first node's ranks, by epoch, as objects; each iterable is consumed once.
        nodes: the fleet; nodes that left it may be absent.
        now_s: end of live attempts.
        unread_bytes: size of reports that are not in `reports`.
    """
    nodes = nodes or {}
    ordered = sorted(attempts, key=lambda attempt: attempt.epoch)
    read = {attempt.epoch: read_reports(attempt.epoch, reports.get(attempt.epoch, ())) for attempt in ordered}
    lineage = split_steps(job, ordered, read)
    spans = attempt_ledgers(ordered, read, lineage.kept, succeeded=job.state is JobState.SUCCEEDED, now_s=now_s)
    ledger = sum_ledgers(device_ledger(attempt, spans[attempt.epoch], now_s=now_s) for attempt in ordered)
    held = sum_ledgers(spans[attempt.epoch] for attempt in ordered)
    weighed = ledger if ledger.total else held  # a job without GPUs is measured by time
    measured = bool(lineage.kept or lineage.lost)
    end_s = now_s if job.ended_s is None else job.ended_s
    wall_us = max(0, round(end_s * 1e6) - round(job.submit_s * 1e6))
    granted = [
        nodes[grant.node_id] for attempt in ordered for grant in attempt.allocation.grants if grant.node_id in nodes
    ]
    losses = [record.loss for record in lineage.kept if record.loss is not None]
    return UsageSummary(
        job_id=job.id,
        name=job.name,
        state=job.state.value,
        gpus=gpus_of(max((attempt.full_allocation.milli for attempt in ordered), default=0)),
        virtual=any(node.virtual for node in granted),
        measured_by="steps" if measured else "attempts",
        gpu_seconds=_seconds(ledger),
        goodput=weighed.productive / weighed.total if weighed.total and measured else None,
        wall_s=wall_us / 1e6,
        queued_s=max(0, wall_us - held.total) / 1e6,
        attempts=tuple(
            _line(attempt, read[attempt.epoch], lineage, device_ledger(attempt, spans[attempt.epoch], now_s=now_s))
            for attempt in ordered
        ),
        steps_total=max((each.steps_total for each in read.values() if each.steps_total is not None), default=None),
        steps_kept=len(lineage.kept),
        steps_lost=len(lineage.lost),
        steps_redone=lineage.redone,
        overlapping_steps=overlapping_steps(read, one_clock=_one_clock(ordered, nodes)),
        loss_first=_loss_first(lineage),
        loss_last=losses[-1] if losses else None,
        tokens_kept=sum(record.tokens or 0 for record in lineage.kept),
        checkpoints=tuple(saved for epoch in sorted(read) for saved in read[epoch].saved),
        unread_bytes=unread_bytes,
        other_seconds=_other_seconds(ordered, spans),
    )


def _other_seconds(attempts: Sequence[Attempt], spans: Mapping[Epoch, Ledger]) -> dict[str, float]:
    found: dict[str, float] = {}
    for attempt in attempts:
        for name, amount in attempt.allocation.resources.besides_gpus():
            found[name] = found.get(name, 0.0) + amount * spans[attempt.epoch].total / 1e6
    return found


def _one_clock(attempts: Sequence[Attempt], nodes: Mapping[NodeId, Node]) -> bool:
    """Whether all nodes that reported steps are known to be one machine in one boot."""
    first = {grant.node_id for attempt in attempts for grant in attempt.allocation.grants if grant.node_rank == 0}
    boots = {nodes[node_id].boot_id if node_id in nodes else "" for node_id in first}
    return len(boots) == 1 and "" not in boots


def _loss_first(lineage: StepLineage) -> float | None:
    """The loss of the very first step, kept or not."""
    made = sorted(
        (*lineage.kept, *lineage.lost),
        key=lambda record: (record.epoch, record.generation, record.begin_us, record.step),
    )
    return next((record.loss for record in made if record.loss is not None), None)


def _line(attempt: Attempt, reports: Reports, lineage: StepLineage, held: Ledger) -> AttemptSummary:
    steps = reports.steps
    kept = [record for record in lineage.kept if record.epoch == attempt.epoch]
    numbers = sorted(
        {
            *(record.generation for record in steps),
            *(each.generation for each in reports.resumed),
            int(attempt.generation),
        }
    )
    generations = tuple(_generation(number, attempt, reports) for number in numbers)
    return AttemptSummary(
        epoch=attempt.epoch,
        cause=_cause(attempt),
        why=attempt.why,
        causes=tuple(cause.value for cause in attempt.causes),
        exit_code=attempt.exit_code,
        nodes=tuple(
            NodeShare(node=grant.node_id, devices=grant.devices, first_rank=grant.first_rank, tasks=grant.tasks)
            for grant in attempt.allocation.grants
        ),
        gpus=gpus_of(attempt.full_allocation.milli),
        placed_s=attempt.placed_s,
        running_s=attempt.first_running_s if attempt.first_running_s is not None else attempt.running_s,
        ended_s=attempt.ended_s,
        first_step_s=steps[0].begin_us / 1e6 if steps else None,
        last_step_s=steps[-1].end_us / 1e6 if steps else None,
        kept_until_s=kept[-1].end_us / 1e6 if kept else None,
        first_step=steps[0].step if steps else None,
        last_step=steps[-1].step if steps else None,
        resumed_from_step=generations[0].resumed_from_step,
        steps=len(steps),
        generations=generations,
        gpu_seconds=_seconds(held),
    )


def _cause(attempt: Attempt) -> str:
    if attempt.holds_allocation:
        return attempt.state.value
    if attempt.stop_cause is not None:
        return attempt.stop_cause.value
    return attempt.causes[-1].value if attempt.causes else attempt.state.value


def _generation(number: int, attempt: Attempt, reports: Reports) -> GenerationSummary:
    steps: list[StepRecord] = [record for record in reports.steps if record.generation == number]
    loads = [record.load_s for record in reports.resumed if record.generation == number]
    resumed = resumed_step(number, steps, reports) if steps or loads else None
    if resumed is None and number == attempt.generation and attempt.resume_from is not None:
        resumed = attempt.resume_from.step
    return GenerationSummary(
        generation=number,
        resumed_from_step=resumed or None,
        first_step=steps[0].step if steps else None,
        last_step=steps[-1].step if steps else None,
        first_step_s=steps[0].begin_us / 1e6 if steps else None,
        last_step_s=steps[-1].end_us / 1e6 if steps else None,
        load_s=loads[-1] if loads else 0.0,
        steps=len(steps),
    )


def _seconds(ledger: Ledger) -> GpuSeconds:
    unit = 1e6 * MILLI_PER_DEVICE
    return GpuSeconds(
        productive=ledger.productive / unit,
        lost=ledger.lost / unit,
        saving=ledger.saving / unit,
        restarting=ledger.restarting / unit,
        idle=ledger.idle / unit,
        total=ledger.total / unit,
    )

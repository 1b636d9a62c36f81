"""Builds the usage of one job: its hours in the ledger of states, what its longest attempt used, and advice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.api.services import HeadServices
from phalanx.core.accounting.advice.evidence import (
    OBSERVED_MIN,
    Advice,
    DeviceEvidence,
    GpuKind,
    JobEvidence,
    NodeEvidence,
    SaveEvidence,
)
from phalanx.core.accounting.advice.judged_time import JUDGED_MIN_S
from phalanx.core.accounting.advice.table import advise
from phalanx.core.accounting.usage_report import JobHours, UsageSum, sum_job_hours
from phalanx.core.accounting.usage_summary import UsageSummary
from phalanx.core.errors import BadRequest
from phalanx.core.fleet.mig import MigProfile
from phalanx.core.fleet.node import Node
from phalanx.core.fleet.summary import model_fits
from phalanx.core.ids import NodeId
from phalanx.core.recovery.failure_rate import gang_mtbf_s, node_mtbf_s
from phalanx.core.recovery.interval import checkpoint_interval_s
from phalanx.core.units import format_duration
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.gpus import parse_gpus
from phalanx.core.work.job import Job
from phalanx.core.work.states import JobState
from phalanx.core.work.usage.attempt_use import AttemptUse
from phalanx.planner.facts.device_speeds import device_speed_facts
from phalanx.planner.facts.gpus import find_gpu
from phalanx.wire.api.usage import JobUsageView, MeasuredDeviceView, MeasuredNodeView, MeasuredUseView

DEVICES_MAX: Final = 256  # in one answer: about 30 KB
HOUR_US: Final = 3_600_000_000
KWH_MILLIJOULES: Final = 3_600_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """What a job held, and its longest attempt as advice judges it; None if it has not run."""

    hours: JobHours
    use: AttemptUse | None = None
    evidence: JobEvidence | None = None


def job_usage_view(services: HeadServices, job: Job, summary: UsageSummary) -> JobUsageView:
    """The usage of a job. Reads one stored document for each hour that it held devices."""
    judged = _judge(services, job, summary)
    held, evidence = judged.hours.amounts, judged.evidence
    return JobUsageView(
        summary=summary,
        gpu_hours=held.total / HOUR_US,
        by_state={state: amount / HOUR_US for state, amount in held.by_state.items()},
        by_note={
            state: {note: amount / HOUR_US for note, amount in notes.items()} for state, notes in held.by_note.items()
        },
        energy_kwh=judged.hours.millijoules / KWH_MILLIJOULES if judged.hours.metered else None,
        energy_share=judged.hours.metered / held.total if held.total else 0.0,
        gpus=job.spec.role.gpus_text,
        cpus=job.spec.role.cpus,
        memory_bytes=job.spec.role.memory_bytes,
        time_limit_s=job.spec.time_limit_s,
        measured=None if evidence is None or judged.use is None else _measured(evidence, judged.use),
        advice=[] if evidence is None else list(advise(evidence)),
        no_advice=_no_advice(evidence),
    )


def job_advice(services: HeadServices, job: Job) -> tuple[Advice, ...]:
    """Advice without that on checkpoints, which would read the reports of all steps."""
    now_s = services.clock.now_s()
    if all(_run_s(attempt, now_s) < JUDGED_MIN_S for attempt in services.store.attempts(job.id)):
        return ()
    evidence = _judge(services, job, None).evidence
    return () if evidence is None else advise(evidence)


def _judge(services: HeadServices, job: Job, summary: UsageSummary | None) -> _Judged:
    now_s = services.clock.now_s()
    attempts = services.store.attempts(job.id)
    if not attempts:
        return _Judged(hours=sum_job_hours((), job.id))
    until_s = max(now_s if attempt.ended_s is None else attempt.ended_s for attempt in attempts)
    hours = sum_job_hours(services.usage_hours(min(attempt.placed_s for attempt in attempts), until_s), job.id)
    longest = max(attempts, key=lambda attempt: _run_s(attempt, now_s))
    use = services.attempt_use(job.id, longest.epoch)
    nodes = {node.id: node for node in services.store.nodes()}
    return _Judged(hours=hours, use=use, evidence=_evidence(job, longest, use, hours.amounts, summary, nodes, now_s))


def _run_s(attempt: Attempt, now_s: float) -> float:
    begun_s = attempt.first_running_s if attempt.first_running_s is not None else attempt.running_s
    return 0.0 if begun_s is None else max(0.0, (now_s if attempt.ended_s is None else attempt.ended_s) - begun_s)


def _no_advice(evidence: JobEvidence | None) -> str:
    if evidence is None:
        return "it has not run"
    if evidence.service:
        return "replicas of a service are not judged"
    if evidence.run_s < JUDGED_MIN_S:
        ran = format_duration(evidence.run_s)
        return f"it ran {ran} at a time; less than {format_duration(JUDGED_MIN_S)} says too little"
    return ""


def _evidence(
    job: Job,
    attempt: Attempt,
    use: AttemptUse | None,
    held: UsageSum,
    summary: UsageSummary | None,
    nodes: dict[NodeId, Node],
    now_s: float,
) -> JobEvidence:
    role, run_s = job.spec.role, _run_s(attempt, now_s)
    grants = attempt.full_allocation.grants
    models = {
        device.model
        for grant in grants
        if grant.node_id in nodes
        for device in nodes[grant.node_id].devices
        if device.index in grant.devices
    }
    return JobEvidence(
        job_id=job.id,
        run_s=run_s,
        held_s=(now_s if attempt.ended_s is None else attempt.ended_s) - attempt.placed_s,
        gpus=role.gpus,
        nodes=tuple(_node(grant.node_id, grant.devices, use, nodes.get(grant.node_id), run_s) for grant in grants),
        roles=len(role.each),
        service=job.spec.service is not None,
        cpus=role.cpus,
        memory_bytes=role.memory_bytes,
        tasks_per_node=max((grant.tasks for grant in grants), default=1),
        tasks_fixed=role.tasks_per_node is not None,
        time_limit_s=job.spec.time_limit_s,
        succeeded=job.state is JobState.SUCCEEDED,
        by_state={state: amount / 1e6 for state, amount in held.by_state.items()},
        saves=_saves(summary, _mtbf_s(job, len(grants), nodes.values(), run_s, now_s)),
        counter="" if use is None else use.counter,
        mig=_mig_slices(models, nodes.values()),
        lesser_kinds=_lesser_kinds(models, nodes.values()),
    )


def _node(
    node_id: NodeId, devices: Sequence[int], use: AttemptUse | None, node: Node | None, run_s: float
) -> NodeEvidence:
    """What one node shows. Values that cover too little of the run are unknown."""
    enough_ms = OBSERVED_MIN * run_s * 1000
    found = {one.index: one for one in (use.devices if use is not None else ()) if one.node == node_id}
    own = next((one for one in (use.nodes if use is not None else ()) if one.node == node_id), None)
    if own is not None and own.observed_ms < enough_ms:
        own = None
    return NodeEvidence(
        devices=tuple(
            DeviceEvidence()
            if (one := found.get(index)) is None or one.observed_ms < enough_ms
            else DeviceEvidence(
                mean=one.mean,
                peak=one.peak,
                memory_peak_bytes=one.memory_peak_bytes,
                memory_bytes=one.memory_bytes,
            )
            for index in devices
        ),
        busy_cpus=None if own is None or not run_s else own.cpu_s / run_s,
        memory_peak_bytes=None if own is None else own.memory_peak_bytes,
        cpus=0 if node is None else node.cpus,
        memory_bytes=0 if node is None else node.memory_bytes,
        gpus=0 if node is None else len(node.devices),
    )


def _mtbf_s(job: Job, gang: int, nodes: Iterable[Node], run_s: float, now_s: float) -> float:
    """Mean time between failures of the gang, as its supervisors were given it."""
    fleet = list(nodes)
    own = node_mtbf_s(sum(node.failure_count for node in fleet), sum(max(0.0, now_s - node.joined_s) for node in fleet))
    return gang_mtbf_s(own, nodes=gang, losses=job.failure_count, exposure_s=run_s)


def _saves(summary: UsageSummary | None, mtbf_s: float) -> SaveEvidence | None:
    """The checkpoints of a job that reports steps; None for any other, of which nothing is known."""
    if summary is None or summary.unread_bytes:
        return None
    spans = [
        one.last_step_s - one.first_step_s
        for one in summary.attempts
        if one.first_step_s is not None and one.last_step_s is not None
    ]
    if not spans:
        return None
    trained_s, steps = sum(spans), summary.steps_kept + summary.steps_lost
    saved = summary.checkpoints
    if not saved:
        return SaveEvidence(count=0, trained_s=trained_s)
    count = len(saved)
    stall_s, write_s = (sum(one.stall_s for one in saved) / count, sum(one.write_s for one in saved) / count)
    return SaveEvidence(
        count=count,
        interval_s=max(0.0, trained_s / count - stall_s),
        wanted_s=checkpoint_interval_s(stall_s=stall_s, write_s=write_s, mtbf_s=mtbf_s),
        stall_s=stall_s,
        step_s=trained_s / steps if steps else 0.0,
        trained_s=trained_s,
    )


def _mig_slices(models: set[str], nodes: Iterable[Node]) -> tuple[tuple[str, MigProfile], ...]:
    """The slices that the fleet makes of GPUs of this model now, with its name in `--gpus`."""
    found: dict[tuple[str, str], MigProfile] = {}
    for device in (device for node in nodes for device in node.devices):
        name = _request_name(device.model)
        if device.model in models and device.mig is not None and device.mig.grantable and name:
            found.update({(name, one.name): one for one in device.mig.profiles if not one.has_media})
    return tuple((name, profile) for (name, _), profile in sorted(found.items()))


def _lesser_kinds(models: set[str], nodes: Iterable[Node]) -> tuple[GpuKind, ...]:
    """Models of the fleet with a lower peak rate than the one used, the lowest first; empty if a rate is unknown."""
    memory = {device.model: device.memory_bytes for node in nodes for device in node.devices if not device.divided}
    peak = device_speed_facts(sorted({*memory, *models}), None).peak
    own = max((peak[model] for model in models if model in peak), default=0.0)
    lesser = sorted((rate, model) for model, rate in peak.items() if rate < own and model in memory)
    return tuple(
        GpuKind(model=name, memory_bytes=memory[model]) for _, model in lesser if (name := _request_name(model))
    )


def _request_name(model: str) -> str:
    """How `--gpus` names a model: the shortest word for it that the scheduler matches with it; "" without one."""
    try:
        gpu = find_gpu(model).gpu
        words = sorted((*gpu.aliases, gpu.name), key=lambda word: (len(word), word))
    except BadRequest:
        words = [model.lower().replace(" ", "-")]
    for word in words:
        try:
            known = parse_gpus(f"{word}:1").model
        except BadRequest:
            continue
        if known is not None and model_fits(model, 0, known, 0):
            return word
    return ""


def _measured(evidence: JobEvidence, use: AttemptUse) -> MeasuredUseView:
    devices = sorted(use.devices, key=lambda one: (one.mean or 0.0, one.node, one.index))
    means = evidence.means
    return MeasuredUseView(
        epoch=use.epoch,
        run_s=evidence.run_s,
        counter=use.counter,
        mean=sum(means) / len(means) if means else None,
        device_count=len(devices),
        devices=[
            MeasuredDeviceView(
                node=one.node,
                index=one.index,
                mean=one.mean,
                peak=one.peak,
                memory_peak_bytes=one.memory_peak_bytes,
                memory_bytes=one.memory_bytes,
            )
            for one in devices[:DEVICES_MAX]
        ],
        nodes=[
            MeasuredNodeView(
                node=one.node,
                cpu_s=one.cpu_s,
                busy_cpus=one.cpu_s / evidence.run_s if evidence.run_s else None,
                memory_peak_bytes=one.memory_peak_bytes,
            )
            for one in use.nodes[:DEVICES_MAX]
        ],
    )

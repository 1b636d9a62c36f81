"""Converts jobs and their attempts to the views that the API returns. Pure; live readings are passed in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.api.views.tracker_links import may_have_links, tracker_links
from phalanx.core.accounting.usage_alarms import Spell, WasteSighting
from phalanx.core.ids import Generation, NodeId
from phalanx.core.lifecycle.transitions import HANGS_BEFORE_STOP, NO_PROGRESS_BUDGET
from phalanx.core.state.plan import WaitReason
from phalanx.core.work.allocation import Allocation, NodeGrant
from phalanx.core.work.attempt import Attempt, EndCause
from phalanx.core.work.gpus import ShareRequest
from phalanx.core.work.job import Job, PublishedCheckpoint
from phalanx.core.work.job_file.data_sources import mount_notes
from phalanx.core.work.job_file.trackers import tracked_job
from phalanx.core.work.job_file.web_ports import web_path
from phalanx.core.work.share import gpus_of
from phalanx.core.work.states import AttemptState, JobState, WaitReasonCode
from phalanx.core.work.topology_constraint import constraint_texts
from phalanx.wire.api.jobs import (
    AttemptView,
    CheckpointView,
    ExitView,
    GrantedSliceView,
    GrantView,
    JobLinkView,
    JobView,
    JobWasteView,
    Progress,
    RoleView,
    StagingView,
    WebPortView,
)
from phalanx.wire.api.output import EndEvent, StateEvent
from phalanx.wire.supervisor import StagingSample


def staging_views(staging: Mapping[NodeId, StagingSample]) -> list[StagingView]:
    """Return how far each node is, by name."""
    return [_staging(name, one) for name, one in sorted(staging.items())]


def _staging(node: NodeId, sample: StagingSample) -> StagingView:
    rate = sample.rate_bytes_per_s
    left = max(0, sample.total_bytes - sample.done_bytes)
    return StagingView(
        node=node,
        name=sample.name,
        done_bytes=sample.done_bytes,
        total_bytes=sample.total_bytes,
        bytes_per_s=rate,
        eta_s=left / rate if rate > 0 else None,
        from_peers_bytes=sample.from_peers_bytes,
    )


def job_view(
    job: Job,
    *,
    attempt: Attempt | None,
    waiting: WaitReason | None,
    progress: Progress | None,
    utilization: float | None,
    show_all: bool,
    output_root: str,
    virtual: bool = False,
    waste: Spell[WasteSighting] | None = None,
    staging: Mapping[NodeId, StagingSample] | None = None,
) -> JobView:
    """Return the view of a job with its newest attempt.

    Args:
        job: the record.
        attempt: its newest attempt; None before the first.
        waiting: why it waits, according to the newest cycle; newer than the record's own reason.
        progress: of its training.
        utilization: of its devices.
        show_all: include command, folders and labels, which only its owner and project may see.
        output_root: the folder with the outputs of all jobs.
        virtual: its devices are virtual.
        waste: its alarm; None if it wastes no GPUs.
        staging: of its nodes that copy data before its start.
    """
    spec = job.spec
    live = attempt is not None and attempt.holds_allocation
    reason, detail = _why_waiting(job, waiting, whole=show_all)
    return JobView(
        id=job.id,
        seq=job.seq,
        name=spec.name,
        state=job.state,
        user=job.user,
        project=job.project,
        queue=job.queue,
        submit_s=job.submit_s,
        reason=reason,
        detail=detail,
        priority=spec.priority,
        started_s=job.started_s,
        ended_s=job.ended_s,
        exit_code=job.exit_code,
        gpus=spec.role.gpus_text,
        gpu_count=gpus_of(spec.role.milli if attempt is None else attempt.allocation.milli),
        shape=_shape(job, attempt),
        nodes=[] if attempt is None else _nodes(attempt.allocation),
        epoch=job.epoch,
        generation=attempt.generation if attempt else Generation(0),
        attempts=job.epoch,
        restarts=max(0, job.epoch - 1) + (attempt.generation if attempt else 0),
        staging=staging_views(staging or {}) if show_all else [],
        attempt_state=attempt.state if attempt is not None and live else None,
        resume_step=attempt.resume_from.step if attempt is not None and attempt.resume_from is not None else None,
        progress=progress,
        utilization=utilization if live else None,
        command=spec.command_line if show_all else "",
        workdir=spec.workdir if show_all else "",
        output_dir=f"{job.spec.outputs or output_root}/{job.folder}" if show_all else "",
        held=job.held,
        parked_s=job.parked_s,
        time_limit_s=spec.time_limit_s,
        idle_s=spec.idle_s,
        terminal=spec.terminal,
        checkpoints=[_checkpoint(resume, whole=show_all) for resume in job.checkpoints],
        cancelled_by=job.cancelled_by,
        waste=None if waste is None or not live else _waste(waste),
        virtual=virtual,
        labels=dict(spec.labels) if show_all else {},
        web_ports=[WebPortView(port=one.port, name=one.name, path=web_path(job.id, one.port)) for one in spec.ports]
        if show_all
        else [],
        links=_links(job) if show_all else [],
        notify=str(spec.notify or "") if show_all else "",
        on_end=str(spec.on_end or "") if show_all else "",
        unmet=[str(one) for one in job.unmet_dependencies] if job.state is JobState.PENDING else [],
        begin_s=spec.begin_s,
        terms=[*constraint_texts(spec), *(mount_notes(spec.data, spec.data_mode) if show_all else [])],
        plan=spec.plan,
        resources=dict(spec.role.extras),
        licences=dict(spec.role.licences),
        roles=_roles(job, attempt),
        budgets=used_budgets(job),
        paces=_paces(job),
        **_place_in_array(job),
        **_place_in_service(job, attempt),
    )


def _waste(alarm: Spell[WasteSighting]) -> JobWasteView:
    return JobWasteView(
        kind=alarm.newest.kind.value,
        gpus=gpus_of(alarm.newest.milli),
        since_s=alarm.since_ms / 1000,
        gpu_hours=alarm.gpu_hours,
    )


def fresh_job_view(job: Job, *, output_root: str) -> JobView:
    """Return the owner's view of a job that was just submitted and has no attempt yet."""
    return job_view(
        job, attempt=None, waiting=None, progress=None, utilization=None, show_all=True, output_root=output_root
    )


def _paces(job: Job) -> list[str]:
    """The newest pace on each model with each number of ranks."""
    newest = {(one.model, one.ranks): one for one in job.paces}
    return [
        f"{one.pace.step_s:.3g} s a step on {one.model}, {one.ranks} rank{'' if one.ranks == 1 else 's'}"
        for one in newest.values()
    ]


def _place_in_array(job: Job) -> dict[str, Any]:
    place = job.array
    if place is None:
        return {}
    return {
        "array_id": place.array_id,
        "array_index": place.index,
        "array_size": place.size,
        "array_max": place.running_max,
    }


def _place_in_service(job: Job, attempt: Attempt | None) -> dict[str, Any]:
    if job.replica is None:
        return {}
    serves = attempt is not None and attempt.holds_allocation
    return {
        "service": job.replica.service,
        "revision": job.replica.revision,
        "port": attempt.service_port if attempt is not None and serves else 0,
        "ready": attempt is not None and attempt.serving,
        "sleep": "" if attempt is None or attempt.sleep is None else attempt.sleep.phase.value,
        "sleep_why": "" if attempt is None or attempt.sleep is None else attempt.sleep.why,
    }


def used_budgets(job: Job) -> list[str]:
    """Describe how much of each restart budget the job has used."""
    spent = {
        (
            f"{job.charged_restarts} of {NO_PROGRESS_BUDGET} restarts without progress"
            if job.replica is None
            else f"{job.charged_restarts} restarts since it last served for a minute"
        ): job.charged_restarts,
        f"{job.hang_restarts} of {HANGS_BEFORE_STOP} restarts after a hang": job.hang_restarts,
        f"{job.user_retries} of {job.spec.retry} retries": job.user_retries,
        f"stopped {job.preemptions} time{'s' * (job.preemptions != 1)} for others": job.preemptions,
    }
    return [words for words, count in spent.items() if count]


def _links(job: Job) -> list[JobLinkView]:
    """The links to its runs at trackers."""
    if job.replica is not None or not may_have_links(job.spec.env):
        return []
    tracked = tracked_job(job.spec, job.id, job.folder, None if job.array is None else job.array.array_id)
    return tracker_links(tracked, dict(job.spec.env))


def _why_waiting(job: Job, waiting: WaitReason | None, *, whole: bool) -> tuple[str, str]:
    """Return why it waits, as a reason and a sentence; for an ended job only the sentence, with the cause of its end."""
    if job.state is not JobState.PENDING:
        return "", job.detail if job.state.terminal and whole else ""
    if waiting is not None and (not job.held or waiting.reason is WaitReasonCode.NEVER):
        # All callers may see the head's own text. The cause of the last attempt's end may quote the job's program.
        ended = whole and waiting.reason is WaitReasonCode.BACKOFF and job.detail
        return (
            waiting.reason.value,
            f"{waiting.detail}; its last attempt ended: {job.detail}" if ended else waiting.detail,
        )
    return job.reason.value, job.detail if whole else ""  # after a restart it has the cause of the last attempt's end


def _shape(job: Job, attempt: Attempt | None) -> str:
    request = job.spec.role.gpus
    if request.alternatives:
        if attempt is None:
            return ""  # which one holds is not decided
        grants = attempt.allocation.grants
        alike = [one for one in request.choices if (one.share is None) == (grants[0].share is None)]
        share = grants[0].share
        if len(alike) > 1 and share is not None:  # several are parts: say what is held
            part = (
                ShareRequest(profile=share.slices[0].profile, count=len(share.slices))
                if share.slices
                else ShareRequest(milli=share.milli)
            )
            return f"{len(grants)} x {part}"
        request = alike[0] if alike else request
    if request.share is not None:
        return f"{request.nodes} x {request.share}"
    if attempt is not None:
        each = [grant.visible_devices for grant in attempt.allocation.grants]
        return f"{len(each)} x {each[0]}" if len(set(each)) == 1 else " + ".join(map(str, each))
    shapes = [f"{one.nodes or 1} x {one.per_node or one.total}" for one in (role.gpus for role in job.spec.role.each)]
    return " + ".join(shapes) if len(shapes) > 1 or request.nodes is not None else ""


def _roles(job: Job, attempt: Attempt | None) -> list[RoleView]:
    """Return the roles of a gang with several, in their order; none of any other job."""
    grants = () if attempt is None else attempt.allocation.grants
    return [
        RoleView(
            gpus=str(role.gpus),
            cpus=role.cpus,
            memory_bytes=role.memory_bytes,
            nodes=[grant.node_id for grant in grants if grant.role == number],
        )
        for number, role in enumerate(job.spec.role.each if job.spec.role.others else ())
    ]


def _nodes(allocation: Allocation) -> list[NodeId]:
    return [grant.node_id for grant in allocation.grants]


def _device_counts(allocation: Allocation) -> list[int]:
    """Return how many devices it holds on each node; nothing if it holds MIG slices, which numbers do not describe."""
    if any(grant.share is not None and grant.share.slices for grant in allocation.grants):
        return []
    return [len(grant.devices) for grant in allocation.grants]


def _checkpoint(resume: PublishedCheckpoint, *, whole: bool) -> CheckpointView:
    return CheckpointView(
        epoch=resume.epoch,
        step=resume.step,
        path=resume.path if whole else "",
        bytes=resume.bytes,
        saved_s=resume.saved_s,
    )


def attempt_view(attempt: Attempt, *, show_all: bool = True) -> AttemptView:
    """Return the view of an attempt; without `show_all` it leaves out program output and paths."""
    resume = attempt.resume_from
    return AttemptView(
        job_id=attempt.job_id,
        epoch=attempt.epoch,
        state=attempt.state,
        generation=attempt.generation,
        placed_s=attempt.placed_s,
        cause=_cause(attempt),
        causes=list(attempt.causes),
        running_s=attempt.running_s,
        first_running_s=attempt.first_running_s,
        ended_s=attempt.ended_s,
        exit_code=attempt.exit_code,
        why=attempt.why if show_all else "",
        resume_step=None if resume is None else resume.step,
        resume_epoch=None if resume is None else resume.epoch,
        grants=[
            GrantView(
                node_id=g.node_id,
                node_rank=g.node_rank,
                devices=list(g.devices),
                first_rank=g.first_rank,
                tasks=g.tasks,
                slices=_slices(g),
            )
            for g in attempt.allocation.grants
        ],
        exits=[
            ExitView(
                rank=e.rank,
                node_id=e.node_id,
                code=e.code,
                signal=e.signal,
                by_us=e.requested_by_phalanx,
                at_s=e.ended_s,
                note=e.note if show_all else "",
            )
            for e in attempt.exits
        ],
    )


def _cause(attempt: Attempt) -> EndCause | None:
    if attempt.state is not AttemptState.ENDED:
        return None
    return attempt.causes[-1] if attempt.causes else attempt.stop_cause


def state_event(job: Job, attempt: Attempt | None, waiting: WaitReason | None, *, show_all: bool = True) -> StateEvent:
    """Return the job's state as an event."""
    reason, detail = _why_waiting(job, waiting, whole=show_all)
    live = attempt is not None and attempt.holds_allocation
    return StateEvent(
        job_id=job.id,
        state=job.state,
        reason=reason,
        detail=detail,
        epoch=job.epoch,
        generation=attempt.generation if attempt is not None else Generation(0),
        attempt_state=attempt.state if attempt is not None and live else None,
        nodes=_nodes(attempt.allocation) if attempt is not None and live else [],
        devices=_device_counts(attempt.allocation) if attempt is not None and live else [],
    )


def end_event(job: Job) -> EndEvent:
    """Return the job's end as an event."""
    return EndEvent(job_id=job.id, state=job.state, exit_code=job.exit_code)


def _slices(grant: NodeGrant) -> list[GrantedSliceView]:
    return [
        GrantedSliceView(device=one.device, profile=one.profile, start=one.start, memory_slices=one.memory_slices)
        for one in (() if grant.share is None else grant.share.slices)
    ]

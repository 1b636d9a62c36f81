"""The head's job history as a trace: ended jobs with their run times, and the current nodes and queues."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from math import ceil
from typing import TYPE_CHECKING, Final

from phalanx.core.errors import NotFound
from phalanx.core.units import format_duration
from phalanx.core.work.gpus import parse_gpus
from phalanx.core.work.queue import Queue
from phalanx.core.work.share import MILLI_PER_DEVICE
from phalanx.core.work.states import TERMINAL_STATES
from phalanx.simulator.fleet import TraceNode
from phalanx.simulator.trace import Trace, TraceJob, normalize_model
from phalanx.wire.api.jobs import JobView

if TYPE_CHECKING:
    from phalanx.client import Client

_EMPTY_PAGES_MAX: Final = 3  # consecutive pages without a recent job; older pages are unlikely to contain one


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadHistory:
    """The history. `notes` describes omitted jobs."""

    trace: Trace
    nodes: tuple[TraceNode, ...]
    queues: tuple[Queue, ...]
    notes: tuple[str, ...] = ()


def read_head_history(head: Client, since_s: float, *, jobs_max: int, page: int) -> HeadHistory:
    """Fetch GPU jobs that ran and ended within the last `since_s` seconds, at most the newest `jobs_max`; and all nodes and queues.

    Raises:
        NotFound: there is no such job.
    """
    from_s = time.time() - since_s
    found: list[TraceJob] = []
    notes: list[str] = []
    without = 0
    before: int | None = None
    empty_pages = 0
    while len(found) < jobs_max and empty_pages < _EMPTY_PAGES_MAX:
        seen_before = len(found) + without
        reply = head.jobs(state=sorted(state.value for state in TERMINAL_STATES), before_seq=before, limit=page)
        for view in reply.jobs:
            run_s = _run_s(head, view)
            if run_s is None or view.ended_s is None or view.ended_s < from_s:
                continue
            if not view.gpu_count:
                without += 1
            elif len(found) < jobs_max:
                found.append(_trace_job(view, run_s))
        empty_pages = 0 if len(found) + without > seen_before else empty_pages + 1
        if reply.next is None:
            break
        before = reply.next
    if len(found) >= jobs_max:
        notes.append(f"only the newest {jobs_max:,} jobs are replayed")
    if without:
        notes.append(f"skipped {without:,} jobs without GPUs")
    if not found:
        raise NotFound(
            f"no job with GPUs ended in the last {format_duration(since_s)}", hint="read jobs from a file with --trace"
        )
    found.sort(key=lambda job: (job.submit_s, job.line))
    nodes = tuple(
        TraceNode(name=node.id, gpus=len(node.devices), model=normalize_model(node.devices[0].model))
        for node in head.nodes()
        if node.devices
    )
    names = {field.name for field in fields(Queue)} - {"open"}
    queues = tuple(Queue(**{name: getattr(queue, name) for name in names}) for queue in head.queues())
    return HeadHistory(trace=Trace(jobs=tuple(found)), nodes=nodes, queues=queues, notes=tuple(notes))


def _trace_job(view: JobView, run_s: float) -> TraceJob:
    choices = [one for role in view.gpus.split(" + ") if not role.endswith("x0") for one in parse_gpus(role).choices]
    # The run time was measured with the number of GPUs held: of alternatives, only those with this number are comparable.
    held = [one for one in choices if one.milli == view.gpu_count * MILLI_PER_DEVICE] or choices
    models = tuple(dict.fromkeys(normalize_model(model) for one in held for model, _ in one.kinds if model is not None))
    return TraceJob(
        id=view.id,
        submit_s=view.submit_s,
        duration_s=run_s,
        gpus=ceil(view.gpu_count),  # the replay counts whole devices: a share as one
        models=models,
        virtual_cluster=view.queue,
        limit_s=view.time_limit_s,
        line=view.seq,
    )


def _run_s(head: Client, view: JobView) -> float | None:
    """Return the run time without waits between attempts; None if the job never ran."""
    if view.started_s is None or view.ended_s is None:
        return None
    if view.attempts <= 1:
        return view.ended_s - view.started_s
    attempts = head.job(view.id).attempts
    return sum(
        (one.ended_s or view.ended_s) - one.first_running_s for one in attempts if one.first_running_s is not None
    )

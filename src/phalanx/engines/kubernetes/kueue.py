"""Kueue's part of an attempt: one suspended Job, which Kueue admits, and suspends again when it preempts it. Pure.

Kueue documents the objects and fields that are used here: the label of the queue, `spec.suspend`, and the conditions of a Workload.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.core.ids import Epoch, JobId
from phalanx.core.state.events import Event
from phalanx.core.state.reports import AttemptQueued, AttemptReclaimed, AttemptWithdrawn
from phalanx.core.work.attempt import Attempt, EndCause, MemberState
from phalanx.core.work.job import Job
from phalanx.core.work.states import AttemptState
from phalanx.engines.kubernetes import options as names
from phalanx.engines.kubernetes import render
from phalanx.engines.kubernetes.parse import INDEX_ANNOTATION, PodState, condition, one_line
from phalanx.engines.kubernetes.pod_template import CONTAINER
from phalanx.engines.kubernetes.render import EPOCH_LABEL, HEAD_LABEL, JOB_LABEL, RANK_LABEL, Manifest, PodSettings
from phalanx.wire.seat import SEAT_RANK_VARIABLE

GROUP: Final = "kueue.x-k8s.io"
QUEUE_LABEL: Final = f"{GROUP}/queue-name"
NO_WORKLOAD_S: Final = 10.0  # after its Job, Kueue makes a Workload within milliseconds
REPORT_EVERY_S: Final = 5.0  # a text about the same wait, such as another position
REASON_S: Final = 0.4  # for which the reason of a stop may arrive after the stop: they are of two watches
STOP_DELAY_S: Final = 1  # of SIGTERM: the head's own order to save comes first, and says that the attempt is preempted
_BEFORE_START: Final = (AttemptState.PLACED, AttemptState.STOPPING)


@dataclass(frozen=True, slots=True, kw_only=True)
class KueueJob:
    """A Job of ours. `failed`: why it failed as a whole; empty otherwise."""

    name: str
    namespace: str
    uid: str
    owner_tag: str
    job_id: JobId
    epoch: Epoch
    suspended: bool
    deleting: bool
    failed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KueueWorkload:
    """What Kueue says of a Job. `waits`: why it is not admitted; `evicted`: why it was stopped, also if it is queued again. Both may be empty."""

    job_uid: str
    waits: str
    evicted: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KueueTrack:
    """One attempt in Kueue. Times are monotonic seconds.

    Attributes:
        created_s: when its Job was created, or found.
        reported, reported_s: the last reason that was reported for its wait, and when.
        admitted: Kueue has started it.
        stopped_s: when its Job was first seen suspended again without a reason; 0 before.
        settled: its end was reported.
    """

    queue: str
    created_s: float
    reported: str = ""
    reported_s: float = 0.0
    admitted: bool = False
    stopped_s: float = 0.0
    settled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KueueVerdict:
    """The result of one look.

    Attributes:
        track: the new state.
        events: for the controller.
        waits: it has no pods yet.
        admitted_now: its pods are created from now on.
        withdrawn: delete the Job and its pods.
    """

    track: KueueTrack
    events: tuple[Event, ...] = ()
    waits: bool = False
    admitted_now: bool = False
    withdrawn: bool = False


def parse_queues(text: str) -> dict[str, str]:
    """Return Kueue's queue by queue of Phalanx, from `NAME` or `QUEUE=NAME,...`; the key "" stands for all that are not named.

    Raises:
        BadRequest: it is neither.
    """
    found: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        ours, _, theirs = part.strip().rpartition("=")
        if not theirs or ours in found or not theirs.replace("-", "").replace(".", "").isalnum():
            raise BadRequest(
                f"--{names.QUEUE} {text}: not a queue of Kueue, nor QUEUE=NAME,... for queues of Phalanx",
                hint=f"--{names.QUEUE} user-queue",
            )
        found[ours] = theirs
    return found


def queue_of(queues: Mapping[str, str], job: Job) -> str:
    """Return Kueue's queue for a job; empty if it runs as plain pods."""
    return queues.get(str(job.queue), queues.get("", ""))


def uneven_parts(attempt: Attempt) -> str:
    """Return why one Job cannot hold the parts of this attempt; empty if it can."""
    parts = {(len(grant.devices), grant.cpus, grant.memory_bytes) for grant in attempt.allocation.grants}
    if len(parts) == 1:
        return ""
    gpus = " + ".join(str(len(grant.devices)) for grant in attempt.allocation.grants)
    return f"all pods of a Job in Kueue are equal, but its nodes have {gpus} GPUs and different CPUs or memory: ask for equal nodes, as in 2x8"


def attempt_job(settings: PodSettings, owner: Manifest, job: Job, attempt: Attempt, queue: str) -> Manifest:
    """Return the suspended Job of an attempt. Its pods have an index, which is their node rank; Kueue and the scheduler choose their nodes."""
    pod = render.seat_pod(settings, owner, job, attempt, attempt.allocation.grants[0], pinned=False)
    about = {
        key: value for key, value in pod["metadata"].items() if key not in {"name", "namespace", "ownerReferences"}
    }
    about["labels"] = {key: value for key, value in about["labels"].items() if key != RANK_LABEL}
    container = next(one for one in pod["spec"]["containers"] if one["name"] == CONTAINER)
    rank = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX_ANNOTATION}']"}}
    container["env"] = [one for one in container["env"] if one["name"] != "PHALANX_NODE_ID"]
    container["env"].append({"name": SEAT_RANK_VARIABLE, "valueFrom": rank})
    delay = {"exec": {"command": ["python3", "-I", "-S", "-c", f"import time; time.sleep({STOP_DELAY_S})"]}}
    container["lifecycle"] = {"preStop": delay, **container.get("lifecycle", {})}
    asked = {key: value for key, value in about["labels"].items() if key.startswith(f"{GROUP}/")}
    nodes = len(attempt.allocation.grants)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": render.attempt_name(settings, job.id, attempt.epoch),
            "namespace": settings.namespace,
            "labels": {
                **{key: value for key, value in about["labels"].items() if key in _OWN_LABELS},
                **asked,
                QUEUE_LABEL: queue,
            },
            "annotations": copy.deepcopy(about.get("annotations", {})),
            "ownerReferences": [owner],
        },
        "spec": {
            "suspend": True,
            "parallelism": nodes,
            "completions": nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,  # a failed pod ends the gang; the next attempt is another Job
            "template": {"metadata": about, "spec": pod["spec"]},
        },
    }


_OWN_LABELS: Final = frozenset(["app.kubernetes.io/name", HEAD_LABEL, JOB_LABEL, EPOCH_LABEL])


def parse_job(item: Mapping[str, Any]) -> KueueJob:
    """Read a Job."""
    about, spec, status = item.get("metadata") or {}, item.get("spec") or {}, item.get("status") or {}
    labels = about.get("labels") or {}
    epoch = str(labels.get(EPOCH_LABEL) or "")
    failed = condition(status, "Failed")
    return KueueJob(
        name=str(about.get("name") or ""),
        namespace=str(about.get("namespace") or ""),
        uid=str(about.get("uid") or ""),
        owner_tag=str(labels.get(HEAD_LABEL) or ""),
        job_id=JobId(str(labels.get(JOB_LABEL) or "")),
        epoch=Epoch(int(epoch) if epoch.isdecimal() else 0),
        suspended=spec.get("suspend") is True,
        deleting=bool(about.get("deletionTimestamp")),
        failed=one_line(failed.get("message") or failed.get("reason")) if failed.get("status") == "True" else "",
    )


def parse_workload(item: Mapping[str, Any]) -> KueueWorkload:
    """Read a Workload."""
    about, spec, status = item.get("metadata") or {}, item.get("spec") or {}, item.get("status") or {}
    owners = [one for one in about.get("ownerReferences") or () if one.get("kind") == "Job"]
    evicted = condition(status, "Evicted")
    return KueueWorkload(
        job_uid=str(owners[0].get("uid") or "") if owners else "",
        waits=_why_waits(spec, status),
        evicted=_reason_of(evicted) if evicted.get("status") == "True" else "",
    )


def parse_positions(summary: Mapping[str, Any]) -> dict[str, int]:
    """Return how many Workloads are before each Job in its ClusterQueue, by the Job's uid, from a PendingWorkloadsSummary."""
    found: dict[str, int] = {}
    for item in summary.get("items") or ():
        place = item.get("positionInClusterQueue")
        for owner in (item.get("metadata") or {}).get("ownerReferences") or ():
            if isinstance(place, int) and owner.get("uid"):
                found[str(owner["uid"])] = place
    return found


def pods_by_slot(slots: Sequence[str], pods: Iterable[PodState]) -> dict[str, PodState]:
    """Return the pod of each node rank under the name that a bare pod of that rank has; of two, the one that is not being deleted."""
    found: dict[str, PodState] = {}
    for pod in pods:
        if pod.node_rank < len(slots):
            slot = slots[pod.node_rank]
            if slot not in found or found[slot].deleting:
                found[slot] = pod
    return found


def evaluate(
    track: KueueTrack,
    attempt: Attempt,
    job: KueueJob | None,
    workload: KueueWorkload | None,
    now_s: float,
    *,
    position: int | None = None,
    reads_workloads: bool,
) -> KueueVerdict:
    """Evaluate the Job of an attempt that has not ended.

    Args:
        track: the state before.
        attempt: whose Job it is.
        job: the Job; None if it is gone.
        workload: Kueue's own object for it; None if it cannot be read, or does not exist.
        now_s: monotonic seconds.
        position: Workloads before it in its queue; None if unknown.
        reads_workloads: Workloads are followed.
    """
    if track.settled:
        return KueueVerdict(track=track)
    waiting = attempt.state in _BEFORE_START and all(one.state is MemberState.REQUESTED for one in attempt.members)
    if job is None or job.deleting:
        if not waiting:
            return KueueVerdict(track=track)  # its pods tell how they ended
        return _withdraw(
            track,
            attempt,
            f"its Job was deleted in Kubernetes while it waited for the queue {track.queue}",
            EndCause.CONTENDED,
        )
    if not job.suspended:
        if track.admitted:
            return KueueVerdict(track=track)
        admitted = AttemptQueued(job_id=attempt.job_id, epoch=attempt.epoch, why="")
        track = replace(track, admitted=True)
        return KueueVerdict(
            track=track, events=(admitted,) if attempt.state is AttemptState.PLACED else (), admitted_now=True
        )
    if track.admitted or not waiting:
        reason = workload.evicted if workload is not None else ""
        stopped_s = track.stopped_s or now_s
        if not reason and reads_workloads and now_s - stopped_s < REASON_S:
            return KueueVerdict(track=replace(track, stopped_s=stopped_s))
        why = f"Kueue stopped it in the queue {track.queue}: {reason or 'its Job was suspended'}"
        if attempt.state is AttemptState.PLACED or waiting:
            return _withdraw(track, attempt, why, EndCause.PREEMPTED)
        back = AttemptReclaimed(job_id=attempt.job_id, epoch=attempt.epoch, why=why)
        return KueueVerdict(track=replace(track, settled=True), events=(back,))
    if attempt.state is AttemptState.STOPPING:
        return _withdraw(
            track, attempt, f"it left the queue {track.queue} of Kueue", attempt.stop_cause or EndCause.CONTENDED
        )
    text = _describe_wait(track, workload, now_s, position, reads_workloads=reads_workloads)
    if text == track.reported or (track.reported and now_s - track.reported_s < REPORT_EVERY_S):
        return KueueVerdict(track=track, waits=True)
    waits = AttemptQueued(job_id=attempt.job_id, epoch=attempt.epoch, why=text)
    return KueueVerdict(track=replace(track, reported=text, reported_s=now_s), events=(waits,), waits=True)


def _withdraw(track: KueueTrack, attempt: Attempt, why: str, cause: EndCause) -> KueueVerdict:
    nodes = tuple(grant.node_id for grant in attempt.allocation.grants)
    event = AttemptWithdrawn(job_id=attempt.job_id, epoch=attempt.epoch, why=why, nodes=nodes, cause=cause)
    return KueueVerdict(track=replace(track, settled=True), events=(event,), withdrawn=True)


def _describe_wait(
    track: KueueTrack, workload: KueueWorkload | None, now_s: float, position: int | None, *, reads_workloads: bool
) -> str:
    before = "" if position is None else f", {position} before it" if position else ", first in line"
    text = f"it waits in the queue {track.queue} of Kueue{before}"
    if workload is not None:
        return f"{text}: {workload.waits}" if workload.waits else text
    if reads_workloads and now_s - track.created_s >= NO_WORKLOAD_S:
        return f"{text}: Kueue has made no Workload for it; check that Kueue runs, and manages Jobs in this namespace"
    return text


def _why_waits(spec: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    if spec.get("active") is False:
        return "it was deactivated in Kueue"
    finished = condition(status, "Finished")
    if finished.get("status") == "True":
        return _reason_of(finished)
    quota = condition(status, "QuotaReserved")
    if quota.get("status") != "True":
        return _reason_of(quota)
    checks = [one for one in status.get("admissionChecks") or () if one.get("state") != "Ready"]
    shown = "; ".join(
        f"{one.get('name')} is {one.get('state')}"
        + (f" ({one_line(one.get('message'))})" if one.get("message") else "")
        for one in checks
    )
    return f"it has quota, and waits for admission checks: {shown}" if shown else ""


def _reason_of(found: Mapping[str, Any]) -> str:
    reason, message = one_line(found.get("reason")), one_line(found.get("message"))
    return f"{message} ({reason})" if message and reason else message or reason

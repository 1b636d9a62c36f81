"""The Jobs of a head in Kueue: follows them and their Workloads, creates and deletes them. `kueue` holds the decisions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.errors import PhalanxError
from phalanx.core.ids import Epoch, JobId
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.engines.kubernetes import kueue
from phalanx.engines.kubernetes.attempt_pods import AttemptPods
from phalanx.engines.kubernetes.cluster_view import ObjectTable
from phalanx.engines.kubernetes.kueue import KueueJob, KueueTrack, KueueVerdict, KueueWorkload
from phalanx.engines.kubernetes.parse import PodState
from phalanx.engines.kubernetes.pod_requests import create_pod
from phalanx.engines.kubernetes.render import Manifest, PodSettings
from phalanx.engines.kubernetes.rest import KubernetesApi, ResourcePath
from phalanx.engines.kubernetes.watch import ObjectWatch

VISIBILITY: Final = "visibility.kueue.x-k8s.io"
VERSION_DEFAULT: Final = "v1beta1"
POSITIONS_EVERY_S: Final = 30.0
NO_POSITIONS_S: Final = 600.0  # until it is asked again, where they cannot be read
_Key = tuple[JobId, Epoch]
_log = logging.getLogger("phalanx.engines.kubernetes")


@dataclass(slots=True, kw_only=True)
class KueueJobs:
    """The Jobs of one head.

    Args:
        api: of the cluster.
        settings: of the head.
        queues: as `kueue.parse_queues` returns.
        workload_version: of Kueue's API, whose Workloads are followed; empty: they may not be read.
        changed_hook, answered_hook: as in `ObjectTable`.
    """

    api: KubernetesApi
    settings: PodSettings
    queues: Mapping[str, str]
    workload_version: str
    changed_hook: Callable[[], None]
    answered_hook: Callable[[PhalanxError | None], None]
    _tracks: dict[_Key, KueueTrack] = field(default_factory=dict)
    _positions: dict[str, tuple[float, dict[str, int]]] = field(default_factory=dict)
    _positions_version: str = ""
    _jobs: ObjectTable[KueueJob] = field(init=False)
    _workloads: ObjectTable[KueueWorkload] = field(init=False)

    def __post_init__(self) -> None:
        self._jobs = ObjectTable(kueue.parse_job, self.changed_hook, self.answered_hook)
        # Without Workloads only the reason of a wait is missing, so a failure to list them is not one of the cluster.
        self._workloads = ObjectTable(kueue.parse_workload, self.changed_hook, lambda _: None)

    @property
    def listed(self) -> bool:
        """Whether the Jobs are known."""
        return self._jobs.listed

    def watches(self) -> list[ObjectWatch]:
        """Return what to run for as long as the head follows its cluster."""
        found = [
            ObjectWatch(api=self.api, path=self._path(), handler=self._jobs, labels=self.settings.selector),
        ]
        if self.workload_version:
            path = ResourcePath("workloads", kueue.GROUP, self.workload_version, self.settings.namespace)
            found.append(ObjectWatch(api=self.api, path=path, handler=self._workloads))
        return found

    def queue_of(self, job: Job) -> str:
        """Return Kueue's queue for a job; empty if it runs as plain pods."""
        return kueue.queue_of(self.queues, job)

    def create(self, owner: Manifest, job: Job, attempt: Attempt, queue: str) -> None:
        """Create the Job of an attempt, once.

        Raises:
            KubernetesError: the server refuses it.
            KubernetesUnreachable: it does not answer.
        """
        item = kueue.attempt_job(self.settings, owner, job, attempt, queue)
        refusal = create_pod(self.api, self._path(), item)
        if refusal is not None:
            raise refusal
        self._tracks[job.id, attempt.epoch] = KueueTrack(queue=queue, created_s=time.monotonic())

    def evaluate(self, key: _Key, attempt: Attempt, now_s: float) -> KueueVerdict | None:
        """Evaluate the Job of a live attempt; None if it has none."""
        job, track = self._job(key), self._tracks.get(key)
        if track is None:
            if job is None:
                return None
            queue = self.queues.get("", "") if len(self.queues) == 1 else "of its Job"
            track = KueueTrack(queue=queue, created_s=now_s)  # of the head before
        elif job is None and now_s - track.created_s < kueue.NO_WORKLOAD_S and not track.admitted:
            job = _CREATED  # no watch has brought it yet
        workload = None if job is None else self._workload(job.uid)
        position = None
        if job is not None and job.suspended:
            position = self._position(job.uid, track.queue, now_s)
        verdict = kueue.evaluate(
            track,
            attempt,
            job,
            workload,
            now_s,
            position=position,
            reads_workloads=bool(self.workload_version) and self._workloads.listed,
        )
        self._tracks[key] = verdict.track
        return verdict

    def waits(self, key: _Key) -> bool:
        """Whether the attempt waits for Kueue: only changes of its Job or Workload matter."""
        track = self._tracks.get(key)
        return track is not None and not track.admitted and not track.settled

    def is_stopping(self, key: _Key) -> bool:
        """Whether Kueue stopped the attempt, and the reason is still awaited."""
        track = self._tracks.get(key)
        return track is not None and track.stopped_s > 0.0 and not track.settled

    def follows(self, key: _Key) -> bool:
        """Whether the attempt has a Job."""
        return key in self._tracks or self._job(key) is not None

    def slots(self, order: AttemptPods, pods: Iterable[PodState]) -> dict[str, PodState]:
        """Return the pods of an attempt by the names of its order."""
        key = (order.attempt.job_id, order.attempt.epoch)
        return kueue.pods_by_slot(order.names, (pod for pod in pods if (pod.job_id, pod.epoch) == key))

    def strays(self, known: Iterable[_Key]) -> list[_Key]:
        """Return the attempts of Jobs of ours that are not known, and not being deleted."""
        keys = frozenset(known)
        ours = (one for one in self._jobs.current().values() if one.owner_tag == self.settings.tag and not one.deleting)
        return [(one.job_id, one.epoch) for one in ours if (one.job_id, one.epoch) not in keys]

    def delete(self, key: _Key) -> None:
        """Delete the Job of an attempt; its pods are deleted by the caller, or with it.

        Raises:
            KubernetesError: the server refuses it.
            KubernetesUnreachable: it does not answer.
        """
        job = self._job(key)
        if job is not None:
            self.api.delete(self._path(), job.name)
        self._tracks.pop(key, None)

    def delete_all(self, api: KubernetesApi) -> None:
        """Delete the Jobs of this head. Raises as `delete` does."""
        for job in self._jobs.current().values():
            if job.owner_tag == self.settings.tag:
                api.delete(self._path(), job.name)

    def _job(self, key: _Key) -> KueueJob | None:
        ours = (one for one in self._jobs.current().values() if one.owner_tag == self.settings.tag)
        return next((one for one in ours if (one.job_id, one.epoch) == key), None)

    def _workload(self, uid: str) -> KueueWorkload | None:
        return next((one for one in self._workloads.current().values() if uid and one.job_uid == uid), None)

    def _position(self, uid: str, queue: str, now_s: float) -> int | None:
        """Return how many Workloads are before this one, as far as Kueue lets us see its queue."""
        due_s, found = self._positions.get(queue, (0.0, {}))
        if now_s >= due_s:
            due_s = now_s + POSITIONS_EVERY_S
            try:
                if not self._positions_version:
                    self._positions_version = served_version(self.api, VISIBILITY)
                path = ResourcePath("localqueues", VISIBILITY, self._positions_version, self.settings.namespace)
                found = kueue.parse_positions(self.api.call("GET", path.url(queue, "pendingworkloads")))
            except PhalanxError as error:
                _log.info("the positions in the queue %s of Kueue are unknown: %s", queue, error)
                found, due_s = {}, now_s + NO_POSITIONS_S
            self._positions[queue] = (due_s, found)
        return found.get(uid)

    def _path(self) -> ResourcePath:
        return ResourcePath("jobs", "batch", namespace=self.settings.namespace)


_CREATED: Final = KueueJob(
    name="",
    namespace="",
    uid="",
    owner_tag="",
    job_id=JobId(""),
    epoch=Epoch(0),
    suspended=True,
    deleting=False,
    failed="",
)


def served_version(api: KubernetesApi, group: str) -> str:
    """Return the preferred version of an API group.

    Raises:
        KubernetesError: 404 if the cluster does not serve it.
        KubernetesUnreachable: it does not answer.
    """
    found = api.call("GET", f"/apis/{group}")
    return str((found.get("preferredVersion") or {}).get("version") or VERSION_DEFAULT)

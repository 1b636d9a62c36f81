"""The demand for free devices: which requests wait and why, and which are usual. Kept up to date job by job."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from phalanx.core.accounting.usage_states import NodeRequest
from phalanx.core.ids import JobId
from phalanx.core.work.job import Job
from phalanx.core.work.spec import JobSpec
from phalanx.core.work.states import JobState

WAITING_MAX: Final = 64  # distinct requests that are compared with free devices, those that wait longest
USUAL_MAX: Final = 64  # distinct requests that count as usual, the newest
JOBS_FOR_USUAL: Final = 20  # before so many jobs were seen, a job for one device counts as usual too
_ONE_DEVICE: Final = NodeRequest(devices=1)


class FreeDeviceDemand:
    """See the module. `wait_reason`: why a job waits, as a word; empty if it does not wait any more."""

    def __init__(self, wait_reason: Callable[[JobId], str]) -> None:
        self._wait_reason = wait_reason
        self._waiting: OrderedDict[NodeRequest, dict[JobId, None]] = OrderedDict()
        self._requests_of: dict[JobId, tuple[NodeRequest, ...]] = {}
        self._later: dict[JobId, Job] = {}  # jobs that may not begin yet
        self._usual: OrderedDict[NodeRequest, None] = OrderedDict()
        self._seen = 0

    def put(self, job: Job, now_s: float) -> None:
        """Take the newest record of a job."""
        for request in self._requests_of.pop(job.id, ()):
            jobs = self._waiting[request]
            jobs.pop(job.id, None)
            if not jobs:
                del self._waiting[request]
        self._later.pop(job.id, None)
        if job.state is not JobState.PENDING or job.held or job.unmet_dependencies or job.spec.reservation:
            return
        if job.spec.begin_s is not None and job.spec.begin_s > now_s:
            self._later[job.id] = job
            return
        requests = tuple(requests_of_job(job.spec))
        for request in requests:
            self._waiting.setdefault(request, {})[job.id] = None
        if requests:
            self._requests_of[job.id] = requests

    def placed(self, job: Job) -> None:
        """Count a job that starts among the usual ones."""
        self._seen += 1
        for request in map(_anywhere, requests_of_job(job.spec)):
            self._usual[request] = None
            self._usual.move_to_end(request)
        while len(self._usual) > USUAL_MAX:
            self._usual.popitem(last=False)

    def usual(self) -> frozenset[NodeRequest]:
        """Requests of jobs that were placed lately, and of those that wait."""
        few = (_ONE_DEVICE,) if self._seen < JOBS_FOR_USUAL else ()
        return frozenset((*self._usual, *map(_anywhere, self._waiting), *few))

    def waiting(self, now_s: float) -> dict[NodeRequest, str]:
        """The requests that wait, with the reason of the first job of each."""
        for job in [job for job in self._later.values() if (job.spec.begin_s or 0.0) <= now_s]:
            self.put(job, now_s)
        found: dict[NodeRequest, str] = {}
        for request, jobs in self._waiting.items():
            why = self._wait_reason(next(iter(jobs)))
            if why:
                found[request] = why
            if len(found) == WAITING_MAX:
                break
        return found


def _anywhere(request: NodeRequest) -> NodeRequest:
    """The request without the nodes that its job names: what is usual is a shape, which fits other nodes too."""
    return replace(request, nodes=frozenset(), excluded=frozenset())


def requests_of_job(spec: JobSpec) -> Iterator[NodeRequest]:
    """What a part of the job takes of a node, for each of its roles and alternatives; nothing for a role without GPUs."""
    for one in spec.role.each:
        for gpus in one.gpus.choices:
            if gpus.milli:
                share = 0 if gpus.share is None else gpus.share.milli_min
                yield NodeRequest(
                    devices=0 if share else gpus.per_node or gpus.total,
                    share_milli=share,
                    cpus=one.cpus,
                    memory_bytes=one.memory_bytes,
                    total=gpus.per_node is None,
                    models=frozenset(model for model, _ in gpus.kinds if model is not None),
                    nodes=frozenset(spec.nodelist),
                    excluded=frozenset(spec.exclude),
                )

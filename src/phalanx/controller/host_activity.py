"""When each job last used a CPU or had input from a client: with the states of its devices, this says since when it is idle.

Called by the thread of `usage_recorder`. Time is an argument, in Unix milliseconds. In memory: a head that starts counts from its own start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from phalanx.controller.telemetry import SILENT_S, silence_s
from phalanx.core.ids import Epoch, Generation, JobId, NodeId
from phalanx.core.work.attempt import Attempt
from phalanx.wire.supervisor import SamplesRequest

WINDOW_MS: Final = 10_000  # over which CPU use is averaged: supervisors measure it every two seconds
CPU_NOISE: Final = 0.1
"""CPUs in use, on one node, up to which a job does nothing: a Jupyter server or an editor's server without a client uses some hundredths."""


@dataclass(slots=True)
class _HostUse:
    """CPU use of one attempt on one node: the beginning of the window, when it last was busy, and until when its samples count."""

    epoch: Epoch
    generation: Generation
    cpu_s: float
    since_ms: int
    busy_ms: int
    fresh_until_ms: int


class HostActivityTracker:
    """See the module.

    Args:
        attempt_of: the live attempt of a job.
    """

    def __init__(self, attempt_of: Callable[[JobId], Attempt | None]) -> None:
        self._attempt_of = attempt_of
        self._hosts: dict[JobId, dict[NodeId, _HostUse]] = {}
        self._input_ms: dict[JobId, int] = {}

    def add_samples(self, request: SamplesRequest, now_ms: int) -> None:
        """Take samples that have just arrived."""
        fresh_until_ms = now_ms + int(max(silence_s(request), 2 * SILENT_S) * 1000)
        for job in request.jobs:
            if self._attempt_of(job.job_id) is None:
                continue
            hosts = self._hosts.setdefault(job.job_id, {})
            known = hosts.get(request.node_id)
            if known is None or (known.epoch, known.generation) != (job.epoch, job.generation):
                hosts[request.node_id] = _HostUse(job.epoch, job.generation, job.cpu_s, now_ms, now_ms, fresh_until_ms)
                continue
            known.fresh_until_ms = fresh_until_ms
            lasted_ms = now_ms - known.since_ms
            if lasted_ms >= WINDOW_MS:
                if job.cpu_s - known.cpu_s > CPU_NOISE * lasted_ms / 1000:
                    known.busy_ms = now_ms
                known.cpu_s, known.since_ms = job.cpu_s, now_ms

    def add_input(self, job_id: JobId, now_ms: int) -> None:
        """Note that a client has sent something to the job."""
        self._input_ms[job_id] = now_ms

    def quiet_since_ms(self, attempt: Attempt, now_ms: int) -> int | None:
        """Since when the attempt has used no CPU above noise and had no input; None if a node of it is not observed."""
        hosts = self._hosts.get(attempt.job_id, {})
        times = [self._input_ms.get(attempt.job_id, 0)]
        for grant in attempt.allocation.grants:
            host = hosts.get(grant.node_id)
            if (
                host is None
                or (host.epoch, host.generation) != (attempt.epoch, attempt.generation)
                or host.fresh_until_ms < now_ms
            ):
                return None
            times.append(host.busy_ms)
        return max(times)

    def prune(self) -> None:
        """Drop what is known of jobs that run no longer."""
        for table in (self._hosts, self._input_ms):
            for job_id in [job_id for job_id in table if self._attempt_of(job_id) is None]:
                del table[job_id]

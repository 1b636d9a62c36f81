"""Keeps what each live attempt used: means and peaks from the samples of its supervisors, for the usage of a job and its advice.

Called by the thread of `usage_recorder`, which stores the records. Time is an argument, in Unix milliseconds. Bounded by what attempts hold:
about 150 bytes for each device and node of an attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Final

from phalanx.controller.telemetry import silence_s
from phalanx.core.ids import Epoch, JobId, NodeId
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.usage.attempt_use import AttemptUse, DeviceUse, NodeUse
from phalanx.wire.supervisor import DeviceSample, JobSample, SamplesRequest

STORE_EVERY_MS: Final = 600_000  # of a live attempt: a crash of the head loses that much of its means
AttemptKey = tuple[JobId, Epoch]


@dataclass(slots=True)
class _DeviceTotals:
    """As `DeviceUse`; changed by every sample."""

    observed_ms: int = 0
    busy_ms: float | None = None
    peak: float = 0.0
    memory_peak_bytes: int | None = None
    memory_bytes: int = 0


@dataclass(slots=True)
class _Track:
    counter: str = ""
    devices: dict[tuple[NodeId, int], _DeviceTotals] = field(default_factory=dict)
    nodes: dict[NodeId, NodeUse] = field(default_factory=dict)
    sampled_ms: dict[tuple[NodeId, int], int] = field(
        default_factory=dict
    )  # of the newest sample; -1 for the node itself
    stored_ms: int = 0
    changed: bool = False

    def record(self, key: AttemptKey) -> AttemptUse:
        return AttemptUse(
            job_id=key[0],
            epoch=key[1],
            counter=self.counter,
            devices=tuple(
                DeviceUse(node=node, index=index, **asdict(self.devices[node, index]))
                for node, index in sorted(self.devices)
            ),
            nodes=tuple(self.nodes[each] for each in sorted(self.nodes)),
        )


class AttemptUseTracker:
    """See the module.

    Args:
        attempt_of: the live attempt of a job.
        stored: the stored record of an attempt, from an earlier head.
    """

    def __init__(
        self, attempt_of: Callable[[JobId], Attempt | None], stored: Callable[[AttemptKey], AttemptUse | None]
    ) -> None:
        self._attempt_of, self._stored = attempt_of, stored
        self._tracks: dict[AttemptKey, _Track] = {}

    def add_samples(self, request: SamplesRequest, now_ms: int) -> None:
        """Take samples that have just arrived. Devices that several jobs share are left out."""
        longest_ms = int(silence_s(request) * 1000)
        for sample in request.devices:
            attempt = None if sample.job_id is None else self._attempt_of(sample.job_id)
            grant = None if attempt is None else attempt.allocation.grant_on(request.node_id)
            if attempt is not None and grant is not None and grant.share is None and sample.index in grant.devices:
                track = self._track(attempt, now_ms)
                lasted_ms = _lasted_ms(track, (request.node_id, sample.index), now_ms, longest_ms)
                _add_device(track, request.node_id, sample, lasted_ms)
        for job in request.jobs:
            attempt = self._attempt_of(job.job_id)
            if (
                attempt is not None
                and attempt.epoch == job.epoch
                and attempt.allocation.grant_on(request.node_id) is not None
            ):
                track = self._track(attempt, now_ms)
                _add_job(track, request.node_id, job, _lasted_ms(track, (request.node_id, -1), now_ms, longest_ms))

    def find(self, job_id: JobId, epoch: Epoch) -> AttemptUse | None:
        """What an attempt used so far; None if it has no samples, or ended and was stored."""
        track = self._tracks.get((job_id, epoch))
        return None if track is None else track.record((job_id, epoch))

    def to_store(self, now_ms: int, *, everything: bool) -> list[AttemptUse]:
        """Records that are due: of attempts that ended, and of others when theirs is old. `everything`: of all that changed."""
        return [
            track.record(key)
            for key, track in self._tracks.items()
            if track.changed and (everything or self._ended(key) or now_ms - track.stored_ms >= STORE_EVERY_MS)
        ]

    def stored(self, records: list[AttemptUse], now_ms: int) -> None:
        """Note that these are durable; drops those of attempts that ended, also if they were stored before their end."""
        for record in records:
            key = record.job_id, record.epoch
            track = self._tracks.get(key)
            if track is not None:
                track.stored_ms, track.changed = now_ms, track.record(key) != record
        for key in [key for key, track in self._tracks.items() if not track.changed and self._ended(key)]:
            del self._tracks[key]

    def _ended(self, key: AttemptKey) -> bool:
        attempt = self._attempt_of(key[0])
        return attempt is None or attempt.epoch != key[1]

    def _track(self, attempt: Attempt, now_ms: int) -> _Track:
        key = attempt.job_id, attempt.epoch
        track = self._tracks.get(key)
        if track is None:
            track = self._tracks[key] = _Track(stored_ms=now_ms)
            known = self._stored(key)
            if known is not None:
                track.counter = known.counter
                track.devices = {
                    (one.node, one.index): _DeviceTotals(
                        observed_ms=one.observed_ms,
                        busy_ms=one.busy_ms,
                        peak=one.peak,
                        memory_peak_bytes=one.memory_peak_bytes,
                        memory_bytes=one.memory_bytes,
                    )
                    for one in known.devices
                }
                track.nodes = {one.node: one for one in known.nodes}
        track.changed = True
        return track


def _lasted_ms(track: _Track, key: tuple[NodeId, int], now_ms: int, longest_ms: int) -> int:
    """The time that a sample covers: since the one before it; 0 for the first, and after a silence."""
    before_ms = track.sampled_ms.get(key, now_ms)
    track.sampled_ms[key] = now_ms
    lasted_ms = max(0, now_ms - before_ms)
    return lasted_ms if lasted_ms <= longest_ms else 0


def _add_device(track: _Track, node_id: NodeId, sample: DeviceSample, lasted_ms: int) -> None:
    key = node_id, sample.index
    known = track.devices.get(key)
    if known is None:
        known = track.devices[key] = _DeviceTotals()
    if sample.utilization is not None:
        track.counter = sample.counter
        known.observed_ms += lasted_ms
        known.busy_ms = (known.busy_ms or 0.0) + sample.utilization * lasted_ms
        known.peak = max(known.peak, sample.utilization)
    if sample.memory_used_bytes is not None:
        known.memory_peak_bytes = max(known.memory_peak_bytes or 0, sample.memory_used_bytes)
    known.memory_bytes = sample.memory_total_bytes or known.memory_bytes


def _add_job(track: _Track, node_id: NodeId, job: JobSample, lasted_ms: int) -> None:
    known = track.nodes.get(node_id) or NodeUse(node=node_id, generation=job.generation)
    if job.generation < known.generation:
        return
    if job.generation > known.generation:
        known = replace(known, generation=job.generation, earlier_cpu_s=known.cpu_s, generation_cpu_s=0.0)
    track.nodes[node_id] = replace(
        known,
        generation_cpu_s=max(known.generation_cpu_s, job.cpu_s),
        memory_peak_bytes=max(known.memory_peak_bytes, job.memory_peak_bytes),
        observed_ms=known.observed_ms + lasted_ms,
    )

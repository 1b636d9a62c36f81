"""What the head knows live and never needs again: newest device samples, and how far each job's training is.

The API's supervisor routes put in, views and metrics read, the controller gets a sparse `Progressed` for its budgets. In memory,
bounded, thread safe; a restarted head fills it again within a few seconds.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from phalanx.core.ids import Epoch, Generation, JobId, NodeId, SupervisorId
from phalanx.core.jsonline import finite, object_of
from phalanx.core.state.events import CheckpointFailed, Progressed
from phalanx.wire.api.jobs import Progress
from phalanx.wire.rank import REPORT_BYTES_MAX, ReportKind
from phalanx.wire.supervisor import DeviceSample, SamplesRequest

NodeSamples = SamplesRequest

JOBS_MAX: Final = (
    20_000  # jobs with progress in memory, least lately reporting out first; 1.3 KB (one step) to 4.2 KB each
)
NODES_MAX: Final = 50_000  # four times the largest fleet of DESIGN 6
RATE_STEPS: Final = 20  # steps that a rate is taken over: smooth, and honest again soon after a stall
ERROR_CHARS_MAX: Final = 500  # of a rank's own words in the story
SILENT_S: Final = 10.0  # ten samples missed: a supervisor on the same node that still samples speaks without it
SILENT_SAMPLES: Final = 3  # missed, where they come more rarely than that
EVERY_MAX_S: Final = (
    600.0  # a bound for what a supervisor may say of itself; 240,000 nodes would have them come so rarely
)
PROGRESSED_EVERY_S: Final = 2.0  # at most one event per job and this span: 10,000 jobs stay under 5,000 events a second


@dataclass(slots=True)
class _Track:
    """One job's reports so far. `steps` are the newest of this generation: (begin_ns, end_ns, tokens)."""

    epoch: Epoch
    generation: Generation
    torn: bytes = b""
    steps: deque[tuple[int, int, int | None]] = field(default_factory=lambda: deque(maxlen=RATE_STEPS))
    step: int | None = None
    step_generation: Generation = Generation(0)  # that made `step`; behind `generation` until the new one's first step
    at_s: float = 0.0
    loss: float | None = None
    steps_total: int | None = None
    checkpoint_step: int | None = None
    saving: bool = False
    save_failed: bool = False
    told_at_s: float = -math.inf


class Telemetry:
    """Newest samples and progress."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: OrderedDict[NodeId, dict[SupervisorId, SamplesRequest]] = OrderedDict()
        self._tracks: OrderedDict[JobId, _Track] = OrderedDict()
        self._nodes_of: dict[JobId, frozenset[NodeId]] = {}

    def samples(self, request: SamplesRequest) -> None:
        """Keep a supervisor's newest samples in place of its older ones.

        A node has several supervisors where an engine brings one for each attempt; each speaks of its own devices.
        """
        with self._lock:
            kept = self._samples.pop(request.node_id, {})
            self._index(request.node_id, kept, present=False)
            kept = {who: said for who, said in kept.items() if request.at_s - said.at_s <= silence_s(said)}
            kept[request.supervisor_id] = request
            self._samples[request.node_id] = kept
            self._index(request.node_id, kept, present=True)
            if len(self._samples) > NODES_MAX:
                self._index(*self._samples.popitem(last=False), present=False)

    def steps(self, job_id: JobId, epoch: Epoch, node_rank: int, data: bytes) -> list[Progressed | CheckpointFailed]:
        """Read new bytes of a `steps-<node rank>` stream, in the order written, and answer what the controller should hear.

        Only node rank 0 counts, as rank 0 sits there. A line torn at the end waits for its rest; one that is no report is passed over.
        """
        if node_rank != 0:
            return []
        with self._lock:
            track = self._tracks.get(job_id)
            if track is not None and epoch < track.epoch:
                return []
            if track is None or epoch > track.epoch:
                track = _Track(epoch=epoch, generation=Generation(0), steps_total=track.steps_total if track else None)
                self._tracks[job_id] = track
                if len(self._tracks) > JOBS_MAX:
                    self._tracks.popitem(last=False)
            self._tracks.move_to_end(job_id)
            *lines, torn = (track.torn + data).split(b"\n")
            track.torn = torn if len(torn) <= REPORT_BYTES_MAX else b""
            told = (_read(job_id, track, report) for line in lines if (report := object_of(line)) is not None)
            return [event for event in told if event is not None]

    def progress(self, job_id: JobId) -> Progress | None:
        """How far the job is, or None before its first step under this head."""
        with self._lock:
            track = self._tracks.get(job_id)
            if track is None or track.step is None:
                return None
            step_s, tokens_per_s = _rates(track)
            return Progress(
                epoch=track.epoch,
                generation=track.step_generation,
                step=track.step,
                at_s=track.at_s,
                steps_total=track.steps_total,
                loss=track.loss,
                tokens_per_s=tokens_per_s,
                step_s=step_s,
                saving=track.saving,
                checkpoint_step=track.checkpoint_step,
            )

    def steps_total(self, job_id: JobId) -> int | None:
        """How many steps the job plans to make, by its newest word on that."""
        with self._lock:
            track = self._tracks.get(job_id)
            return None if track is None else track.steps_total

    def devices(self, node_id: NodeId) -> NodeSamples | None:
        """The node's newest samples, or None if it sent none under this head."""
        with self._lock:
            kept = self._samples.get(node_id)
            return None if kept is None else _together(kept.values())

    def utilization(self, job_id: JobId) -> float | None:
        """Mean over the devices that say they work for the job, 0..1; None if none does or none tells."""
        with self._lock:
            names = [node_id for node_id in self._nodes_of.get(job_id, ()) if node_id in self._samples]
            nodes = [_together(self._samples[node_id].values()) for node_id in names]
        busy = [
            device.utilization
            for node in nodes
            for device in node.devices
            if device.job_id == job_id and device.utilization is not None
        ]
        return sum(busy) / len(busy) if busy else None

    def forget_node(self, node_id: NodeId) -> None:
        """Drop a node's samples: it is gone, and what it said last is no longer so."""
        with self._lock:
            self._index(node_id, self._samples.pop(node_id, {}), present=False)

    def _index(self, node_id: NodeId, kept: dict[SupervisorId, SamplesRequest], *, present: bool) -> None:
        for job_id in {job_id for said in kept.values() for job_id in _jobs_in(said.devices)}:
            nodes = self._nodes_of.get(job_id, frozenset())
            nodes = nodes | {node_id} if present else nodes - {node_id}
            if nodes:
                self._nodes_of[job_id] = nodes
            else:
                self._nodes_of.pop(job_id, None)


def silence_s(said: SamplesRequest) -> float:
    """How old samples may be before whoever sent them counts as silent: longer where a large fleet has them come rarely."""
    return max(SILENT_S, SILENT_SAMPLES * min(said.every_s, EVERY_MAX_S))


def _together(said: Iterable[SamplesRequest]) -> SamplesRequest:
    """What a node's supervisors say, as one: each device by its newest sample, the node by the newest of all."""
    in_time = sorted(said, key=lambda request: request.at_s)
    devices = {device.index: device for request in in_time for device in request.devices}
    return msgspec.structs.replace(in_time[-1], devices=[devices[index] for index in sorted(devices)])


def _jobs_in(devices: list[DeviceSample]) -> set[JobId]:
    return {device.job_id for device in devices if device.job_id is not None}


def _read(job_id: JobId, track: _Track, report: dict[str, Any]) -> Progressed | CheckpointFailed | None:
    """Take one report into the track; answers an event if the controller should hear of it."""
    generation = report.get("generation")
    if not isinstance(generation, int) or report.get("rank") != 0 or generation < track.generation:
        return None
    fresh = generation > track.generation
    if fresh:
        track.generation = Generation(generation)
        track.steps.clear()
        track.saving = False
    match report.get("k"):
        case ReportKind.STEP:
            return _read_step(job_id, track, report)
        case ReportKind.PLANNED:
            total = report.get("steps_total")
            track.steps_total = total if isinstance(total, int) else track.steps_total
        case ReportKind.CHECKPOINT:
            step = report.get("step")
            track.saving = track.save_failed = False
            track.checkpoint_step = step if isinstance(step, int) else track.checkpoint_step
        case ReportKind.CHECKPOINT_FAILED:
            return _read_failed_save(job_id, track, report)
        case ReportKind.STALL:
            # The stall of a save is reported when it begins to be written behind the training; the CHECKPOINT ends it.
            track.saving = track.saving or report.get("cause") == "save"
        case _:
            pass
    return None


def _read_failed_save(job_id: JobId, track: _Track, report: dict[str, Any]) -> CheckpointFailed | None:
    step, told = report.get("step"), track.save_failed
    track.saving, track.save_failed = False, True
    if told or not isinstance(step, int):
        return None
    error = str(report.get("error", "no reason given"))[:ERROR_CHARS_MAX]
    return CheckpointFailed(job_id=job_id, epoch=track.epoch, generation=track.generation, step=step, error=error)


def _read_step(job_id: JobId, track: _Track, report: dict[str, Any]) -> Progressed | None:
    step, begin_ns, end_ns, at_s = (report.get(name) for name in ("step", "begin_ns", "end_ns", "at_s"))
    when_s = finite(at_s)
    if not isinstance(step, int) or when_s is None:
        return None
    track.step, track.step_generation, track.at_s = step, track.generation, when_s
    loss, tokens = report.get("loss"), report.get("tokens")
    # A loss of NaN is news to its user, but JSON has no word for it: absent says so too.
    track.loss = finite(loss)
    if isinstance(begin_ns, int) and isinstance(end_ns, int) and end_ns >= begin_ns:
        track.steps.append((begin_ns, end_ns, tokens if isinstance(tokens, int) else None))
    if 0 <= track.at_s - track.told_at_s < PROGRESSED_EVERY_S:
        return None
    track.told_at_s = track.at_s
    return Progressed(job_id=job_id, epoch=track.epoch, generation=track.generation, step=step)


def _rates(track: _Track) -> tuple[float | None, float | None]:
    """(seconds a step, tokens a second) over the newest steps, waits between them included; None where nothing is known."""
    if not track.steps:
        return None, None
    span_s = (track.steps[-1][1] - track.steps[0][0]) / 1e9
    if span_s <= 0:
        return None, None
    tokens = [count for _, _, count in track.steps if count is not None]
    return span_s / len(track.steps), sum(tokens) / span_s if len(tokens) == len(track.steps) else None

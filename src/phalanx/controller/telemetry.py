"""Live telemetry that is never stored: the newest device samples and the training progress of each job.

The API's supervisor routes write it; views and metrics read it; the controller gets a sparse `ProgressReported` for its budgets. In memory,
bounded, thread-safe. A restarted head has it again within a few seconds.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Final, NamedTuple

import msgspec

from phalanx.core.accounting.activity import WINDOW_S
from phalanx.core.accounting.usage_states import StepActivity, UsageState, larger_part
from phalanx.core.ids import Epoch, Generation, JobId, NodeId, SupervisorId
from phalanx.core.jsonline import finite_float, parse_object
from phalanx.core.state.reports import CheckpointFailed, ProgressReported
from phalanx.core.work.pace import PACE_STEPS_MIN, StepPace, TimedStep
from phalanx.wire.api.jobs import Progress
from phalanx.wire.rank import REPORT_BYTES_MAX, ReportKind
from phalanx.wire.supervisor import DeviceSample, SamplesRequest, StagingSample

NodeSamples = SamplesRequest

# Jobs with progress in memory; the least recently reporting are dropped first. 1.3 KB (one step) to 4.2 KB each.
JOBS_MAX: Final = 20_000
NODES_MAX: Final = 50_000  # four times the largest fleet of DESIGN 6
RATE_STEPS: Final = 20  # steps that a rate is averaged over: smooth, and correct again soon after a stall
ERROR_CHARS_MAX: Final = 500  # of a rank's error message in the history
SILENT_S: Final = 10.0  # ten missed samples: the supervisor's devices are dropped from the node's samples
SILENT_SAMPLES: Final = 3  # missed samples that count as silence when samples come more rarely than that
COUNT_MAX: Final = 1 << 53  # of a batch's tokens
EVERY_MAX_S: Final = 600.0  # largest sampling interval accepted from a supervisor; that of 240,000 nodes
PROGRESSED_EVERY_S: Final = 2.0  # at most one event per job in this time: 10,000 jobs stay under 5,000 events a second


@dataclass(slots=True)
class _Track:
    """One job's reports so far.

    Attributes:
        steps: the newest of this generation as (begin_ns, end_ns, tokens).
        waits: the parts of the same steps, 0 to 1, that waited for data and for other ranks.
        paused: training stands still for a save that has not been staged.
        announced: it said that no step comes for a while.
    """

    epoch: Epoch
    generation: Generation
    reported: int = 0  # steps of this generation
    partial: bytes = b""  # beginning of a line whose rest has not arrived
    steps: deque[tuple[int, int, int | None]] = field(default_factory=lambda: deque(maxlen=RATE_STEPS))
    step: int | None = None
    step_generation: Generation = Generation(0)  # of `step`; older than `generation` until the new one's first step
    at_s: float = 0.0
    loss: float | None = None
    steps_total: int | None = None
    checkpoint_step: int | None = None
    saving: bool = False
    save_failed: bool = False
    waits: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RATE_STEPS))
    paused: bool = False
    announced: bool = False
    new_steps: list[TimedStep] = field(default_factory=list)  # that no listener has received
    progressed_at_s: float = -math.inf  # when the last `ProgressReported` was emitted
    trains: bool = False  # it reported anything but tokens
    new_counts: list[TokenCount] = field(default_factory=list)  # that no listener has received


class TokenCount(NamedTuple):
    """All that a batch has answered in one hour so far. `hour_s`: Unix time of its beginning."""

    hour_s: int
    requests: int
    prompt_tokens: int
    answer_tokens: int


class ReportedSteps(NamedTuple):
    """What the newest steps of a job show. `reported`: steps that this generation reported; `activity`: as if the newest came now."""

    epoch: Epoch
    generation: Generation
    reported: int
    activity: StepActivity


class Telemetry:
    """Newest samples and progress.

    Attributes:
        sample_listeners: called with the samples of a supervisor.
        step_listeners: called with a job whose ranks reported something, and its new steps.
        token_listeners: called with a job that counted tokens, and the counts.
    """

    def __init__(self) -> None:
        self.sample_listeners: list[Callable[[SamplesRequest], None]] = []
        self.step_listeners: list[Callable[[JobId, Sequence[TimedStep]], None]] = []
        self.token_listeners: list[Callable[[JobId, Sequence[TokenCount]], None]] = []
        self._lock = threading.Lock()
        self._samples: OrderedDict[NodeId, dict[SupervisorId, SamplesRequest]] = OrderedDict()
        self._tracks: OrderedDict[JobId, _Track] = OrderedDict()
        self._nodes_of: dict[JobId, frozenset[NodeId]] = {}

    def put_samples(self, request: SamplesRequest) -> None:
        """Replace a supervisor's samples by newer ones.

        A node has several supervisors if its engine starts one for each attempt; each samples its own devices.
        """
        with self._lock:
            newest = self._samples.pop(request.node_id, {})
            self._index(request.node_id, newest, present=False)
            newest = {
                supervisor: sample
                for supervisor, sample in newest.items()
                if request.at_s - sample.at_s <= silence_s(sample)
            }
            newest[request.supervisor_id] = request
            self._samples[request.node_id] = newest
            self._index(request.node_id, newest, present=True)
            if len(self._samples) > NODES_MAX:
                self._index(*self._samples.popitem(last=False), present=False)
        for listener in self.sample_listeners:
            listener(request)

    def put_steps(
        self, job_id: JobId, epoch: Epoch, node_rank: int, data: bytes, *, replayed: bool = False
    ) -> list[ProgressReported | CheckpointFailed]:
        """Parse new bytes of a `steps-<node rank>` stream, in the order written; return events for the controller.

        Only node rank 0 counts, since rank 0 runs there. An incomplete last line waits for its rest; invalid lines are skipped.
        `replayed`: the bytes are of a stored stream, so that its steps are not new.
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
            *lines, partial = (track.partial + data).split(b"\n")
            track.partial = partial if len(partial) <= REPORT_BYTES_MAX else b""
            events = [_read(job_id, track, report) for line in lines if (report := parse_object(line)) is not None]
            steps, track.new_steps = track.new_steps, []
            counts, track.new_counts = track.new_counts, []
        for listener in self.step_listeners:
            listener(job_id, () if replayed else steps)
        for counted in self.token_listeners if counts and not replayed else ():
            counted(job_id, counts)
        return [event for event in events if event is not None]

    def progress(self, job_id: JobId) -> Progress | None:
        """The job's progress; None before its first step under this head."""
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

    def step_activity(self, job_id: JobId) -> ReportedSteps | None:
        """What the newest steps of a job show; None without a report."""
        with self._lock:
            track = self._tracks.get(job_id)
            if track is None or not track.trains:
                return None
            ends = [end_ns for _, end_ns, _ in track.steps]
            gaps = [later - earlier for earlier, later in pairwise(ends)]
            data, communication = _newest_shares(track)
            activity = StepActivity(
                silent_s=0.0,
                gap_s=median(gaps) / 1e9 if gaps else 0.0,
                data_share=data,
                communication_share=communication,
                share_s=_share_s(track, larger_part(data, communication)),
                saving=track.paused,
                announced=track.announced,
                stepped=track.reported > 0,
            )
            return ReportedSteps(track.epoch, track.generation, track.reported, activity)

    def steps_total(self, job_id: JobId) -> int | None:
        """The number of steps that the job plans to make, as it reported last."""
        with self._lock:
            track = self._tracks.get(job_id)
            return None if track is None else track.steps_total

    def node_samples(self, node_id: NodeId) -> NodeSamples | None:
        """The node's newest samples; None if it sent none under this head."""
        with self._lock:
            newest = self._samples.get(node_id)
            return None if newest is None else _merged(newest.values())

    def utilizations(self, node_id: NodeId) -> dict[int, float | None]:
        """The newest utilization of each of the node's devices, 0..1, by index; empty if it sent no samples."""
        with self._lock:
            samples = sorted(self._samples.get(node_id, {}).values(), key=lambda request: request.at_s)
        return {device.index: device.utilization for request in samples for device in request.devices}

    def utilization(self, job_id: JobId) -> float | None:
        """Mean over the devices that work for the job, 0..1; None if no such device reports its utilization."""
        with self._lock:
            names = [node_id for node_id in self._nodes_of.get(job_id, ()) if node_id in self._samples]
            nodes = [_merged(self._samples[node_id].values()) for node_id in names]
        busy = [
            device.utilization
            for node in nodes
            for device in node.devices
            if device.job_id == job_id and device.utilization is not None
        ]
        return sum(busy) / len(busy) if busy else None

    def staging(self, node_ids: Iterable[NodeId], job_id: JobId, epoch: Epoch) -> dict[NodeId, StagingSample]:
        """How far each of these nodes is that stages data for the attempt now."""
        found: dict[NodeId, StagingSample] = {}
        with self._lock:
            for node_id in node_ids:
                for request in self._samples.get(node_id, {}).values():
                    for one in request.staging:
                        if (one.job_id, one.epoch) == (job_id, epoch):
                            found[node_id] = one
        return found

    def remove_node(self, node_id: NodeId) -> None:
        """Drop the samples of a node that is gone."""
        with self._lock:
            self._index(node_id, self._samples.pop(node_id, {}), present=False)

    def _index(self, node_id: NodeId, samples: dict[SupervisorId, SamplesRequest], *, present: bool) -> None:
        for job_id in {job_id for sample in samples.values() for job_id in _jobs_in(sample.devices)}:
            nodes = self._nodes_of.get(job_id, frozenset())
            nodes = nodes | {node_id} if present else nodes - {node_id}
            if nodes:
                self._nodes_of[job_id] = nodes
            else:
                self._nodes_of.pop(job_id, None)


def silence_s(sample: SamplesRequest) -> float:
    """Age at which a sender counts as silent; longer in a large fleet, where samples come more rarely."""
    return max(SILENT_S, SILENT_SAMPLES * min(sample.every_s, EVERY_MAX_S))


def _merged(samples: Iterable[SamplesRequest]) -> SamplesRequest:
    """Merge the samples of a node's supervisors: each device by its newest sample, the node by the newest of all."""
    by_time = sorted(samples, key=lambda request: request.at_s)
    devices = {device.index: device for request in by_time for device in request.devices}
    return msgspec.structs.replace(by_time[-1], devices=[devices[index] for index in sorted(devices)])


def _jobs_in(devices: list[DeviceSample]) -> set[JobId]:
    return {device.job_id for device in devices if device.job_id is not None}


def _newest_shares(track: _Track) -> tuple[float, float]:
    """The parts of the time of the newest steps that waited for data and for other ranks, 0 to 1."""
    if not track.steps:
        return 0.0, 0.0
    newest_ns = track.steps[-1][1]
    lengths, weighted = 0.0, [0.0, 0.0]
    for (begin_ns, end_ns, _), shares in zip(track.steps, track.waits, strict=True):
        if newest_ns - end_ns < WINDOW_S * 1e9:
            length = max(end_ns - begin_ns, 1)
            lengths += length
            weighted = [total + length * share for total, share in zip(weighted, shares, strict=True)]
    return weighted[0] / lengths, weighted[1] / lengths


def _share_s(track: _Track, part: UsageState | None) -> float:
    """For how long the newest steps, one by one, have mostly waited for `part`, or for nothing."""
    begin_ns = None
    for (step_begin_ns, _, _), shares in zip(reversed(track.steps), reversed(track.waits), strict=True):
        if larger_part(*shares) is not part:
            break
        begin_ns = step_begin_ns
    return 0.0 if begin_ns is None else (track.steps[-1][1] - begin_ns) / 1e9


def _read(job_id: JobId, track: _Track, report: dict[str, Any]) -> ProgressReported | CheckpointFailed | None:
    """Apply one report to the track; return an event if the controller needs one."""
    generation = report.get("generation")
    if not isinstance(generation, int) or report.get("rank") != 0 or generation < track.generation:
        return None
    if report.get("k") == ReportKind.TOKENS:
        track.new_counts += _read_counts(report)
        return None
    track.trains = True
    fresh = generation > track.generation
    if fresh:
        track.generation = Generation(generation)
        track.steps.clear()
        track.waits.clear()
        track.reported = 0
        track.saving = track.paused = track.announced = False
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
            # A save's stall is reported when its asynchronous write begins; the CHECKPOINT report ends it.
            if report.get("cause") == "save":
                track.saving, track.paused = True, False
        case ReportKind.BUSY:
            if report.get("what") == "save":
                track.paused = True
            else:
                track.announced = True
        case _:
            pass
    return None


def _read_counts(report: dict[str, Any]) -> list[TokenCount]:
    found = [report.get(name) for name in ("hour", "requests", "prompt_tokens", "answer_tokens")]
    numbers = [one for one in found if type(one) is int and 0 <= one < COUNT_MAX]
    return [TokenCount(*numbers)] if len(numbers) == len(found) else []


def _read_failed_save(job_id: JobId, track: _Track, report: dict[str, Any]) -> CheckpointFailed | None:
    step, reported = report.get("step"), track.save_failed
    track.saving, track.save_failed, track.paused = False, True, False
    if reported or not isinstance(step, int):
        return None
    error = str(report.get("error", "no reason given"))[:ERROR_CHARS_MAX]
    return CheckpointFailed(job_id=job_id, epoch=track.epoch, generation=track.generation, step=step, error=error)


def _read_step(job_id: JobId, track: _Track, report: dict[str, Any]) -> ProgressReported | None:
    step, begin_ns, end_ns, at_s = (report.get(name) for name in ("step", "begin_ns", "end_ns", "at_s"))
    when_s = finite_float(at_s)
    if not isinstance(step, int) or when_s is None:
        return None
    track.step, track.step_generation, track.at_s = step, track.generation, when_s
    track.paused = track.announced = False
    loss, tokens = report.get("loss"), report.get("tokens")
    # JSON has no NaN: a loss of NaN is left out.
    track.loss = finite_float(loss)
    seconds = None
    if isinstance(begin_ns, int) and isinstance(end_ns, int) and end_ns >= begin_ns:
        track.steps.append((begin_ns, end_ns, tokens if isinstance(tokens, int) else None))
        track.waits.append(_wait_shares(report, end_ns - begin_ns))
        track.reported += 1
        seconds = (end_ns - begin_ns) / 1e9
    track.new_steps.append(TimedStep(step, when_s, seconds, track.loss))
    if 0 <= track.at_s - track.progressed_at_s < PROGRESSED_EVERY_S:
        return None
    track.progressed_at_s = track.at_s
    return ProgressReported(job_id=job_id, epoch=track.epoch, generation=track.generation, step=step, pace=_pace(track))


def _wait_shares(report: dict[str, Any], step_ns: int) -> tuple[float, float]:
    """The parts of a step that waited for data and for other ranks, 0 to 1."""
    data_s, communication_s = (finite_float(report.get(name)) or 0.0 for name in ("data_s", "communication_s"))
    length_s = max(step_ns / 1e9, 1e-9)
    return min(max(data_s / length_s, 0.0), 1.0), min(max(communication_s / length_s, 0.0), 1.0)


def _pace(track: _Track) -> StepPace | None:
    """The pace over the newest steps: medians, so that a save or a stall among them does not count. None for too few."""
    if len(track.steps) < PACE_STEPS_MIN:
        return None
    ends = [end_ns for _, end_ns, _ in track.steps]
    tokens = [count for _, _, count in track.steps if count is not None]
    return StepPace(
        steps=track.reported,
        step_s=median(later - earlier for earlier, later in pairwise(ends)) / 1e9,
        tokens=int(median(tokens)) if len(tokens) == len(track.steps) else 0,
        steps_left=None if track.steps_total is None or track.step is None else max(0, track.steps_total - track.step),
    )


def _rates(track: _Track) -> tuple[float | None, float | None]:
    """(seconds per step, tokens per second) over the newest steps, including waits between them; None if unknown."""
    if not track.steps:
        return None, None
    span_s = (track.steps[-1][1] - track.steps[0][0]) / 1e9
    if span_s <= 0:
        return None, None
    tokens = [count for _, _, count in track.steps if count is not None]
    return span_s / len(track.steps), sum(tokens) / span_s if len(tokens) == len(track.steps) else None

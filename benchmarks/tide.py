"""One fleet for a service and training, against two separate pools, over simulated days.

    python -m benchmarks.tide                     # a table
    python -m benchmarks.tide --json              # slo_share of the worst day, gpu_use_gain as the mean and of the worst day, and the figures of each
    python -m benchmarks.tide --picture tide.svg  # the first day as a picture
    python -m benchmarks.tide --days office --seeds 1 2 3

Real is the head: `Controller.step` scales the service by its load once a second, preempts training for its replicas, and starts training again. Simulated
are the requests, one by one, the replicas, and the nodes, which start and stop processes at once (`simulator.cluster`). A replica serves a minute after it
is placed, for the save of a training and the load of a model; a training computes again a minute after each of its starts.

The requests of a day are drawn from its seed: a smooth rhythm (`DAYS`), other by a few percent each ten minutes, with six bursts of five minutes. Jobs are
drawn too: there are always more of them than fit. Both sides have the same requests, the same jobs, and the same scheduler.

The two pools are as good as they can be: the service has the smallest fixed number of replicas with which 99 of 100 requests of this very day keep the
target, found by search, and training has all other GPUs.

GPU use counts a GPU of a replica by its share of streams, and a GPU of training whole while it computes: not while it saves, loads or waits.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from phalanx.core.ids import JobId, ServiceId, UserId
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.state.events import Event, SubmitJob, SubmitService
from phalanx.core.state.reports import LoadObserved, ReadinessChanged
from phalanx.core.work.gpus import parse_gpus
from phalanx.core.work.job import Job
from phalanx.core.work.services.scale_terms import ScaleTerms
from phalanx.core.work.services.service_terms import ServiceTerms
from phalanx.core.work.spec import JobSpec, LaunchMode, Role
from phalanx.simulator.cluster import PROJECT, QUEUE, ReplayCluster
from phalanx.simulator.fleet import TraceNode
from phalanx.simulator.serving.load_traces import Rate
from phalanx.simulator.serving.simulated_service import EngineModel, SimulatedTraffic
from phalanx.simulator.supervisors import GangEvent

HOURS: Final = 24.0
DAY_S: Final = 86_400.0
GPUS, GPUS_EACH = 64, 8
PEAK_GPUS: Final = 40  # that the streams at the peak of the rhythm fill
WAITING: Final = 24  # jobs that wait at least
SIZES: Final = (1, 1, 1, 1, 2, 2, 4, 4, 8, 8)  # GPUs of jobs
RUN_S, RUN_SIGMA = 5400.0, 1.2  # of the lognormal distribution of the time that a job computes
RESTART_S: Final = 60.0
WARM_S: Final = (
    3600.0  # before the day, not counted: replicas and trainings start, and the rate rises to that of the first second
)
BEGIN_S: Final = 4 * 3600.0  # when the day begins, at its trough
SLO: Final = 0.99
BURSTS, BURST_S, BURST_FACTOR = 6, 300.0, 1.3
ENGINE: Final = EngineModel(streams=16, limit=64, prefill_s=0.4, answer_s=40.0, start_s=60.0)
TERMS: Final = ScaleTerms(
    ttft_s=2.0, in_flight=14
)  # one stream of eight is kept free: full replicas let requests wait already
CHAT: Final = ServiceId("chat")
_USER: Final = UserId("ada")


def _office(hour: float) -> float:
    """Colleagues: almost nothing at night, two humps with a lunch between them."""
    return 0.03 + 0.97 * min(
        1.0, math.exp(-(((hour - 10.5) / 2.0) ** 2)) + 0.95 * math.exp(-(((hour - 15.0) / 2.4) ** 2))
    )


def _public(hour: float) -> float:
    """The public of one continent: a trough of a third at night, the peak in the evening."""
    return 0.65 + 0.35 * math.cos(2 * math.pi * (hour - 20.0) / 24.0)


DAYS: Final[dict[str, Callable[[float], float]]] = {"public": _public, "office": _office}
"""Requests by the hour, as a share of the peak."""


def day(name: str, seed: int) -> Rate:
    """Return the rate of requests over the day."""
    dice = Random(f"{name} {seed}")
    peak = PEAK_GPUS * ENGINE.streams / (ENGINE.answer_s + ENGINE.prefill_s)
    noise = [dice.gauss(1.0, 0.04) for _ in range(200)]
    begins = [dice.uniform(0.0, DAY_S) for _ in range(BURSTS)]

    def rate(at_s: float) -> float:
        day_s = max(0.0, at_s - WARM_S)
        burst = BURST_FACTOR if any(begin_s <= day_s < begin_s + BURST_S for begin_s in begins) else 1.0
        ramp = min(1.0, at_s / WARM_S)
        return (
            ramp
            * peak
            * DAYS[name]((day_s + BEGIN_S) % DAY_S / 3600.0)
            * burst
            * noise[int(day_s / 600.0) % len(noise)]
        )

    return rate


@dataclass(frozen=True, slots=True)
class Sample:
    """GPUs at one moment: of replicas, of their streams, and of training that computes."""

    at_s: float
    replicas: int
    streams: float
    training: int


@dataclass(slots=True)
class _Training:
    gpus: int
    left_s: float  # that it still computes
    since_s: float | None = None  # since when it computes, or will


@dataclass(slots=True)
class SimulatedFleet:
    """Training on nodes with the real head, and one service unless `traffic` is None.

    Attributes:
        trained_s: GPU seconds in which training computed.
        replicas_s: GPU seconds that replicas held.
        preempted: stops of trainings.
        finished: trainings that came to their end.
    """

    gpus: int
    dice: Random
    traffic: SimulatedTraffic | None = None
    now_s: float = 0.0
    trained_s: float = 0.0
    replicas_s: float = 0.0
    preempted: int = 0
    finished: int = 0
    samples: list[Sample] = field(default_factory=list)
    _trainings: dict[JobId, _Training] = field(default_factory=dict)
    _submitted: list[_Training] = field(default_factory=list)  # whose number comes with the next answers
    _ready_s: dict[JobId, float] = field(default_factory=dict)  # when a replica will be ready

    def run(self, hours: float) -> None:
        """Pass the day."""
        sizes = [GPUS_EACH] * (self.gpus // GPUS_EACH) + [self.gpus % GPUS_EACH]
        nodes = [TraceNode(name=f"n{number}", gpus=size) for number, size in enumerate(sizes) if size]
        cluster = ReplayCluster(nodes, PolicySettings(), users=[_USER], start_s=0.0)
        inbox: list[Event] = []
        if self.traffic is not None:
            inbox.append(SubmitService(spec=_service(self.gpus), user=_USER, project=PROJECT, queue=QUEUE))
        while self.now_s < WARM_S + hours * 3600.0:
            if self.now_s == WARM_S:
                self._begin_day()
            inbox += self._changes(cluster)
            jobs = self._jobs()
            inbox += jobs
            turned = cluster.run_instant(self.now_s, inbox)
            for job in turned.answers[len(turned.answers) - len(jobs) :]:
                assert isinstance(job, Job), job
                self._trainings[job.id] = self._submitted.pop(0)
            for kind, job_id in turned.gang_events:
                self._follow(cluster, kind, job_id)
            inbox = self._pass_second()
        for job_id in self._trainings:
            self._stopped(job_id)

    def _begin_day(self) -> None:
        """Count from now on."""
        for one in self._trainings.values():
            if one.since_s is not None and one.since_s < self.now_s:
                one.left_s -= self.now_s - one.since_s
                one.since_s = self.now_s
        self.trained_s = self.replicas_s = 0.0
        self.preempted = self.finished = 0
        self.samples.clear()
        if self.traffic is not None:
            self.traffic.forget()

    def _jobs(self) -> list[Event]:
        """New jobs, so that enough of them wait."""
        found: list[Event] = []
        waiting = sum(one.since_s is None for one in self._trainings.values())
        for _ in range(waiting, WAITING):
            one = _Training(self.dice.choice(SIZES), self.dice.lognormvariate(math.log(RUN_S), RUN_SIGMA))
            self._submitted.append(one)
            found.append(SubmitJob(spec=_training(one.gpus), user=_USER, project=PROJECT, queue=QUEUE))
        return found

    def _changes(self, cluster: ReplayCluster) -> list[Event]:
        """Replicas that become ready now, and trainings that end."""
        found: list[Event] = []
        for job_id in [job_id for job_id, at_s in self._ready_s.items() if at_s <= self.now_s]:
            del self._ready_s[job_id]
            gang = cluster.supervisors.gangs[job_id]
            assert self.traffic is not None
            self.traffic.add_replica(job_id)
            node_id = gang.allocation.grants[0].node_id
            found.append(
                ReadinessChanged(
                    job_id=job_id, epoch=gang.epoch, generation=gang.generation, node_id=node_id, ready=True
                )
            )
        for job_id, one in list(self._trainings.items()):
            if one.since_s is not None and self.now_s - one.since_s >= one.left_s:
                self._stopped(job_id)
                del self._trainings[job_id]
                self.finished += 1
                found += cluster.supervisors.finish_job(job_id, self.now_s)
        return found

    def _follow(self, cluster: ReplayCluster, kind: GangEvent, job_id: JobId) -> None:
        replica = cluster.controller.world.jobs[job_id].replica is not None
        if kind is GangEvent.STARTED and replica:
            self._ready_s[job_id] = self.now_s + ENGINE.start_s
        elif kind is GangEvent.STARTED:
            self._trainings[job_id].since_s = self.now_s + RESTART_S
        elif replica and self.traffic is not None:
            self._ready_s.pop(job_id, None)
            self.traffic.remove_replica(job_id)
        elif kind is GangEvent.STOPPED:
            self.preempted += 1
            self._stopped(job_id)

    def _stopped(self, job_id: JobId) -> None:
        one = self._trainings[job_id]
        if one.since_s is not None:
            computed_s = max(0.0, self.now_s - one.since_s)
            self.trained_s += one.gpus * computed_s
            one.left_s -= computed_s
            one.since_s = None

    def _pass_second(self) -> list[Event]:
        found: list[Event] = []
        held, streams = 0, 0.0
        if self.traffic is not None:
            busy_s = self.traffic.busy_s
            found.append(LoadObserved(user=_USER, gateway="gateway", loads=((CHAT, self.traffic.pass_second()),)))
            held, streams = (
                len(self.traffic.engines) + len(self._ready_s),
                (self.traffic.busy_s - busy_s) / ENGINE.streams,
            )
            self.replicas_s += held
        if self.now_s % 60.0 == 0.0:
            training = sum(
                one.gpus for one in self._trainings.values() if one.since_s is not None and one.since_s <= self.now_s
            )
            self.samples.append(Sample(self.now_s, held, streams, training))
        self.now_s += 1.0
        return found


def kept_by(replicas: int, hours: float, name: str, seed: int) -> SimulatedTraffic:
    """Return the day of a service with a fixed number of replicas, until it is clear that it misses the target too often."""
    rate = day(name, seed)
    missed_max = (1 - SLO) * sum(map(rate, range(int(WARM_S), int(WARM_S + hours * 3600.0))))
    traffic = SimulatedTraffic(TERMS, rate, ENGINE, Random(seed))
    for number in range(replicas):
        traffic.add_replica(number)
    while traffic.now_s < WARM_S:
        traffic.pass_second()
    traffic.forget()
    while traffic.now_s < WARM_S + hours * 3600.0 and traffic.served - traffic.kept <= 1.1 * missed_max:
        traffic.pass_second()
    return traffic


def shared_day(hours: float, name: str, seed: int) -> SimulatedFleet:
    """Return the day on one fleet."""
    fleet = SimulatedFleet(GPUS, Random(seed), SimulatedTraffic(TERMS, day(name, seed), ENGINE, Random(seed)))
    fleet.run(hours)
    return fleet


@dataclass(frozen=True, slots=True)
class FixedPool:
    """The day of a service with its own GPUs."""

    replicas: int
    busy_s: float
    slo_share: float


def smallest_pool(hours: float, name: str, seed: int) -> FixedPool:
    """Return the smallest fixed number of replicas with which the target is kept, and its day."""
    low, high, middle = 1, GPUS, PEAK_GPUS
    best: SimulatedTraffic | None = None
    while best is None or low < high:  # in steps of 4 to a range of 4, then by halves
        found = kept_by(middle, hours, name, seed)
        if found.kept >= SLO * found.served:
            high, best = middle, found
        else:
            low = middle + 1
        if best is None:
            assert low <= GPUS, "no pool of this size keeps the target"
            middle = min(GPUS, middle + 4)
        else:
            middle = max(1, high - 4) if low == 1 else (low + high) // 2
    return FixedPool(high, best.busy_s, best.kept / best.served)


def separate_pools(hours: float, name: str, seed: int) -> tuple[FixedPool, SimulatedFleet]:
    """Return the day of two pools."""
    pool = smallest_pool(hours, name, seed)
    training = SimulatedFleet(GPUS - pool.replicas, Random(seed))
    training.run(hours)
    return pool, training


def measure(hours: float, name: str, seed: int) -> tuple[dict[str, float | str], list[Sample], int]:
    """Return the figures of a day, its samples, and the replicas of the fixed pool."""
    gpu_s = GPUS * hours * 3600.0
    with ProcessPoolExecutor(1) as beside:
        search = beside.submit(separate_pools, hours, name, seed)
        shared = shared_day(hours, name, seed)
        pool, apart = search.result()
    traffic = shared.traffic
    assert traffic is not None
    use = (traffic.busy_s / ENGINE.streams + shared.trained_s) / gpu_s
    use_apart = (pool.busy_s / ENGINE.streams + apart.trained_s) / gpu_s
    figures: dict[str, float | str] = {
        "day": name,
        "seed": seed,
        "slo_share": round(traffic.kept / traffic.served, 5),
        "gpu_use_gain": round(100 * (use - use_apart), 2),
        "gpu_use": round(100 * use, 2),
        "gpu_use_apart": round(100 * use_apart, 2),
        "slo_share_apart": round(pool.slo_share, 5),
        "pool_of_service": pool.replicas,
        "replicas_mean": round(shared.replicas_s / (hours * 3600.0), 2),
        "replicas_peak": max(one.replicas for one in shared.samples),
        "streams_gpus_mean": round(traffic.busy_s / ENGINE.streams / (hours * 3600.0), 2),
        "training_gpu_hours": round(shared.trained_s / 3600.0, 1),
        "training_gpu_hours_apart": round(apart.trained_s / 3600.0, 1),
        "preemptions": shared.preempted,
        "preemptions_apart": apart.preempted,
        "requests": traffic.served,
    }
    return figures, shared.samples, pool.replicas


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--hours", type=float, default=HOURS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="one day of each kind for each")
    parser.add_argument("--days", choices=list(DAYS), nargs="*", default=list(DAYS))
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    found: list[dict[str, float | str]] = []
    for name in options.days:
        for seed in options.seeds:
            figures, samples, pool = measure(options.hours, name, seed)
            if options.picture and not found:
                draw(options.picture, samples, pool)
            found.append(figures)
            if not options.json:
                sys.stdout.write(" ".join(f"{key}={value}" for key, value in figures.items()) + "\n")
                sys.stdout.flush()
    gains = [float(one["gpu_use_gain"]) for one in found]
    summary = {
        "slo_share": min(float(one["slo_share"]) for one in found),
        "gpu_use_gain": round(sum(gains) / len(gains), 2),
        "gpu_use_gain_worst": min(gains),
    }
    sys.stdout.write((json.dumps({**summary, "days": found}) if options.json else f"{summary}") + "\n")


def draw(path: Path, samples: Sequence[Sample], pool: int) -> None:
    """Draw a day: below what computes on the fleet, above the GPUs that the service holds, beside a pool of its own."""
    from matplotlib.figure import Figure

    hours = [(one.at_s - WARM_S + BEGIN_S) / 3600.0 for one in samples]
    streams, training = [one.streams for one in samples], [float(one.training) for one in samples]
    figure = Figure(figsize=(10, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(
        hours,
        [one.replicas for one in samples],
        color="#2a6fd0",
        label="replicas on the shared fleet",
        drawstyle="steps-post",
    )
    above.fill_between(hours, streams, color="#2a6fd0", alpha=0.3, linewidth=0, label="filled by their streams")
    above.axhline(pool, color="#d8433d", linestyle="--", label=f"pool of its own: {pool} GPUs all day")
    above.set_ylabel("GPUs of the service")
    below.stackplot(
        hours, training, streams, colors=["#2e9c6a", "#2a6fd0"], labels=["training computes", "streams of the service"]
    )
    below.axhline(GPUS, color="#5c626d", linewidth=1)
    below.set_ylabel(f"use of {GPUS} shared GPUs")
    below.set_xlabel("hour of the day")
    below.set_xticks(range(4, 29, 2), [f"{hour % 24}:00" for hour in range(4, 29, 2)])
    for axes in (above, below):
        axes.set_xlim(hours[0], hours[-1])
        axes.set_ylim(0, GPUS + 2)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", framealpha=0.9)
    figure.savefig(path, metadata={"Date": None})


def _service(gpus: int) -> JobSpec:
    terms = ServiceTerms(replicas_min=1, replicas_max=gpus, scale=TERMS)
    role = Role(argv=("serve",), gpus=parse_gpus("1"), launch=LaunchMode.FIXED, tasks_per_node=1)
    return JobSpec(name=CHAT, role=role, workdir="/", service=terms, preemptible=False, priority=10)


def _training(gpus: int) -> JobSpec:
    role = Role(argv=("train",), gpus=parse_gpus(str(gpus)), launch=LaunchMode.FIXED, tasks_per_node=1)
    return JobSpec(name="train", role=role, workdir="/", saves_on_stop=True)


if __name__ == "__main__":
    main()

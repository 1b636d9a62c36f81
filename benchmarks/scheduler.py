"""Benchmark of the pure scheduler, on one core without a daemon: scheduling passes on a large fleet, and replays.

python -m benchmarks.scheduler [--json] [--runs N] [--only pass,shared,place,decision,fifo,default,board_fifo,board_default,replay]

Each part runs in its own process. ranges/scheduler.json has the bounds and their origin. Each figure is also given in yardsticks
(`benchmarks.yardstick`, measured before and after the part): times divided by it, rates multiplied.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.figures import (
    Figure,
    argument_parser,
    at_least,
    at_most,
    plain_figure,
    print_progress,
    print_report,
)
from benchmarks.replays import replay_s
from benchmarks.yardstick import yardstick_s
from phalanx.controller.driver import tune_gc
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.ids import Epoch, JobId, NodeId, ProjectId, QueueId, UserId
from phalanx.core.lifecycle.job import place
from phalanx.core.lifecycle.transitions import TransitionContext
from phalanx.core.scheduling.needs import Need
from phalanx.core.scheduling.pool import DevicePool
from phalanx.core.scheduling.scheduler import Scheduler
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.state.world import World, WorldChange
from phalanx.core.units import GIB
from phalanx.core.work.allocation import Allocation, NodeGrant
from phalanx.core.work.attempt import Attempt, Member
from phalanx.core.work.gpus import parse_gpus
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Queue
from phalanx.core.work.share import MILLI_PER_DEVICE, DeviceShare
from phalanx.core.work.spec import JobSpec, Role
from phalanx.core.work.states import AttemptState, JobState

REPLAYS: Final = ("fifo", "default", "board_fifo", "board_default")  # through the lifecycle, and by the board alone
RUNS: Final = 5  # passes, placements and decisions; a replay runs once
PARTS: Final = ("pass", "shared", "place", "decision", *REPLAYS)
DEFAULT_PARTS: Final = ("pass", "place", "decision", *REPLAYS)  # `shared` by name: it builds both worlds
SHARED_PART: Final = 1 / 3  # of all devices, in part `shared`, and of its waiting jobs
SHARES: Final = (
    125,
    250,
    500,
)  # thousandths; they fill a device, as whole jobs do, so that quotas are used up in both worlds
SECONDS: Final = {"s": 1.0, "ms": 0.001, "/s": 1.0}  # of a unit; ratios have no yardstick
RANGES: Final = Path(__file__).parent / "ranges" / "scheduler.json"
NODES, PENDING, QUEUES = 12_500, 50_000, 200
GPUS_PER_NODE = 8
HELD_SHARE = 0.95
PLACED_LEAST, CLASSES_LEAST = 500, 2_000
TURNOVER = 450  # jobs that end and arrive between two passes: enough that more than PLACED_LEAST can start
SHARED_TURNOVER = 650  # the same for part `shared`, in both worlds: with shares most of the jobs that end are small
WARM_UP = 3  # uncounted passes: a new scheduler fits its history again at every tenth end
T = 1_700_000_000.0


@dataclass(frozen=True)
class SchedulingPass:
    """One measured pass. `cpu_s`: of its process; it depends less on other load."""

    seconds: float
    cpu_s: float
    placed: int
    classes: int


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argument_parser("The scheduler alone: passes, placements, one decision, replays of a month.")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # for child processes
    given = parser.parse_args(argv)
    runs = given.runs or RUNS
    if given.part:
        print(json.dumps(asdict(measure_part(given.part, runs))))
        return
    only = set(filter(None, given.only.split(",")))
    if "replay" in only:
        only |= set(REPLAYS)
    wanted = [part for part in PARTS if part in (only or DEFAULT_PARTS)]
    if not wanted:
        parser.error(f"--only {given.only}: unknown figure; known are {', '.join(PARTS)} and replay")
    parts = {}
    before_s = yardstick_s()
    for part in wanted:
        measured = measure_in_child(part, runs)
        after_s = yardstick_s()
        parts[part] = replace(measured, yardstick_s=(before_s + after_s) / 2)
        before_s = after_s
    print_figures(parts, as_json=given.json)


# ---- parts, each in a process of its own ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartResult:
    """The result of one part of the benchmark: runs by figure, further facts, the peak memory of its process, and the yardstick's seconds there."""

    runs: dict[str, list[float]]
    facts: dict[str, object]
    peak_mib: float
    yardstick_s: float = 0.0


def measure_part(part: str, repeat: int) -> PartResult:
    """Measure one part, in this process."""
    facts: dict[str, object] = {}
    if part == "pass":
        measured = list(passes(repeat, TURNOVER))
        runs = {"pass_50k_ms": [1000 * one.seconds for one in measured]}
        facts = {
            "pass_cpu_ms": round(1000 * median_cpu_s(measured), 1),
            "pass_placed": min(one.placed for one in measured),
            "pass_classes": min(one.classes for one in measured),
        }
    elif part == "shared":  # in one process, one pass after the other, so that the ratio does not depend on other load
        worlds = (passes(repeat, SHARED_TURNOVER), passes(repeat, SHARED_TURNOVER, shared=True))
        plain, shared = zip(*zip(*worlds, strict=True), strict=True)
        ratio = statistics.median(one.seconds for one in shared) / statistics.median(one.seconds for one in plain)
        runs = {"pass_shared_ratio": [ratio]}
        facts = {
            "pass_shared_ms": round(1000 * statistics.median(one.seconds for one in shared), 1),
            "pass_shared_cpu_ms": round(1000 * median_cpu_s(shared), 1),
            "pass_shared_cpu_ratio": round(median_cpu_s(shared) / median_cpu_s(plain), 2),
            "pass_shared_placed": min(one.placed for one in shared),
            "pass_whole_placed": min(one.placed for one in plain),
        }
    elif part == "place":
        runs = {"placements_per_s": [placements_per_s(seed) for seed in range(repeat)]}
    elif part == "decision":
        runs = {"decision_1213_ms": [1000 * decision_s(seed) for seed in range(repeat)]}
    else:
        seconds, facts = replay_s(part.removeprefix("board_"), lifecycle=not part.startswith("board_"))
        facts[f"replay_{part}_cpu_s"] = round(time.process_time(), 1)  # does not depend on other load
        runs = {f"replay_{part}_s": [seconds]}  # once: it takes as long as all other parts
    return PartResult(runs=runs, facts=facts, peak_mib=peak_mib())


def median_cpu_s(measured: Sequence[SchedulingPass]) -> float:
    """Return the median processor time of these passes."""
    return statistics.median(one.cpu_s for one in measured)


def measure_in_child(part: str, runs: int) -> PartResult:
    """Measure one part in a new process, for a separate memory peak and an unfragmented heap."""
    print_progress(f"{part} ...")
    words = [sys.executable, "-m", "benchmarks.scheduler", "--part", part, "--runs", str(runs)]
    done = subprocess.run(
        words, cwd=Path(__file__).resolve().parents[1], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"benchmarks.scheduler: {part} ended with {done.returncode}; its output is above")
    return PartResult(**json.loads(done.stdout))


def peak_mib() -> float:
    """Return the peak memory of this process. Not `ru_maxrss`, which starts with the memory of the parent at the fork."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def print_figures(parts: dict[str, PartResult], *, as_json: bool) -> None:
    """Print the medians with their ranges as a table, or as one flat JSON object in which `missed` lists figures out of range."""
    ranges = json.loads(RANGES.read_text(encoding="utf-8"))
    peaks = {part: each.peak_mib for part, each in parts.items()}
    figures = [figure_with_range(name, runs, ranges) for each in parts.values() for name, runs in each.runs.items()]
    for name, of in (("pass", ["pass"]), ("replay", list(REPLAYS)), ("", list(PARTS))):
        held = [peaks[part] for part in of if part in peaks]
        if held:
            figures.append(
                plain_figure(
                    f"peak_{name}_mib" if name else "peak_mib",
                    [max(held)],
                    "MiB",
                    note="largest of these processes" if name else "largest of all",
                )
            )
    facts = {name: value for each in parts.values() for name, value in each.facts.items()}
    facts["yardstick_s"] = round(statistics.median(each.yardstick_s for each in parts.values()), 3)
    facts |= {
        f"{name}_per_yardstick": in_yardsticks(runs, ranges[name]["unit"], each.yardstick_s)
        for each in parts.values()
        for name, runs in each.runs.items()
        if each.yardstick_s and ranges[name]["unit"] in SECONDS
    }
    if not as_json:
        print_report(
            "scheduler" + "".join(f"; {name} {value}" for name, value in facts.items()), figures, as_json=False
        )
        return
    flat: dict[str, object] = {figure.name: float(f"{figure.value:.5g}") for figure in figures}
    print(json.dumps({**flat, **facts, "missed": [figure.name for figure in figures if figure.met is False]}))


def in_yardsticks(runs: list[float], unit: str, yardstick_s: float) -> float:
    """Return the median of times as a multiple of the yardstick, and of rates as a number in its time."""
    middle = statistics.median(runs)
    return float(f"{middle * yardstick_s if unit == '/s' else middle * SECONDS[unit] / yardstick_s:.4g}")


def figure_with_range(name: str, runs: list[float], ranges: dict[str, dict[str, Any]]) -> Figure:
    """Return a figure with its range."""
    bound = ranges[name]
    make = {"at most": at_most, "at least": at_least}[bound["direction"]]
    return make(name, runs, bound["unit"], bound["bound"], note=bound["origin"])


# ---- one pass on a full fleet -------------------------------------------------------------------------------------------


def passes(repeat: int, turnover: int, *, shared: bool = False) -> Iterator[SchedulingPass]:
    """Measure passes: `turnover` jobs end, as many arrive, the policy decides. Each pass continues from the state after the previous one.

    With `shared`, a third of the devices is shared, and a third of the jobs asks for shares.
    """
    random_ = random.Random(7)
    world, change = full_world(random_, shared=shared)
    scheduler = Scheduler(PolicySettings(placements_max=100_000))
    now_s = T
    scheduler.plan(world, now_s)
    tune_gc()  # as the head does at start
    for number in range(WARM_UP + repeat):
        now_s += 60.0
        seen = len(change.records)
        for attempt in random_.sample(
            sorted(world.attempts.values(), key=lambda attempt: int(attempt.job_id)), turnover
        ):
            end(world, change, attempt, now_s)
        for _ in range(turnover):
            change.put(new_job(change.new_job_seq(), random_, now_s, share=shared))
        changed = change.records[seen:]
        begun, begun_cpu_s = time.perf_counter(), time.process_time()
        scheduler.update(world, changed, now_s)
        plan = scheduler.plan(world, now_s)
        seconds, cpu_s = time.perf_counter() - begun, time.process_time() - begun_cpu_s
        classes = len({entry.job_class.number for entry in scheduler.board.waiting.values()})
        if number >= WARM_UP:
            measured = SchedulingPass(seconds=seconds, cpu_s=cpu_s, placed=len(plan.placements), classes=classes)
            assert len(plan.placements) >= PLACED_LEAST, measured
            assert classes >= CLASSES_LEAST, measured
            yield measured
        commit(world, change, scheduler, plan, now_s)
    gc.unfreeze()


def full_world(random_: random.Random, *, shared: bool = False) -> tuple[World, WorldChange]:
    """Build 12,500 nodes of 8 in 4 spines of 10 leaves, 95 % allocated; 50,000 jobs wait in 200 queues and more than 2,000 classes."""
    world = World()
    change = WorldChange(world=world)
    for number in range(NODES):
        change.put(node(number))
    for number in range(QUEUES):
        parent = None if number < 10 else QueueId(f"q{number % 10}")
        change.put(
            Queue(id=QueueId(f"q{number}"), parent=parent, quota_gpus=400 if parent else None, weight=1.0 + number % 3)
        )
    whole = list(range(NODES))
    random_.shuffle(whole)
    partial: list[tuple[int, list[int]]] = []  # partly allocated nodes with their free devices
    held = 0
    while shared and held < SHARED_PART * NODES * GPUS_PER_NODE:
        place = whole.pop()
        for device in range(GPUS_PER_NODE):
            milli = random_.choice(SHARES)
            for _ in range(MILLI_PER_DEVICE // milli):
                job = new_job(change.new_job_seq(), random_, T - 7200.0, milli=milli)
                run(change, job, [(place, [device])], random_)
        held += GPUS_PER_NODE
    while held < HELD_SHARE * NODES * GPUS_PER_NODE:
        gpus = random_.choice((1, 1, 2, 4, 8, 8, 16, 32))
        parts: list[tuple[int, list[int]]] = []
        if gpus >= GPUS_PER_NODE:
            parts = [(whole.pop(), list(range(GPUS_PER_NODE))) for _ in range(gpus // GPUS_PER_NODE)]
        else:
            room = next((place for place in partial[-64:] if len(place[1]) >= gpus), None)
            if room is None:
                room = (whole.pop(), list(range(GPUS_PER_NODE)))
                partial.append(room)
            parts = [(room[0], [room[1].pop(0) for _ in range(gpus)])]
        held += gpus
        run(change, new_job(change.new_job_seq(), random_, T - 7200.0, gpus=gpus), parts, random_)
    for _ in range(PENDING):
        change.put(new_job(change.new_job_seq(), random_, T - random_.random() * 86400.0, share=shared))
    return world, change


def node(number: int) -> Node:
    """Return one server with its place in the topology."""
    return Node(
        id=NodeId(f"n{number:05}"),
        engine="local",
        cpus=128,
        memory_bytes=2048 * GIB,
        state=NodeState.UP,
        devices=tuple(
            Device(index=index, uuid=f"{number}-{index}", model="h100", memory_bytes=80 * GIB)
            for index in range(GPUS_PER_NODE)
        ),
        labels={"spine": f"s{number * 4 // NODES}", "leaf": f"l{number * 40 // NODES:02}"},
    )


def new_job(
    seq: int, random_: random.Random, submit_s: float, gpus: int | None = None, *, milli: int = 0, share: bool = False
) -> Job:
    """Return a job with a random queue and size; with `share`, one in three asks for a share, with `milli` for this one."""
    size: int | float = gpus or random_.choice((1, 1, 1, 2, 2, 3, 4, 6, 8, 8, 16, 24, 32, 48, 64, 128))
    if milli or (share and random_.random() < SHARED_PART):
        size = (milli or random_.choice(SHARES)) / MILLI_PER_DEVICE
    spec = JobSpec(
        name="train", role=Role(argv=("python", "train.py"), gpus=parse_gpus(size)), workdir="/work", saves_on_stop=True
    )
    queue = random_.randrange(QUEUES)
    return Job(
        id=JobId(str(seq)),
        folder=f"{seq}-k",
        seq=seq,
        spec=spec,
        user=UserId(f"u{queue}"),
        project=ProjectId("p"),
        queue=QueueId(f"q{queue}"),
        submit_s=submit_s,
    )


def run(change: WorldChange, job: Job, parts: list[tuple[int, list[int]]], random_: random.Random) -> None:
    """Make the job run on these nodes, for up to two hours already."""
    asked = job.spec.role.gpus.share
    grants = tuple(
        NodeGrant(
            node_id=NodeId(f"n{number:05}"),
            node_rank=rank,
            devices=tuple(devices),
            cpus=0,
            memory_bytes=0,
            tasks=len(devices),
            first_rank=0,
            share=None
            if asked is None
            else DeviceShare(milli=asked.milli, memory_bytes=0, kind=asked.kind, group="mps:p"),
        )
        for rank, (number, devices) in enumerate(sorted(parts))
    )
    placed_s = T - random_.random() * 7200.0
    change.put(replace(job, state=JobState.RUNNING, epoch=Epoch(1), started_s=placed_s))
    change.put(
        Attempt(
            job_id=job.id,
            epoch=Epoch(1),
            folder=f"{job.folder}/epoch-1-k",
            allocation=Allocation(grants=grants),
            placed_s=placed_s,
            state=AttemptState.RUNNING,
            members=tuple(Member(node_id=grant.node_id) for grant in grants),
            first_running_s=placed_s,
        )
    )


def end(world: World, change: WorldChange, attempt: Attempt, now_s: float) -> None:
    """End the job successfully."""
    change.put(replace(world.jobs[attempt.job_id], state=JobState.SUCCEEDED, ended_s=now_s))
    change.put(replace(attempt, state=AttemptState.ENDED, ended_s=now_s))


def commit(world: World, change: WorldChange, scheduler: Scheduler, plan: object, now_s: float) -> None:
    """Apply the plan as the controller does; not part of the measured time."""
    seen = len(change.records)
    facts = TransitionContext(now_s=now_s)
    for stop in plan.stops:  # type: ignore[attr-defined]
        attempt = world.attempts[stop.job_id]
        change.put(replace(world.jobs[stop.job_id], state=JobState.PENDING))
        change.put(replace(attempt, state=AttemptState.ENDED, ended_s=now_s))
    for placement in plan.placements:  # type: ignore[attr-defined]
        outcome = place(world.jobs[placement.job_id], placement.allocation, facts)
        change.put(outcome.job)
        if outcome.attempt is not None:
            change.put(outcome.attempt)
    scheduler.update(world, change.records[seen:], now_s)


# ---- placements alone ---------------------------------------------------------------------------------------------------


def placements_per_s(seed: int) -> float:
    """Place gangs of mixed sizes by topology on the empty fleet until it is full; return placements per second."""
    from phalanx.core.fleet.topology import build_topology_tree

    random_ = random.Random(seed)
    fleet = [node(number) for number in range(NODES)]
    pool = DevicePool([GPUS_PER_NODE] * NODES, tree=build_topology_tree(fleet))
    wanted = [_need(random_.choice((1, 2, 4, 8, 16, 32, 64))) for _ in range(4_000)]
    begun = time.perf_counter()
    for need in wanted:
        places = pool.find(need)
        assert places is not None
        pool.take(places)
    return len(wanted) / (time.perf_counter() - begun)


def decision_s(seed: int) -> float:
    """Plan and place one gang of 64 GPUs on 1,213 nodes, half of them partly allocated, with a warm scheduler; return the seconds."""
    random_ = random.Random(seed)
    world = World()
    change = WorldChange(world=world)
    for number in range(1_213):
        change.put(node(number))
    change.put(Queue(id=QueueId("q0")))
    for number in range(0, 1_213, 2):
        job = replace(new_job(change.new_job_seq(), random_, T, gpus=4), queue=QueueId("q0"))
        run(change, job, [(number, [0, 1, 2, 3])], random_)
    scheduler = Scheduler(PolicySettings())
    scheduler.plan(world, T)
    seen = len(change.records)
    gang = replace(new_job(change.new_job_seq(), random_, T, gpus=64), queue=QueueId("q0"))
    change.put(gang)
    begun = time.perf_counter()
    scheduler.update(world, change.records[seen:], T + 1.0)
    plan = scheduler.plan(world, T + 1.0)
    seconds = time.perf_counter() - begun
    assert plan.placement(gang.id) is not None
    return seconds


def _need(gpus: int) -> Need:
    return (
        Need(nodes=1, devices=gpus)
        if gpus <= GPUS_PER_NODE
        else Need(nodes=gpus // GPUS_PER_NODE, devices=GPUS_PER_NODE)
    )


if __name__ == "__main__":
    main(sys.argv[1:])

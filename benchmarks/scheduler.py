"""What a scheduling pass costs on a large fleet, and what replays cost: figures of the pure scheduler, on one core, no daemon.

python -m benchmarks.scheduler [--json] [--runs N] [--only pass,place,decision,fifo,default,replay]

Each part runs in a process of its own; bounds, and where each comes from, stand in ranges/scheduler.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.figures import Figure, arguments, at_least, at_most, report, shown, tell
from benchmarks.replays import replay_s
from phalanx.controller.driver import calm_collector
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.ids import Epoch, JobId, NodeId, ProjectId, QueueId, UserId
from phalanx.core.lifecycle.facts import Facts
from phalanx.core.lifecycle.job import place
from phalanx.core.scheduling.needs import Need
from phalanx.core.scheduling.pool import Pool
from phalanx.core.scheduling.scheduler import Scheduler
from phalanx.core.scheduling.settings import Policy
from phalanx.core.state.world import Change, World
from phalanx.core.units import GIB
from phalanx.core.work.allocation import Allocation, Grant
from phalanx.core.work.attempt import Attempt, AttemptState, Member
from phalanx.core.work.gpus import parse_gpus
from phalanx.core.work.job import Job, JobState
from phalanx.core.work.queue import Queue
from phalanx.core.work.spec import JobSpec, Role

REPLAYS: Final = ("fifo", "default")  # the policies that have a bound
RUNS: Final = 5  # passes, placements and decisions; a replay runs once
PARTS: Final = ("pass", "place", "decision", *REPLAYS)
RANGES: Final = Path(__file__).parent / "ranges" / "scheduler.json"
NODES, PENDING, QUEUES = 12_500, 50_000, 200
GPUS_PER_NODE = 8
HELD_SHARE = 0.95
PLACED_LEAST, CLASSES_LEAST = 500, 2_000
ENDS = ARRIVALS = 450  # between two passes: enough that more than PLACED_LEAST can start
WARM_UP = 3  # passes before the first that counts: the history of a fresh scheduler is fitted anew at every tenth end
T = 1_700_000_000.0


@dataclass(frozen=True)
class Pass:
    """One measured pass."""

    seconds: float
    placed: int
    classes: int


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = arguments("The scheduler alone: passes, placements, one decision, replays of a month.")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # what a child is asked for
    given = parser.parse_args(argv)
    runs = given.runs or RUNS
    if given.part:
        print(json.dumps(asdict(measured(given.part, runs))))
        return
    only = set(filter(None, given.only.split(",")))
    if "replay" in only:
        only |= set(REPLAYS)
    wanted = [part for part in PARTS if not only or part in only]
    if not wanted:
        parser.error(f"--only {given.only}: no such figure; there are {', '.join(PARTS)} and replay")
    print_figures({part: in_a_child(part, runs) for part in wanted}, as_json=given.json)


# ---- parts, each in a process of its own ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What one part of the benchmark has measured: runs by figure, facts that are no figures, and its process's largest memory."""

    runs: dict[str, list[float]]
    facts: dict[str, object]
    peak_mib: float


def measured(part: str, repeat: int) -> Part:
    """Measure one part, in this process."""
    facts: dict[str, object] = {}
    if part == "pass":
        passes = measure_passes(repeat)
        runs = {"pass_50k_ms": [1000 * one.seconds for one in passes]}
        facts = {"pass_placed": min(one.placed for one in passes), "pass_classes": min(one.classes for one in passes)}
    elif part == "place":
        runs = {"placements_per_s": [placements_per_s(seed) for seed in range(repeat)]}
    elif part == "decision":
        runs = {"decision_1213_ms": [1000 * decision_s(seed) for seed in range(repeat)]}
    else:
        seconds, facts = replay_s(part)
        facts[f"replay_{part}_cpu_s"] = round(
            time.process_time(), 1
        )  # what it would be nearer to on a machine of its own
        runs = {f"replay_{part}_s": [seconds]}  # once: it takes as long as all others together
    return Part(runs=runs, facts=facts, peak_mib=peak_mib())


def in_a_child(part: str, runs: int) -> Part:
    """The same in a fresh process: peaks are told apart, and no part runs in the memory that another has broken up."""
    tell(f"{part} ...")
    words = [sys.executable, "-m", "benchmarks.scheduler", "--part", part, "--runs", str(runs)]
    done = subprocess.run(
        words, cwd=Path(__file__).resolve().parents[1], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"benchmarks.scheduler: {part} ended with {done.returncode}; what it said stands above")
    return Part(**json.loads(done.stdout))


def peak_mib() -> float:
    """The most memory that this process has held. Not `ru_maxrss`: that begins with what the parent held when it forked."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def print_figures(parts: dict[str, Part], *, as_json: bool) -> None:
    """The medians beside their ranges (ranges/scheduler.json): a table, or one flat JSON object in which `missed` names what is out of range."""
    ranges = json.loads(RANGES.read_text(encoding="utf-8"))
    peaks = {part: each.peak_mib for part, each in parts.items()}
    figures = [ranged(name, runs, ranges) for each in parts.values() for name, runs in each.runs.items()]
    for name, of in (("pass", ["pass"]), ("replay", list(REPLAYS)), ("", list(PARTS))):
        held = [peaks[part] for part in of if part in peaks]
        if held:
            figures.append(
                shown(
                    f"peak_{name}_mib" if name else "peak_mib",
                    [max(held)],
                    "MiB",
                    note="largest of these processes" if name else "largest of all",
                )
            )
    facts = {name: value for each in parts.values() for name, value in each.facts.items()}
    if not as_json:
        report("scheduler" + "".join(f"; {name} {value}" for name, value in facts.items()), figures, as_json=False)
        return
    flat: dict[str, object] = {figure.name: float(f"{figure.value:.5g}") for figure in figures}
    print(json.dumps({**flat, **facts, "missed": [figure.name for figure in figures if figure.met is False]}))


def ranged(name: str, runs: list[float], ranges: dict[str, dict[str, Any]]) -> Figure:
    """A figure beside its range."""
    bound = ranges[name]
    judge = {"at most": at_most, "at least": at_least}[bound["direction"]]
    return judge(name, runs, bound["unit"], bound["bound"], note=bound["origin"])


# ---- one pass on a full fleet -------------------------------------------------------------------------------------------


def measure_passes(repeat: int) -> list[Pass]:
    """A pass is: 450 jobs end, 450 arrive, the policy decides. Every pass goes on from the state that the one before left."""
    random_ = random.Random(7)  # a benchmark's dice
    world, change = full_world(random_)
    scheduler = Scheduler(Policy(placements_max=100_000))
    now_s = T
    scheduler.plan(world, now_s)
    calm_collector()  # as the head does when it begins
    found = []
    for number in range(WARM_UP + repeat):
        now_s += 60.0
        told = len(change.records)
        for attempt in random_.sample(sorted(world.attempts.values(), key=lambda attempt: int(attempt.job_id)), ENDS):
            end(world, change, attempt, now_s)
        for _ in range(ARRIVALS):
            change.put(new_job(change.new_job_seq(), random_, now_s))
        changed = change.records[told:]
        begun = time.perf_counter()
        scheduler.tell(world, changed, now_s)
        plan = scheduler.plan(world, now_s)
        seconds = time.perf_counter() - begun
        classes = len({entry.klass.number for entry in scheduler.board.waiting.values()})
        if number >= WARM_UP:
            found.append(Pass(seconds=seconds, placed=len(plan.placements), classes=classes))
            assert len(plan.placements) >= PLACED_LEAST, found[-1]
            assert classes >= CLASSES_LEAST, found[-1]
        commit(world, change, scheduler, plan, now_s)
    gc.unfreeze()
    return found


def full_world(random_: random.Random) -> tuple[World, Change]:
    """12,500 nodes of 8 in 4 spines of 10 leaves, 95 % held; 50,000 jobs wait in 200 queues and more than 2,000 classes."""
    world = World()
    change = Change(world=world)
    for number in range(NODES):
        change.put(node(number))
    for number in range(QUEUES):
        parent = None if number < 10 else QueueId(f"q{number % 10}")
        change.put(
            Queue(id=QueueId(f"q{number}"), parent=parent, quota_gpus=400 if parent else None, weight=1.0 + number % 3)
        )
    whole = list(range(NODES))
    random_.shuffle(whole)
    broken: list[tuple[int, list[int]]] = []  # nodes held in part, and what is free on them
    held = 0
    while held < HELD_SHARE * NODES * GPUS_PER_NODE:
        gpus = random_.choice((1, 1, 2, 4, 8, 8, 16, 32))
        parts: list[tuple[int, list[int]]] = []
        if gpus >= GPUS_PER_NODE:
            parts = [(whole.pop(), list(range(GPUS_PER_NODE))) for _ in range(gpus // GPUS_PER_NODE)]
        else:
            room = next((place for place in broken[-64:] if len(place[1]) >= gpus), None)
            if room is None:
                room = (whole.pop(), list(range(GPUS_PER_NODE)))
                broken.append(room)
            parts = [(room[0], [room[1].pop(0) for _ in range(gpus)])]
        held += gpus
        run(change, new_job(change.new_job_seq(), random_, T - 7200.0, gpus=gpus), parts, random_)
    for _ in range(PENDING):
        change.put(new_job(change.new_job_seq(), random_, T - random_.random() * 86400.0))
    return world, change


def node(number: int) -> Node:
    """One server and its place."""
    return Node(
        id=NodeId(f"n{number:05}"), engine="local", cpus=128, memory_bytes=2048 * GIB, state=NodeState.UP,
        devices=tuple(Device(index=index, uuid=f"{number}-{index}", model="h100", memory_bytes=80 * GIB) for index in range(GPUS_PER_NODE)),
        labels={"spine": f"s{number * 4 // NODES}", "leaf": f"l{number * 40 // NODES:02}"},
    )  # fmt: skip


def new_job(seq: int, random_: random.Random, submit_s: float, gpus: int | None = None) -> Job:
    """A job of some class: its queue, its size, its priority."""
    size = gpus or random_.choice((1, 1, 1, 2, 2, 3, 4, 6, 8, 8, 16, 24, 32, 48, 64, 128))
    spec = JobSpec(
        name="train", role=Role(argv=("python", "train.py"), gpus=parse_gpus(size)), workdir="/work", saves_on_stop=True
    )
    queue = random_.randrange(QUEUES)
    return Job(
        id=JobId(str(seq)), seq=seq, spec=spec, user=UserId(f"u{queue}"), project=ProjectId("p"), queue=QueueId(f"q{queue}"),
        submit_s=submit_s,
    )  # fmt: skip


def run(change: Change, job: Job, parts: list[tuple[int, list[int]]], random_: random.Random) -> None:
    """The job has run for up to two hours on these nodes."""
    grants = tuple(
        Grant(
            node_id=NodeId(f"n{number:05}"),
            node_rank=rank,
            devices=tuple(devices),
            cpus=0,
            memory_bytes=0,
            tasks=len(devices),
            first_rank=0,
        )
        for rank, (number, devices) in enumerate(sorted(parts))
    )
    placed_s = T - random_.random() * 7200.0
    change.put(replace(job, state=JobState.RUNNING, epoch=Epoch(1), started_s=placed_s))
    change.put(Attempt(
        job_id=job.id, epoch=Epoch(1), allocation=Allocation(grants=grants), placed_s=placed_s, state=AttemptState.RUNNING,
        members=tuple(Member(node_id=grant.node_id) for grant in grants), first_running_s=placed_s,
    ))  # fmt: skip


def end(world: World, change: Change, attempt: Attempt, now_s: float) -> None:
    """The job has come to its end."""
    change.put(replace(world.jobs[attempt.job_id], state=JobState.SUCCEEDED, ended_s=now_s))
    change.put(replace(attempt, state=AttemptState.ENDED, ended_s=now_s))


def commit(world: World, change: Change, scheduler: Scheduler, plan: object, now_s: float) -> None:
    """Carry the plan out, outside the measured time, as the controller does."""
    told = len(change.records)
    facts = Facts(now_s=now_s)
    for stop in plan.stops:  # type: ignore[attr-defined]
        attempt = world.attempts[stop.job_id]
        change.put(replace(world.jobs[stop.job_id], state=JobState.PENDING))
        change.put(replace(attempt, state=AttemptState.ENDED, ended_s=now_s))
    for placement in plan.placements:  # type: ignore[attr-defined]
        outcome = place(world.jobs[placement.job_id], placement.allocation, facts)
        change.put(outcome.job)
        if outcome.attempt is not None:
            change.put(outcome.attempt)
    scheduler.tell(world, change.records[told:], now_s)


# ---- placements alone ---------------------------------------------------------------------------------------------------


def placements_per_s(seed: int) -> float:
    """Gangs of mixed sizes placed by topology on the empty fleet until it is full: finds and takes per second."""
    from phalanx.core.fleet.topology import tree_of

    random_ = random.Random(seed)
    fleet = [node(number) for number in range(NODES)]
    pool = Pool([GPUS_PER_NODE] * NODES, tree=tree_of(fleet))
    wanted = [_need(random_.choice((1, 2, 4, 8, 16, 32, 64))) for _ in range(4_000)]
    begun = time.perf_counter()
    for need in wanted:
        places = pool.find(need)
        assert places is not None
        pool.take(places)
    return len(wanted) / (time.perf_counter() - begun)


def decision_s(seed: int) -> float:
    """One gang of 64 GPUs judged and placed on 1,213 nodes, half of them held in part: the whole plan, on a warm scheduler."""
    random_ = random.Random(seed)
    world = World()
    change = Change(world=world)
    for number in range(1_213):
        change.put(node(number))
    change.put(Queue(id=QueueId("q0")))
    for number in range(0, 1_213, 2):
        job = replace(new_job(change.new_job_seq(), random_, T, gpus=4), queue=QueueId("q0"))
        run(change, job, [(number, [0, 1, 2, 3])], random_)
    scheduler = Scheduler(Policy())
    scheduler.plan(world, T)
    told = len(change.records)
    gang = replace(new_job(change.new_job_seq(), random_, T, gpus=64), queue=QueueId("q0"))
    change.put(gang)
    begun = time.perf_counter()
    scheduler.tell(world, change.records[told:], T + 1.0)
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

"""Judge policies on families of drawn traces and on public ones: completion times, waits and stops, in virtual time by the policy's board.

python -m benchmarks.policy [--json] [--quick] [--seeds 1 2] [--policies default,las] [--traces steady,muri_trace3] [--reporting 0.5] [--picture front.svg]

Settings of a policy are chosen on one half of the families and judged on the other half and on the public traces, which are read where they
exist (see benchmarks.replays). Each preemption and move costs 60 s with every policy. `backfill`, `sjf` and `srtf` know every run time, which
no cluster does: they are yardsticks. For what is wanted see `WANTED`.
`--reporting 0.5` lets half of the jobs with 2 GPUs and more report their progress, from the seed of the trace, so that `default` reads when they end.
`--stating 3` lets all these reports be wrong: they state 3 times the true run time.
`misled-long` and `misled-short`, by name only, are the default policy after a history whose run times are wrong by a factor of ten.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.figures import print_progress
from benchmarks.replays import public_trace
from phalanx.core.scheduling.policies import POLICIES
from phalanx.core.scheduling.policies.default import DefaultPolicy
from phalanx.core.scheduling.policy import Policy
from phalanx.simulator.fleet import TraceNode, equal_nodes
from phalanx.simulator.report import build_report
from phalanx.simulator.simulation import simulate_board
from phalanx.simulator.trace import Trace, read_trace
from phalanx.simulator.trace_families import FAMILIES, GPUS_PER_NODE, draw_trace

if TYPE_CHECKING:
    from phalanx.cli.figure_files import Axes

RESTART_COST_S: Final = 60.0
SEEDS: Final = (1, 2)
CHOSEN_ON: Final = ("steady", "sweeps", "heavy-tail", "gangs", "overload", "few-classes", "spare")
JUDGED_ON: Final = tuple(name for name in FAMILIES if name not in CHOSEN_ON)
PUBLIC: Final = {  # file and nodes
    "muri_trace3": ("muri_trace3.csv", 8),
    "muri_trace1": ("muri_trace1.csv", 8),
    "philly_640": ("philly_2017_oct.csv", 80),
    "philly_512": ("philly_2017_oct.csv", 64),
}
QUICK: Final = ("few-classes", "gangs", "spare-unlike", "heavy-scripts")
COMPARED: Final[dict[str, Callable[[], Policy]]] = {
    "default": DefaultPolicy,
    **{name: POLICIES[name] for name in ("throughput", "las", "fair", "backfill", "srtf", "sjf", "skip", "fifo")},
}
MISLED: Final = {"misled-long": 10.0, "misled-short": 0.1}  # factor of the run times in their history
MISLED_SHARE: Final = 5  # one in so many jobs of the trace is in the history
MONTH_S: Final = 30 * 86_400.0  # before the replay, when they were submitted
WANTED: Final = {  # of issue 21, for `default` on every trace
    "avg_jct_s": "at most 1.1 x srtf where users repeat themselves, elsewhere at most the best of las, backfill and throughput",
    "p99_jct_s": "at most that of backfill",
    "avg_wait_large_s": "at most that of backfill",
    "max_wait_s": "at most 1.5 x that of las",
    "stops_per_job": "at most 0.35, with moves",
}
AVERAGE_MAX, WAIT_MAX, STOPS_MAX = 1.1, 1.5, 0.35
TICKS: Final = (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0)


@dataclass(frozen=True, slots=True)
class PolicyReplay:
    """One policy on one trace. Times in seconds; `stops_per_job` counts preemptions and moves, `moves_per_job` the moves of these."""

    trace: str
    half: str
    seed: int
    policy: str
    avg_jct_s: float
    p99_jct_s: float
    avg_wait_large_s: float
    max_wait_s: float
    stops_per_job: float
    moves_per_job: float
    cpu_s: float


def main(argv: list[str] | None = None) -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}, and the first seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="of the drawn traces")
    parser.add_argument("--policies", default=",".join(COMPARED))
    parser.add_argument("--traces", default="", help="families and public traces; all if empty")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--reporting", type=float, default=0.0, help="share of jobs with 2 GPUs and more that report their progress"
    )
    parser.add_argument(
        "--stating", type=float, default=1.0, help="run time that they state, as a multiple of the true one"
    )
    parser.add_argument("--picture", type=Path, help="draw the front: .svg, .png or .pdf")
    given = parser.parse_args(argv)
    known = (*CHOSEN_ON, *JUDGED_ON, *PUBLIC)
    traces = given.traces.split(",") if given.traces else list(QUICK if given.quick else known)
    policies = given.policies.split(",")
    for name, names in (*((one, known) for one in traces), *((one, (*COMPARED, *MISLED)) for one in policies)):
        if name not in names:
            parser.error(f"unknown {name!r}; known are {', '.join(names)}")
    seeds = given.seeds[:1] if given.quick else given.seeds
    reporting = (given.reporting, given.stating)
    replays = replay_all(traces, policies, seeds, given.workers, reporting)
    found = {half: compare(one for one in replays if one.half == half) for half in ("chosen on", "judged on", "public")}
    missed = [text for one in replays if one.policy == "default" for text in misses(one, replays)]
    if given.picture:
        given.picture.write_bytes(draw_front(found, given.picture.suffix.removeprefix(".")))
    if given.json:
        facts = {"restart_cost_s": RESTART_COST_S, "seeds": seeds, "wanted": WANTED}
        rows = [asdict(one) for one in replays]
        print(json.dumps({**facts, "missed": missed, "halves": found, "replays": rows}))
        return
    print_tables(replays, found, missed)


# ---- replays -----------------------------------------------------------------------------------------------------------------


def replay_all(
    traces: Sequence[str],
    policies: Sequence[str],
    seeds: Sequence[int],
    workers: int,
    reporting: tuple[float, float] = (0.0, 1.0),
) -> list[PolicyReplay]:
    """Replay each policy on each trace; a public trace once, and only if it exists. `reporting`: as in `with_reports`."""
    here = [name for name in traces if name in FAMILIES or public_path(name) is not None]
    for name in traces:
        if name not in here:
            print_progress(f"{name} is not here")
    tasks = [
        (name, seed, policy) for name in here for seed in (seeds if name in FAMILIES else (0,)) for policy in policies
    ]
    # The longest first, so that no worker is left with one of them at the end.
    order = sorted(tasks, key=lambda task: (task[0] in FAMILIES, task[0] != "muri_trace1" or task[2] != "las"))
    found: dict[tuple[str, int, str], PolicyReplay] = {}
    with ProcessPoolExecutor(workers) as pool:
        for task, one in zip(order, pool.map(replay, order, repeat(reporting)), strict=True):
            found[task] = one
            print_progress(f"{len(found)} of {len(tasks)}: {one.policy} on {one.trace}, {one.cpu_s:.1f} s of CPU time")
    return [found[task] for task in tasks]


def replay(task: tuple[str, int, str], reporting: tuple[float, float] = (0.0, 1.0)) -> PolicyReplay:
    """Replay a trace, by name and seed, under a policy."""
    name, seed, policy = task
    trace, nodes = trace_named(name, seed)
    trace = with_reports(trace, seed, *reporting)
    begun_s = time.process_time()
    make = COMPARED[policy] if policy in COMPARED else lambda: misled_policy(trace, MISLED[policy])
    report = build_report(simulate_board(trace, nodes, make, restart_cost_s=RESTART_COST_S), wall_s=0.0)
    return PolicyReplay(
        trace=name,
        half="chosen on" if name in CHOSEN_ON else "judged on" if name in FAMILIES else "public",
        seed=seed,
        policy=policy,
        avg_jct_s=round(report.avg_jct_s),
        p99_jct_s=round(report.p99_jct_s),
        avg_wait_large_s=round(report.avg_wait_large_s),
        max_wait_s=round(report.max_wait_s),
        stops_per_job=round(report.stops_per_job, 3),
        moves_per_job=round(report.moves / report.jobs, 3),
        cpu_s=round(time.process_time() - begun_s, 1),
    )


def with_reports(trace: Trace, seed: int, share: float, factor: float) -> Trace:
    """Let this share of the jobs with 2 GPUs and more report their progress, which states `factor` times their run time."""
    chance = random.Random(seed)  # not used for security
    drawn = [(job, chance.random() < share and job.gpus >= 2) for job in trace.jobs]
    jobs = tuple(replace(job, stated_s=factor * job.duration_s) if reports else job for job, reports in drawn)
    return replace(trace, jobs=jobs)


def misled_policy(trace: Trace, factor: float) -> DefaultPolicy:
    """Return the default policy after it learned from a history like the trace, but with run times multiplied by `factor`."""
    policy = DefaultPolicy()
    labels: dict[str, int] = {}  # as a replay numbers them
    for job in trace.jobs:
        labels.setdefault(job.virtual_cluster, len(labels))
    for job in trace.jobs[::MISLED_SHARE]:
        policy.learn(labels[job.virtual_cluster], job.gpus, trace.jobs[0].submit_s - MONTH_S, factor * job.duration_s)
    return policy


def trace_named(name: str, seed: int) -> tuple[Trace, tuple[TraceNode, ...]]:
    """Return a trace and its fleet."""
    if name in FAMILIES:
        return draw_trace(FAMILIES[name], seed), FAMILIES[name].fleet
    path = public_path(name)
    assert path is not None
    return read_trace(path.read_text(encoding="utf-8").splitlines(), name=path.name), equal_nodes(
        PUBLIC[name][1], GPUS_PER_NODE
    )


def public_path(name: str) -> Path | None:
    """Return the path of a public trace; None if it is not here."""
    known = public_trace()
    path = None if known is None else known.with_name(PUBLIC[name][0])
    return path if path is not None and path.is_file() else None


# ---- comparison --------------------------------------------------------------------------------------------------------------


def compare(replays: Iterable[PolicyReplay]) -> dict[str, dict[str, float]]:
    """Return for each policy the geometric means of its figures as multiples of the yardstick's, where that was replayed.

    The largest wait is also given where it is worst, and stops per job as their mean and maximum.
    """
    rows = list(replays)
    by_key = {(one.trace, one.seed, one.policy): one for one in rows}
    found: dict[str, dict[str, float]] = {}
    for policy in dict.fromkeys(one.policy for one in rows):
        own = [one for one in rows if one.policy == policy]
        figures: dict[str, float] = {}
        for key, other in (
            ("avg_jct_s", "srtf"),
            ("p99_jct_s", "backfill"),
            ("avg_wait_large_s", "backfill"),
            ("max_wait_s", "las"),
        ):
            pairs = [(one, by_key.get((one.trace, one.seed, other))) for one in own]
            ratios = [ratio(getattr(one, key), getattr(peer, key)) for one, peer in pairs if peer is not None]
            if ratios:
                figures[f"{key.removesuffix('_s')}_to_{other}"] = round(geometric_mean(ratios), 3)
                if key == "max_wait_s":
                    figures["max_wait_to_las_worst"] = round(max(ratios), 2)
        figures["stops_per_job"] = round(sum(one.stops_per_job for one in own) / len(own), 3)
        figures["stops_per_job_worst"] = max(one.stops_per_job for one in own)
        found[policy] = figures
    return found


def ratio(own: float, other: float) -> float:
    """Return the ratio of two times, each with a minute more: waits may be zero, and less than that is nothing."""
    return (own + 60.0) / (other + 60.0)


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean, in which twice and half as long cancel."""
    return math.exp(sum(map(math.log, values)) / len(values))


def misses(one: PolicyReplay, replays: Iterable[PolicyReplay]) -> list[str]:
    """Return what of `WANTED` this replay misses, against the others of its trace."""
    peers = {peer.policy: peer for peer in replays if (peer.trace, peer.seed) == (one.trace, one.seed)}
    limits: dict[str, float] = {"stops_per_job": STOPS_MAX}
    repeats = FAMILIES[one.trace].repeats if one.trace in FAMILIES else one.trace.startswith("philly")
    if repeats and "srtf" in peers:
        limits["avg_jct_s"] = AVERAGE_MAX * peers["srtf"].avg_jct_s
    elif not repeats and {"las", "backfill", "throughput"} <= set(peers):
        limits["avg_jct_s"] = min(peers[name].avg_jct_s for name in ("las", "backfill", "throughput"))
    if "backfill" in peers:
        limits["p99_jct_s"] = peers["backfill"].p99_jct_s
        limits["avg_wait_large_s"] = peers["backfill"].avg_wait_large_s
    if "las" in peers:
        limits["max_wait_s"] = WAIT_MAX * peers["las"].max_wait_s
    return [
        f"{one.trace}, seed {one.seed}: {key} {getattr(one, key):g}, wanted at most {limits[key]:g}"
        for key in WANTED
        if key in limits and getattr(one, key) > limits[key]
    ]


# ---- output ------------------------------------------------------------------------------------------------------------------


def print_tables(
    replays: Sequence[PolicyReplay], found: Mapping[str, Mapping[str, Mapping[str, float]]], missed: Sequence[str]
) -> None:
    """Print every replay, the comparison by half, and what is missed."""
    heading = ("mean JCT", "p99 JCT", "mean wait >= 8", "largest wait", "stops", "moves")
    print(f"{'trace':18}{'seed':>5}  {'policy':10}" + "".join(f"{name:>16}" for name in heading))
    for one in replays:
        times = (one.avg_jct_s, one.p99_jct_s, one.avg_wait_large_s, one.max_wait_s)
        print(
            f"{one.trace:18}{one.seed:5}  {one.policy:10}"
            + "".join(f"{value:16,.0f}" for value in times)
            + f"{one.stops_per_job:16.3f}{one.moves_per_job:16.3f}"
        )
    for half, policies in found.items():
        for policy, figures in policies.items():
            print(f"{half}: {policy}: " + ", ".join(f"{name} {value:g}" for name, value in figures.items()))
    print(f"{len(missed)} missed" + "".join(f"\n  {text}" for text in missed))


_SIDES: Final = ((6, 4, "left"), (-6, 4, "right"), (6, -12, "left"), (-6, -12, "right"))
"""Of a point, where its name may stand: points to the right, points up, alignment."""


def draw_front(found: Mapping[str, Mapping[str, Mapping[str, float]]], kind: str) -> bytes:
    """Draw mean completion time against the largest wait and against stops; a line joins the policies that none beats in both."""
    from phalanx.cli.figure_files import Chart, render

    def chart(key: str, title: str, label: str) -> Chart:
        return Chart(lambda axes: _plot_front(axes, found, key, title, label), height=420.0)

    panels = [
        chart(
            "max_wait_to_las", "Largest wait against mean completion time", "largest wait, as a multiple of that of las"
        ),
        chart("stops_per_job", "Stops and moves against mean completion time", "stops and moves of a job"),
    ]
    lines = [
        "Geometric means over traces. Filled: judged on these families; hollow: settings were chosen on these; squares: public traces.",
        "srtf, sjf and backfill know every run time in advance.",
    ]
    return render(panels, kind, title="Policies on families of traces: what each gives up", lines=lines)


def _plot_front(
    axes: Axes, found: Mapping[str, Mapping[str, Mapping[str, float]]], key: str, title: str, label: str
) -> None:
    from phalanx.cli.figure_files import colour, series_colour, style_axes

    names = list(dict.fromkeys(policy for half in found.values() for policy in half))
    colours = {name: colour(series_colour(number) if number < 8 else "ink") for number, name in enumerate(names)}
    marks: list[tuple[float, float]] = []
    judged: dict[str, tuple[float, float]] = {}
    for half, marker in (("chosen on", "o"), ("judged on", "o"), ("public", "s")):
        points = {
            policy: (figures["avg_jct_to_srtf"], figures[key])
            for policy, figures in found[half].items()
            if "avg_jct_to_srtf" in figures and key in figures
        }
        for policy, (x, y) in points.items():
            filled = colours[policy] if half == "judged on" else "none"
            axes.plot([x], [y], marker, color=colours[policy], markerfacecolor=filled, markersize=7)
        marks += points.values()
        if half == "judged on":
            judged = points
            front = pareto_front(points.values())
            axes.plot([x for x, _ in front], [y for _, y in front], color=colour("line"), linewidth=1.2, zorder=0)
    axes.set_xscale("log")
    axes.set_xlabel("mean completion time, as a multiple of that of srtf")
    furthest = axes.get_xlim()[1]
    ticks = [tick for tick in TICKS if tick <= furthest]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(0.97, furthest)
    axes.set_ylim(bottom=0.0)
    style_axes(axes, title, y_label=label)
    _write_names(axes, judged, marks, colours)


def _write_names(
    axes: Axes,
    points: Mapping[str, tuple[float, float]],
    marks: Sequence[tuple[float, float]],
    colours: Mapping[str, str],
) -> None:
    """Write the name of each point beside it, on the first side where it covers no mark, name or axis, else on the first."""
    from matplotlib.transforms import Bbox

    half = 5.0 * axes.figure.dpi / 72.0  # of a mark, in pixels
    taken = [Bbox.from_extents(x - half, y - half, x + half, y + half) for x, y in axes.transData.transform(marks)]
    for name, place in points.items():
        texts = [
            axes.annotate(name, place, (across, up), textcoords="offset points", ha=align, color=colours[name])
            for across, up, align in _SIDES
        ]
        boxes = [text.get_window_extent() for text in texts]
        fits = [
            own.x0 >= axes.bbox.x0 and own.y0 >= axes.bbox.y0 and not any(map(own.overlaps, taken)) for own in boxes
        ]
        chosen = fits.index(True) if any(fits) else 0
        taken.append(boxes[chosen])
        for number, text in enumerate(texts):
            if number != chosen:
                text.remove()


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other beats in both numbers, ascending in the first."""
    front: list[tuple[float, float]] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


if __name__ == "__main__":
    main(sys.argv[1:])

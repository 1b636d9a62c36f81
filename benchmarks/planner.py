"""Accuracy of the planner: its step times and memory compared with published runs, on fitted sources and on sources left out of the fit.

python -m benchmarks.planner [--csv FILE] [--json] [--loso] [--no-loso] [--fit] [--spreads]

FILE has the columns of training_measured.csv (docs/planner.md lists them). The default for --csv is that file, where it is, and pretraining_measured.csv.
For `loso` (leave one source out) all coefficients are fitted again without the source; that is the default without --csv. With --csv, all
figures come from the shipped coefficients and nothing is fitted, unless --loso. `--fit` fits all rows and prints the table to ship.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.fitting import fit, predicted
from benchmarks.interval_spreads import spread_lines
from benchmarks.prediction_score import PredictionScore
from benchmarks.published_runs import PublishedRun, read_runs
from phalanx.core.work.gpus import parse_gpus
from phalanx.core.work.layouts.layout import Recompute
from phalanx.planner.cost.coefficients import Stack
from phalanx.planner.cost.memory import (
    MemoryEstimate,
    MemoryItem,
    estimate_memory,
    exceeds_memory,
)
from phalanx.planner.cost.training_task import TrainingMethod
from phalanx.planner.cost.uncertainty import interval_s, item_variance
from phalanx.planner.facts.coefficient_table import (
    Coefficient,
    coefficients,
    find_stack,
    physics,
    physics_from,
    stacks_from,
)
from phalanx.planner.facts.machines import build_machine
from phalanx.planner.facts.model_argument import parse_model_argument
from phalanx.planner.search.layout_search import plan_layouts
from phalanx.planner.search.request import LayoutRequest

RANGES: Final = Path(__file__).parent / "ranges" / "planner.json"
TUNING: Final = Path(__file__).parent / "tuning_measured.csv"
OWN_RUNS: Final = Path(__file__).parent / "pretraining_measured.csv"
CLOSE: Final = 0.05  # a choice within 5 % of the best measured layout counts as the best
UNKNOWN: Final = "generic"  # its spread is used for a stack without rows in the fit


def main() -> None:
    """Print the scores of a file."""
    options = _options()
    read = [read_runs(path) for path in options.csv]
    runs, wrong = [run for part, _ in read for run in part], [line for _, part in read for line in part]
    for line in wrong:
        print(f"not scored: {line}", file=sys.stderr)
    if not runs:
        sys.exit(f"{', '.join(path.name for path in options.csv)}: no row can be scored")
    table = coefficients()
    if options.spreads:
        for line in spread_lines(
            score_left_out(runs, table), score(read_runs(TUNING)[0], table, set(stacks_from(table)))
        ):
            print(line)
        return
    if options.fit:
        table = fit(runs, table)
        for line in shipped_lines(table):
            print(line)
        return
    known = {run.stack for run in runs}
    scores = score(runs, table, known)
    left = score_left_out(runs, table) if options.loso else []
    figures = summary(scores, left, table)
    figures |= {"csv": ", ".join(path.name for path in options.csv), "not_scored": len(wrong), "search_s": search_s()}
    print(json.dumps(figures, indent=2) if options.json else format_figures(figures))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", help="a file of measured runs; nothing is fitted to it")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--loso",
        action=argparse.BooleanOptionalAction,
        help="fit once without each source (a minute); the default without --csv",
    )
    parser.add_argument(
        "--fit", action="store_true", help="fit all rows and print the lines of coefficients.csv that change"
    )
    parser.add_argument(
        "--spreads",
        action="store_true",
        help="print the spreads between sources that coefficients.csv needs for the present coefficients",
    )
    options = parser.parse_args()
    if options.loso is None:
        options.loso = options.csv is None
    options.csv = [Path(options.csv)] if options.csv else [path for path in (public_runs(), OWN_RUNS) if path]
    return options


def public_runs() -> Path | None:
    """Return the path of the published runs: next to the checkout or in PHALANX_SHARED, as for the traces of the tests."""
    beside = Path(__file__).resolve().parents[1].parent / "shared"
    path = Path(os.environ.get("PHALANX_SHARED", beside)) / "data" / "training_measured.csv"
    return path if path.is_file() else None


def score(runs: Sequence[PublishedRun], table: Sequence[Coefficient], known: set[str]) -> list[PredictionScore]:
    """Score all runs for a table; `known` are the stacks with rows in the fit."""
    physics, stacks = physics_from(table), stacks_from(table)
    scores = []
    for run, step in zip(runs, predicted(runs, table), strict=True):
        spread = stacks[run.stack if run.stack in known else UNKNOWN].spread
        low_s, high_s = interval_s(
            step, physics, spread, run.machine.gpu, mixture=run.is_mixture, adapters=run.has_adapters
        )
        items = item_variance(step, physics, spread, run.machine.gpu)
        scores.append(PredictionScore(run=run, seconds=step.total_s, low_s=low_s, high_s=high_s, item_variance=items))
    return scores


def score_left_out(runs: Sequence[PublishedRun], table: Sequence[Coefficient]) -> list[PredictionScore]:
    """Score every run with a fit that leaves its source out."""
    sources = sorted({run.source for run in runs})
    if len(sources) < 2:
        return []
    with multiprocessing.get_context("fork").Pool(min(len(sources), multiprocessing.cpu_count())) as pool:
        parts = pool.starmap(_left_out, [(runs, table, source) for source in sources], chunksize=1)
    return [one for part in parts for one in part]


def _left_out(runs: Sequence[PublishedRun], table: Sequence[Coefficient], source: str) -> list[PredictionScore]:
    rest = [run for run in runs if run.source != source]
    return score(
        [run for run in runs if run.source == source], fit(rest, table, warm=True), {run.stack for run in rest}
    )


def summary(
    scores: Sequence[PredictionScore], left: Sequence[PredictionScore], table: Sequence[Coefficient]
) -> dict[str, Any]:
    """Return all figures by name."""
    stacks = stacks_from(table)
    memories = [
        (one.run, estimate_memory(one.run.task, one.run.layout, one.run.machine.gpu, stacks[one.run.stack]))
        for one in scores
    ]
    all_rows, scores = len(scores), [one for one in scores if one.run.step_s is not None]
    left = [one for one in left if one.run.step_s is not None]
    ran = [(run, memory) for run, memory in memories if not run.failed]
    off = [abs(_comparable_bytes(memory, run) / run.memory_bytes - 1.0) for run, memory in memories if run.memory_bytes]
    figures: dict[str, Any] = {
        "rows": all_rows,
        "mape": _mape(scores) if scores else None,
        "mape_by_source": _by_source(scores),
        "bias_by_source": {name: statistics.mean(one.error for one in part) for name, part in _sources(scores).items()},
        "loso_by_source": _by_source(left),
        "loso_mean": statistics.mean(_by_source(left).values()) if left else None,
        "memory_rows": len(off),
        "memory_mape": statistics.mean(off) if off else None,
        "memory_mape_by_method": {
            name: statistics.mean(
                abs(_comparable_bytes(memory, run) / run.memory_bytes - 1.0) for run, memory in part if run.memory_bytes
            )
            for name in TrainingMethod
            if (part := [one for one in memories if one[0].task.method is name])
            and any(run.memory_bytes for run, _ in part)
        },
        "mape_by_method": {
            name: _mape(timed)
            for name in TrainingMethod
            if (timed := [one for one in scores if one.run.task.method is name])
        },
        "memory_in_interval": statistics.mean(
            memory.low_bytes
            <= run.memory_bytes / _comparable_bytes(memory, run) * memory.total_bytes
            <= memory.high_bytes
            for run, memory in memories
            if run.memory_bytes
        )
        if off
        else None,
        "ran": len(ran),
        "refused_that_ran": sum(refuses(run, stacks[run.stack]) for run, _ in ran),
        "failed": len(memories) - len(ran),
        "accepted_that_failed": sum(not refuses(run, stacks[run.stack]) for run, _ in memories if run.failed),
        "tight_that_failed": sum(
            memory.low_bytes <= memory.usable_bytes < memory.high_bytes for run, memory in memories if run.failed
        ),
        "coverage_80": _held(left or scores) if scores else None,
        "coverage_80_by_source": {name: _held(part) for name, part in _sources(left or scores).items()},
        "mape_by_kind": {name: _mape(part) for name, part in _kinds(scores).items()},
        "loso_by_kind": {name: statistics.mean(_by_source(part).values()) for name, part in _kinds(left).items()},
        "coverage_80_by_kind": {name: _held(part) for name, part in _kinds(left or scores).items()},
        "coverage_80_seen": _held(scores) if scores else None,
        "interval_width": statistics.median(one.high_s / one.low_s for one in left or scores) if scores else None,
        "choice": choices(scores),
        "peers": peers(scores),
    }
    return figures


def refuses(run: PublishedRun, stack: Stack) -> bool:
    """Return whether the run is refused for its memory. Of what its source does not state, every possibility must exceed it."""
    layouts = [run.layout]
    if not run.states_zero:
        layouts.append(replace(run.layout, zero=3, shard=run.layout.data, replicate=1))
    if not run.states_recompute:
        layouts = [replace(one, recompute=Recompute(how)) for one in layouts for how in stack.recomputations]
    return all(exceeds_memory(estimate_memory(run.task, one, run.machine.gpu, stack)) for one in layouts)


def search_s(runs: int = 5) -> float:
    """Return the median seconds of a search: all layouts of a model of a trillion parameters on 8,192 H100."""
    asked = LayoutRequest(
        model=parse_model_argument("megatron-1t"),
        machine=build_machine(parse_gpus("1024xh100:8")),
        physics=physics(),
        stack=find_stack("fsdp2-compile"),
        seq=2048,
        global_batch=6144,
    )
    taken = []
    for _ in range(runs):
        began_s = time.perf_counter()
        plan_layouts(asked)
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)


def choices(scores: Sequence[PredictionScore]) -> dict[str, Any]:
    """For tasks with several measured layouts, compare the layout predicted fastest with the one measured fastest."""
    groups: dict[tuple[str, ...], list[PredictionScore]] = defaultdict(list)
    for one in scores:
        groups[one.run.group].append(one)
    losses = []
    for group in groups.values():
        if len({str(one.run.layout) for one in group}) > 1:
            chosen = min(group, key=lambda one: one.seconds)
            losses.append(chosen.run.measured_s / min(one.run.measured_s for one in group) - 1.0)
    if not losses:
        return {"groups": 0}
    return {
        "groups": len(losses),
        "within_5": statistics.mean(loss <= CLOSE for loss in losses),
        "mean_loss": statistics.mean(losses),
        "worst_loss": max(losses),
    }


def peers(scores: Sequence[PredictionScore]) -> dict[str, Any]:
    """Compare other tools with ours on the rows that they can predict."""
    out: dict[str, Any] = {}
    for name in sorted({name for one in scores for name in one.run.peers}):
        rows = [one for one in scores if name in one.run.peers]
        theirs = [abs(one.run.peers[name] / one.run.measured_s - 1.0) for one in rows]
        by_source = {
            source: {
                "theirs": statistics.mean(abs(one.run.peers[name] / one.run.measured_s - 1.0) for one in part),
                "ours": _mape(part),
            }
            for source, part in _sources(rows).items()
        }
        out[name] = {"rows": len(rows), "theirs": statistics.mean(theirs), "ours": _mape(rows), "by_source": by_source}
    return out


def _comparable_bytes(memory: MemoryEstimate, run: PublishedRun) -> float:
    """Return the bytes that the row reports: of the device, reserved by the allocator, or only allocated or modelled ones."""
    if "modelled" in run.memory_kind or "allocated" in run.memory_kind:
        return memory.total_bytes - memory.items[MemoryItem.OTHER]
    if "device" in run.memory_kind:
        return memory.device_bytes
    return memory.reserved_bytes


def _sources(scores: Sequence[PredictionScore]) -> dict[str, list[PredictionScore]]:
    parts: dict[str, list[PredictionScore]] = defaultdict(list)
    for one in scores:
        parts[one.run.source].append(one)
    return dict(sorted(parts.items()))


def _kinds(scores: Sequence[PredictionScore]) -> dict[str, list[PredictionScore]]:
    """Return the scores by kind of run: dense, mixture, adapters."""
    parts: dict[str, list[PredictionScore]] = defaultdict(list)
    for one in scores:
        parts["adapters" if one.run.has_adapters else "mixture" if one.run.is_mixture else "dense"].append(one)
    return dict(sorted(parts.items()))


def _held(scores: Sequence[PredictionScore]) -> float:
    """Return the share of rows inside their intervals."""
    return sum(one.in_interval for one in scores) / len(scores)


def _mape(scores: Sequence[PredictionScore]) -> float:
    return statistics.mean(abs(one.error) for one in scores)


def _by_source(scores: Sequence[PredictionScore]) -> dict[str, float]:
    return {name: _mape(part) for name, part in _sources(scores).items()}


def shipped_lines(table: Sequence[Coefficient]) -> list[str]:
    """Return the changed parts of the lines of coefficients.csv."""
    return [f"{one.scope},{one.name},{one.value:.4g},{one.prior:g},{one.spread:g}" for one in table if one.spread]


def format_figures(figures: dict[str, Any]) -> str:
    """Format the figures as text."""
    bounds = json.loads(RANGES.read_text(encoding="utf-8"))
    lines = [f"{figures['rows']} measured runs of {figures['csv']}", ""]
    lines.append(f"{'source':24} {'error':>8} {'bias':>8} {'left out':>9} {'in 80 %':>8}")
    for name, error in figures["mape_by_source"].items():
        left, held = figures["loso_by_source"].get(name), figures["coverage_80_by_source"].get(name)
        lines.append(
            f"{name:24} {error:8.1%} {figures['bias_by_source'][name]:+8.1%} {_percent(left):>9} {_percent(held):>8}"
        )
    lines.append("")
    for name in ("mape", "loso_mean", "memory_mape", "coverage_80", "refused_that_ran", "accepted_that_failed"):
        bound = bounds.get(name) or {"bound": "75 to 90 %" if name == "coverage_80" else 0}
        value = figures[name]
        shown = "-" if value is None else f"{value}" if isinstance(value, int) else f"{value:.1%}"
        lines.append(f"{name:24} {shown:>8}   bound {bound['bound']}")
    for name, error in figures["loso_by_kind"].items():
        bound = bounds.get(f"loso_{name}")
        lines.append(f"{'loso_' + name:24} {error:8.1%}" + (f"   bound {bound['bound']}" if bound else ""))
    lines.append(
        f"{'search_s':24} {figures['search_s']:7.2f}s   bound {bounds['search_s']['bound']} s, 1T on 8,192 GPUs"
    )
    choice = figures["choice"]
    if choice["groups"]:
        lines.append(
            f"{'choice':24} {choice['within_5']:8.1%}   of {choice['groups']} groups within 5 % of the best; "
            f"mean loss {choice['mean_loss']:.1%}, worst {choice['worst_loss']:.1%}"
        )
    for name, peer in figures["peers"].items():
        lines.append(f"{name:24} {peer['theirs']:8.1%}   on its {peer['rows']} rows; ours there {peer['ours']:.1%}")
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.1%}"


if __name__ == "__main__":
    main()

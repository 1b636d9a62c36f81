"""`phalanx simulate --inflate`: fill a fleet with jobs drawn from a trace, and print how much of its GPUs is allocated."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from phalanx.cli.list_output import to_json
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import terminal
from phalanx.core.errors import BadRequest
from phalanx.simulator.packing_replay import PACKING_POLICIES, PackingResult, replay_packing

if TYPE_CHECKING:
    from phalanx.simulator.fleet import TraceNode
    from phalanx.simulator.trace import Trace


def check_fill(options: dict[str, Any], names: list[str]) -> None:
    """Check what was asked before a fill.

    Raises:
        BadRequest: a policy only replays in time, or an option does not go with `--inflate`.
    """
    for name, given in (
        ("--per-vc", options["per_vc"]),
        ("--plot", options["plot_path"]),
        ("--html", options["html_path"]),
    ):
        if given:
            raise BadRequest(f"{name} does not go with --inflate", hint="leave it out")
    for name in names:
        if name not in PACKING_POLICIES:
            raise BadRequest(f"--inflate does not know the policy {name}", hint=f"one of {' '.join(PACKING_POLICIES)}")


def fill_fleet(
    options: dict[str, Any],
    names: list[str],
    trace: Trace,
    nodes: Sequence[TraceNode],
    progress: Callable[[str], AbstractContextManager[Callable[[int, int], None] | None]],
) -> None:
    """Fill the fleet once for each policy and seed, and print the shares. `progress` shows a bar with a title."""
    seeds = options["seeds"] or [options["seed"]]
    found: dict[str, list[PackingResult]] = {}
    walls_s: dict[str, float] = {}
    for name in names:
        started_s = time.perf_counter()
        found[name] = []
        for seed in seeds:
            with progress(f"{name}, seed {seed}") as on_progress:
                found[name].append(
                    replay_packing(
                        trace.jobs,
                        nodes,
                        name,
                        inflate=options["inflate"],
                        seed=seed,
                        trace_first=options["trace_first"],
                        on_progress=on_progress,
                    )
                )
        walls_s[name] = time.perf_counter() - started_s
    summary = {
        "trace": options["trace_path"],
        "nodes": len(nodes),
        "gpus": sum(node.gpus for node in nodes),
        "inflate": options["inflate"],
        "trace_first": options["trace_first"],
        "bad_rows": len(trace.invalid_rows),
    }
    if options["as_json"]:
        shown = [{**_figures(name, runs), "wall_s": walls_s[name], **summary} for name, runs in found.items()]
        print(to_json(shown if options["compare"] else shown[0], indent=2))
    else:
        _print(found, summary)


def _figures(name: str, runs: list[PackingResult]) -> dict[str, Any]:
    return {
        "policy": name,
        "gpu_allocated_share": statistics.fmean(run.share for run in runs),
        "seeds": [
            {"seed": run.seed, "gpu_allocated_share": run.share, "jobs": run.drawn, "placed": run.placed}
            for run in runs
        ],
    }


def _print(found: dict[str, list[PackingResult]], summary: dict[str, Any]) -> None:
    runs = next(iter(found.values()))
    print(
        f"{summary['gpus']:,} GPUs on {summary['nodes']:,} nodes, filled with about {runs[0].drawn:,} jobs "
        f"that ask for {summary['inflate']:g} times as many; {len(runs)} seed{'' if len(runs) == 1 else 's'}"
    )
    best = max(statistics.fmean(run.share for run in each) for each in found.values())
    rows: list[list[Cell | str]] = []
    for name, each in found.items():
        mean = statistics.fmean(run.share for run in each)
        rows.append(
            [
                name,
                Cell(f"{mean:.2%}", "green" if mean == best and len(found) > 1 else ""),
                f"{min(run.share for run in each):.2%} to {max(run.share for run in each):.2%}",
                f"{statistics.fmean(run.placed for run in each):,.0f} of {statistics.fmean(run.drawn for run in each):,.0f}",
            ]
        )
    columns = [
        Column(title="POLICY"),
        Column(title="GPUS ALLOCATED", right=True),
        Column(title="OVER SEEDS", right=True),
        Column(title="JOBS PLACED", right=True),
    ]
    print("\n".join(table(columns, rows, terminal(), titles=True)))

"""`phalanx whatif`: replay the same jobs on the current and a changed fleet; compare waits, utilisation, GPU-hours and cost.

The jobs come from a trace or from the head's history. Both replays use the production scheduler and lifecycle. Nothing is changed on the
head. Prices come only from `--price`.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any, Final

import click

from phalanx.cli.errors import warn
from phalanx.cli.option_types import DURATION, GPUS, HOSTS
from phalanx.cli.terminal import strip_control, terminal
from phalanx.core.errors import BadRequest, NotFound
from phalanx.core.units import parse_duration_s

_PAGE: Final = 1000  # jobs per page, the head's maximum
_PAST_MAX: Final = 200_000  # past jobs to replay; bounds the replay time
_LEFT_OUT_SHOWN: Final = 3  # jobs named with the reason
_LEFT_OUT_NAMED: Final = 20  # further jobs that are named; --json names all


@click.command()
@click.option(
    "--add", "added", multiple=True, type=GPUS, metavar="GPUS", help="Add nodes: 4xh200:8 is four nodes of eight GPUs."
)
@click.option("--remove", "removed", multiple=True, type=HOSTS, metavar="NODES", help="Remove nodes: gpu[001-004].")
@click.option("--policy", metavar="NAME", help="Use another policy.")
@click.option("--quota", "quotas", multiple=True, metavar="QUEUE=N", help="Change the quota of a queue, in GPUs.")
@click.option(
    "--price", "prices", multiple=True, metavar="[MODEL=]P", help="Price of one GPU-hour: h200=3.5, or 3.5 for all."
)
@click.option(
    "--trace", "trace_path", metavar="FILE", help="Jobs: CSV with job_id, submit_s, duration_s, num_gpus; or SWF."
)
@click.option("--fleet", "fleet_path", metavar="FILE", help="Nodes, with --trace: CSV with node and gpus.")
@click.option("--nodes", type=int, metavar="N", help="Instead of --fleet: number of equal nodes.")
@click.option("--gpus-per-node", type=int, metavar="G", help="GPUs of each node, with --nodes.")
@click.option(
    "--since",
    type=DURATION,
    metavar="TIME",
    help="Instead of --trace: the head's jobs that ended in the last TIME (30d), on its nodes.",
)
@click.option(
    "--restart-cost",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="S",
    help="Seconds of lost work for each preemption or move.",
)
@click.option("--skip-bad", is_flag=True, help="Skip invalid rows.")
@click.option("--limit-jobs", type=click.IntRange(min=1), metavar="N", help="Replay only the first N jobs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def whatif(**options: Any) -> None:
    """Compare waits, utilisation and cost with those on another fleet, or under another quota or policy.

    \b
    phalanx whatif --add 4xh200:8 --since 30d --price h200=3.5
    phalanx whatif --remove gpu[001-004] --policy fifo --trace jobs.csv --fleet nodes.csv
    """  # noqa: D301  # \b is a click marker
    from phalanx.cli.list_output import to_json

    trace, nodes, queues = _past(options)
    prices = _prices(options["prices"])
    changed_nodes = _changed(nodes, options)
    changed_queues = _with_quotas(queues, options["quotas"])
    if (changed_nodes, changed_queues, options["policy"]) == (nodes, queues, None):
        raise BadRequest(
            "no change given", hint="add one of --add 4xh200:8, --remove NODES, --quota QUEUE=N or --policy NAME"
        )
    sides = [
        _side("current", nodes, None, queues, prices),
        _side("changed", changed_nodes, options["policy"], changed_queues, prices),
    ]
    for side in sides:
        _replay(side, trace, options)
    results = [_figures(side) for side in sides]
    if options["as_json"]:
        print(
            to_json(
                {
                    "now": results[0],
                    "then": results[1],
                    "jobs": len(trace.jobs),
                    "restart_cost_s": options["restart_cost"],
                },
                indent=2,
            )
        )
        return
    _print(sides, results)


# ---- inputs -------------------------------------------------------------------------------------------------------------


def _past(options: dict[str, Any]) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """Return jobs, nodes and queues."""
    from phalanx.cli.simulate.command import load_fleet, load_trace

    if (options["trace_path"] is None) == (options["since"] is None):
        raise BadRequest("no jobs given", hint="add one of --trace jobs.csv and --since 30d")
    if options["trace_path"] is not None:
        return load_trace(options), tuple(load_fleet({**options, "per_vc": False})), ()
    if any(options[name] is not None for name in ("fleet_path", "nodes", "gpus_per_node")):
        raise BadRequest("--since uses the head's nodes", hint="use --fleet and --nodes only with --trace")
    from phalanx.cli.connection import connect
    from phalanx.cli.simulate.head_history import read_head_history

    found = read_head_history(
        connect(), parse_duration_s(options["since"]), jobs_max=options["limit_jobs"] or _PAST_MAX, page=_PAGE
    )
    for line in found.notes:
        warn(line)
    return found.trace, found.nodes, found.queues


def _changed(nodes: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    from phalanx.core.fleet.hostlist import expand_hostlist
    from phalanx.core.work.gpus import parse_gpus
    from phalanx.simulator.fleet import TraceNode

    gone = {name for words in options["removed"] for name in expand_hostlist(words)}
    unknown = sorted(gone - {node.name for node in nodes})
    if unknown:
        raise NotFound(
            f"--remove: no node {unknown[0]!r}", hint=f"node names range from {nodes[0].name} to {nodes[-1].name}"
        )
    found = [node for node in nodes if node.name not in gone]
    for words in options["added"]:
        more = parse_gpus(words)
        if more.nodes is None or more.per_node is None or more.nodes_max is not None or more.alternatives:
            raise BadRequest(f"--add {words}: needs a number of nodes and of GPUs per node", hint="--add 4xh200:8")
        model = more.model or (nodes[0].model if len({node.model for node in nodes}) == 1 else "")
        found += [
            TraceNode(name=f"added-{len(found)}-{number}", gpus=more.per_node, model=model)
            for number in range(more.nodes)
        ]
    if not found:
        raise BadRequest("--remove removes every node", hint="keep at least one node")
    return tuple(found)


def _with_quotas(queues: tuple[Any, ...], words: tuple[str, ...]) -> tuple[Any, ...]:
    from phalanx.core.ids import QueueId
    from phalanx.core.work.queue import Queue
    from phalanx.core.work.quotas.queue_validation import check_queue_tree

    found = {queue.id: queue for queue in queues}
    for word in words:
        name, _, count = word.partition("=")
        if not name or not count.isdigit():
            raise BadRequest(f"--quota {word}: is not a quota", hint="--quota QUEUE=16, in GPUs")
        known = found.get(QueueId(name)) or Queue(id=QueueId(name))
        found[known.id] = replace(known, quota_gpus=int(count))
    check_queue_tree(found)
    return tuple(found.values())


def _prices(words: tuple[str, ...]) -> dict[str, float]:
    """Return the price of a GPU-hour by model; "" stands for all others."""
    found: dict[str, float] = {}
    for word in words:
        model, _, price = word.rpartition("=")
        try:
            found[model.strip().lower()] = float(price)
        except ValueError:
            raise BadRequest(
                f"--price {word}: {price!r} is not a price", hint="--price h200=3.5, or --price 3.5"
            ) from None
    return found


# ---- the two replays ----------------------------------------------------------------------------------------------------


def _side(
    name: str, nodes: tuple[Any, ...], policy: str | None, queues: tuple[Any, ...], prices: dict[str, float]
) -> dict[str, Any]:
    return {
        "name": name,
        "nodes": nodes,
        "policy": policy or "default",
        "queues": queues,
        "per_hour": _per_hour(nodes, prices),
    }


def _per_hour(nodes: tuple[Any, ...], prices: dict[str, float]) -> float | None:
    """Return the price of the fleet per hour; None without prices.

    Raises:
        BadRequest: some models have no price.
    """
    if not prices:
        return None
    total, missing = 0.0, set()
    for node in nodes:
        price = next((cost for model, cost in prices.items() if model and model in node.model.lower()), prices.get(""))
        if price is None:
            missing.add(node.model or "GPUs without a model")
        else:
            total += price * node.gpus
    if missing:
        raise BadRequest(
            f"--price: no price for {', '.join(sorted(missing))}", hint="add one, or --price P for all others"
        )
    return total


def _replay(side: dict[str, Any], trace: Any, options: dict[str, Any]) -> None:
    from phalanx.cli.simulate.command import progress_bar
    from phalanx.simulator.report import build_report
    from phalanx.simulator.simulation import SimulationSettings, simulate

    setting = SimulationSettings(
        policy=side["policy"], restart_cost_s=options["restart_cost"], skip_unplaceable=True, queues=side["queues"]
    )
    gc.collect()
    with progress_bar(side["name"], len(trace.jobs), quiet=options["as_json"]) as on_progress:
        started_s = time.perf_counter()
        parts = simulate(trace, side["nodes"], setting, on_progress=on_progress)
    refused = [each for part in parts for each in part.unplaceable]
    if len(refused) == len(trace.jobs):
        raise BadRequest(f"{side['name']} fleet: no job can ever start", hint=refused[0][1])
    for job, why in refused[:_LEFT_OUT_SHOWN]:
        warn(f"{side['name']} fleet: left out job {job.id}, which can never start: {why}")
    more = [job.id for job, _ in refused[_LEFT_OUT_SHOWN:]]
    if more:
        named = ", ".join(more[:_LEFT_OUT_NAMED]) + (", ..." if len(more) > _LEFT_OUT_NAMED else "")
        warn(f"{side['name']} fleet: left out {len(more)} more jobs that can never start: {named}")
    side["report"] = build_report(parts, wall_s=time.perf_counter() - started_s)
    side["left_out"] = [{"job": job.id, "why": why} for job, why in refused]


def _figures(side: dict[str, Any]) -> dict[str, Any]:
    report, gpus = side["report"], sum(node.gpus for node in side["nodes"])
    hours = gpus * report.makespan_s / 3600.0
    used = report.utilization * hours
    cost = None if side["per_hour"] is None else side["per_hour"] * report.makespan_s / 3600.0
    return {
        "nodes": len(side["nodes"]),
        "gpus": gpus,
        "policy": side["policy"],
        **report.as_dict(),
        "jobs_left_out": len(side["left_out"]),
        "left_out": side["left_out"],
        "gpu_hours": hours,
        "gpu_hours_used": used,
        "cost": cost,
        "cost_per_day": None if side["per_hour"] is None else 24.0 * side["per_hour"],
        "cost_per_gpu_hour_used": None if cost is None or not used else cost / used,
    }


def _print(sides: list[dict[str, Any]], results: list[dict[str, Any]]) -> None:
    from phalanx.cli.simulate.report_rows import report_rows
    from phalanx.cli.tables import Cell, Column, table

    screen = terminal()
    for side, figures in zip(sides, results, strict=True):
        print(
            strip_control(
                f"{side['name']}: {figures['nodes']} nodes, {figures['gpus']:,} GPUs, policy {side['policy']}"
            )
        )
    columns = [Column(title="", min_width=24), *(Column(title=side["name"], right=True) for side in sides)]
    rows: list[list[Cell | str]] = []
    for row in report_rows([side["report"] for side in sides]):
        values = [row.value(side["report"]) for side in sides]
        best = row.best(values)
        rows.append([row.name, *(Cell(row.format_brief(value), "green" if value == best else "") for value in values)])
    for name, key, digits in (
        ("GPU-hours of the fleet over the makespan", "gpu_hours", 0),
        ("GPU-hours used", "gpu_hours_used", 0),
        ("cost over the makespan", "cost", 0),
        ("cost per day", "cost_per_day", 0),
        ("cost per used GPU-hour", "cost_per_gpu_hour_used", 2),
    ):
        if results[0][key] is not None and results[1][key] is not None:
            rows.append([name, *(f"{figures[key]:,.{digits}f}" for figures in results)])
    print("\n".join(table(columns, rows, screen, titles=True)))
    if sides[0]["per_hour"] is None:
        print("next: add prices with --price h200=3.5")

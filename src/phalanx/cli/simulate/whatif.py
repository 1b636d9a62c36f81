"""`phalanx whatif`: the same jobs on the fleet as it is and as it might be: waits, utilisation, GPU-hours and cost side by side.

The jobs come from a trace, or from the head's own past. Both replays go through the scheduler and the lifecycle that run live. Nothing is
changed anywhere, and no price is known here but those that are given.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any, Final

import click

from phalanx.cli.faults import warn
from phalanx.cli.terminal import clean, terminal
from phalanx.cli.words import DURATION, GPUS, HOSTS
from phalanx.core.errors import BadRequest, NotFound
from phalanx.core.units import parse_duration_s

_PAGE: Final = 1000  # jobs in one page of the head's list; it gives no more
_PAST_MAX: Final = 200_000  # jobs of the past that are replayed; more take longer than anybody waits
_LEFT_OUT_SHOWN: Final = 3


@click.command()
@click.option("--add", "added", multiple=True, type=GPUS, metavar="GPUS", help="Nodes more: 4xh200:8 is four of eight.")
@click.option("--remove", "removed", multiple=True, type=HOSTS, metavar="NODES", help="Nodes less: gpu[001-004].")
@click.option("--policy", metavar="NAME", help="Another policy than the default one.")
@click.option("--quota", "quotas", multiple=True, metavar="QUEUE=N", help="Another quota for a queue, in GPUs.")
@click.option(
    "--price", "prices", multiple=True, metavar="[MODEL=]P", help="Price of one GPU-hour: h200=3.5, or 3.5 for all."
)
@click.option(
    "--trace", "trace_path", metavar="FILE", help="Jobs: a CSV with job_id, submit_s, duration_s, num_gpus; or SWF."
)
@click.option("--fleet", "fleet_path", metavar="FILE", help="With --trace: nodes, a CSV with node and gpus.")
@click.option("--nodes", type=int, metavar="N", help="Instead of --fleet: so many equal nodes ...")
@click.option("--gpus-per-node", type=int, metavar="G", help="... of so many GPUs.")
@click.option(
    "--since",
    type=DURATION,
    metavar="TIME",
    help="Instead of --trace: the head's own jobs that ended within 30d, on its own nodes.",
)
@click.option(
    "--restart-cost",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="S",
    help="Seconds of work done twice for each preemption or move.",
)
@click.option("--skip-bad", is_flag=True, help="Leave out rows that are no job.")
@click.option("--limit-jobs", type=click.IntRange(min=1), metavar="N", help="Only the first N jobs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def whatif(**asked: Any) -> None:
    """What would waits, utilisation and cost have been on another fleet, or under another quota or policy?

    \b
    phalanx whatif --add 4xh200:8 --since 30d --price h200=3.5
    phalanx whatif --remove gpu[001-004] --policy fifo --trace jobs.csv --fleet nodes.csv
    """  # noqa: D301  # \b is click's
    from phalanx.cli.lists import encoded

    trace, nodes, queues = _past(asked)
    prices = _prices(asked["prices"])
    there = _changed(nodes, asked)
    wanted = _with_quotas(queues, asked["quotas"])
    if (there, wanted, asked["policy"]) == (nodes, queues, None):
        raise BadRequest("nothing is changed", hint="--add 4xh200:8, --remove NODES, --quota QUEUE=N or --policy NAME")
    sides = [
        _side("as it is", nodes, None, queues, prices),
        _side("as it might be", there, asked["policy"], wanted, prices),
    ]
    for side in sides:
        _replay(side, trace, asked)
    told = [_figures(side) for side in sides]
    if asked["as_json"]:
        print(
            encoded(
                {"now": told[0], "then": told[1], "jobs": len(trace.jobs), "restart_cost_s": asked["restart_cost"]},
                indent=2,
            )
        )
        return
    _print(sides, told)


# ---- what is asked ------------------------------------------------------------------------------------------------------


def _past(asked: dict[str, Any]) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """The jobs, the nodes they ran on, and the queues they waited in."""
    from phalanx.cli.simulate.command import fleet_of, trace_of

    if (asked["trace_path"] is None) == (asked["since"] is None):
        raise BadRequest("whose past?", hint="give one of --trace jobs.csv and --since 30d")
    if asked["trace_path"] is not None:
        return trace_of(asked), tuple(fleet_of({**asked, "per_vc": False})), ()
    if any(asked[name] is not None for name in ("fleet_path", "nodes", "gpus_per_node")):
        raise BadRequest("--since takes the head's own nodes", hint="--fleet and --nodes go with --trace")
    from phalanx.cli.connect import connect
    from phalanx.cli.simulate.past import past_of

    found = past_of(connect(), parse_duration_s(asked["since"]), jobs_max=asked["limit_jobs"] or _PAST_MAX, page=_PAGE)
    for line in found.notes:
        warn(line)
    return found.trace, found.nodes, found.queues


def _changed(nodes: tuple[Any, ...], asked: dict[str, Any]) -> tuple[Any, ...]:
    from phalanx.core.fleet.hostlist import expand
    from phalanx.core.work.gpus import parse_gpus
    from phalanx.simulator.fleet import SimNode

    gone = {name for words in asked["removed"] for name in expand(words)}
    unknown = sorted(gone - {node.name for node in nodes})
    if unknown:
        raise NotFound(
            f"--remove: there is no node {unknown[0]!r}", hint=f"nodes are called {nodes[0].name} to {nodes[-1].name}"
        )
    found = [node for node in nodes if node.name not in gone]
    for words in asked["added"]:
        more = parse_gpus(words)
        if more.nodes is None or more.per_node is None or more.nodes_max is not None:
            raise BadRequest(f"--add {words}: say how many nodes of how many GPUs", hint="--add 4xh200:8")
        model = more.model or (nodes[0].model if len({node.model for node in nodes}) == 1 else "")
        found += [
            SimNode(name=f"added-{len(found)}-{number}", gpus=more.per_node, model=model)
            for number in range(more.nodes)
        ]
    if not found:
        raise BadRequest("--remove leaves no node")
    return tuple(found)


def _with_quotas(queues: tuple[Any, ...], words: tuple[str, ...]) -> tuple[Any, ...]:
    from phalanx.core.ids import QueueId
    from phalanx.core.work.queue import Queue
    from phalanx.core.work.queuetree import check_tree

    found = {queue.id: queue for queue in queues}
    for word in words:
        name, _, count = word.partition("=")
        if not name or not count.isdigit():
            raise BadRequest(f"--quota {word}: is no quota", hint="--quota QUEUE=16, in GPUs")
        known = found.get(QueueId(name)) or Queue(id=QueueId(name))
        found[known.id] = replace(known, quota_gpus=int(count))
    check_tree(found)
    return tuple(found.values())


def _prices(words: tuple[str, ...]) -> dict[str, float]:
    """Price of a GPU-hour by model; "" for any other."""
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
    """What the fleet costs in an hour; None where a price is missing.

    Raises:
        BadRequest: some models have a price and others have none.
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
            f"--price: no price for {', '.join(sorted(missing))}", hint="give one more, or --price P for all others"
        )
    return total


def _replay(side: dict[str, Any], trace: Any, asked: dict[str, Any]) -> None:
    from phalanx.cli.simulate.command import progress_of
    from phalanx.simulator.report import report
    from phalanx.simulator.simulate import Setting, simulate_live

    setting = Setting(
        policy=side["policy"], restart_cost_s=asked["restart_cost"], skip_never=True, queues=side["queues"]
    )
    gc.collect()
    with progress_of(side["name"], len(trace.jobs), quiet=asked["as_json"]) as told:
        started_s = time.perf_counter()
        parts = simulate_live(trace, side["nodes"], setting, on_progress=told)
    refused = [each for part in parts for each in part.refused]
    if len(refused) == len(trace.jobs):
        raise BadRequest(f"{side['name']}: no job fits this fleet", hint=refused[0][1])
    for job, why in refused[:_LEFT_OUT_SHOWN]:
        warn(f"{side['name']}: left out: job {job.id}: {why}")
    if len(refused) > _LEFT_OUT_SHOWN:
        warn(f"{side['name']}: left out: {len(refused) - _LEFT_OUT_SHOWN} more jobs that fit no empty fleet")
    side["report"], side["left_out"] = report(parts, wall_s=time.perf_counter() - started_s), len(refused)


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
        "jobs_left_out": side["left_out"],
        "gpu_hours": hours,
        "gpu_hours_used": used,
        "cost": cost,
        "cost_per_day": None if side["per_hour"] is None else 24.0 * side["per_hour"],
        "cost_per_gpu_hour_used": None if cost is None or not used else cost / used,
    }


def _print(sides: list[dict[str, Any]], told: list[dict[str, Any]]) -> None:
    from phalanx.cli.simulate.rows import ROWS
    from phalanx.cli.tables import Cell, Column, table

    screen = terminal()
    for side, figures in zip(sides, told, strict=True):
        print(clean(f"{side['name']}: {figures['nodes']} nodes, {figures['gpus']:,} GPUs, policy {side['policy']}"))
    columns = [Column(title="", least=24), *(Column(title=side["name"], right=True) for side in sides)]
    rows: list[list[Cell | str]] = []
    for row in ROWS:
        values = [row.value(side["report"]) for side in sides]
        best = row.best(values)
        rows.append([row.name, *(Cell(row.brief(value), "green" if value == best else "") for value in values)])
    for name, key, digits in (
        ("GPU-hours of the fleet, over that time", "gpu_hours", 0),
        ("GPU-hours used", "gpu_hours_used", 0),
        ("cost, over that time", "cost", 0),
        ("cost a day", "cost_per_day", 0),
        ("cost for each GPU-hour used", "cost_per_gpu_hour_used", 2),
    ):
        if told[0][key] is not None and told[1][key] is not None:
            rows.append([name, *(f"{figures[key]:,.{digits}f}" for figures in told)])
    print("\n".join(table(columns, rows, screen, titles=True)))
    if sides[0]["per_hour"] is None:
        print("next: --price h200=3.5 adds what it costs")

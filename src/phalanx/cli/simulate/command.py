"""`phalanx simulate`: replay a trace on a fleet under a policy. Needs no head and contacts none."""

from __future__ import annotations

import gc
import gzip
import io
import math
import os
import shlex
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

from phalanx.cli.errors import warn
from phalanx.cli.option_types import SEEDS
from phalanx.cli.terminal import terminal
from phalanx.client.input_files import read_file_bytes
from phalanx.core.errors import BadFile, BadRequest, TooLarge

_GZIP: Final = b"\x1f\x8b"  # RFC 1952, 2.3.1
FILE_BYTES_MAX: Final = 64 << 20  # the largest public traces have 10 to 40 MB
_SHOWN_MAX: Final = 5  # skipped jobs that are listed individually
_CURVE_POINTS: Final = 4000  # points of the utilisation curve: about nine for each drawn step


@click.command()
@click.option(
    "--trace",
    "trace_path",
    metavar="FILE",
    help="Jobs: CSV with job_id, submit_s, duration_s, num_gpus; or SWF; optionally gzipped; - reads standard input.",
)
@click.option(
    "--family",
    metavar="NAME",
    help="Instead of --trace: draw a trace of a family by --seed, for the family's fleet: steady, office, overload, ...; a wrong NAME lists all.",
)
@click.option(
    "--fleet",
    "--nodes-file",
    "fleet_path",
    metavar="FILE|FLEET",
    help="Nodes: CSV with node, gpus, optional gpu_type; for --per-vc also vc; or 8xv100:1,16xp100:8: nodes x model : GPUs of each.",
)
@click.option(
    "--pools",
    "pools_path",
    metavar="FILE",
    help="Rent nodes too: pools with boot time, price, caps and burst rule (YAML). Replays without and with them.",
)
@click.option("--nodes", type=int, metavar="N", help="Instead of --fleet: number of equal nodes.")
@click.option("--gpus-per-node", type=int, metavar="G", help="GPUs of each node, with --nodes.")
@click.option("--per-vc", is_flag=True, help="Run each virtual cluster's jobs on its own nodes.")
@click.option("--per-queue", is_flag=True, help="Also print what the jobs of each virtual cluster ran and waited.")
@click.option(
    "--policy",
    default="default",
    show_default=True,
    metavar="NAME",
    help="default throughput fifo skip backfill sjf las srtf fair makespan, or MODULE:CLASS; with --inflate: fgd best-fit packing dot-product random.",
)
@click.option("--compare", metavar="NAMES", help="Compare several policies: fifo,las,default.")
@click.option(
    "--durations",
    type=click.Choice(["exact", "limit", "predicted"]),
    default="exact",
    show_default=True,
    help="Source of run times for policies that use them.",
)
@click.option(
    "--restart-cost",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="S",
    help="Seconds of lost work for each preemption or move.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="S",
    help="Seed for the order of jobs submitted at the same time, 0 for the order of the trace; with --family, for drawing it.",
)
@click.option(
    "--inflate",
    type=click.FloatRange(min=0, min_open=True, max=100),
    metavar="X",
    help="Instead of a replay in time: fill the fleet with jobs drawn from the trace until they ask for X times its GPUs; none leaves.",
)
@click.option(
    "--seeds", type=SEEDS, metavar="A-B", help="With --inflate: one fill for each of these seeds; default: --seed."
)
@click.option(
    "--trace-first",
    is_flag=True,
    help="With --inflate: fill with each job of the trace once, shuffled, and then with drawn ones, as the FGD paper does.",
)
@click.option(
    "--lifecycle",
    is_flag=True,
    help="Replay every transition of every job, as a head makes it; the same result, slower. It is the default where GPU models differ.",
)
@click.option(
    "--events",
    "events_path",
    metavar="OUT.jsonl",
    help="Write each start, stop and end: a JSON object on each line. A move is a stop and a start.",
)
@click.option("--skip-bad", is_flag=True, help="Skip invalid rows, and jobs that can never start.")
@click.option("--limit-jobs", type=click.IntRange(min=1), metavar="N", help="Replay only the first N jobs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.option(
    "--plot",
    "plot_path",
    metavar="OUT.png",
    help="Draw utilisation, queue depth and wait by size.",
)
@click.option("--html", "html_path", metavar="OUT.html", help="Write the same charts as an HTML page.")
def simulate(**options: Any) -> None:
    """Replay a trace in virtual time with the production scheduler.

    \b
    phalanx simulate --trace jobs.csv --nodes 80 --gpus-per-node 8
    phalanx simulate --trace jobs.csv --fleet nodes.csv --per-vc --compare fifo,las,default --html out.html
    phalanx simulate --family overload --seed 1 --compare las,default
    phalanx simulate --trace pods.csv --fleet nodes.csv --inflate 1.3 --compare fgd,best-fit --seeds 42-51
    """  # noqa: D301  # \b is a click marker
    _check_source(options)
    if options["inflate"] is not None:
        _fill(options)
        return
    _check_replay(options)
    _check_outputs(options)
    trace, nodes = load_trace(options), load_fleet(options)
    names = policy_names(options)
    # Check all policies first: an error must not follow minutes of replay.
    settings = [_setting(options, name, trace) for name in names]
    if options["pools_path"] is not None:
        settings = _with_pools(options, settings)
    runs: list[Any] = []
    refused: list[Any] = []
    with _events_file(options["events_path"]) as events:
        for setting in settings:
            run, left_out = _replayed(trace, nodes, setting, events, quiet=options["as_json"])
            runs.append(run)
            refused = refused or left_out
    for job, why in refused[:_SHOWN_MAX]:
        warn(f"skipped job {job.id} (line {job.line}): {why}")
    if len(refused) > _SHOWN_MAX:
        warn(f"skipped {len(refused) - _SHOWN_MAX} more jobs that can never start")
    summary = {
        "trace": options["trace_path"],
        "nodes": len(nodes),
        "gpus": sum(node.gpus for node in nodes),
        "per_vc": options["per_vc"],
        "durations": options["durations"],
        "restart_cost_s": options["restart_cost"],
        "seed": options["seed"],
        "bad_rows": len(trace.invalid_rows),
        "jobs_left_out": len(refused),
    }
    _write(runs, options, summary)  # before printing: a closed pipe (`| head`) must not prevent the files
    if options["as_json"]:
        _print_json(runs, settings, summary, options)
    else:
        _print(runs, summary, per_queue=options["per_queue"])


def _fill(options: dict[str, Any]) -> None:
    """Fill the fleet with the jobs of the trace, instead of a replay in time."""
    from phalanx.cli.simulate.packing import check_fill, fill_fleet

    names = policy_names(options)
    check_fill(options, names)
    quiet = options["as_json"]
    fill_fleet(
        options, names, load_trace(options), load_fleet(options), lambda title: progress_bar(title, 1, quiet=quiet)
    )


def _check_replay(options: dict[str, Any]) -> None:
    if options["seeds"] is not None or options["trace_first"]:
        name = "--trace-first" if options["seeds"] is None else "--seeds"
        raise BadRequest(f"{name} is for --inflate", hint="add --inflate 1.3, or use --seed for a replay in time")
    if not math.isfinite(options["restart_cost"]):
        raise BadRequest(
            f"--restart-cost {options['restart_cost']} is not a number of seconds", hint="--restart-cost 60"
        )


def _check_source(options: dict[str, Any]) -> None:
    """Check that there is one source of jobs; a family also names the trace in the output."""
    family = options["family"]
    if (options["trace_path"] is None) == (family is None):
        raise BadRequest(
            "--trace and --family exclude each other" if family else "no jobs given",
            hint="use one of the two" if family else "add --trace jobs.csv, or --family steady",
        )
    if family is not None:
        if options["per_vc"]:
            raise BadRequest("--per-vc needs the virtual cluster of each node, which a family does not have")
        options["trace_path"] = f"family {family}, seed {options['seed']}"


def _check_outputs(options: dict[str, Any]) -> None:
    """Check the output paths before the replay."""
    from phalanx.cli.figure_files import check_writable, picture_format

    if options["plot_path"]:
        picture_format(options["plot_path"], ("png", "svg", "pdf"))
    for option, path in (("--html", options["html_path"]), ("--events", options["events_path"])):
        if path:
            check_writable(option, path)


def load_trace(options: dict[str, Any]) -> Any:
    """Read or draw the trace; warn about skipped rows."""
    from phalanx.simulator.trace import Trace, read_trace

    path = options["trace_path"]
    if options.get("family") is not None:
        from phalanx.simulator.trace_families import draw_trace, family_named

        trace = draw_trace(family_named(options["family"]), options["seed"])
    else:
        trace = read_trace(
            read_lines(path), name=path, skip_bad=options["skip_bad"], with_parts=options.get("inflate") is not None
        )
    for row in trace.invalid_rows[:_SHOWN_MAX]:
        warn(f"skipped line {row.line} of {path}: {row.reason}")
    if len(trace.invalid_rows) > _SHOWN_MAX:
        warn(f"skipped {len(trace.invalid_rows) - _SHOWN_MAX} more rows of {path}")
    limit = options["limit_jobs"]
    return trace if limit is None else Trace(jobs=trace.jobs[:limit], invalid_rows=trace.invalid_rows)


def load_fleet(options: dict[str, Any]) -> Any:
    """Read or build the fleet.

    Raises:
        BadRequest: the fleet is missing or given twice.
    """
    from phalanx.simulator.fleet import equal_nodes, parse_fleet, read_fleet

    path, nodes, each = options["fleet_path"], options["nodes"], options["gpus_per_node"]
    if path is not None:
        if nodes is not None or each is not None:
            raise BadRequest("--fleet and --nodes exclude each other", hint="use one of the two")
        stated = None if os.path.exists(path) else parse_fleet(path)
        return stated or read_fleet(read_lines(path), name=path, cpu_nodes=options.get("inflate") is not None)
    if nodes is None and each is None and options.get("family") is not None:
        from phalanx.simulator.trace_families import family_named

        return family_named(options["family"]).fleet
    if nodes is None or each is None:
        raise BadRequest("no fleet given", hint="add --fleet nodes.csv, or --nodes 80 --gpus-per-node 8")
    if options["per_vc"]:
        raise BadRequest("--per-vc needs the virtual cluster of each node", hint="use --fleet with a column vc")
    return equal_nodes(nodes, each)


def read_lines(path: str) -> list[str]:
    """Read the lines of a text file, plain or gzipped; `-` is standard input.

    Raises:
        BadFile: the file does not exist or is not text.
        TooLarge: the file exceeds the limit, before or after decompression.
    """
    raw = read_file_bytes(path, FILE_BYTES_MAX, "trace or fleet")
    try:
        if raw.startswith(_GZIP):
            # Bounded: a few kilobytes can decompress to terabytes.
            with gzip.GzipFile(fileobj=io.BytesIO(raw)) as packed:
                raw = packed.read(FILE_BYTES_MAX + 1)
            if len(raw) > FILE_BYTES_MAX:
                raise TooLarge(
                    f"{path}: decompresses to more than {FILE_BYTES_MAX >> 20} MiB",
                    hint="check that it is the right file",
                )
        return raw.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise BadFile(
            f"{path}: byte {error.start} is not UTF-8 text", hint="use a CSV or SWF file, plain or gzipped"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadFile(f"{path}: invalid gzip file: {error}") from None


def policy_names(options: dict[str, Any]) -> list[str]:
    """Return the policies to compare, or the one.

    Raises:
        BadRequest: `--compare` names none.
    """
    if options["compare"] is None:
        return [options["policy"]]
    names = [name.strip() for name in options["compare"].split(",") if name.strip()]
    if not names:
        raise BadRequest("--compare needs policies", hint="--compare fifo,las,default")
    return list(dict.fromkeys(names))


def _setting(options: dict[str, Any], policy: str, trace: Any) -> Any:
    from phalanx.simulator.run_times import RunTimeKnowledge
    from phalanx.simulator.simulation import SimulationSettings, check_settings

    setting = SimulationSettings(
        policy=policy,
        run_times=RunTimeKnowledge(options["durations"]),
        per_virtual_cluster=options["per_vc"],
        restart_cost_s=options["restart_cost"],
        seed=options["seed"],
        skip_unplaceable=options["skip_bad"],
        lifecycle=options["lifecycle"],
        curve_points=_CURVE_POINTS if options["plot_path"] or options["html_path"] else 0,
    )
    check_settings(setting, trace)
    return setting


def _with_pools(options: dict[str, Any], settings: list[Any]) -> list[Any]:
    """Return each setting without and with the pools of the file."""
    from dataclasses import replace

    from phalanx.simulator.pool_file import parse_pool_file

    if options["per_vc"]:
        raise BadRequest("--pools is for one fleet", hint="leave out --per-vc")
    path = options["pools_path"]
    plan = parse_pool_file("\n".join(read_lines(path)), path=path)
    queues = plan.queues if len(plan.queues) > 1 else ()  # they share the fleet in both
    return [
        one
        for plain in settings
        for one in (replace(plain, queues=queues), replace(plain, pools=plan.pools, queues=plan.queues))
    ]


@contextmanager
def _events_file(path: str | None) -> Iterator[Callable[[str], Any] | None]:
    """Yield what writes one line of the file of events; None without one."""
    if not path:
        yield None
        return
    with open(path, "w", encoding="utf-8") as file:
        yield file.write


def _event_writer(policy: str, write: Callable[[str], Any]) -> Callable[..., None]:
    """Return a listener of a replay that writes each event."""
    import json

    def listen(at_s: float, event: Any, job: Any, places: tuple[tuple[str, int], ...]) -> None:
        line: dict[str, Any] = {"policy": policy, "at_s": at_s, "event": event.value, "job": job.id, "gpus": job.gpus}
        if places:
            line["nodes"] = dict(places)
        write(json.dumps(line) + "\n")

    return listen


def _replayed(
    trace: Any, nodes: Any, setting: Any, events: Callable[[str], Any] | None, *, quiet: bool
) -> tuple[Any, list[Any]]:
    from phalanx.cli.simulate.chart_data import PolicyRun
    from phalanx.simulator.report import build_report
    from phalanx.simulator.simulation import simulate as replay

    gc.collect()
    gc.freeze()  # the trace lives to the end: collecting it repeatedly only costs time
    with progress_bar(setting.policy, len(trace.jobs), quiet=quiet) as on_progress:
        started_s = time.perf_counter()
        on_event = None if events is None else _event_writer(setting.policy, events)
        parts = replay(trace, nodes, setting, on_progress=on_progress, on_event=on_event)
        wall_s = time.perf_counter() - started_s
    refused = [each for part in parts for each in part.unplaceable]
    if len(refused) == len(trace.jobs):
        raise BadRequest("no job of the trace fits the fleet", hint=refused[0][1])
    label = f"{setting.policy}, renting" if setting.pools else setting.policy
    return PolicyRun(policy=label, report=build_report(parts, wall_s=wall_s), parts=parts), refused


@contextmanager
def progress_bar(policy: str, jobs: int, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a progress callback (ended, total) that draws a bar; None without a terminal."""
    if quiet or not terminal(sys.stderr).interactive:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("jobs"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(policy, total=jobs)
        yield lambda ended, total: progress.update(task, completed=ended, total=total)


def _queues(run: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the report by queue for `--json`, if it was asked for."""
    from phalanx.simulator.queue_report import queue_reports

    return {"queues": [one.as_dict() for one in queue_reports(run.parts)]} if options["per_queue"] else {}


def _print_json(runs: list[Any], settings: list[Any], summary: dict[str, Any], options: dict[str, Any]) -> None:
    """Print one object, or with --compare a list of them."""
    from phalanx.cli.list_output import to_json

    found = [
        {
            "policy": setting.policy,
            "rents": bool(setting.pools),
            **run.report.as_dict(),
            **_queues(run, options),
            **summary,
        }
        for run, setting in zip(runs, settings, strict=True)
    ]
    print(to_json(found if len(found) > 1 or options["compare"] else found[0], indent=2))


def _print(runs: list[Any], summary: dict[str, Any], *, per_queue: bool) -> None:
    from phalanx.cli.simulate.report_rows import report_rows
    from phalanx.cli.tables import Cell, Column, table

    screen = terminal()
    print(
        f"{runs[0].report.jobs:,} jobs on {summary['nodes']} node{'' if summary['nodes'] == 1 else 's'}, {summary['gpus']:,} GPUs"
        f"{', each virtual cluster on its own nodes' if summary['per_vc'] else ''}; each preemption or move costs {summary['restart_cost_s']:g} s"
    )
    columns = [Column(title="", min_width=24), *(Column(title=run.policy, right=True) for run in runs)]
    rows: list[list[Cell | str]] = []
    for row in report_rows([run.report for run in runs])[1:]:
        values = [row.value(run.report) for run in runs]
        best = row.best(values) if len(runs) > 1 else None
        shown = row.format if len(runs) == 1 else row.format_brief
        rows.append([row.name, *(Cell(shown(value), "green" if value == best else "") for value in values)])
    print("\n".join(table(columns, rows, screen, titles=True)))
    if per_queue:
        from phalanx.cli.simulate.queue_table import queue_table
        from phalanx.simulator.queue_report import queue_reports

        for run in runs:
            print(queue_table(run.policy, queue_reports(run.parts), screen))
    if len(runs) == 1 and runs[0].policy == "default":
        print("next: compare policies with --compare fifo,las,default; draw charts with --html out.html")


def _write(runs: list[Any], options: dict[str, Any], summary: dict[str, Any]) -> None:
    name = Path(options["trace_path"]).name
    title = f"{name}: {', '.join(run.policy for run in runs)}"
    lead = f"{runs[0].report.jobs:,} jobs on {summary['nodes']} node{'' if summary['nodes'] == 1 else 's'}, {summary['gpus']:,} GPUs; each preemption or move costs {summary['restart_cost_s']:g} s."
    if not options["plot_path"] and not options["html_path"]:
        return
    from phalanx.cli.simulate.charts import replay_charts

    charts = replay_charts(runs)
    if options["plot_path"]:
        from phalanx.cli.figure_files import render

        best = min(runs, key=lambda run: run.report.avg_jct_s)
        figures = best.report
        line = (
            f"{f'Lowest with {best.policy}: mean' if len(runs) > 1 else 'Mean'} time from submit to end {figures.avg_jct_s:,.0f} s, "
            f"99th percentile {figures.p99_jct_s:,.0f} s; mean wait {figures.avg_wait_s:,.0f} s; GPU utilisation {figures.utilization:.0%}"
        )
        kind = Path(options["plot_path"]).suffix.lower().removeprefix(".")
        drawn = render([chart for _, chart in charts], kind, title=title, lines=[lead, line])
        Path(options["plot_path"]).write_bytes(drawn)
    if options["html_path"]:
        from phalanx.cli.figure_page import build_figure_page
        from phalanx.cli.simulate.report_table import report_table

        command = shlex.join(["phalanx", *sys.argv[1:]])
        page = build_figure_page(charts, title=title, lead=lead, command=command, table=report_table(runs))
        Path(options["html_path"]).write_text(page, encoding="utf-8")

"""`phalanx simulate`: what would a trace have met on a fleet, under a policy? Needs no head and touches none."""

from __future__ import annotations

import gc
import gzip
import io
import math
import shlex
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

from phalanx.cli.faults import warn
from phalanx.cli.terminal import terminal
from phalanx.client.given import bytes_of
from phalanx.core.errors import BadFile, BadRequest, TooLarge

_GZIP: Final = b"\x1f\x8b"  # RFC 1952, 2.3.1
FILE_BYTES_MAX: Final = 64 << 20  # the longest public traces have 10 to 40 MB
_SHOWN_MAX: Final = 5  # jobs left out that are named one by one
_CURVE_POINTS: Final = 4000  # of the fleet's curve: about nine for each step that is drawn


@click.command()
@click.option(
    "--trace",
    "trace_path",
    required=True,
    metavar="FILE",
    help="Jobs: a CSV with job_id, submit_s, duration_s, num_gpus; or SWF; also gzipped, and - for standard input.",
)
@click.option(
    "--fleet",
    "fleet_path",
    metavar="FILE",
    help="Nodes: a CSV with node, gpus and perhaps gpu_type; for --per-vc also vc.",
)
@click.option("--nodes", type=int, metavar="N", help="Instead of --fleet: so many equal nodes ...")
@click.option("--gpus-per-node", type=int, metavar="G", help="... of so many GPUs.")
@click.option("--per-vc", is_flag=True, help="Each virtual cluster's jobs on its own nodes.")
@click.option(
    "--policy",
    default="default",
    show_default=True,
    metavar="NAME",
    help="default fifo skip backfill sjf las srtf fair.",
)
@click.option("--compare", metavar="NAMES", help="Several policies side by side: fifo,las,default.")
@click.option(
    "--durations",
    type=click.Choice(["exact", "limit", "predicted"]),
    default="exact",
    show_default=True,
    help="What policies that look at run times may know of them.",
)
@click.option(
    "--restart-cost",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="S",
    help="Seconds of work done twice for each preemption or move.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="S",
    help="Order of jobs submitted at one instant; 0 is the trace's own.",
)
@click.option("--skip-bad", is_flag=True, help="Leave out rows that are no job, and jobs that fit no empty fleet.")
@click.option("--limit-jobs", type=click.IntRange(min=1), metavar="N", help="Only the first N jobs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.option(
    "--plot",
    "plot_path",
    metavar="OUT.png",
    help="Draw utilisation, queue depth and wait by size (needs phalanx[plot]).",
)
@click.option("--html", "html_path", metavar="OUT.html", help="Write the same as a page.")
def simulate(**asked: Any) -> None:
    """Replay a trace in virtual time, through the scheduler and the job lifecycle that run live.

    \b
    phalanx simulate --trace jobs.csv --nodes 80 --gpus-per-node 8
    phalanx simulate --trace jobs.csv --fleet nodes.csv --per-vc --compare fifo,las,default --html out.html
    """  # noqa: D301  # \b is click's
    from phalanx.cli.lists import encoded

    if not math.isfinite(asked["restart_cost"]):
        raise BadRequest(f"--restart-cost {asked['restart_cost']}: no number of seconds", hint="--restart-cost 60")
    _check_outputs(asked)
    trace, nodes = trace_of(asked), fleet_of(asked)
    names = _policies(asked)
    # All are checked first: a refusal of one must not come after minutes of another.
    settings = [_setting(asked, name, trace) for name in names]
    runs: list[Any] = []
    refused: list[Any] = []
    for setting in settings:
        run, left_out = _replayed(trace, nodes, setting, quiet=asked["as_json"])
        runs.append(run)
        refused = refused or left_out
    for job, why in refused[:_SHOWN_MAX]:
        warn(f"left out: job {job.id} (line {job.line}): {why}")
    if len(refused) > _SHOWN_MAX:
        warn(f"left out: {len(refused) - _SHOWN_MAX} more jobs that fit no empty fleet")
    about = {
        "trace": asked["trace_path"],
        "nodes": len(nodes),
        "gpus": sum(node.gpus for node in nodes),
        "per_vc": asked["per_vc"],
        "durations": asked["durations"],
        "restart_cost_s": asked["restart_cost"],
        "seed": asked["seed"],
        "bad_rows": len(trace.bad),
        "jobs_left_out": len(refused),
    }
    _write(runs, asked, about)  # first: a reader that goes away (`| head`) must not cost the files
    if asked["as_json"]:
        found = [{"policy": run.policy, **run.report.as_dict(), **about} for run in runs]
        print(encoded(found if asked["compare"] else found[0], indent=2))
    else:
        _print(runs, about)


def _check_outputs(asked: dict[str, Any]) -> None:
    """Refuse now what could not be written after minutes of replay."""
    if asked["plot_path"]:
        from phalanx.cli.simulate.plot import check_plot

        check_plot(asked["plot_path"])
    for option, path in (("--plot", asked["plot_path"]), ("--html", asked["html_path"])):
        if path and not Path(path).absolute().parent.is_dir():
            raise BadRequest(f"{option} {path}: there is no folder {Path(path).parent}", hint="make it first")
        if path and Path(path).is_dir():
            raise BadRequest(f"{option} {path} is a folder, not a file")


def trace_of(asked: dict[str, Any]) -> Any:
    """The trace that the options name; what is left out of it is told."""
    from phalanx.simulator.trace import Trace, read_trace

    path = asked["trace_path"]
    trace = read_trace(lines_of(path), name=path, skip_bad=asked["skip_bad"])
    for row in trace.bad[:_SHOWN_MAX]:
        warn(f"left out: {path}: line {row.line}: {row.why}")
    if len(trace.bad) > _SHOWN_MAX:
        warn(f"left out: {len(trace.bad) - _SHOWN_MAX} more rows of {path}")
    limit = asked["limit_jobs"]
    return trace if limit is None else Trace(jobs=trace.jobs[:limit], bad=trace.bad)


def fleet_of(asked: dict[str, Any]) -> Any:
    """The fleet that the options name.

    Raises:
        BadRequest: none, or two that contradict each other.
    """
    from phalanx.simulator.fleet import equal_nodes, read_fleet

    path, nodes, each = asked["fleet_path"], asked["nodes"], asked["gpus_per_node"]
    if path is not None:
        if nodes is not None or each is not None:
            raise BadRequest("--fleet and --nodes contradict each other", hint="give one of the two")
        return read_fleet(lines_of(path), name=path)
    if nodes is None or each is None:
        raise BadRequest("the fleet is missing", hint="--fleet nodes.csv, or --nodes 80 --gpus-per-node 8")
    if asked["per_vc"]:
        raise BadRequest("--per-vc needs to know which node is whose", hint="--fleet with a column vc")
    return equal_nodes(nodes, each)


def lines_of(path: str) -> list[str]:
    """The lines of a text file, unpacked if gzip packed it; `-` is standard input.

    Raises:
        BadFile: there is none, or it is no text.
        TooLarge: it is longer than any trace, packed or not.
    """
    raw = bytes_of(path, FILE_BYTES_MAX, "trace or fleet")
    try:
        if raw.startswith(_GZIP):
            # Not past the limit: a few kilobytes may unpack to a disk full.
            with gzip.GzipFile(fileobj=io.BytesIO(raw)) as packed:
                raw = packed.read(FILE_BYTES_MAX + 1)
            if len(raw) > FILE_BYTES_MAX:
                raise TooLarge(f"{path}: unpacks to more than {FILE_BYTES_MAX >> 20} MiB", hint="is it the right file?")
        return raw.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise BadFile(
            f"{path}: byte {error.start} is no UTF-8 text", hint="a CSV or SWF file as text, or the same packed by gzip"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadFile(f"{path}: begins as gzip does and cannot be unpacked: {error}") from None


def _policies(asked: dict[str, Any]) -> list[str]:
    if asked["compare"] is None:
        return [asked["policy"]]
    names = [name.strip() for name in asked["compare"].split(",") if name.strip()]
    if not names:
        raise BadRequest("--compare names no policy", hint="--compare fifo,las,default")
    return list(dict.fromkeys(names))


def _setting(asked: dict[str, Any], policy: str, trace: Any) -> Any:
    from phalanx.simulator.known import Durations
    from phalanx.simulator.simulate import Setting, check

    setting = Setting(
        policy=policy,
        durations=Durations(asked["durations"]),
        per_label=asked["per_vc"],
        restart_cost_s=asked["restart_cost"],
        seed=asked["seed"],
        skip_never=asked["skip_bad"],
        curve_points=_CURVE_POINTS if asked["plot_path"] or asked["html_path"] else 0,
    )
    check(setting, trace)
    return setting


def _replayed(trace: Any, nodes: Any, setting: Any, *, quiet: bool) -> tuple[Any, list[Any]]:
    from phalanx.cli.simulate.figures import Run
    from phalanx.simulator.report import report
    from phalanx.simulator.simulate import simulate_live

    gc.collect()
    gc.freeze()  # the trace lives to the end: looking through it again and again would be time for nothing
    try:
        with progress_of(setting.policy, len(trace.jobs), quiet=quiet) as told:
            started_s = time.perf_counter()
            parts = simulate_live(trace, nodes, setting, on_progress=told)
            wall_s = time.perf_counter() - started_s
    finally:
        gc.unfreeze()
    refused = [each for part in parts for each in part.refused]
    if len(refused) == len(trace.jobs):
        raise BadRequest("no job of the trace fits this fleet", hint=refused[0][1])
    return Run(policy=setting.policy, report=report(parts, wall_s=wall_s), parts=parts), refused


@contextmanager
def progress_of(policy: str, jobs: int, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal, to be told (ended, all); None where nobody looks."""
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
        yield lambda ended, _: progress.update(task, completed=ended)


def _print(runs: list[Any], about: dict[str, Any]) -> None:
    from phalanx.cli.simulate.rows import ROWS
    from phalanx.cli.tables import Cell, Column, table

    screen = terminal()
    print(
        f"{runs[0].report.jobs:,} jobs on {about['nodes']} node{'' if about['nodes'] == 1 else 's'}, {about['gpus']:,} GPUs"
        f"{', each virtual cluster by itself' if about['per_vc'] else ''}; a preemption or move costs {about['restart_cost_s']:g} s"
    )
    columns = [Column(title="", least=24), *(Column(title=run.policy, right=True) for run in runs)]
    rows: list[list[Cell | str]] = []
    for row in ROWS[1:]:
        values = [row.value(run.report) for run in runs]
        best = row.best(values) if len(runs) > 1 else None
        shown = row.shown if len(runs) == 1 else row.brief
        rows.append([row.name, *(Cell(shown(value), "green" if value == best else "") for value in values)])
    print("\n".join(table(columns, rows, screen, titles=True)))
    if len(runs) == 1 and runs[0].policy == "default":
        print("next: --compare fifo,las,default sets policies side by side; --html out.html draws it")


def _write(runs: list[Any], asked: dict[str, Any], about: dict[str, Any]) -> None:
    name = Path(asked["trace_path"]).name
    title = f"{name}: {', '.join(run.policy for run in runs)}"
    lead = f"{runs[0].report.jobs:,} jobs on {about['nodes']} node{'' if about['nodes'] == 1 else 's'}, {about['gpus']:,} GPUs; a preemption or move costs {about['restart_cost_s']:g} s."
    if asked["plot_path"]:
        from phalanx.cli.simulate.plot import check_plot, plot

        best = min(runs, key=lambda run: run.report.avg_jct_s)
        figures = best.report
        line = (
            f"{f'Least with {best.policy}: mean' if len(runs) > 1 else 'Mean'} time from submit to end {figures.avg_jct_s:,.0f} s, "
            f"99th percentile {figures.p99_jct_s:,.0f} s; mean wait {figures.avg_wait_s:,.0f} s; GPUs held {figures.utilization:.0%}"
        )
        kind = check_plot(asked["plot_path"])
        Path(asked["plot_path"]).write_bytes(plot(runs, kind=kind, title=title, lines=[lead, line]))
    if asked["html_path"]:
        from phalanx import __version__
        from phalanx.cli.simulate.page import build_page

        command = shlex.join(["phalanx", *sys.argv[1:]])
        page = build_page(runs, title=title, lead=lead, version=__version__, command=command)
        Path(asked["html_path"]).write_text(page, encoding="utf-8")

"""`phalanx demo`: connect the parts and choose the exit code."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

from phalanx.core.errors import BadFile, BadRequest, PhalanxError

if TYPE_CHECKING:
    from phalanx.cli.demo.cluster import DemoCluster
    from phalanx.cli.demo.outcome import DemoOutcome
    from phalanx.cli.demo.runner import DemoRunner
    from phalanx.cli.demo.state import DemoState
    from phalanx.cli.demo.views import DemoView

_FLEET: Final = re.compile(r"([1-9]\d{0,2})x([1-9]\d{0,2})")
_STEPS_MIN: Final = 40  # fewer steps leave no time for a checkpoint, a kill and a resume
_REVIVE_S: Final = 20.0  # a killed virtual node restarts after this time, so that users can kill more
_REVIVE_ALONE_S: Final = 0.5  # without a spare node the job can only continue on the killed one
_NODES_USED: Final = 2
_SAMPLE_BYTES_MAX: Final = 4096
_INTERRUPTED: Final = 130  # 128 + SIGINT, as in shells


@click.command()
@click.option("--json", "json_path", metavar="FILE", help="Write the usage summary and measurements as JSON.")
@click.option(
    "--html",
    "html_path",
    metavar="FILE",
    default="demo.html",
    show_default=True,
    help="Write the report page.",
)
@click.option(
    "--nodes",
    "fleet",
    metavar="NxM",
    help="N virtual nodes of M devices, even where there are GPUs.  [default: 3x4, or the GPUs here]",
)
@click.option("--steps", type=click.IntRange(min=_STEPS_MIN), default=200, show_default=True, help="Training steps.")
@click.option("--no-kill", is_flag=True, help="Kill no node automatically.")
@click.option("--keep", is_flag=True, help="Keep the cluster running at the end and print how to use it.")
@click.option("--plain", is_flag=True, help="Print plain lines instead of the live view.")
def demo(
    json_path: str | None, html_path: str, fleet: str | None, steps: int, no_kill: bool, keep: bool, plain: bool
) -> int:
    """Start a cluster, train a real model on it, kill a node, and report the cost.

    The demo uses a temporary folder and a free port: clusters that already run are not affected.
    """
    from rich.console import Console

    from phalanx.cli.demo.cluster import DemoCluster, gpu_count
    from phalanx.cli.demo.example import (
        build_demo_job,
        check_torch,
        find_example,
        kill_step,
    )
    from phalanx.cli.demo.runner import DemoQuit, DemoRunner
    from phalanx.cli.demo.state import DemoState
    from phalanx.cli.demo.views import view_for

    check_torch()
    folder = find_example()
    for path in filter(None, (json_path, html_path)):
        _check_writable(path)
    gpus = 0 if fleet else gpu_count()
    words, shape, nodes = _fleet_of(fleet or "3x4", gpus)
    console = Console(highlight=False)
    scene = DemoState(
        started_s=time.time(), now_s=time.time(), fleet=words, steps_total=steps, activity="starting the cluster"
    )
    cluster = DemoCluster(
        virtual=None if gpus else fleet or "3x4", revive_s=_REVIVE_S if nodes > _NODES_USED else _REVIVE_ALONE_S
    )
    job = build_demo_job(folder, shape=shape, steps=steps)
    with _signals_as_interrupts():
        kept = False
        try:
            with view_for(console, plain=plain) as audience:
                conductor = DemoRunner(cluster, scene, audience, kill_step=None if no_kill else kill_step(steps))
                _run(conductor, cluster, scene, audience, nodes=nodes, job=job)
            outcome = _finish(
                conductor, console, scene, job, json_path=json_path, html_path=html_path, kill_wanted=not no_kill
            )
            kept = keep
            return 1 if outcome.failures else 0
        except DemoQuit:
            sys.stderr.write("phalanx: you quit the demo before its end\n")
            return _INTERRUPTED
        except KeyboardInterrupt:
            sys.stderr.write("phalanx: interrupted; stopping the demo's cluster\n")
            return _INTERRUPTED
        finally:
            if kept:
                _print_usage_hint(cluster)
            else:
                _close_cluster(cluster)


def _run(
    conductor: DemoRunner,
    cluster: DemoCluster,
    scene: DemoState,
    audience: DemoView,
    *,
    nodes: int,
    job: dict[str, object],
) -> None:
    audience.show_message(f"starting a head and {scene.fleet}", scene)
    audience.show(scene)
    cluster.start()
    conductor.await_nodes(nodes)
    audience.show_message(f"the cluster is up after {scene.elapsed_s:.1f} s", scene)
    conductor.submit(job)
    conductor.run()


def _finish(
    conductor: DemoRunner,
    console: object,
    scene: DemoState,
    job: dict[str, object],
    *,
    json_path: str | None,
    html_path: str,
    kill_wanted: bool,
) -> DemoOutcome:
    """Print the summary and write the files."""
    from rich.console import Console

    from phalanx import __version__
    from phalanx.cli.demo.example import format_command
    from phalanx.cli.demo.outcome import as_json, build_outcome
    from phalanx.cli.demo.page import build_page
    from phalanx.cli.demo.summary import result_lines, summary_lines
    from phalanx.core.work.states import JobState

    assert isinstance(console, Console)
    scene.now_s = time.time()
    outcome = build_outcome(scene, conductor.fetch_usage_summary(), sample=_sample_of(scene), kill_wanted=kill_wanted)
    blocks = console.encoding.lower().startswith("utf")
    for line in summary_lines(scene, outcome, width=console.width if console.is_terminal else 100, blocks=blocks):
        console.print(line, soft_wrap=True)
    _write(html_path, build_page(scene, outcome, version=__version__, command=format_command(job)).encode())
    if json_path:
        _write(json_path, as_json(outcome, scene))
    if outcome.usage.state != JobState.SUCCEEDED:
        console.print(conductor.log_tail(), markup=False, soft_wrap=True)
    for line in result_lines(outcome):
        console.print(line, soft_wrap=True)
    console.print(f"Report: {html_path}" + (f", JSON: {json_path}" if json_path else ""), soft_wrap=True)
    return outcome


def _fleet_of(virtual: str, gpus: int) -> tuple[str, str, int]:
    """Return the description of the fleet, the job's shape, and the number of nodes.

    Raises:
        BadRequest: `virtual` is not of the form NxM.
    """
    if gpus:
        return f"this machine with {gpus} GPU{'s' if gpus > 1 else ''}", f"1x{min(gpus, 4)}", 1
    match = _FLEET.fullmatch(virtual.strip().lower())
    if match is None:
        raise BadRequest(
            f"--nodes {virtual!r} is not NODESxDEVICES", hint="write --nodes 3x4 for 3 nodes of 4 virtual devices"
        )
    nodes, devices = int(match[1]), int(match[2])
    return (
        f"{nodes} node{'s' if nodes > 1 else ''} x {devices} virtual devices",
        f"{min(_NODES_USED, nodes)}x{min(2, devices)}",
        nodes,
    )


def _sample_of(scene: DemoState) -> str:
    """Return the text that the trained model generated, or ""."""
    if scene.job is None or not scene.job.output_dir:
        return ""
    try:
        with open(os.path.join(scene.job.output_dir, "sample.txt"), encoding="utf-8", errors="replace") as file:
            return file.read(_SAMPLE_BYTES_MAX)
    except OSError:
        return ""


def _check_writable(path: str) -> None:
    """Check an output path before the demo starts.

    Raises:
        BadFile: the path cannot be written.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise BadFile(f"{path} cannot be written", hint="choose a file in a writable folder: --html FILE, --json FILE")


def _write(path: str, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)


def _print_usage_hint(cluster: DemoCluster) -> None:
    sys.stdout.write(
        f"The cluster keeps running. To use it: export PHALANX_HOME={cluster.home}\nTo stop it: phalanx down, then remove that folder\n"
    )


def _close_cluster(cluster: DemoCluster) -> None:
    """Close the cluster with signals ignored: a second Ctrl-C must not leave processes behind."""
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        cluster.stop()
    except PhalanxError as error:
        sys.stderr.write(f"phalanx: {error.message}\n")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, so that the demo always stops its cluster."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

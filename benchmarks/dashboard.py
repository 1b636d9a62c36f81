"""Measure the dashboard in a real Chromium, on a real head with a large fleet.

    python -m benchmarks.dashboard [--nodes 1000] [--past-jobs 100000] [--pages 50] [--peer ray] [--runs 5] [--json]

Half of a second's work is the browser's: it shares the processors with the head. `first_view_ms` ends with the first paint of the numbers of
the fleet, `usable_ms` when every GPU is drawn and keys and clicks work; both with an empty cache. `tick_ms` is the main thread's time for a
change of a tenth of the GPUs. `--json` prints one flat object; `missed` names figures out of range (ranges/dashboard.json).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.cluster import BenchmarkCluster, free_port, wait_until
from benchmarks.dashboard_fleet import (
    GPUS,
    LEASE_S,
    RUNNING,
    WAITING,
    PlayedFleet,
    list_requests,
    write_past_jobs,
)
from benchmarks.dashboard_ray import RayPage, measure_ray
from benchmarks.figures import Figure, argument_parser, at_most, plain_figure, print_progress, print_report
from phalanx.node.processes.proctable import TICKS_PER_S, read_row
from tests.chromium_here import Chromium, chromium, program

RANGES: Final = Path(__file__).parent / "ranges" / "dashboard.json"
WATCH_S: Final = 20.0  # with and without open pages
WATCHES: Final = 3  # the difference of two such times varies by some percent of a core
CHANGE_S: Final = 30.0  # time-out
READ_S: Final = 1.0
SETTLE_S: Final = 11.0  # of the window in which samples become a state
# Utilizations that move the mean of three samples below and above 10 %, where an active GPU is `low` (core.accounting.activity).
_UTILIZATIONS: Final = (0.05, 0.17, 0.02, 0.25, 0.0, 0.3)
_LARGE: Final = 5_000  # nodes from which the target of the large fleet counts
# Put into each page before its own scripts: keeps tasks of the main thread over 50 ms, and the work of each change.
_OBSERVER: Final = """
window.seen = {long: [], ticks: []};
new PerformanceObserver((list) => { for (const one of list.getEntries()) seen.long.push(one.duration) }).observe({type: 'longtask', buffered: true});
new PerformanceObserver((list) => { for (const one of list.getEntries()) if (one.name === 'tick') seen.ticks.push([one.duration, one.detail.nodes]) }).observe({type: 'measure', buffered: true});
"""
_USABLE: Final = "performance.getEntriesByName('usable')[0]?.startTime"
_PAINTED: Final = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--running", type=int, default=RUNNING)
    parser.add_argument("--waiting", type=int, default=WAITING)
    parser.add_argument("--past-jobs", type=int, default=100_000)
    parser.add_argument("--pages", type=int, default=50, help="open pages whose cost is measured")
    parser.add_argument(
        "--peer", choices=["ray"], help="measure Ray's dashboard in the same run, and ours as large as it"
    )
    parser.add_argument("--peer-python", default=sys.executable, help="Python that has Ray, if this one has not")
    given = parser.parse_args(argv)
    if program() is None:
        print_progress("no Chromium here: make browser-tools")
        return 1
    runs = given.runs or 5
    figures, facts = measure_fleet(
        given.nodes, given.running, given.waiting, runs=runs, past_jobs=given.past_jobs, pages=given.pages
    )
    if given.peer:
        peer = measure_ray(given.peer_python, given.nodes, runs)
        ours, _ = measure_fleet(peer.nodes, peer.jobs, 0, runs=runs, past_jobs=0, pages=0, changing=False)
        figures += beside(ours, peer)
        facts |= {"ray_nodes": peer.nodes, "ray_jobs": peer.jobs, "ray_version": peer.version}
    print_figures(figures, {**facts, "load_1m": os.getloadavg()[0], "cpus": os.cpu_count()}, as_json=given.json)
    return 0


def measure_fleet(
    nodes: int, running: int, waiting: int, *, runs: int, past_jobs: int, pages: int, changing: bool = True
) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures of one size of fleet. `changing`: also what changes of the fleet cost the page."""
    ranges = json.loads(RANGES.read_text(encoding="utf-8"))
    with played_fleet(nodes, running, waiting, past_jobs) as fleet:
        with chromium() as page:
            views = [cold_view(fleet, page) for _ in range(runs)]
            print_progress(f"first views in {', '.join(format(view['first_view_ms'], '.0f') for view in views)} ms")
            ticks = changes(fleet, page, nodes) if changing else []
            long = page.run("seen.long")
        lists = list_ms(fleet, runs) if past_jobs else []
        costs = [open_pages_cost(fleet, pages) for _ in range(WATCHES)] if pages else []
    print_progress(f"changes {ticks} ms, lists {lists} ms, open pages {costs} % of a core")
    large = "_10000" if nodes >= _LARGE else ""
    figures = [
        _ranged(f"first_view{large}_ms", [view["first_view_ms"] for view in views], ranges),
        _ranged(f"usable{large}_ms", [view["usable_ms"] for view in views], ranges),
        _ranged("transfer_kb", [view["transfer_kb"] for view in views], {} if large else ranges),
        _ranged("long_task_ms", [max([*view["long"], 0.0]) for view in views], {} if large else ranges),
    ]
    if ticks:
        figures.append(_ranged("tick_ms", ticks, {} if large else ranges))
        figures.append(_ranged("tick_long_task_ms", [max([*long, 0.0])], {} if large else ranges))
    if lists:
        figures.append(_ranged("list_p95_ms", lists, ranges))
    if costs:
        figures.append(_ranged("open_pages_core_percent", costs, {} if large else ranges))
    return figures, {"nodes": nodes, "gpus": nodes * GPUS, "past_jobs": past_jobs, "pages": pages}


@contextlib.contextmanager
def played_fleet(nodes: int, running: int, waiting: int, past_jobs: int) -> Iterator[PlayedFleet]:
    """Run a head with its fleet and jobs; remove it afterwards."""
    home = tempfile.mkdtemp(prefix="phalanx-bench-")
    cluster = BenchmarkCluster(home=home, port=free_port(), virtual=f"1x{GPUS}", lease_s=LEASE_S)
    try:
        if past_jobs:
            write_past_jobs(home, past_jobs)
        cluster.start()
        fleet = PlayedFleet(cluster, nodes)
        began = time.monotonic()
        fleet.join()
        print_progress(f"{nodes} nodes are up, {time.monotonic() - began:.0f} s")
        fleet.fill(running, waiting)
        fleet.sample(fleet.names, 0.11)
        print_progress(f"{running} jobs run, {waiting} wait, {time.monotonic() - began:.0f} s")
        time.sleep(SETTLE_S)
        yield fleet
    finally:
        cluster.stop()
        shutil.rmtree(home, ignore_errors=True)


def cold_view(fleet: PlayedFleet, page: Chromium) -> dict[str, Any]:
    """Sign in, empty the cache, open the fleet; return what it took."""
    url = f"http://127.0.0.1:{fleet.cluster.port}"
    page.send("Network.clearBrowserCache")
    link = json.loads(fleet.ask("POST", "/v1/dashboard/link"))["path"]
    page.send("Page.navigate", url=url + link)
    page.until("location.pathname === '/' && document.querySelector('canvas') !== null")
    page.send("Page.navigate", url="about:blank")
    page.until("location.href === 'about:blank'")
    page.send("Network.clearBrowserCache")
    observer = page.send("Page.addScriptToEvaluateOnNewDocument", source=_OBSERVER)["identifier"]
    page.received.clear()
    page.send("Page.navigate", url=url)
    page.until(_USABLE)
    time.sleep(READ_S)  # what the page does after it is usable counts as well
    page.send("Page.removeScriptToEvaluateOnNewDocument", identifier=observer)
    return {
        "first_view_ms": page.until(_PAINTED),
        "usable_ms": page.run(_USABLE),
        "long": page.run("seen.long"),
        "transfer_kb": (sum(page.received.values()) + stream_bytes(fleet)) / 1000,
    }


def stream_bytes(fleet: PlayedFleet) -> int:
    """Return how much the stream of a page that opens sends in a second: Chromium does not count it."""
    received, end = 0, time.monotonic() + READ_S
    with _open_page(fleet) as connection:
        while (left_s := end - time.monotonic()) > 0:
            connection.settimeout(left_s)
            try:
                piece = connection.recv(1 << 16)
            except TimeoutError:
                break
            if not piece:
                break
            received += len(piece)
    return received


def changes(fleet: PlayedFleet, page: Chromium, nodes: int) -> list[float]:
    """Let a tenth of the GPUs change their state several times; return the main thread's work for each change, in ms."""
    tenth = fleet.names[:: max(1, len(fleet.names) // max(1, nodes // 10))]
    page.run("(seen.ticks.length = 0, seen.long.length = 0)")
    found: list[float] = []
    for utilization in _UTILIZATIONS:
        time.sleep(SETTLE_S)
        page.run("(seen.ticks.length = 0, 0)")
        fleet.sample(tenth, utilization)
        try:
            wait_until(
                lambda: sum(count for _, count in page.run("seen.ticks")) >= 0.9 * len(tenth),
                "the change is shown",
                every_s=0.5,
                limit_s=CHANGE_S,
            )
        except TimeoutError:  # on a machine that is too busy; the figure is that of the other changes
            print_progress(f"a change was not shown within {CHANGE_S:g} s: {page.run('seen.ticks')}")
            continue
        found.append(sum(took for took, count in page.run("seen.ticks") if count))  # all of it, if it came in two ticks
    return found


def list_ms(fleet: PlayedFleet, runs: int) -> list[float]:
    """Return the 95th percentile of lists in each run, in ms."""
    found = []
    for run in range(runs):
        taken = []
        for path in list_requests((f"run-{run:05}", f"train-{run:03}")):
            began = time.perf_counter()
            body = fleet.ask("GET", path)
            taken.append(1000 * (time.perf_counter() - began))
            after = json.loads(body).get("after") if path.startswith("/v1") else None
            if after:
                began = time.perf_counter()
                fleet.ask("GET", f"{path}&after={after}")
                taken.append(1000 * (time.perf_counter() - began))
        found.append(sorted(taken)[int(0.95 * (len(taken) - 1))])
    return found


def open_pages_cost(fleet: PlayedFleet, pages: int) -> float:
    """Return what `pages` open pages cost the head, in percent of a core, while a hundredth of the GPUs changes each few seconds."""
    few = fleet.names[::100]

    def watch() -> float:
        before_s, began = cpu_s(fleet.cluster), time.monotonic()
        number = 0
        while time.monotonic() < began + WATCH_S:
            fleet.cordon(few, cordoned=number % 2 == 0)
            number += 1
            time.sleep(2.0)
        return (cpu_s(fleet.cluster) - before_s) / (time.monotonic() - began)

    without = watch()
    reader = _Reader([_open_page(fleet) for _ in range(pages)])
    reader.start()
    try:
        time.sleep(2.0)
        return 100 * max(0.0, watch() - without)
    finally:
        reader.close()


class _Reader(threading.Thread):
    """Reads all streams, so that none holds up the head."""

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        super().__init__(daemon=True)
        self._connections = connections
        self._over = False

    def run(self) -> None:
        """Read until `close`."""
        with selectors.DefaultSelector() as selector:
            for one in self._connections:
                selector.register(one, selectors.EVENT_READ)
            while not self._over:
                for key, _ in selector.select(timeout=0.5):
                    assert isinstance(key.fileobj, socket.socket)
                    if not key.fileobj.recv(1 << 16):
                        selector.unregister(key.fileobj)

    def close(self) -> None:
        """Close all streams."""
        self._over = True
        self.join()
        for one in self._connections:
            one.close()


def _open_page(fleet: PlayedFleet) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", fleet.cluster.port), timeout=60)
    connection.sendall(
        (
            f"GET /v1/fleet/events HTTP/1.1\r\nHost: 127.0.0.1:{fleet.cluster.port}\r\nAccept-Encoding: gzip\r\n"
            f"Authorization: Bearer {fleet.cluster.token()}\r\n\r\n"
        ).encode()
    )
    return connection


def cpu_s(cluster: BenchmarkCluster) -> float:
    """Return the processor time that the head has used."""
    row = None if cluster.head is None else read_row(cluster.head.pid)
    if row is None:
        raise RuntimeError("the head has ended")
    return (row.cpu_ticks - row.waited_cpu_ticks) / TICKS_PER_S


def beside(ours: Sequence[Figure], peer: RayPage) -> list[Figure]:
    """Return our figures at the peer's size beside the peer's."""
    theirs = {"first_view_ms": peer.first_view_ms, "usable_ms": peer.usable_ms, "transfer_kb": peer.transfer_kb}
    found = []
    for figure in ours:
        if figure.name in theirs:
            name, _, unit = figure.name.rpartition("_")
            found.append(plain_figure(f"{name}_as_ray_{unit}", figure.runs, figure.unit))
            found.append(plain_figure(f"ray_{figure.name}", theirs[figure.name], figure.unit))
    return found


def print_figures(figures: Sequence[Figure], facts: dict[str, Any], *, as_json: bool) -> None:
    """Print medians as a table, or as one flat JSON object in which `missed` lists figures out of range."""
    if not as_json:
        print_report(
            "dashboard; " + ", ".join(f"{name} {value}" for name, value in facts.items()), figures, as_json=False
        )
        return
    flat = {figure.name: float(f"{statistics.median(figure.runs):.5g}") for figure in figures}
    print(json.dumps({**flat, **facts, "missed": [figure.name for figure in figures if figure.met is False]}))


def _ranged(name: str, runs: Sequence[float], ranges: dict[str, dict[str, Any]]) -> Figure:
    bound = ranges.get(name)
    unit = name.rpartition("_")[2]
    if bound is None:
        return plain_figure(name, runs, unit)
    return at_most(name, runs, bound["unit"], bound["bound"], note=bound["origin"])


if __name__ == "__main__":
    sys.exit(main())

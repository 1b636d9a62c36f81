"""Takeover time: two real heads with one real PostgreSQL; the leader is killed, stopped, cut off, or shut down.

    python -m benchmarks.takeover [--only kill,stop,cut,down] [--runs 20] [--json]

Measures two times from the fault: until the other head leads, and until a submit is acknowledged that a client with both addresses sent right
after the fault. At the end every acknowledged job must exist once, and a long-running job must be in its first attempt; otherwise the benchmark
fails. PostgreSQL runs with `fsync` off and everything is on one machine, so networks and disks add to the times.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Final

from benchmarks.cluster import wait_until
from benchmarks.cuttable_link import CuttableLink
from benchmarks.figures import (
    Figure,
    argument_parser,
    at_most,
    print_progress,
    print_report,
)
from benchmarks.heads import HeadGroup, HeadProcess, heads
from phalanx.client import Client
from tests import postgres_here

RUNS: Final = 20
BOUND_S: Final = 5.0  # target: a new leader within 5 s after a kill, a stop, or a cut network
LEASE_S: Final = 30.0  # of supervisors; long, because the benchmark measures only heads
KINDS: Final = {
    "kill": "leader killed",
    "stop": "leader stopped (SIGSTOP)",
    "cut": "leader cut off from the database",
    "down": "leader told to go (phalanx down)",
}


def main() -> int:
    """Measure and print."""
    parser = argument_parser(__doc__ or "")
    given = parser.parse_args()
    why = postgres_here.why_not()
    if why:
        print_progress(f"skipped: {why}")
        return 0
    figures: list[Figure] = []
    for kind, words in KINDS.items():
        if not given.only or kind in given.only.split(","):
            led, answered = zip(*_takeovers(kind, given.runs or RUNS), strict=True)
            figures += [
                at_most(f"{words}, to the next one leading", led, "s", BOUND_S),
                at_most(f"{words}, to a submit acknowledged", answered, "s", BOUND_S),
            ]
    print_report("Takeovers", figures, as_json=given.json)
    return 0


def _takeovers(kind: str, runs: int) -> Iterator[tuple[float, float]]:
    """Yield (until the other head led, until a submit was acknowledged) for each takeover, in seconds."""
    server = postgres_here.server()
    dsn = server.empty()
    with contextlib.ExitStack() as stack:
        cables = [stack.enter_context(CuttableLink(server.port)) for _ in range(2)]
        stores = tuple(dsn.replace(f":{server.port}/", f":{cable.port}/") for cable in cables)
        cluster = stack.enter_context(heads(dsn, "1x2", "1x2", stores=stores, words=("--lease", f"{LEASE_S:g}")))
        client = stack.enter_context(cluster.client())
        steady = client.submit(
            {"run": ["sleep", "3600"], "workdir": "/tmp", "gpus": 1, "name": "steady", "grace": "1s"}
        ).id
        wait_until(lambda: client.job(steady).job.state == "running", "it runs")
        acknowledged = {}
        for run in range(runs):
            leader = cluster.wait_for_leader()
            wait_until(lambda: sum(one.role == "standby" for one in client.heads().heads) == 1, "another stands by")
            cable = cables[cluster.heads.index(leader)]
            began_s = time.monotonic()
            _fault(kind, leader, cable, cluster)
            acknowledged[f"run-{run}"], led_s, answered_s = _timed(cluster, client, leader, f"run-{run}")
            print_progress(f"{kind} {run + 1}/{runs}: {led_s - began_s:.2f} s, {answered_s - began_s:.2f} s")
            yield led_s - began_s, answered_s - began_s
            _repair(leader, cable)
        _check(client, steady, acknowledged)
        client.cancel(steady)


def _fault(kind: str, leader: HeadProcess, cable: CuttableLink, cluster: HeadGroup) -> None:
    if kind == "kill":
        leader.send(signal.SIGKILL)
    elif kind == "stop":
        leader.send(signal.SIGSTOP)
    elif kind == "cut":
        cable.cut.set()
    else:
        with Client(leader.url, cluster.token()) as alone:
            alone.stop()


def _timed(cluster: HeadGroup, client: Client, leader: HeadProcess, key: str) -> tuple[str, float, float]:
    """Submit a job; return its id, when the other head led, and when the submit was acknowledged, on the monotonic clock."""
    led_s: list[float] = []
    other = next(head for head in cluster.heads if head is not leader)

    def watch() -> None:
        wait_until(lambda: other.role() == "leader", "another leads")
        led_s.append(time.monotonic())

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    job = client.submit({"run": ["true"], "workdir": "/tmp", "gpus": 1, "name": key}, key=key).id
    answered_s = time.monotonic()
    watching.join(timeout=120)
    return job, led_s[0], answered_s


def _repair(leader: HeadProcess, cable: CuttableLink) -> None:
    """Undo the fault, and wait until that head is a standby."""
    cable.cut.clear()
    if leader.process is not None and leader.process.poll() is None and leader.role() == "":
        leader.send(signal.SIGCONT)
    time.sleep(0.5)  # a shutdown may still be in progress
    wait_until(lambda: leader.ended() or leader.role() == "standby", "it has ended, or stands by")
    if leader.ended():
        leader.start()
        wait_until(lambda: leader.role() == "standby", "it stands by")


def _check(client: Client, steady: str, acknowledged: dict[str, str]) -> None:
    for job in acknowledged.values():
        assert client.wait(job, timeout_s=120).state == "succeeded"
    listed = Counter(job.name for job in client.jobs(limit=1000).jobs)
    assert all(listed[name] == 1 for name in acknowledged), listed
    kept = client.job(steady).job
    assert (kept.state, kept.attempts, kept.restarts) == ("running", 1, 0), kept


if __name__ == "__main__":
    sys.exit(main())

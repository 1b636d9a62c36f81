"""Soak test: a whole cluster under load. Checks all answers, and measures tail latencies and memory growth.

    python -m benchmarks.soak [--minutes 10] [--supervisors 500] [--standing 10000] [--users 8] [--json]

Runs a real head in its own process; supervisors with their real logic and protocol, many in one process, whose tasks are timers
(benchmarks/soak_member.py); users that check each answer against earlier ones (benchmarks/soak_client.py, soak_books.py); and a fault every
30 s: the head is killed, a supervisor dies, or a node is cut off. The head is killed only in the first 40 % of the time, so that one head
process runs long enough to measure its memory. Exits with 1 if an answer was wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.cluster import ROOT, BenchmarkCluster, free_port
from benchmarks.figures import (
    Figure,
    argument_parser,
    plain_figure,
    print_progress,
    print_report,
)
from benchmarks.soak_checks import TERMINAL, AnswerChecks
from benchmarks.soak_client import STANDING_QUEUE, SoakUser, SoakUsers
from benchmarks.soak_http import HttpConnection
from phalanx.app.state_folder import StateFolder
from phalanx.core.access.node_tokens import node_token
from phalanx.core.ids import NodeId

PROCESSES: Final = 4  # for the supervisors
LEASE_S: Final = 12.0  # twice the default: supervisors, users and head share the processors
FAULT_EVERY_S: Final = 30.0
HEAD_KILLS_SHARE: Final = 0.4
DEAD_S: Final = (5.0, 20.0)  # how long a dead supervisor stays away
SILENT_S: Final = (3.0, 40.0)  # shorter and longer than a lease
WATCH_EVERY_S: Final = 5.0
WARM_S: Final = 45.0  # age of a head process from which its memory counts
HEAD_BACK_S: Final = (
    20.0  # requests may fail for this long after a kill; a restart with 10,000 jobs takes 2 s on an idle machine
)
SETTLE_S: Final = 240.0  # time-out
PAUSE_S: Final = 0.15  # between two requests of one user, on average
CANCEL_AT_ONCE: Final = 500
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
MIB: Final = 2**20


@dataclass(slots=True)
class HeadReadings:
    """Readings of the head over time: (age of the process in seconds, RSS MiB, descriptors, threads), one list for each process."""

    processes: list[list[tuple[float, float, int, int]]] = field(default_factory=list)

    def read(self, pid: int, age_s: float) -> None:
        """Take one reading, unless the process has just ended."""
        try:
            with open(f"/proc/{pid}/statm", encoding="ascii") as file:
                rss_mib = int(file.read().split()[1]) * PAGE_BYTES / MIB
            descriptors, threads = len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))
        except OSError:
            return
        self.processes[-1].append((age_s, rss_mib, descriptors, threads))

    def slope_mib_per_h(self) -> float | None:
        """Return the memory growth of the longest process after warming up, by least squares; None if all were too short."""
        warm = [[(age, rss) for age, rss, *_ in life if age > WARM_S] for life in self.processes]
        longest = max(warm, key=len, default=[])
        if len(longest) < 6:
            return None
        ages, sizes = zip(*longest, strict=True)
        return statistics.linear_regression(ages, sizes).slope * 3600


class SoakTest:
    """One run of the soak test."""

    def __init__(
        self, head: BenchmarkCluster, *, minutes: float, supervisors: int, standing: int, users: int, seed: int
    ) -> None:
        self._head, self._supervisors, self._users = head, supervisors, users
        self._seconds = minutes * 60
        self._rng = random.Random(seed)
        self.books, self.watch = AnswerChecks(), HeadReadings()
        self.crowd = SoakUsers(
            port=head.port, token=head.token(), workdir=head.home, books=self.books, rng=random.Random(seed + 1)
        )
        self.crowd.standing = standing
        self._processes: list[asyncio.subprocess.Process] = []
        self._homes: dict[str, asyncio.subprocess.Process] = {}
        self._kills: list[float] = []
        self.refused: list[str] = []
        self._begun_s = 0.0

    async def run(self) -> None:
        """Run the whole test."""
        self._prepare()
        await self._start_supervisors()
        print_progress(f"{self._supervisors} supervisors are up")
        while await self.crowd.fill_standing() < self.crowd.standing:
            pass
        print_progress(f"{self.crowd.standing} jobs wait")
        self._new_head()
        load = asyncio.create_task(self.crowd.run(self._users, PAUSE_S))
        watching = asyncio.create_task(self._watch_head())
        await self._inject_faults()
        self.crowd.over = True
        await load
        print_progress("the load has ended, waiting for the jobs")
        await self._settle()
        watching.cancel()
        self._check_absences()
        await self._collect_spans()
        for process in self._processes:
            process.kill()
            await process.wait()

    def _prepare(self) -> None:
        self._head.call("POST", "/v1/nodes/n0/drain", {"why": "soak", "cordon_only": True})
        for name, priority in (("side", 0), (STANDING_QUEUE, -5)):
            self._head.call("PUT", f"/v1/queues/{name}", {"open": True, "priority": priority})

    def _new_head(self) -> None:
        self._begun_s = time.monotonic()
        self.watch.processes.append([])

    async def _watch_head(self) -> None:
        while True:
            if self._head.head is not None:
                self.watch.read(self._head.head.pid, time.monotonic() - self._begun_s)
            await asyncio.sleep(WATCH_EVERY_S)

    async def _start_supervisors(self) -> None:
        secret = StateFolder(path=self._head.home).secret()
        for number in range(PROCESSES):
            names = [f"f{index}" for index in range(number, self._supervisors, PROCESSES)]
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "benchmarks.soak_member",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                cwd=ROOT,
                limit=1 << 30,
                env={**os.environ, "PYTHONPATH": os.path.join(ROOT, "src")},
            )
            self._processes.append(process)
            self._homes |= dict.fromkeys(names, process)
            self._write(
                process, {"port": self._head.port, "tokens": {name: node_token(secret, NodeId(name)) for name in names}}
            )
        for process in self._processes:
            await self._read(process)

    async def _inject_faults(self) -> None:
        end = time.monotonic() + self._seconds
        until_kills = time.monotonic() + HEAD_KILLS_SHARE * self._seconds
        number = 0
        while (left_s := end - time.monotonic()) > 0:
            await asyncio.sleep(min(FAULT_EVERY_S, left_s))
            if end - time.monotonic() < FAULT_EVERY_S / 2:
                break
            kinds = ("head", "death", "silence") if time.monotonic() < until_kills else ("death", "silence")
            kind = kinds[number % len(kinds)]
            number += 1
            self.books.counts[f"blows: {kind}"] += 1
            if kind == "head":
                await self._kill_head()
            else:
                await self._fault_nodes(kind)
            print_progress(
                f"{self._seconds - (end - time.monotonic()):.0f} s: {kind}; {self.books.counts['requests']} requests, {self.books.counts['wrong answers']} wrong"
            )

    async def _kill_head(self) -> None:
        self._kills.append(time.monotonic())
        await asyncio.to_thread(self._head.kill_head)
        await asyncio.to_thread(self._head.start, wait_nodes=False)
        self._new_head()

    async def _fault_nodes(self, kind: str) -> None:
        for name in self._rng.sample(sorted(self._homes), max(1, self._supervisors // 100)):
            seconds = self._rng.uniform(*(DEAD_S if kind == "death" else SILENT_S))
            self._write(
                self._homes[name], {"do": "die" if kind == "death" else "silence", "node": name, "seconds": seconds}
            )
            await self._read(self._homes[name])

    async def _settle(self) -> None:
        """Wait for the jobs of the users, cancel the standing ones, and check the final state."""
        user = SoakUser(self.crowd, HttpConnection(self._head.port, self._head.token()))
        mine = set(self.crowd.submitted)
        end = time.monotonic() + SETTLE_S
        views = await user.all_jobs()
        # First the standing jobs: with the default policy, gangs of several nodes would wait for them for days (docs/scheduling.md).
        await self._cancel(
            user, [view["id"] for view in views if view["id"] not in mine and view["state"] not in TERMINAL]
        )
        while any(view["id"] in mine and view["state"] not in TERMINAL for view in views):
            for view in views:
                if view["id"] in mine and view["held"] and view["state"] == "pending":
                    await user.ask("release", "POST", f"/v1/jobs/{view['id']}/release", fine=(409,))
            if time.monotonic() > end:
                late = [
                    (view["id"], view["state"], view["detail"])
                    for view in views
                    if view["id"] in mine and view["state"] not in TERMINAL
                ]
                self.books.record_wrong(
                    f"{len(late)} jobs did not end within {SETTLE_S:g} s after the faults: {late[:5]}"
                )
                break
            await asyncio.sleep(2.0)
            views = await user.all_jobs()
        await self._cancel(user, [view["id"] for view in views if view["state"] not in TERMINAL])
        while json.loads((await user.ask("overview", "GET", "/v1/overview")).body)["counts"].get("running", 0):
            if time.monotonic() > end + SETTLE_S:
                self.books.record_wrong("cancelled jobs still run")
                break
            await asyncio.sleep(1.0)
        views = await user.all_jobs()
        overview = json.loads((await user.ask("overview", "GET", "/v1/overview")).body)
        self.books.check_list(views, overview["counts"])
        self.books.check_history(await user.all_history())
        self.books.counts["jobs"] = len(views)
        self.books.counts["attempts"] = sum(view["attempts"] for view in views)

    async def _cancel(self, user: SoakUser, jobs: list[str]) -> None:
        for start in range(0, len(jobs), CANCEL_AT_ONCE):
            await user.ask(
                "cancel, many at once",
                "POST",
                "/v1/jobs/cancel",
                {"jobs": jobs[start : start + CANCEL_AT_ONCE], "why": "the soak is over"},
            )
        self.books.cancelled |= set(jobs)

    def _check_absences(self) -> None:
        """Check that requests failed to reach a head only just after it was killed."""
        unexpected = [at for at in self.crowd.away if not any(kill <= at <= kill + HEAD_BACK_S for kill in self._kills)]
        if unexpected:
            self.books.record_wrong(f"{len(unexpected)} requests found no head though none had been killed")

    async def _collect_spans(self) -> None:
        held: list[Any] = []
        ran: list[Any] = []
        for process in self._processes:
            self._write(process, {"do": "spans"})
            spans = await self._read(process)
            held += spans["held"]
            ran += spans["ran"]
            self.refused += spans["refused"]
            if spans["live"]:
                self.books.record_wrong(f"tasks still run at the end: {spans['live'][:5]}")
        self.books.check_devices(held)
        self.books.check_generations(ran)

    @staticmethod
    def _write(process: asyncio.subprocess.Process, order: dict[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(order).encode() + b"\n")

    @staticmethod
    async def _read(process: asyncio.subprocess.Process) -> dict[str, Any]:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"supervisors ended with {await process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def figures(self) -> list[Figure]:
        """Return all figures."""
        counts = {name: count for name, count in sorted(self.books.counts.items()) if name != "wrong answers"}
        figures = [Figure(name=name, value=count, unit="") for name, count in counts.items()]
        figures.append(
            Figure(
                name="wrong answers",
                value=self.books.counts["wrong answers"],
                unit="",
                target="0",
                met=not self.books.wrong,
            )
        )
        figures += [
            Figure(
                name="supervisors' reports refused",
                value=len(self.refused),
                unit="",
                note=" | ".join(sorted({text[:80] for text in self.refused})[:3]),
            )
        ]
        for kind, taken in sorted(self.crowd.seconds.items()):
            ordered = sorted(1000 * each for each in taken)
            p99 = ordered[int(0.99 * (len(ordered) - 1))]
            figures.append(
                Figure(
                    name=f"{kind}, p99",
                    value=p99,
                    unit="ms",
                    note=f"p50 {statistics.median(ordered):.1f}, slowest {ordered[-1]:.0f} ms, {len(ordered)} asked",
                )
            )
        slope = self.watch.slope_mib_per_h()
        life = max(self.watch.processes, key=len)
        if slope is not None:
            figures.append(
                Figure(
                    name="the head's memory, drift",
                    value=slope,
                    unit="MiB/h",
                    note=f"over the last {life[-1][0] - WARM_S:.0f} s of its longest life",
                )
            )
        figures += [
            plain_figure("the head's memory", [rss for _, rss, _, _ in life], "MiB"),
            plain_figure("the head's descriptors", [count for _, _, count, _ in life], ""),
            plain_figure("the head's threads", [count for _, _, _, count in life], ""),
            plain_figure("the database", [os.path.getsize(os.path.join(self._head.home, "phalanx.db")) / MIB], "MiB"),
        ]
        return figures


@contextmanager
def run_soak(**options: Any) -> Iterator[SoakTest]:
    """Run the test; the head still runs in the context."""
    with tempfile.TemporaryDirectory(prefix="phalanx-soak-", ignore_cleanup_errors=True) as home:
        head = BenchmarkCluster(home=home, port=free_port(), virtual="1x1", lease_s=LEASE_S)
        try:
            head.start()
            soak = SoakTest(head, **options)
            asyncio.run(soak.run())
            yield soak
        finally:
            head.stop()


def main() -> int:
    """Run and print."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--supervisors", type=int, default=500)
    parser.add_argument("--standing", type=int, default=10_000, help="number of jobs that always wait")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with run_soak(
        minutes=given.minutes,
        supervisors=given.supervisors,
        standing=given.standing,
        users=given.users,
        seed=given.seed,
    ) as soak:
        print_report(f"A soak of {given.minutes:g} minutes", soak.figures(), as_json=given.json)
        for what in soak.books.wrong:
            print_progress(f"WRONG: {what}")
    return 1 if soak.books.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""The users of the soak test: mixed requests, whose answers are checked against earlier ones."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlencode

from benchmarks.soak_checks import TERMINAL, AnswerChecks
from benchmarks.soak_http import HttpAnswer, HttpConnection, NoHeadAnswers

STANDING_QUEUE: Final = "standing"
QUEUES: Final = ("default", "side")
STANDING_RUN_S: Final = (60.0, 120.0)
ARRAY_MAX: Final = 2000  # elements of one standing array
PAGE: Final = 1000
HISTORY_PAGE: Final = 1000
AWAY_PAUSE_S: Final = 0.1
RETRY_S: Final = 120.0  # for one submit while the head is away


@dataclass(slots=True)
class SoakUsers:
    """All users of one run.

    Attributes:
        seconds: latencies of answers by kind of request, while a head was available.
        away: times (monotonic) at which no head answered.
        standing: number of jobs that always wait.
    """

    port: int
    token: str
    workdir: str
    books: AnswerChecks
    rng: random.Random
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    away: list[float] = field(default_factory=list)
    over: bool = False
    standing: int = 0
    submitted: list[str] = field(default_factory=list)
    number: itertools.count[int] = field(default_factory=itertools.count)

    async def run(self, users: int, pause_s: float) -> None:
        """Run all users until `over`."""
        await asyncio.gather(*(self._user(pause_s) for _ in range(users)), self._keep_standing())

    async def _user(self, pause_s: float) -> None:
        user = SoakUser(self, HttpConnection(self.port, self.token))
        kinds = user.kinds()
        weights = [weight for _, weight in kinds]
        while not self.over:
            request = self.rng.choices(kinds, weights)[0][0]
            try:
                await request()
            except NoHeadAnswers:
                self.away.append(time.monotonic())
                self.books.counts["requests while the head was away"] += 1
                await asyncio.sleep(AWAY_PAUSE_S)
            await asyncio.sleep(self.rng.expovariate(1 / pause_s))

    async def fill_standing(self) -> int:
        """Submit waiting jobs up to `standing`; return how many waited before."""
        user = SoakUser(self, HttpConnection(self.port, self.token))
        answer = await user.ask("queue", "GET", f"/v1/queues/{STANDING_QUEUE}")
        waiting = int(json.loads(answer.body)["queue"]["pending"])
        left = self.standing - waiting
        while left > 0:
            count = min(left, ARRAY_MAX)
            seconds = f"{self.rng.uniform(*STANDING_RUN_S):.1f}"
            await user.submit(
                {
                    "run": ["soak", seconds, "0"],
                    "gpus": 4,
                    "queue": STANDING_QUEUE,
                    "array": f"0-{count - 1}",
                    "name": "standing",
                },
                kind="submit, large array",
            )
            left -= count
        return waiting

    async def _keep_standing(self) -> None:
        while not self.over:
            try:
                await self.fill_standing()
            except NoHeadAnswers:
                self.away.append(time.monotonic())
            await asyncio.sleep(5.0)


@dataclass(slots=True)
class SoakUser:
    """One user with one connection."""

    crowd: SoakUsers
    wire: HttpConnection

    def kinds(self) -> list[tuple[Callable[[], Awaitable[None]], float]]:
        """Return the requests and their relative frequencies."""
        return [
            (self.one_job, 6),
            (self.small_array, 1),
            (self.list_filtered, 2),
            (self.list_all, 0.1),
            (self.show, 5),
            (self.why, 1),
            (self.history, 1),
            (self.logs, 2),
            (self.steps, 0.5),
            (self.events, 0.5),
            (self.cancel, 1),
            (self.hold, 0.5),
            (self.requeue, 0.5),
            (self.queues, 1),
            (self.nodes, 0.5),
            (self.drain, 0.3),
            (self.overview, 0.5),
            (self.dry_run, 0.5),
            (self.metrics, 0.2),
        ]

    async def ask(
        self, kind: str, method: str, path: str, body: Any = None, key: str = "", fine: tuple[int, ...] = ()
    ) -> HttpAnswer:
        """Send one request; an unexpected status is a wrong answer."""
        answer = await self.wire.ask(method, path, b"" if body is None else json.dumps(body).encode(), key=key)
        books = self.crowd.books
        books.counts["requests"] += 1
        if answer.status == 503:
            books.counts[f"try later: {kind}"] += 1
            raise NoHeadAnswers("try later")
        self.crowd.seconds[kind].append(answer.seconds)
        if answer.status >= 300 and answer.status not in fine:
            books.record_wrong(f"{method} {path}: {answer.status} {answer.body[:300].decode(errors='replace')}")
        return answer

    async def submit(self, body: dict[str, Any], kind: str = "submit") -> list[str]:
        """Submit a job with one key until the head acknowledges it; sometimes once more after that."""
        crowd = self.crowd
        key = f"soak-{next(crowd.number)}"
        end = time.monotonic() + RETRY_S
        answers, wanted = 0, 2 if crowd.rng.random() < 0.1 else 1
        ids: list[str] = []
        while answers < wanted:
            try:
                answer = await self.ask(kind, "POST", "/v1/jobs", {"workdir": crowd.workdir, **body}, key, fine=(200,))
            except NoHeadAnswers:
                crowd.away.append(time.monotonic())
                if time.monotonic() > end:
                    crowd.books.record_wrong(f"submit {key} reached no head for {RETRY_S:g} s")
                    raise
                await asyncio.sleep(AWAY_PAUSE_S)
                continue
            if answer.status not in (200, 201):
                return []
            reply = json.loads(answer.body)
            size = int(reply["job"]["array_size"])
            ids = [f"{reply['array_id']}_{index}" for index in range(size)] if size else [reply["job"]["id"]]
            crowd.books.check_acknowledged(key, ids)
            answers += 1
        if kind != "submit, large array":
            crowd.submitted += ids
        return ids

    async def one_job(self) -> None:
        """Submit a job of a few GPUs and seconds; one in ten fails."""
        rng = self.crowd.rng
        words = ["soak", f"{rng.uniform(1, 10):.1f}", str(int(rng.random() < 0.1))]
        await self.submit(
            {
                "run": words,
                "gpus": rng.choice((1, 1, 2, 4, 8)),
                "queue": rng.choice(QUEUES),
                "name": f"u{rng.randrange(20)}",
                "priority": 10,
            }
        )

    async def small_array(self) -> None:
        """Submit an array of ten jobs."""
        await self.submit(
            {"run": ["soak", "2", "0"], "gpus": 1, "array": "0-9", "name": "array", "priority": 10},
            kind="submit, array of 10",
        )

    def _some(self) -> str | None:
        submitted = self.crowd.submitted
        return self.crowd.rng.choice(submitted[-300:]) if submitted else None

    async def _about(
        self, kind: str, verb: str, method: str = "GET", body: Any = None, fine: tuple[int, ...] = ()
    ) -> tuple[str, Any] | None:
        job_id = self._some()
        if job_id is None:
            return None
        answer = await self.ask(kind, method, f"/v1/jobs/{job_id}{verb}", body, fine=fine)
        return (job_id, json.loads(answer.body)) if answer.status < 300 else None

    async def show(self) -> None:
        """Show a job; it must not contradict earlier views, and have at most one live attempt."""
        found = await self._about("show", "")
        if found is not None:
            self.crowd.books.check_view(found[1]["job"])
            live = [attempt for attempt in found[1]["attempts"] if attempt["state"] != "ended"]
            if len(live) > 1:
                self.crowd.books.record_wrong(f"job {found[0]} has {len(live)} live attempts")

    async def why(self) -> None:
        """Ask why a job waits."""
        await self._about("why", "/why", fine=(409,))

    async def history(self) -> None:
        """Read the history of a job; it must be in order."""
        found = await self._about("story", "/story")
        if found is not None:
            seqs = [line["seq"] for line in found[1]["story"]]
            if seqs != sorted(set(seqs)):
                self.crowd.books.record_wrong(f"the history of {found[0]} is out of order: {seqs}")

    async def logs(self) -> None:
        """Read the output of a job; each line must be from its rank."""
        job_id, reply = await self._about("logs", "/logs") or ("", {"chunks": []})
        for chunk in reply["chunks"]:
            for line in chunk["text"].splitlines():
                words = line.split()
                if words[0] not in ("begin", "end") or words[1] != job_id or int(words[4]) != chunk["rank"]:
                    self.crowd.books.record_wrong(f"rank {chunk['rank']} of {job_id} printed {line[:80]!r}")

    async def steps(self) -> None:
        """Read the steps of a job."""
        await self._about("steps", "/steps")

    async def events(self) -> None:
        """Follow a job for a second; its events must be in order."""
        job_id = self._some()
        if job_id is None:
            return
        last = 0
        self.crowd.books.counts["requests"] += 1
        async for mark, _ in self.wire.follow(f"/v1/jobs/{job_id}/events", 1.0):
            if mark:
                if int(mark) <= last:
                    self.crowd.books.record_wrong(f"events of {job_id}: {mark} after {last}")
                last = int(mark)

    async def list_filtered(self) -> None:
        """List two pages with a filter."""
        rng = self.crowd.rng
        name, value = rng.choice(
            (
                ("state", "pending"),
                ("state", "running"),
                ("state", "succeeded"),
                ("queue", "side"),
                ("name", f"u{rng.randrange(20)}"),
            )
        )
        before: int | None = None
        for _ in range(2):
            query = {name: value, "limit": 100, **({} if before is None else {"before_seq": before})}
            answer = await self.ask("list, filtered", "GET", f"/v1/jobs?{urlencode(query)}")
            page = json.loads(answer.body)
            self.crowd.books.check_page(page["jobs"], before_seq=before)
            wrong = [view["id"] for view in page["jobs"] if view[name] != value]
            if wrong:
                self.crowd.books.record_wrong(f"a list of {name}={value} contains {wrong[:5]}")
            before = page["next"]
            if before is None:
                return

    async def list_all(self) -> None:
        """List all pages; all jobs acknowledged before must be there once."""
        promised = {job_id for ids in list(self.crowd.books.jobs.values()) for job_id in ids}
        found = [view["id"] for view in await self.all_jobs()]
        if len(set(found)) != len(found):
            self.crowd.books.record_wrong("a walk over all pages found a job twice")
        lost = promised - set(found)
        if lost:
            self.crowd.books.record_wrong(
                f"a walk over all pages did not find {len(lost)} acknowledged jobs: {sorted(lost)[:5]}"
            )

    async def all_jobs(self) -> list[dict[str, Any]]:
        """Return all jobs, newest first."""
        views: list[dict[str, Any]] = []
        before: int | None = None
        while True:
            query = {"limit": PAGE, **({} if before is None else {"before_seq": before})}
            page = json.loads((await self.ask("list, a page of 1,000", "GET", f"/v1/jobs?{urlencode(query)}")).body)
            self.crowd.books.check_page(page["jobs"], before_seq=before)
            views += page["jobs"]
            before = page["next"]
            if before is None:
                return views

    async def all_history(self) -> list[dict[str, Any]]:
        """Return the whole history of the head."""
        lines: list[dict[str, Any]] = []
        while True:
            answer = await self.ask(
                "history, a page of 1,000",
                "GET",
                f"/v1/story?after={lines[-1]['seq'] if lines else 0}&limit={HISTORY_PAGE}",
            )
            page = json.loads(answer.body)["story"]
            lines += page
            if not page:
                return lines

    async def cancel(self) -> None:
        """Cancel a job."""
        found = await self._about("cancel", "/cancel", "POST", {"why": "soak"}, fine=(409,))
        if found is not None:
            self.crowd.books.check_view(found[1]["job"])
            self.crowd.books.cancelled.add(found[0])

    async def hold(self) -> None:
        """Hold a job, and release some."""
        if await self._about("hold", "/hold", "POST", fine=(409,)) is not None:
            for job_id in self.crowd.submitted[-300:]:
                if self.crowd.rng.random() < 0.02:
                    await self.ask("release", "POST", f"/v1/jobs/{job_id}/release", fine=(409,))

    async def requeue(self) -> None:
        """Requeue a job."""
        await self._about("requeue", "/requeue", "POST", fine=(409,))

    async def queues(self) -> None:
        """List the queues, and change one."""
        await self.ask("queues", "GET", "/v1/queues")
        await self.ask("put queue", "PUT", "/v1/queues/side", {"priority": self.crowd.rng.randrange(3)})

    async def nodes(self) -> None:
        """List the nodes."""
        await self.ask("nodes", "GET", "/v1/nodes")

    async def drain(self) -> None:
        """Drain a node, and undo it."""
        node = f"f{self.crowd.rng.randrange(100)}"
        await self.ask(
            "drain",
            "POST",
            f"/v1/nodes/{node}/drain",
            {"why": "soak", "cordon_only": self.crowd.rng.random() < 0.7},
            fine=(404,),
        )
        await asyncio.sleep(1.0)
        await self.ask("undrain", "POST", f"/v1/nodes/{node}/undrain", fine=(404,))

    async def overview(self) -> None:
        """Read the overview; running jobs must be running."""
        reply = json.loads((await self.ask("overview", "GET", "/v1/overview")).body)
        for view in reply["running"]:
            if view["state"] in TERMINAL:
                self.crowd.books.record_wrong(f"overview: {view['id']} is listed as running but is {view['state']}")

    async def dry_run(self) -> None:
        """Ask whether a job would start."""
        await self.ask(
            "dry run", "POST", "/v1/jobs/dry-run", {"run": ["soak", "1", "0"], "gpus": 8, "workdir": self.crowd.workdir}
        )

    async def metrics(self) -> None:
        """Read the metrics."""
        await self.ask("metrics", "GET", "/metrics")

"""The soak's users: mixed requests, each answer held against the books."""

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

from benchmarks.soak_books import TERMINAL, Books
from benchmarks.soak_wire import Answer, Away, Wire

STANDING_QUEUE: Final = "standing"
QUEUES: Final = ("default", "side")
STANDING_RUN_S: Final = (60.0, 120.0)
ARRAY_MAX: Final = 2000  # elements of one standing array
PAGE: Final = 1000
STORY_PAGE: Final = 1000
AWAY_PAUSE_S: Final = 0.1
RETRY_S: Final = 120.0  # for one submit, over a head's absence


@dataclass(slots=True)
class Crowd:
    """All users of one run.

    Attributes:
        seconds: how long answers took, by kind of request, while a head was there.
        away: when no head answered (monotonic).
    """

    port: int
    token: str
    workdir: str
    books: Books
    rng: random.Random
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    away: list[float] = field(default_factory=list)
    over: bool = False
    submitted: list[str] = field(default_factory=list)
    number: itertools.count[int] = field(default_factory=itertools.count)

    async def run(self, users: int, pause_s: float) -> None:
        """Until `over`."""
        await asyncio.gather(*(self._user(pause_s) for _ in range(users)), self._keep_standing())

    async def _user(self, pause_s: float) -> None:
        user = User(self, Wire(self.port, self.token))
        doing = list(user.kinds())
        weights = [weight for _, weight in doing]
        while not self.over:
            what = self.rng.choices(doing, weights)[0][0]
            try:
                await what()
            except Away:
                self.away.append(time.monotonic())
                self.books.counts["requests while the head was away"] += 1
                await asyncio.sleep(AWAY_PAUSE_S)
            await asyncio.sleep(self.rng.expovariate(1 / pause_s))

    standing: int = 0

    async def stand(self) -> int:
        """Bring the jobs that wait up to `standing`; how many waited before."""
        user = User(self, Wire(self.port, self.token))
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
                await self.stand()
            except Away:
                self.away.append(time.monotonic())
            await asyncio.sleep(5.0)


@dataclass(slots=True)
class User:
    """One connection that does one thing after the other."""

    crowd: Crowd
    wire: Wire

    def kinds(self) -> list[tuple[Callable[[], Awaitable[None]], float]]:
        """What it does, and how often beside the others."""
        return [
            (self.one_job, 6), (self.small_array, 1), (self.list_filtered, 2), (self.list_all, 0.1), (self.show, 5), (self.why, 1), (self.story, 1),
            (self.logs, 2), (self.steps, 0.5), (self.events, 0.5), (self.cancel, 1), (self.hold, 0.5), (self.requeue, 0.5), (self.queues, 1),
            (self.nodes, 0.5), (self.drain, 0.3), (self.overview, 0.5), (self.dry_run, 0.5), (self.metrics, 0.2),
        ]  # fmt: skip

    async def ask(
        self, kind: str, method: str, path: str, body: Any = None, key: str = "", fine: tuple[int, ...] = ()
    ) -> Answer:
        """One request; a status that nobody could expect is a wrong answer."""
        answer = await self.wire.ask(method, path, b"" if body is None else json.dumps(body).encode(), key=key)
        books = self.crowd.books
        books.counts["requests"] += 1
        if answer.status == 503:
            books.counts[f"try later: {kind}"] += 1
            raise Away("try later")
        self.crowd.seconds[kind].append(answer.seconds)
        if answer.status >= 300 and answer.status not in fine:
            books.say(f"{method} {path}: {answer.status} {answer.body[:300].decode(errors='replace')}")
        return answer

    async def submit(self, body: dict[str, Any], kind: str = "submit") -> list[str]:
        """Hand in a job, over and over under one key until the head has acknowledged it; now and then once more after that."""
        crowd = self.crowd
        key = f"soak-{next(crowd.number)}"
        end = time.monotonic() + RETRY_S
        answers, wanted = 0, 2 if crowd.rng.random() < 0.1 else 1
        ids: list[str] = []
        while answers < wanted:
            try:
                answer = await self.ask(kind, "POST", "/v1/jobs", {"workdir": crowd.workdir, **body}, key, fine=(200,))
            except Away:
                crowd.away.append(time.monotonic())
                if time.monotonic() > end:
                    crowd.books.say(f"submit {key} found no head for {RETRY_S:g} s")
                    raise
                await asyncio.sleep(AWAY_PAUSE_S)
                continue
            if answer.status not in (200, 201):
                return []
            told = json.loads(answer.body)
            size = int(told["job"]["array_size"])
            ids = [f"{told['array_id']}_{index}" for index in range(size)] if size else [told["job"]["id"]]
            crowd.books.acknowledged(key, ids)
            answers += 1
        if kind != "submit, large array":
            crowd.submitted += ids
        return ids

    async def one_job(self) -> None:
        """A few GPUs for a few seconds; one in ten fails."""
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
        """Ten of them."""
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
        """A job, which contradicts nothing that was shown before; at most one of its attempts lives."""
        told = await self._about("show", "")
        if told is not None:
            self.crowd.books.view(told[1]["job"])
            live = [attempt for attempt in told[1]["attempts"] if attempt["state"] != "ended"]
            if len(live) > 1:
                self.crowd.books.say(f"job {told[0]} has {len(live)} live attempts")

    async def why(self) -> None:
        """Why it waits."""
        await self._about("why", "/why", fine=(409,))

    async def story(self) -> None:
        """Its story, in order."""
        told = await self._about("story", "/story")
        if told is not None:
            seqs = [line["seq"] for line in told[1]["story"]]
            if seqs != sorted(set(seqs)):
                self.crowd.books.say(f"the story of {told[0]} is out of order: {seqs}")

    async def logs(self) -> None:
        """Its output: of each rank what that rank printed."""
        told = await self._about("logs", "/logs")
        for chunk in told[1]["chunks"] if told is not None else ():
            assert told is not None
            for line in chunk["text"].splitlines():
                words = line.split()
                if words[0] not in ("begin", "end") or words[1] != told[0] or int(words[4]) != chunk["rank"]:
                    self.crowd.books.say(f"rank {chunk['rank']} of {told[0]} printed {line[:80]!r}")

    async def steps(self) -> None:
        """Its steps."""
        await self._about("steps", "/steps")

    async def events(self) -> None:
        """Follow a job for a second: lines in order, and an end if there is one."""
        job_id = self._some()
        if job_id is None:
            return
        last = 0
        self.crowd.books.counts["requests"] += 1
        async for mark, _ in self.wire.follow(f"/v1/jobs/{job_id}/events", 1.0):
            if mark:
                if int(mark) <= last:
                    self.crowd.books.say(f"events of {job_id}: {mark} after {last}")
                last = int(mark)

    async def list_filtered(self) -> None:
        """One page under a filter, and the next."""
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
            self.crowd.books.listed(page["jobs"], before_seq=before)
            strange = [view["id"] for view in page["jobs"] if view[name] != value]
            if strange:
                self.crowd.books.say(f"a list of {name}={value} holds {strange[:5]}")
            before = page["next"]
            if before is None:
                return

    async def list_all(self) -> None:
        """Every page: all that was acknowledged before is there, each once."""
        promised = {job_id for ids in list(self.crowd.books.jobs.values()) for job_id in ids}
        found = [view["id"] for view in await self.all_jobs()]
        if len(set(found)) != len(found):
            self.crowd.books.say("a walk over all pages met a job twice")
        lost = promised - set(found)
        if lost:
            self.crowd.books.say(
                f"a walk over all pages did not meet {len(lost)} acknowledged jobs: {sorted(lost)[:5]}"
            )

    async def all_jobs(self) -> list[dict[str, Any]]:
        """All of them, newest first."""
        views: list[dict[str, Any]] = []
        before: int | None = None
        while True:
            query = {"limit": PAGE, **({} if before is None else {"before_seq": before})}
            page = json.loads((await self.ask("list, a page of 1,000", "GET", f"/v1/jobs?{urlencode(query)}")).body)
            self.crowd.books.listed(page["jobs"], before_seq=before)
            views += page["jobs"]
            before = page["next"]
            if before is None:
                return views

    async def all_story(self) -> list[dict[str, Any]]:
        """Every line of the head."""
        lines: list[dict[str, Any]] = []
        while True:
            answer = await self.ask(
                "story, a page of 1,000",
                "GET",
                f"/v1/story?after={lines[-1]['seq'] if lines else 0}&limit={STORY_PAGE}",
            )
            page = json.loads(answer.body)["story"]
            lines += page
            if not page:
                return lines

    async def cancel(self) -> None:
        """End one for good."""
        told = await self._about("cancel", "/cancel", "POST", {"why": "soak"}, fine=(409,))
        if told is not None:
            self.crowd.books.view(told[1]["job"])
            self.crowd.books.cancelled.add(told[0])

    async def hold(self) -> None:
        """Hold and release."""
        if await self._about("hold", "/hold", "POST", fine=(409,)) is not None:
            for job_id in self.crowd.submitted[-300:]:
                if self.crowd.rng.random() < 0.02:
                    await self.ask("release", "POST", f"/v1/jobs/{job_id}/release", fine=(409,))

    async def requeue(self) -> None:
        """Stop one and let it wait again."""
        await self._about("requeue", "/requeue", "POST", fine=(409,))

    async def queues(self) -> None:
        """Look at them, and put one."""
        await self.ask("queues", "GET", "/v1/queues")
        await self.ask("put queue", "PUT", "/v1/queues/side", {"priority": self.crowd.rng.randrange(3)})

    async def nodes(self) -> None:
        """All nodes."""
        await self.ask("nodes", "GET", "/v1/nodes")

    async def drain(self) -> None:
        """Cordon one and let it back."""
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
        """What `top` draws: running jobs within the devices there are, and no device under two of them."""
        told = json.loads((await self.ask("overview", "GET", "/v1/overview")).body)
        for view in told["running"]:
            if view["state"] in TERMINAL:
                self.crowd.books.say(f"overview: {view['id']} is among the running and {view['state']}")

    async def dry_run(self) -> None:
        """Whether it would start."""
        await self.ask(
            "dry run", "POST", "/v1/jobs/dry-run", {"run": ["soak", "1", "0"], "gpus": 8, "workdir": self.crowd.workdir}
        )

    async def metrics(self) -> None:
        """What Prometheus scrapes."""
        await self.ask("metrics", "GET", "/metrics")

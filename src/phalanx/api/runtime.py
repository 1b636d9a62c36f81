"""What the running API holds besides its parts: the gate, the bridge to the controller, followers, sessions. One for each app."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final, ParamSpec, TypeVar

from fastapi import FastAPI
from starlette.requests import Request

from phalanx.api.answers import Answers
from phalanx.api.calls import SERVING
from phalanx.api.gate import Gate, still
from phalanx.api.hub import Bell, Hub
from phalanx.api.keeping import Carried, Settling
from phalanx.api.kept_files import KeptFiles
from phalanx.api.output_files import KeptOutputs
from phalanx.api.parts import HeadParts
from phalanx.api.sessions import Sessions
from phalanx.api.supervisors import Supervisors
from phalanx.controller.outbox import Answer
from phalanx.core.access.audit import Call
from phalanx.core.access.roles import Caller
from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.node import Node
from phalanx.core.ids import JobId, UserId
from phalanx.core.state.events import PlanStop, Report, TokensUsed
from phalanx.core.state.events import Request as Wish
from phalanx.core.work.people import Action
from phalanx.core.work.spec import Role

P = ParamSpec("P")
T = TypeVar("T")

# Threads sleep in the disk, not on the processor: asyncio's own pool (cores + 4) would let six slow reads stop all others.
_LOOK_AGAIN_S: Final = 0.05
UPKEEP_S: Final = 60.0
REFUSALS_PER_MINUTE: Final = (
    60  # told in the audit trail: each costs a commit, and whoever is refused may repeat it at will
)
_THREADS: Final = ThreadPoolExecutor(max_workers=24, thread_name_prefix="api")


class Runtime:
    """The API's own state. Used on the event loop alone.

    Attributes:
        counts: of what the routes did, for /metrics.
        streams: event streams that are open, by user.
        fleet, fleet_read_s, notes: the fleet as last read for the notes of a submit, when, and the notes made against it.
    """

    def __init__(self, parts: HeadParts) -> None:
        self.parts = parts
        welcome = parts.welcome
        self.gate = Gate(
            parts.store, parts.node_secret, parts.clock, join_salt=lambda: "" if welcome is None else welcome.salt.value
        )
        self.hub = Hub()
        self.access = Bell()
        self.sessions = Sessions(parts.limits, parts.clock)
        self.supervisors = Supervisors(parts.store)
        self.kept = KeptFiles(parts.checkpoint_root, parts.output_root)
        self.outputs = KeptOutputs(parts.output_root)
        self.carried = Carried()
        self.counts: dict[str, int] = {}
        self.streams: Counter[UserId] = Counter()
        self.receipts_asked = 0
        self.fleet: list[Node] = []
        self.fleet_read_s = -math.inf
        self.notes: dict[Role, list[str]] = {}
        self._answers: Answers | None = None
        self._upkeep: asyncio.Task[None] | None = None
        self._refusals, self._refusals_since_s = 0, -math.inf
        self._touched: deque[frozenset[JobId]] = deque()

    @property
    def answers(self) -> Answers:
        """The bridge to the controller's thread, for the loop that runs now."""
        if self._answers is None or self._answers.loop is not asyncio.get_running_loop():
            self._answers = Answers()
        return self._answers

    @property
    def streams_open(self) -> int:
        """How many event streams are open."""
        return self.streams.total()

    @property
    def heads(self) -> list[str]:
        """Where all heads are that share our store, ours first; empty where we are alone."""
        return [] if self.parts.among is None else self.parts.among.urls()

    @property
    def relieved(self) -> bool:
        """Whether another head takes over at once when this one ends."""
        return self.parts.among is not None and self.parts.among.relieved()

    async def ask(self, wish: Wish) -> Answer:
        """What the controller answers once it is durable.

        Raises:
            PhalanxError: refused.
        """
        serving = SERVING.get()
        return await self.answers.of(self.parts.driver.request(wish, None if serving is None else serving.take()))

    async def ask_all(self, wishes: list[Wish]) -> list[Answer | PhalanxError]:
        """The same for several wishes in one step of the controller, with nothing scheduled in between; refusals are among the answers."""
        serving = SERVING.get()
        calls = [] if serving is None else [serving.take()] * len(wishes)
        return await self.answers.of(self.parts.driver.request_all(wishes, calls))

    async def note(self, detail: str = "") -> None:
        """Have the audit trail tell of the call that is served now, durably, before what it does is done."""
        serving = SERVING.get()
        if serving is not None:
            await self.answers.of(self.parts.driver.note(serving.take(detail)))

    def refused(self, call: Call, error: PhalanxError) -> None:
        """Have the audit trail tell of a refusal. Nobody waits for it, and of a flood it holds the beginning of each minute."""
        now_s = self.parts.clock.boottime_s()
        if now_s - self._refusals_since_s >= 60.0:
            self._refusals_since_s, self._refusals = now_s, 0
        self._refusals += 1
        self.count("refusals")
        if self._refusals <= REFUSALS_PER_MINUTE:
            self.parts.driver.note(replace(call, result=error.code))

    async def report(self, reports: list[Report]) -> list[Answer | PhalanxError]:
        """Hand supervisors' reports over; returns when they are durable."""
        return await self.answers.of(self.parts.driver.report(reports))

    async def lengthen_leases(self) -> None:
        """Grant long leases from now on, and wait until every supervisor that still renews has got one."""
        limits = self.parts.limits
        lease_s = limits.plan_stop_lease_s
        await off_loop(self.parts.on_long_leases, lease_s)
        await self.ask(PlanStop(lease_s=lease_s))
        for _ in range(int(limits.plan_stop_wait_s / _LOOK_AGAIN_S)):
            if self.parts.driver.leases.all_lengthened():
                return
            await asyncio.sleep(_LOOK_AGAIN_S)

    def begin(self) -> None:
        """The loop runs: hear of every commit, so that followers wake for what passed no route of ours."""
        wake = self.answers.soon(self._news)

        access = self.answers.soon(self._access_changed)
        known = self.parts.store.access_version

        def committed(job_ids: frozenset[JobId]) -> None:
            nonlocal known
            if self.parts.store.access_version != known:
                known = self.parts.store.access_version
                access()
            if self.hub.followers:
                self._touched.append(job_ids)
                wake()

        self.parts.driver.listen(committed)
        settling = Settling(self.parts.store, self.kept, self.outputs, self.carried)
        self.parts.driver.listen(settling.touched)
        settling.begin()
        self._upkeep = asyncio.get_running_loop().create_task(self._keep_up())

    async def upkeep(self) -> None:
        """What is kept sparsely: when tokens were used, and where the audit trail stands."""
        used_s = self.gate.take_used()
        if used_s:
            await self.answers.of(self.parts.driver.request(TokensUsed(used_s=used_s)))
        if self.parts.anchors is not None:
            await off_loop(self.parts.anchors.say, self.parts.driver.audit_tip)

    async def _keep_up(self) -> None:
        while not self.hub.closing:
            await asyncio.sleep(UPKEEP_S)
            with contextlib.suppress(PhalanxError):  # a disk that is full: the next round tells it
                await self.upkeep()

    def _access_changed(self) -> None:
        """A user, a project or a token is another: whoever lost what an open stream or session takes is shown out."""
        self.access.ring()
        store = self.parts.store
        self.sessions.expel(lambda one: still(self.gate, store, one.caller, Action.CHANGE_OWN, one.job_id)())

    def _news(self) -> None:
        while self._touched:
            self.hub.tell(self._touched.popleft())

    def count(self, what: str, by: int = 1) -> None:
        """Count for /metrics."""
        self.counts[what] = self.counts.get(what, 0) + by

    def close(self) -> None:
        """The head stops: streams and long polls end."""
        if self._upkeep is not None:
            self._upkeep.cancel()
        self.hub.close()
        self.sessions.close()


def runtime_of(request: Request) -> Runtime:
    """The runtime of the app that serves this request."""
    runtime: Runtime = request.app.state.runtime
    return runtime


def runtime_in(app: FastAPI) -> Runtime:
    """The runtime of an app."""
    runtime: Runtime = app.state.runtime
    return runtime


def caller_of(request: Request) -> Caller:
    """Whom the gate admitted; once the body is here, as they stand then."""
    caller: Caller = request.state.caller
    return caller


def judge_again(request: Request) -> None:
    """Judge the caller once more, as a body may come long after its head; `caller_of` is from now on who they are now.

    Raises:
        NotSignedIn, NotPermitted: they would not be let in any more.
    """
    state = request.state
    state.caller = runtime_of(request).gate.again(state.caller, state.action)


async def off_loop(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run what may block (disk, long queries) on a thread."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, partial(work, *args, **kwargs))

"""The state of the running API: authentication, answers of the controller, followers, exec sessions. One per app."""

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
from phalanx.core.state.events import Request as Command
from phalanx.core.work.people import Action
from phalanx.core.work.spec import Role

P = ParamSpec("P")
T = TypeVar("T")

_POLL_S: Final = 0.05
UPKEEP_S: Final = 60.0
REFUSALS_PER_MINUTE: Final = 60  # recorded in the audit trail: each costs a commit, and callers may repeat them at will
# These threads wait for the disk, not the CPU: with asyncio's own pool (cores + 4), six slow reads would stop all others.
_THREADS: Final = ThreadPoolExecutor(max_workers=24, thread_name_prefix="api")


class Runtime:
    """The API's own state. Use it on the event loop only.

    Attributes:
        counts: counters of the routes, for /metrics.
        streams: open event streams, by user.
        fleet, fleet_read_s, notes: the fleet as last read for the notes of a submit, the time of that, and the notes made for it.
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
        """The bridge to the controller's thread, for the running event loop."""
        if self._answers is None or self._answers.loop is not asyncio.get_running_loop():
            self._answers = Answers()
        return self._answers

    @property
    def streams_open(self) -> int:
        """The number of open event streams."""
        return self.streams.total()

    @property
    def heads(self) -> list[str]:
        """The URLs of all heads that share the store, this one first; empty if this head does not share it."""
        return [] if self.parts.among is None else self.parts.among.urls()

    @property
    def relieved(self) -> bool:
        """Whether another head takes over at once when this one stops."""
        return self.parts.among is not None and self.parts.among.relieved()

    async def ask(self, command: Command) -> Answer:
        """Send a request to the controller, and return its answer once that is durable.

        Raises:
            PhalanxError: the request was refused.
        """
        serving = SERVING.get()
        return await self.answers.of(self.parts.driver.request(command, None if serving is None else serving.take()))

    async def ask_all(self, wishes: list[Command]) -> list[Answer | PhalanxError]:
        """Send several requests that are handled in one step, with no scheduling in between; refusals are among the answers."""
        serving = SERVING.get()
        calls = [] if serving is None else [serving.take()] * len(wishes)
        return await self.answers.of(self.parts.driver.request_all(wishes, calls))

    async def note(self, detail: str = "") -> None:
        """Record the current call in the audit trail, durably, before the handler acts."""
        serving = SERVING.get()
        if serving is not None:
            await self.answers.of(self.parts.driver.note(serving.take(detail)))

    def refused(self, call: Call, error: PhalanxError) -> None:
        """Record a refusal in the audit trail, without waiting; at most REFUSALS_PER_MINUTE are recorded per minute."""
        now_s = self.parts.clock.boottime_s()
        if now_s - self._refusals_since_s >= 60.0:
            self._refusals_since_s, self._refusals = now_s, 0
        self._refusals += 1
        self.count("refusals")
        if self._refusals <= REFUSALS_PER_MINUTE:
            self.parts.driver.note(replace(call, result=error.code))

    async def report(self, reports: list[Report]) -> list[Answer | PhalanxError]:
        """Pass reports of supervisors to the controller; returns when they are durable."""
        return await self.answers.of(self.parts.driver.report(reports))

    async def lengthen_leases(self) -> None:
        """Grant long leases from now on, and wait until every supervisor that still renews has one."""
        limits = self.parts.limits
        lease_s = limits.plan_stop_lease_s
        await off_loop(self.parts.on_long_leases, lease_s)
        await self.ask(PlanStop(lease_s=lease_s))
        for _ in range(int(limits.plan_stop_wait_s / _POLL_S)):
            if self.parts.driver.leases.all_lengthened():
                return
            await asyncio.sleep(_POLL_S)

    def begin(self) -> None:
        """Subscribe to commits once the event loop runs, so that followers also see changes that no API route made."""
        wake = self.answers.soon(self._wake_followers)
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
        self._upkeep = asyncio.get_running_loop().create_task(self._run_upkeep())

    async def upkeep(self) -> None:
        """Record when tokens were last used, and the tip of the audit trail."""
        used_s = self.gate.take_used()
        if used_s:
            await self.answers.of(self.parts.driver.request(TokensUsed(used_s=used_s)))
        if self.parts.anchors is not None:
            await off_loop(self.parts.anchors.say, self.parts.driver.audit_tip)

    async def _run_upkeep(self) -> None:
        while not self.hub.closing:
            await asyncio.sleep(UPKEEP_S)
            with contextlib.suppress(PhalanxError):  # such as a full disk: the next round retries
                await self.upkeep()

    def _access_changed(self) -> None:
        """End the open streams and sessions whose users lost the permission, after a user, project or token changed."""
        self.access.ring()
        store = self.parts.store
        self.sessions.expel(lambda one: still(self.gate, store, one.caller, Action.CHANGE_OWN, one.job_id)())

    def _wake_followers(self) -> None:
        while self._touched:
            self.hub.tell(self._touched.popleft())

    def count(self, what: str, by: int = 1) -> None:
        """Count for /metrics."""
        self.counts[what] = self.counts.get(what, 0) + by

    def close(self) -> None:
        """End streams and long polls, since the head stops."""
        if self._upkeep is not None:
            self._upkeep.cancel()
        self.hub.close()
        self.sessions.close()


def runtime_of(request: Request) -> Runtime:
    """Return the runtime of the app that serves this request."""
    runtime: Runtime = request.app.state.runtime
    return runtime


def runtime_in(app: FastAPI) -> Runtime:
    """Return the runtime of an app."""
    runtime: Runtime = app.state.runtime
    return runtime


def caller_of(request: Request) -> Caller:
    """Return the authenticated caller; after the body was read, with its permissions at that time."""
    caller: Caller = request.state.caller
    return caller


def judge_again(request: Request) -> None:
    """Authorize the caller again, as a body may arrive long after its head; `caller_of` then returns the updated caller.

    Raises:
        NotSignedIn, NotPermitted: the caller is no longer permitted.
    """
    state = request.state
    state.caller = runtime_of(request).gate.again(state.caller, state.action)


async def off_loop(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run blocking work (disk, long queries) on a thread."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, partial(work, *args, **kwargs))

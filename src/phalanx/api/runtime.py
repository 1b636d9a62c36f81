"""The state of the running API: authentication, answers of the controller, followers, exec sessions. One per app."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

from fastapi import FastAPI
from starlette.requests import HTTPConnection

from phalanx.api.auth.audited_call import CURRENT_CALL, HourlyCalls
from phalanx.api.auth.authenticator import Authenticator
from phalanx.api.auth.device_logins import DeviceLogins
from phalanx.api.auth.program_access import ProgramAccess
from phalanx.api.auth.provider_sign_in import ProviderSignIn
from phalanx.api.auth.secret_seal import SecretSeal
from phalanx.api.live.batch_use import BatchUseRecorder
from phalanx.api.live.channel_sender import ChannelSender
from phalanx.api.live.controller_futures import ControllerFutures
from phalanx.api.live.exec_sessions import ExecSessionRegistry
from phalanx.api.live.fleet_feed import FleetFeed
from phalanx.api.live.gateway_demands import GatewayDemands
from phalanx.api.live.history_tail import newest_seq
from phalanx.api.live.hub import Broadcast, FollowerHub
from phalanx.api.live.job_notifier import JobNotifier
from phalanx.api.live.job_tracer import JobTracer
from phalanx.api.live.pending_output import PendingOutput
from phalanx.api.nodes.data_servers import DataServerRegistry
from phalanx.api.nodes.file_cleaner import FileCleaner
from phalanx.api.nodes.output_usage import OutputUsage
from phalanx.api.nodes.retention import PendingUploads, RetentionWorker
from phalanx.api.nodes.supervisors import SupervisorRegistry
from phalanx.api.services import HeadServices
from phalanx.api.views.fleet import fleet_frame
from phalanx.controller.leases import LONG_LEASES_GRANTED_WITHIN_S
from phalanx.controller.step_result import Answer
from phalanx.core.access.audit import AuditCall
from phalanx.core.access.caller import Caller
from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.node import Node
from phalanx.core.ids import JobId, UserId
from phalanx.core.state.events import PreparePlannedStop, RecordTokenUse
from phalanx.core.state.events import Request as Command
from phalanx.core.state.reports import Report
from phalanx.core.work.spec import Role
from phalanx.store.checkpoints.copies import CheckpointCopies
from phalanx.store.job_archives import JobArchives
from phalanx.store.outputs.copies import OutputCopies

P = ParamSpec("P")
T = TypeVar("T")

_POLL_S: Final = 0.05
_log: Final = logging.getLogger("phalanx.api")
_EXPIRY_LOOK_S: Final = 1.0  # how late the expiry of a token is noticed; a revocation is noticed at once
UPKEEP_S: Final = 60.0
REFUSALS_PER_MINUTE: Final = 60  # recorded in the audit trail: each costs a commit, and callers may repeat them at will
# These threads wait for the disk, not the CPU: with asyncio's own pool (cores + 4), six slow reads would stop all others.
_THREADS: Final = ThreadPoolExecutor(max_workers=24, thread_name_prefix="api")


class ApiRuntime:
    """The API's own state. Use it on the event loop only.

    Attributes:
        counts: counters of the routes, for /metrics.
        streams_by_user: open event streams, by user.
        websockets: the tasks that serve open WebSockets.
        fleet, fleet_read_s, notes: the fleet as last read for the notes of a submit, the time of that, and the notes made for it.
    """

    def __init__(self, services: HeadServices) -> None:
        self.services = services
        welcome = services.join_service
        self.authenticator = Authenticator(
            services.store,
            services.node_secret,
            services.clock,
            join_salt=lambda: "" if welcome is None else welcome.salt.value,
        )
        self.hub = FollowerHub()
        self.fleet_feed = FleetFeed(partial(fleet_frame, services), heartbeat_s=services.limits.heartbeat_s)
        self.access_changes = Broadcast()
        self.provider_sign_in = ProviderSignIn(services, run_in_thread, self._answer_of)
        self.device_logins = DeviceLogins(services.clock)
        self.secret_seal = SecretSeal(services.secret_keys)
        self.service_use_lock = asyncio.Lock()
        self.hourly_calls = HourlyCalls(services.clock.boottime_s)
        self.batch_use = BatchUseRecorder(services, self.service_use_lock, self.request, run_in_thread)
        self.secrets_lock = asyncio.Lock()  # no secret is set while all are encrypted again
        self.program_access = ProgramAccess(services.clock)
        self.sessions = ExecSessionRegistry(services.limits)
        self.websockets: set[asyncio.Task[None]] = set()
        self.supervisors = SupervisorRegistry(services.store, services.controller.committed_attempt)
        self.checkpoint_copies = CheckpointCopies(services.checkpoint_root, services.output_root)
        self.output_copies = OutputCopies(services.output_root)
        self.output_usage = OutputUsage(services, self.output_copies)
        self.channel_sender = ChannelSender(services, partial(newest_seq, services.store))
        self.job_notifier = JobNotifier(services, self.secret_seal)
        self.job_tracer = (
            None
            if services.tracing is None
            else JobTracer(services, services.tracing, partial(newest_seq, services.store))
        )
        self.archives = JobArchives(services.archive_root, version=services.version, clock_s=services.clock.now_s)
        self.file_cleaner = FileCleaner(services, self.checkpoint_copies, self.output_copies, self.archives)
        self.pending_uploads = PendingUploads()
        self.pending_output = PendingOutput(services.store, services.logs)
        self.data_servers = DataServerRegistry()
        self.gateway_demands = GatewayDemands(services.clock.boottime_s())
        self.counts: dict[str, int] = {}
        self.streams_by_user: Counter[UserId] = Counter()
        self.usage_summaries_pending = 0
        self.fleet: list[Node] = []
        self.fleet_read_s = -math.inf
        self.notes: dict[Role, list[str]] = {}
        self._answers: ControllerFutures | None = None
        self._upkeep: asyncio.Task[None] | None = None
        self._rechecks: asyncio.Task[None] | None = None
        self._batch_use: asyncio.Task[None] | None = None
        self._refusals, self._refusals_since_s = 0, -math.inf
        self._touched: deque[frozenset[JobId]] = deque()

    @property
    def controller_futures(self) -> ControllerFutures:
        """The bridge to the controller's thread, for the running event loop."""
        if self._answers is None or self._answers.loop is not asyncio.get_running_loop():
            self._answers = ControllerFutures()
        return self._answers

    @property
    def streams_open(self) -> int:
        """The number of open event streams."""
        return self.streams_by_user.total()

    @property
    def head_urls(self) -> list[str]:
        """The URLs of all heads that share the store, this one first; empty if this head does not share it."""
        return [] if self.services.leader_status is None else self.services.leader_status.urls()

    @property
    def has_standby(self) -> bool:
        """Whether another head takes over at once when this one stops."""
        return self.services.leader_status is not None and self.services.leader_status.has_standby()

    async def request(self, command: Command[T]) -> T:
        """Send a request to the controller, and return its answer once that is durable.

        Raises:
            PhalanxError: the request was refused.
        """
        serving = CURRENT_CALL.get()
        return await self.controller_futures.result_of(
            self.services.controller.request(command, None if serving is None else serving.mark_recorded())
        )

    async def request_all(self, wishes: Sequence[Command[Any]]) -> list[Answer | PhalanxError]:
        """Send several requests that are handled in one step, with no scheduling in between; refusals are among the answers."""
        serving = CURRENT_CALL.get()
        calls = [] if serving is None else [serving.mark_recorded()] * len(wishes)
        return await self.controller_futures.result_of(self.services.controller.request_all(wishes, calls))

    async def _answer_of(self, asked: Future[T]) -> T:
        return await self.controller_futures.result_of(asked)

    async def record_call(self, detail: str = "") -> None:
        """Record the current call in the audit trail, durably, before the handler acts."""
        serving = CURRENT_CALL.get()
        if serving is not None:
            await self.controller_futures.result_of(self.services.controller.record_call(serving.mark_recorded(detail)))

    def record_refusal(self, call: AuditCall, error: PhalanxError, detail: str = "") -> None:
        """Record a refusal in the audit trail, without waiting; at most REFUSALS_PER_MINUTE are recorded per minute."""
        now_s = self.services.clock.boottime_s()
        if now_s - self._refusals_since_s >= 60.0:
            self._refusals_since_s, self._refusals = now_s, 0
        self._refusals += 1
        self.count("refusals")
        if self._refusals <= REFUSALS_PER_MINUTE:
            self.services.controller.record_call(replace(call, result=error.code, detail=detail or call.detail))

    async def report(self, reports: list[Report]) -> list[Answer | PhalanxError]:
        """Pass reports of supervisors to the controller; returns when they are durable."""
        return await self.controller_futures.result_of(self.services.controller.report(reports))

    async def grant_long_leases(self) -> None:
        """Grant long leases from now on, and wait until every supervisor that still renews has one."""
        limits = self.services.limits
        lease_s = limits.plan_stop_lease_s
        until_s = self.services.clock.boottime_s() + LONG_LEASES_GRANTED_WITHIN_S
        await run_in_thread(self.services.before_long_leases, lease_s)
        await self.request(PreparePlannedStop(lease_s=lease_s, grants_until_s=until_s))
        for _ in range(int(limits.plan_stop_wait_s / _POLL_S)):
            if self.services.controller.leases.all_long():
                return
            await asyncio.sleep(_POLL_S)

    def start(self) -> None:
        """Subscribe to commits once the event loop runs, so that followers also see changes that no API route made."""
        wake = self.controller_futures.threadsafe_callback(self._wake_followers)
        access = self.controller_futures.threadsafe_callback(self.access_changes.notify_all)
        known = self.services.store.access_version

        def committed(job_ids: frozenset[JobId]) -> None:
            nonlocal known
            if self.services.store.access_version != known:
                known = self.services.store.access_version
                access()
            if self.hub.follower_count or self.fleet_feed.is_running:
                self._touched.append(job_ids)
                wake()

        self.services.controller.listen(committed)
        settling = RetentionWorker(
            self.services.store, self.checkpoint_copies, self.output_copies, self.pending_uploads
        )
        self.services.controller.listen(settling.on_commit)
        settling.start()
        if self.services.notifier is not None:
            self.channel_sender.start()
            self.job_notifier.start()
        if self.job_tracer is not None:
            self.job_tracer.start()
        self._upkeep = asyncio.get_running_loop().create_task(self._run_upkeep())
        self._rechecks = asyncio.get_running_loop().create_task(self._run_rechecks())
        self._batch_use = asyncio.get_running_loop().create_task(self.batch_use.run())

    async def upkeep(self) -> None:
        """Record when tokens were last used, and the tip of the audit trail; check the space of outputs; remove files past their retention."""
        used_s = self.authenticator.take_unrecorded_uses()
        if used_s:
            await self.controller_futures.result_of(self.services.controller.request(RecordTokenUse(used_s=used_s)))
        if self.services.audit_checkpoints is not None:
            await run_in_thread(self.services.audit_checkpoints.record, self.services.controller.audit_tip)
        await run_in_thread(self.output_usage.check)
        await run_in_thread(self.file_cleaner.sweep)

    async def _run_upkeep(self) -> None:
        while not self.hub.closing:
            await asyncio.sleep(UPKEEP_S)
            with contextlib.suppress(PhalanxError):  # such as a full disk: the next round retries
                await self.upkeep()

    async def _run_rechecks(self) -> None:
        while not self.hub.closing:
            await asyncio.sleep(UPKEEP_S)
            try:
                await self.provider_sign_in.recheck()
            except Exception:  # noqa: BLE001  an internal error must not end the checks: the next round tries again
                _log.exception("internal error while users are checked at the sign-in provider")

    async def permission_lost(self, reauthorize: Callable[[], None]) -> PhalanxError:
        """Wait until `reauthorize` raises: a user, project or token has changed, or the token has expired; return its error."""
        while True:
            try:
                reauthorize()
            except PhalanxError as error:
                return error
            await self.access_changes.wait(_EXPIRY_LOOK_S)

    def _wake_followers(self) -> None:
        while self._touched:
            job_ids = self._touched.popleft()
            self.hub.notify(job_ids)
            self.fleet_feed.note_changes(job_ids)

    def count(self, what: str, by: int = 1) -> None:
        """Count for /metrics."""
        self.counts[what] = self.counts.get(what, 0) + by

    def close(self) -> None:
        """End streams and long polls, since the head stops."""
        for task in (self._upkeep, self._rechecks, self._batch_use):
            if task is not None:
                task.cancel()
        self.hub.close()
        self.fleet_feed.close()
        self.channel_sender.close()
        self.job_notifier.close()
        if self.job_tracer is not None:
            self.job_tracer.close()
        self.sessions.close()

    async def wait_for_websockets(self, timeout_s: float) -> None:
        """Wait until all WebSockets have sent their last frames."""
        if self.websockets:
            await asyncio.wait(self.websockets, timeout=timeout_s)


def runtime_of(request: HTTPConnection) -> ApiRuntime:
    """Return the runtime of the app that serves this request."""
    runtime: ApiRuntime = request.app.state.runtime
    return runtime


def runtime_of_app(app: FastAPI) -> ApiRuntime:
    """Return the runtime of an app."""
    runtime: ApiRuntime = app.state.runtime
    return runtime


def caller_of(request: HTTPConnection) -> Caller:
    """Return the authenticated caller; after the body was read, with its permissions at that time."""
    caller: Caller = request.state.caller
    return caller


def reauthorize_caller(request: HTTPConnection) -> None:
    """Authorize the caller again, as a body may arrive long after its head; `caller_of` then returns the updated caller.

    Raises:
        NotSignedIn, NotPermitted: the caller is no longer permitted.
    """
    state = request.state
    state.caller = runtime_of(request).authenticator.refresh(state.caller, state.action)


async def run_in_thread(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run blocking work (disk, long queries) on a thread."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, partial(work, *args, **kwargs))

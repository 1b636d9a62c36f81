"""The supervisor's shell: one thread feeds `Supervisor.step` and performs its actions; work that may block runs on thread pools.

Three pools, each in order per member: *work* here (prepare, spawn, wind up, clean up), and those of `fence` (signal and kill; freeze and
thaw), so that a freeze at the end of a lease never waits for a checkpoint verification or for processes that do not die.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, assert_never

from phalanx.core.fleet.node import HeldDataset
from phalanx.core.ids import Epoch, JobId
from phalanx.core.state.commands import Command
from phalanx.core.state.reports import DatasetsHeld, TaskExited
from phalanx.core.state.reports import Report as ReportedEvent
from phalanx.node.data.held_datasets import HeldDatasets
from phalanx.node.diagnosis.job_usage import JobUsageProbe
from phalanx.node.diagnosis.memory_watch import MemoryWatch
from phalanx.node.diagnosis.rank_monitor import RankMonitor
from phalanx.node.files import checkpoint_folders, job_accounts
from phalanx.node.files.cache_folder import cache_folder
from phalanx.node.files.checkpoint_deletion import delete_checkpoints_as_owner
from phalanx.node.files.job_accounts import acting_as
from phalanx.node.head_link.channels import (
    CommandPoller,
    EventSender,
    LeaseRenewer,
    Registrar,
    start_thread,
)
from phalanx.node.head_link.head_connection import HeadConnection, RequestRejected
from phalanx.node.logic.actions import (
    AppendNote,
    CallSleepHook,
    CheckEmpty,
    DrainOutput,
    DumpStacks,
    ExitSupervisor,
    FreezeMember,
    KillMember,
    PrepareMember,
    PublishMembers,
    RemoveCheckpoints,
    RemoveScratch,
    RenewLease,
    SendEvent,
    SendSigterm,
    SetPowerLimits,
    SpawnTasks,
    SupervisorAction,
    ThawMember,
    UpdateLeasePage,
)
from phalanx.node.logic.events import (
    CommandReceived,
    MemberEmptied,
    MemberKey,
    OutputDrained,
    SupervisorEvent,
    TaskEnded,
    TerminationRequested,
)
from phalanx.node.logic.lease import NS_PER_S
from phalanx.node.logic.local_copies import checkpoints_folder, has_local_checkpoints, outputs_folder
from phalanx.node.logic.supervisor import Supervisor
from phalanx.node.member.member_runtime import (
    MemberRuntime,
    MemberRuntimes,
    member_key,
)
from phalanx.node.member.rank_reports import RankReport
from phalanx.node.member.scratch import scratch_of
from phalanx.node.member.spare_scratch import SpareScratch
from phalanx.node.member.task_end import task_end
from phalanx.node.power.limit_order import apply_power_limits
from phalanx.node.prepare import data_staging, member_preparation
from phalanx.node.prepare.data_server import DataServers
from phalanx.node.prepare.hook_runner import OperatorHooks
from phalanx.node.prepare.node_services import NodeServices
from phalanx.node.prepare.setup_runner import SETUP_TASKS
from phalanx.node.probes.devices import DeviceProbe
from phalanx.node.probes.preflight_checks import PreflightChecks
from phalanx.node.probes.readiness import probe_until_closed
from phalanx.node.probes.sampling import Sampler
from phalanx.node.probes.sleep_hooks import call_sleep_hook
from phalanx.node.processes.attempt_processes import ProcessHost, TaskProcessExit
from phalanx.node.processes.containment import AttemptKey, ContainmentFactory
from phalanx.node.processes.thread_pool import KeyedThreadPool
from phalanx.node.processes.zygote import Zygotes
from phalanx.node.shell import member_start
from phalanx.node.shell.exec_sessions import ExecSessions
from phalanx.node.shell.node_recovery import recover_node
from phalanx.node.shell.node_settings import NodeSettings
from phalanx.node.shell.process_control import MemberProcessControl
from phalanx.node.shell.upload_coordinator import UploadCoordinator
from phalanx.node.transfer import object_checkpoints
from phalanx.node.transfer.shared_storage import check_head_files
from phalanx.node.transfer.spool import Spool
from phalanx.node.transfer.stream_upload import StreamUploader
from phalanx.node.transfer.unsent_output import send_unsent_output
from phalanx.wire import supervisor as wire
from phalanx.wire.rank import RankStopReason, boottime_ns

WORK_THREADS: Final = 4  # a slow file system may hold one or two
SLOW_THREADS: Final = 64  # concurrent setups, image pulls and package installs that do not delay other work
WAKE_MAX_S: Final = 0.5  # a queue's timeout does not count the time a host sleeps; the lease does
INBOX_BATCH: Final = 1024  # happenings in one step
FLUSH_S: Final = 2.0  # for the last events before the supervisor exits
SEND_LAST_S: Final = 6.0  # for output of ended jobs before that; engines end the process 10 s after SIGTERM
REAP_EVERY_S: Final = 10.0
SHARED_SIGNAL_S: Final = 0.5  # a signal to all processes of the node has reached us this long after a rank died of it
_log = logging.getLogger(__name__)


class SupervisorLoop:
    """One incarnation of a supervisor."""

    def __init__(self, settings: NodeSettings, probe: DeviceProbe) -> None:
        self._settings = settings
        self._ended, self._leaves = threading.Event(), threading.Event()
        self._inbox: queue.SimpleQueue[SupervisorEvent] = queue.SimpleQueue()
        self._supervisor = Supervisor(
            settings.node.id,
            settings.supervisor_id if settings.unwatched else None,
            terminate_grace_s=settings.terminate_grace_s,
        )
        self._presents = MemberRuntimes()
        self._running_members: tuple[MemberKey, ...] = ()
        access, ended, who = settings.access, self._ended, settings.supervisor_id
        self._registrar = Registrar(access, self._hello, self._leaves, on_refused=self._on_registration_refused)
        self._renewer = LeaseRenewer(
            access,
            self._registrar,
            node_id=settings.node.id,
            supervisor_id=who,
            epochs=self._epochs,
            on_renewed=self._inbox.put,
            ended=self._leaves,
        )
        self._events = EventSender(access, self._registrar, supervisor_id=who, ended=ended)
        self._commands = CommandPoller(
            access, self._registrar, supervisor_id=who, on_commands=self._receive, ended=ended
        )
        self._shipper = StreamUploader(access, self._registrar, supervisor_id=who, ended=ended)
        self._watch = RankMonitor(probe.devices(), self._inbox.put)
        self._sampler = Sampler(
            access,
            probe,
            node_id=settings.node.id,
            supervisor_id=who,
            folder=settings.folder,
            job_by_device=self._presents.job_by_device,
            tenants_by_device=self._presents.tenants_by_device,
            ended=ended,
            head_index=self._number,
            indices_known=lambda: settings.seat is None or bool(self._numbers),
            renew_interval_s=lambda: self._renewer.renew_in_s,
            job_samples=JobUsageProbe(self._presents.all).sample,
            staging=lambda: [one for member in self._presents.all() if (one := data_staging.progress_of(member))],
            on_xids=self._watch.kernel_log.add_xids,
        )
        self._memory_watch = MemoryWatch(
            self._presents.all, self._inbox.put, ended, devices=self._sampler.latest_samples
        )
        self._containments = ContainmentFactory(settings.node_key, climb=settings.seat is None)
        self._exec = ExecSessions(access, ended)
        self._uploads = UploadCoordinator(
            access,
            self._shipper,
            ended,
            note=lambda member, text: self._services.note(member, text),  # noqa: PLW0108  the services open later
            shutting_down=lambda: self._urgent,
            resume_folders=self._presents.resume_folders,
            outlives_members=settings.seat is None,
        )
        self._cache = cache_folder(settings.folder, per_attempt=settings.seat is not None, environment=settings.base)
        self._held = HeldDatasets("" if settings.accounts.folder else self._cache, self._report_datasets)
        self._storage_connection = HeadConnection(access)
        self._probe = probe
        self._work = KeyedThreadPool("work", WORK_THREADS, SLOW_THREADS)
        self._work.start_first_thread()
        self._fence = MemberProcessControl(self._watch, self._inbox.put, self._after_work, lambda: self._services)
        self._opened_services: NodeServices | None = None
        self._hooks = OperatorHooks(
            settings.hooks,
            settings.node.id,
            settings.folder,
            settings.node_key,
            lambda report: self._events.put([report]),
        )
        self._reaped_s = time.monotonic()
        self._leaving = self._urgent = self._failed = False
        self.sees_head_files: bool | None = None
        self._numbers: tuple[int, ...] = ()
        self.exit_code = 0  # of the first task that failed by itself, else of one that was stopped
        self.stop = RankStopReason.NONE  # the last reason why its ranks were asked to end

    def run(self) -> None:
        """Run until the supervisor ends and no member is left."""
        start_thread("renewer", self._renewer.run)  # registers first, in parallel with the remaining setup
        self._opened_services = self._open_services()
        for name, run in (
            ("commands", self._commands.run),
            ("events", self._events.run),
            ("shipper", self._shipper.run),
            ("sampler", self._sampler.run),
            ("outputs", self._uploads.output_sync.run),
            ("memory", self._memory_watch.run),
            ("health", lambda: self._hooks.watch(self._ended)),
        ):
            start_thread(name, run)
        send_unsent_output(self._settings.folder, self._services.spool, self._shipper)
        wake_ns: int | None = None
        while not self._leaving:
            outbox = self._supervisor.step(boottime_ns(), self._collect(wake_ns), unix_s=time.time())
            for action in outbox.actions:
                self._perform(action)
            if reports := [action.event for action in outbox.actions if isinstance(action, SendEvent)]:
                self._events.put(reports)  # together: the head must not place a job again on a node that leaves
            wake_ns = outbox.wake_ns
            self._watch.check_for_hangs(self._presents.all)
            self._reap()
        self._close()

    @property
    def has_members(self) -> bool:
        """Whether it runs, prepares or cleans up a part of an attempt. For any thread."""
        return bool(self._running_members)

    def terminate(self) -> None:
        """Stop all members and end; a second call ends at once. Safe in a signal handler."""
        self._urgent = True
        self._inbox.put(TerminationRequested())

    # ------------------------------------------------------------------------------------------------------------ the loop

    def _collect(self, wake_ns: int | None) -> list[SupervisorEvent]:
        timeout_s = WAKE_MAX_S if self._presents.all() else REAP_EVERY_S  # without members no lease ends here
        if wake_ns is not None:
            timeout_s = min(timeout_s, max(0.0, (wake_ns - boottime_ns()) / NS_PER_S))
        found: list[SupervisorEvent] = []
        try:
            found.append(self._inbox.get(timeout=timeout_s))
            while len(found) < INBOX_BATCH:
                found.append(self._inbox.get_nowait())
        except queue.Empty:
            pass
        return found

    def _perform(self, action: SupervisorAction) -> None:
        match action:
            case SendEvent(event=event):
                self._note_exit(event)
            case UpdateLeasePage(key=key):
                self.stop = action.stop or self.stop
                if (member := self._presents.get(key)) is not None:
                    member.write_page(action)
            case PrepareMember():
                self._prepare(action)
            case SpawnTasks() | DrainOutput():
                self._do_work(action)
            case SendSigterm() | DumpStacks() | FreezeMember() | ThawMember() | KillMember() | CheckEmpty():
                self._fence.submit(self._member(action.key), action)
            case CallSleepHook():
                self._call_sleep_hook(self._member(action.key), action)
            case RemoveScratch(job_id=job_id, epoch=epoch):
                self._clean_up(job_id, epoch)
            case RemoveCheckpoints():
                self._work.submit(("delete", action.job_id), lambda: self._remove_checkpoints(action))
            case SetPowerLimits():
                self._work.submit(("power",), lambda: self._limit_power(action))
            case AppendNote(job_id=job_id, epoch=epoch, text=text):
                for member in self._presents.of_attempt(job_id, epoch)[:1]:
                    self._services.note(member, text)
            case PublishMembers(members=members):
                self._running_members = members
            case RenewLease():
                self._renewer.renew_now()
            case ExitSupervisor():
                self._leaves.set()  # a request after the report of the end would register the node again
                self._leaving = True
            case _:
                assert_never(action)

    @property
    def failed(self) -> bool:
        """Whether a task here failed by itself."""
        return self._failed

    @property
    def _services(self) -> NodeServices:
        assert self._opened_services is not None
        return self._opened_services

    def _member(self, key: MemberKey) -> MemberRuntime:
        member = self._presents.get(key)
        assert member is not None
        return member

    def _number(self, index: int) -> int:
        """The head's index of a device: on a seat that of the grant, whichever device the engine chose for it."""
        return self._numbers[index] if index < len(self._numbers) else index

    def _note_exit(self, event: ReportedEvent) -> None:
        if isinstance(event, TaskExited) and (event.exit.failed > self._failed or not self.exit_code):
            self.exit_code, self._failed = event.exit.shell_code, event.exit.failed

    # ---------------------------------------------------------------------------------------------------------- work lane

    def _prepare(self, action: PrepareMember) -> None:
        order = action.prepare
        # On a seat the attempt continues in a new generation.
        self.exit_code, self._failed, self.stop = 0, False, RankStopReason.NONE
        grant = order.allocation.grant_on(self._settings.node.id)
        assert grant is not None
        if self._settings.seat is not None:
            self._numbers = grant.devices
            grant = replace(grant, devices=tuple(range(len(grant.devices))))
        scratch = scratch_of(self._settings.folder, order.job_id, order.epoch)
        workdir = scratch.workdir if order.spec.upload else order.spec.workdir
        for older in self._presents.of_attempt(order.job_id, order.epoch):
            self._presents.remove(older.key)
        member = MemberRuntime(
            key=action.key,
            prepare=order,
            grant=grant,
            scratch=scratch,
            workdir=workdir,
            checkpoints=checkpoints_folder(self._settings.folder, order),
            outputs=outputs_folder(scratch.path),
        )
        self._presents.add(member)
        self._memory_watch.wake()
        self._sampler.sample_now()  # its energy counts from here

        def work() -> None:
            self._inbox.put(member_preparation.prepare_member(member, self._services))

        spec = order.spec
        slow = bool(
            spec.setup
            or spec.image
            or spec.requirements
            or spec.software
            or spec.upload
            or spec.data
            or self._hooks.may_run
        )
        self._work.submit(_lane(action.key), work, slow=slow)

    def _do_work(self, action: SpawnTasks | DrainOutput) -> None:
        member = self._member(action.key)

        def work() -> None:
            if isinstance(action, SpawnTasks):
                self._inbox.put(member_start.start_member_tasks(member, action, self._services))
                probe_until_closed(member, self._inbox.put)
                return
            self._sampler.sample_now(send=True)  # its processes have ended
            tail = member_start.close_member(member, action.tail_of, self._services)
            self._uploads.finish_member(
                member, lambda unsent: self._inbox.put(OutputDrained(key=action.key, tail=tail, unsent=unsent))
            )

        self._work.submit(_lane(action.key), work, slow=self._hooks.may_run)

    def _after_work(self, member: MemberRuntime, then: Callable[[], None]) -> None:
        self._work.submit(_lane(member.key), then)

    def _remove_checkpoints(self, action: RemoveCheckpoints) -> None:
        urls = tuple(path for path in action.paths if "://" in path)
        if urls:
            members = [one for one in self._presents.all() if one.key.job_id == action.job_id and one.store_variables]
            object_checkpoints.remove(members, urls)  # else the next attempt deletes them
        paths = tuple(path for path in action.paths if path not in urls)
        delete_checkpoints_as_owner(self._settings.accounts, action.job_id, paths, action.user)

    def _report_datasets(self, held: tuple[HeldDataset, ...]) -> None:
        if self._settings.seat is None:  # a seat's supervisor speaks for one attempt, not for the node
            self._events.put([DatasetsHeld(node_id=self._settings.node.id, datasets=held)])

    def _call_sleep_hook(self, member: MemberRuntime, action: CallSleepHook) -> None:
        def memory_in_use() -> str:
            if self._settings.node.virtual:  # its devices have no memory of their own
                return ""
            return member_preparation.wait_for_free_devices(member, self._services)[0]

        call_sleep_hook(member, action, memory_in_use, self._inbox.put)

    def _limit_power(self, action: SetPowerLimits) -> None:
        """Set or restore the power limits, and report what they are now."""
        if (power := self._settings.power) is not None:
            self._events.put([apply_power_limits(power, action, self._settings.node.id)])

    def _clean_up(self, job_id: JobId, epoch: Epoch) -> None:
        self._uploads.stop_attempt(job_id, epoch)
        gone = self._presents.of_attempt(job_id, epoch)
        for member in gone:
            self._presents.remove(member.key)
        scratch = gone[0].scratch if gone else scratch_of(self._settings.folder, job_id, epoch)
        services = self._services

        def remove(keys: list[str]) -> None:
            object_checkpoints.end_attempt(gone)
            self._shipper.remove(keys)
            for key in keys:
                services.spool.remove(key)
            member_preparation.remove_scratch(scratch, gone[0] if gone else None, services.spares)
            for member in gone[:1]:
                with acting_as(member.account):
                    checkpoint_folders.remove_empty_folders(member.prepare.checkpoint_dir)
            if not gone or any(has_local_checkpoints(member.prepare) for member in gone):
                self._uploads.remove_departed_jobs(
                    (self._settings.folder, self._settings.accounts.folder), self._presents.all()
                )
            if (seat := self._settings.seat) is not None and (seat.job_id, seat.epoch) == (job_id, epoch):
                self.terminate()  # the seat's attempt is over

        def work() -> None:
            keys = self._shipper.streams_of(job_id, epoch)
            lane = ("remove", job_id, epoch)
            self._uploads.when_output_is_sent(keys, lambda: self._work.submit(lane, lambda: remove(keys)))

        self._work.submit((job_id, epoch), work)

    # --------------------------------------------------------------------------------------------- callbacks of other threads

    def _receive(self, commands: list[Command | wire.OpenExec]) -> None:
        for command in commands:
            if isinstance(command, wire.OpenExec):
                order = command
                self._work.submit(("exec", order.session), lambda order=order: self._open_exec(order))  # type: ignore[misc]  # mypy infers no lambda with a default
            else:
                self._inbox.put(CommandReceived(command=command))

    def _open_exec(self, order: wire.OpenExec) -> None:
        found = self._presents.of_attempt(order.job_id, order.epoch)
        self._exec.open(order, found[0] if found else None)

    def _on_task_exit(self, exit: TaskProcessExit) -> None:
        if self._exec.task_ended(exit.task_id, exit.code, exit.signal):
            return
        member = self._presents.of_process(exit.key)
        if exit.task_id in SETUP_TASKS:
            if member is not None:
                member.setup_code = exit.code if exit.code is not None else 128 + (exit.signal or 9)
                member.setup_done.set()
            return
        end, pid = task_end(exit, member)
        if self._settings.signals_reach_ranks and end.code != 0:
            threading.Timer(SHARED_SIGNAL_S, self._report_shared_end, (member, end, pid)).start()
            return
        self._watch.on_task_end(member, end, pid, self._services)

    def _report_shared_end(self, member: MemberRuntime | None, end: TaskEnded, pid: int | None) -> None:
        """Report a rank that failed. If this node was asked to end meanwhile, the same signal ended the rank: it counts as stopped with us."""
        if self._urgent:
            end = replace(end, ended_ns=boottime_ns())
        self._watch.on_task_end(member, end, pid, self._services)

    def _on_empty(self, key: AttemptKey) -> None:
        self._inbox.put(MemberEmptied(key=member_key(key)))

    def _on_report(self, member: MemberRuntime, report: RankReport) -> None:
        """Store a rank's report as received, and pass on reports that are more than numbers."""
        key = member.key
        if report.epoch != key.epoch or report.generation != key.generation:
            return
        try:
            stream = self._services.stream_key(member, f"steps-{member.grant.node_rank}")
            line = report.line if member.masker is None else member.masker.mask(report.line)
            self._services.spool.write(stream, line + b"\n")
        except (OSError, KeyError) as error:
            _log.warning("job %s: a report of rank %d is lost: %s", key.job_id, report.rank, error)
        self._watch.on_report(member, report)
        self._uploads.on_report(member, report, self._inbox.put)

    def _output_missing(self, stream: str, text: str) -> None:
        """The spool dropped output because the disk is full, or has room again: write to our log and to the job's supervisor stream."""
        _log.warning("stream %s: %s", stream, text)
        for member in self._presents.all():
            key = member.key
            if stream.startswith(f"{key.job_id}.{key.epoch}.") and not stream.endswith(
                f".supervisor-{member.grant.node_rank}"
            ):
                self._services.note(member, f"{stream.rpartition('.')[2]}: {text}")
                return

    def _on_registration_refused(self, error: RequestRejected) -> None:
        """The head refused the registration: on a seat whose attempt is over, end."""
        if self._settings.seat is not None and error.code == "seat_over":
            _log.warning("%s", error)
            self.terminate()

    def _hello(self, challenge: str) -> wire.HelloRequest:
        self.sees_head_files = check_head_files(self._storage_connection)
        running = [(key.job_id, key.epoch, key.generation) for key in self._running_members]
        return wire.HelloRequest(
            version=wire.WIRE_VERSION,
            supervisor_id=self._settings.supervisor_id,
            node=replace(
                self._settings.node,
                shares_head_files=bool(self.sees_head_files),
                datasets=self._held.current(),
                limits=self._containments.limits.kind,
                power_limits=() if self._settings.power is None else self._settings.power.limits(),
            ),
            members=running,
            challenge=challenge,
        )

    def _epochs(self) -> list[tuple[JobId, Epoch]]:
        return [(key.job_id, key.epoch) for key in self._running_members]

    # ------------------------------------------------------------------------------------------------------ begin and end

    def _open_services(self) -> NodeServices:
        settings = self._settings
        spool = Spool(on_bytes=self._shipper.mark_grown, on_missing=self._output_missing)
        self._shipper.set_spool(spool)
        host = ProcessHost(
            node_key=settings.node_key,
            on_exit=self._on_task_exit,
            on_empty=self._on_empty,
            containments=self._containments,
        )
        _log.info("%s", self._containments.describe())
        mps, mounts = recover_node(settings, self._probe, self._hooks, self._cache)
        return NodeServices(
            node_key=settings.node_key,
            access=settings.access,
            base=settings.base,
            virtual=settings.node.virtual,
            devices=self._probe.devices(),
            fresh_samples=self._sampler.fresh_samples,
            host=host,
            zygotes=Zygotes(node_key=settings.node_key),
            folder=settings.folder,
            accounts=settings.accounts,
            cache=self._cache,
            spool=spool,
            shipper=self._shipper,
            on_report=self._on_report,
            checkpoint_uploader=self._uploads.checkpoint_uploader,
            output_sync=self._uploads.output_sync,
            sees_head_files=lambda: self.sees_head_files,
            mps=mps,
            slices=settings.slices,
            data_servers=DataServers(settings.access, settings.supervisor_id, settings.node.address),
            held_datasets=self._held,
            data_mounts=mounts,
            hooks=self._hooks,
            spares=SpareScratch(settings.folder),
            clock_offset_s=lambda: self._renewer.clock_offset_s,
            preflight_checks=PreflightChecks(
                folder=settings.folder,
                base=settings.base,
                devices=() if settings.node.virtual else tuple(one.uuid for one in self._probe.devices()),
            ),
        )

    def _reap(self) -> None:
        now_s = time.monotonic()
        if now_s - self._reaped_s >= REAP_EVERY_S:
            self._reaped_s = now_s
            self._services.zygotes.reap(now_s)
            self._watch.kernel_log.poll()  # a busy log is overwritten soon
            if (power := self._settings.power) is not None and power.is_over(time.time()):
                self._work.submit(("power",), lambda: self._limit_power(SetPowerLimits(milliwatts=None, until_s=None)))

    def _close(self) -> None:
        """All members are closed: flush the events and release all resources."""
        services = self._services
        self._events.wait_flushed(FLUSH_S)
        self._shipper.wait_sent(SEND_LAST_S)
        self._ended.set()
        self._work.close(FLUSH_S)
        self._fence.close(FLUSH_S)
        self._watch.close(FLUSH_S)
        services.zygotes.close()
        services.data_servers.close()
        if leftover := services.host.close():
            _log.error("processes %s survive SIGKILL", leftover)
        for member in self._presents.all():
            if not self._shipper.unsent(self._shipper.streams_of(member.key.job_id, member.key.epoch)):
                member.scratch.remove()  # else the next supervisor sends the rest
        services.spares.close()
        if self._settings.accounts.folder:
            job_accounts.remove_empty_job_folders(self._settings.accounts.folder)


def _lane(key: MemberKey) -> tuple[JobId, Epoch]:
    """Generations of an attempt share a folder, so they share a lane."""
    return (key.job_id, key.epoch)

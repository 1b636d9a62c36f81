"""The session of one rank: its process group, its supervisor, and the calls between two steps.

A training loop:

    run = phalanx.torch.init()
    saver = phalanx.torch.checkpoint(model, optimizer)
    for step in range(saver.resume().step + 1, steps + 1):
        loss = train_one_step(...)
        phalanx.torch.report(step=step, loss=loss, tokens=tokens)
        saver.save_if_due(step)
        if phalanx.torch.should_stop():
            break
    phalanx.torch.finish()

Steps count from 1; a checkpoint "of step n" has the state after step n. Every call that returns to the loop passes the fence last, and the
next step counts as begun when the fence was found open. So no step begins after the lease has expired, whatever happens between the calls.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from phalanx.torch.agreement import AgreedRequest, RankAgreement, RankRequest
from phalanx.torch.environment import RankEnvironment
from phalanx.torch.lease_fence import LeaseFence
from phalanx.torch.report_writer import ReportWriter
from phalanx.torch.stack_dump import install_stack_dump
from phalanx.wire.rank import MIG_PROFILE_VARIABLE, RankStopReason, ReportKind, boottime_ns

_DEFAULT_TIMEOUT_S: Final = 600.0
"""Default timeout of a collective: the default of torch for NCCL."""
_SLOW_WRITE_S: Final = 3600.0
"""How long a rank may wait in the background for the disk of another rank. A dead rank is detected at once by its closed connection."""
_REPORTED_STALL_NS: Final = 1_000_000
"""Shorter blocking by the fence than 1 ms is not reported."""
_DEADLINE_MARGIN_S: Final = 5.0
"""Time between the end of the last save and the time limit of the job, in addition to twice the measured save."""


class RankSession:
    """The state of `phalanx.torch`; one per process, created by `init`."""

    def __init__(self, environment: RankEnvironment, *, device: Any) -> None:
        self.environment = environment
        self.device = device
        self.rank: int = dist.get_rank()
        self.world_size: int = dist.get_world_size()
        epoch, generation = environment.epoch, environment.generation
        self.fence = LeaseFence.attach(environment.lease_page, epoch=epoch, generation=generation)
        self.pipe = ReportWriter(environment.report_pipe, rank=self.rank, epoch=epoch, generation=generation)
        self.agreement = RankAgreement(self.new_group() if self.world_size > 1 else None)
        self.checkpointers: list[Any] = []
        self._calls: Counter[str] = Counter()
        self._signalled = False
        self._stop = RankStopReason.NONE
        self._begin_ns = 0
        self.pass_fence()

    def new_group(self, *, timeout_s: float | None = None) -> Any:
        """Create a gloo group of all ranks for one use. Threads must not share a group with each other or with the user. Collective."""
        timeout_s = timeout_s or collective_timeout_s(self.environment)
        return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))

    def new_background_group(self) -> Any:
        """Create a group for background writes, which may take as long as the disk needs. Collective."""
        return self.new_group(timeout_s=max(_SLOW_WRITE_S, collective_timeout_s(self.environment)))

    def pass_fence(self) -> int:
        """Block until the lease is valid; return the time (CLOCK_BOOTTIME ns) at which the next step begins."""
        self._begin_ns, blocked_ns = self.fence.wait_for_lease()
        if blocked_ns >= _REPORTED_STALL_NS:
            self.pipe.send(ReportKind.STALL, seconds=blocked_ns / 1e9, cause="fence")
        return self._begin_ns

    def report(self, *, step: int, loss: float | None, measured: dict[str, float | None]) -> None:
        """Implement `phalanx.torch.report`."""
        begin_ns, end_ns, at_s = self._begin_ns, boottime_ns(), time.time()
        # The fence comes first: a superseded rank does not report its last step.
        self.pass_fence()
        given = {"loss": None if loss is None else float(loss), **measured}
        known = {name: value for name, value in given.items() if value is not None}
        self.pipe.send(ReportKind.STEP, step=step, begin_ns=begin_ns, end_ns=end_ns, at_s=at_s, **known)

    def exchange_requests(self, caller: str) -> AgreedRequest:
        """Return the agreement of all ranks at this point of the loop; callers between two steps share one. Collective."""
        self._calls[caller] += 1
        if self._calls[caller] > self.agreement.tick:
            self.agreement.advance(self._wish)
        return self.agreement.latest

    def agreed_stop(self, agreed: AgreedRequest) -> RankStopReason:
        """Return the stop reason that all ranks know. The first one stays in effect."""
        if not self._stop:
            self._stop = RankStopReason(agreed.request.stop)
        return self._stop

    def handle_sigterm(self) -> None:
        """Make SIGTERM request a stop instead of ending the process.

        Only for scripts that call `should_stop`: others would ignore SIGTERM until SIGKILL. A second SIGTERM ends the process.
        """
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def finish(self) -> None:
        """Implement `phalanx.torch.finish`.

        The groups end here, with their threads. One that is alive when Python exits aborts the rank if it is the last to release a tensor:
        it waits for the interpreter, which ends it in the midst of C++.
        """
        for saver in self.checkpointers:
            saver.close()
        self.agreement.leave()
        if dist.is_initialized():
            dist.destroy_process_group()
        self.pipe.send(
            ReportKind.BUSY, what="finished"
        )  # the script may continue without steps, such as a last evaluation or an upload

    def _on_sigterm(self, _signal: int, _frame: object) -> None:
        self._signalled = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _wish(self, tick_us: int) -> RankRequest:
        return RankRequest(
            stop=self._stop_reason(tick_us),
            checkpoints_requested=self.fence.checkpoints_requested(),
            save_due=int(self.rank == 0 and any(saver.is_due() for saver in self.checkpointers)),
            saving=int(any(saver.saving for saver in self.checkpointers)),
            tick_us=tick_us,
        )

    def _stop_reason(self, tick_us: int) -> RankStopReason:
        asked = self.fence.stop_reason()
        if asked:
            return asked
        if self._signalled:
            return RankStopReason.PREEMPTED
        left_s = self._left_s()
        save_s = sum(saver.save_s for saver in self.checkpointers)
        if left_s is not None and left_s < 2.0 * save_s + _DEADLINE_MARGIN_S + 2e-6 * tick_us:
            return RankStopReason.DEADLINE
        return RankStopReason.NONE

    def _left_s(self) -> float | None:
        """Return seconds until the time limit of the job; None without one. The clock of the lease page is preferred, as it does not jump."""
        deadline_ns = self.fence.job_deadline_ns()
        if deadline_ns:
            return (deadline_ns - boottime_ns()) / 1e9
        if self.environment.deadline_unix_s is not None:
            return self.environment.deadline_unix_s - time.time()
        return None


def collective_timeout_s(environment: RankEnvironment) -> float:
    """Return the timeout of one collective in seconds."""
    return environment.collective_timeout_s or _DEFAULT_TIMEOUT_S


def start_session(environment: RankEnvironment, *, backend: str | None, timeout_s: float | None) -> RankSession:
    """Choose the device, join the process group and attach to the supervisor. Collective."""
    install_stack_dump(environment.stacks_folder, environment.rank)
    device = _select_device(environment)
    if not dist.is_initialized():
        _join(environment, backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"), timeout_s, device)
    return RankSession(environment, device=device)


def _select_device(environment: RankEnvironment) -> Any:
    """Select the CUDA device by local rank, else the CPU with its share of threads.

    Raises:
        RuntimeError: the node has fewer visible devices than ranks.
    """
    if not environment.virtual and torch.cuda.is_available():
        count = torch.cuda.device_count()
        index = 0 if os.environ.get(MIG_PROFILE_VARIABLE) else environment.local_rank  # a task sees only its own slice
        if index >= count:
            raise RuntimeError(
                f"local rank {environment.local_rank} has no device: this node has {count} visible; "
                "start at most one rank per device"
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        return device
    if "OMP_NUM_THREADS" not in os.environ:
        cores = (
            1 if environment.virtual else len(os.sched_getaffinity(0))
        )  # virtual nodes share the cores of one machine
        torch.set_num_threads(max(1, cores // environment.local_world_size))
    return torch.device("cpu")


def _join(environment: RankEnvironment, backend: str, timeout_s: float | None, device: Any) -> None:
    timeout = datetime.timedelta(seconds=timeout_s or collective_timeout_s(environment))
    device_id = device if device.type == "cuda" and "nccl" in backend else None
    if environment.launched:
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=device_id)


_session: RankSession | None = None


def current_session() -> RankSession:
    """Return the session of this process.

    Raises:
        RuntimeError: `init` was not called.
    """
    if _session is None:
        raise RuntimeError("phalanx.torch.init() has not been called; call it first, in every rank")
    return _session


def open_session(make: Callable[[], RankSession]) -> RankSession:
    """Create the session of this process with `make`, or return the existing one."""
    global _session
    if _session is None:
        _session = make()
    return _session


def close_session() -> None:
    """Finish the session, if there is one. Collective."""
    global _session
    if _session is not None:
        session, _session = _session, None
        session.finish()


def wait_at_exit() -> None:
    """Wait for a checkpoint in progress at a normal exit, in case the script did not call `finish`."""
    if _session is None or hasattr(sys, "last_value"):  # after an uncaught exception: other ranks may be gone
        return
    for saver in _session.checkpointers:
        saver.wait(timeout_s=_EXIT_PATIENCE_S)


_EXIT_PATIENCE_S: Final = 10.0

"""One rank's training process: its group, its supervisor, and the calls between two steps.

A training loop reads

    run = phalanx.torch.init()
    saver = phalanx.torch.checkpoint(model, optimizer)
    for step in range(saver.resume().step + 1, steps + 1):
        loss = train_one_step(...)
        phalanx.torch.report(step=step, loss=loss, tokens=tokens)
        saver.save_if_due(step)
        if phalanx.torch.should_stop():
            break
    phalanx.torch.finish()

Step n is the n-th; a checkpoint "of step n" holds the state after it. Every call here that gives control back to the loop passes the
fence on its way out, and the next step counts as begun at the instant at which the fence was found open: so no step is begun past
the lease, whatever lay between the calls.
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

from phalanx.torch.agreement import Agreed, Agreement, Wish
from phalanx.torch.environment import RankEnvironment
from phalanx.torch.fence import Fence
from phalanx.torch.pipe import ReportPipe
from phalanx.torch.stacks import answer_with_stacks
from phalanx.wire.rank import ReportKind, StopReason, boottime_ns

_DEFAULT_TIMEOUT_S: Final = 600.0
"""Of a collective, where nobody says: torch's own default for NCCL."""
_SLOW_WRITE_S: Final = 3600.0
"""A rank may wait this long for another's disk in the background; a dead rank is noticed at once by its closed connection."""
_REPORTED_STALL_NS: Final = 1_000_000
"""Shorter shut fences than 1 ms are not worth a report."""
_DEADLINE_MARGIN_S: Final = 5.0
"""Kept between the end of the last save and the job's time limit, beside twice the measured save."""


class Session:
    """The state behind the functions of `phalanx.torch`; there is one per process, made by `init`."""

    def __init__(self, environment: RankEnvironment, *, device: Any) -> None:
        self.environment = environment
        self.device = device
        self.rank: int = dist.get_rank()
        self.world_size: int = dist.get_world_size()
        epoch, generation = environment.epoch, environment.generation
        self.fence = Fence.attach(environment.lease_page, epoch=epoch, generation=generation)
        self.pipe = ReportPipe(environment.report_pipe, rank=self.rank, epoch=epoch, generation=generation)
        self.agreement = Agreement(self.new_group() if self.world_size > 1 else None)
        self.savers: list[Any] = []
        self._calls: Counter[str] = Counter()
        self._signalled = False
        self._stop = StopReason.NONE
        self._begin_ns = 0
        self.pass_fence()

    def new_group(self, *, timeout_s: float | None = None) -> Any:
        """A gloo group of all ranks for one use. Sharing one between threads, or with the user's, is undefined. Collective."""
        timeout_s = timeout_s or collective_timeout_s(self.environment)
        return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))

    def new_background_group(self) -> Any:
        """As `new_group`, for writes in the background, whose length is the disk's."""
        return self.new_group(timeout_s=max(_SLOW_WRITE_S, collective_timeout_s(self.environment)))

    def pass_fence(self) -> int:
        """Block until the lease holds, and let the next step begin; the instant (CLOCK_BOOTTIME ns) at which it did."""
        self._begin_ns, blocked_ns = self.fence.pass_()
        if blocked_ns >= _REPORTED_STALL_NS:
            self.pipe.send(ReportKind.STALL, seconds=blocked_ns / 1e9, cause="fence")
        return self._begin_ns

    def report(self, *, step: int, loss: float | None, tokens: int | None, mfu: float | None) -> None:
        """See `phalanx.torch.report`."""
        begin_ns, end_ns, at_s = self._begin_ns, boottime_ns(), time.time()
        # The fence comes first: what a superseded rank did last is not even reported.
        self.pass_fence()
        given = {"loss": None if loss is None else float(loss), "tokens": tokens, "mfu": mfu}
        measured = {name: value for name, value in given.items() if value is not None}
        self.pipe.send(ReportKind.STEP, step=step, begin_ns=begin_ns, end_ns=end_ns, at_s=at_s, **measured)

    def tick(self, caller: str) -> Agreed:
        """The ranks' agreement at this point of the loop; several callers between two steps share one. Collective."""
        self._calls[caller] += 1
        if self._calls[caller] > self.agreement.tick:
            self.agreement.advance(self._wish)
        return self.agreement.agreed

    def stop_agreed(self, agreed: Agreed) -> StopReason:
        """The reason all ranks know of by now. Once there is one it stays."""
        if not self._stop:
            self._stop = StopReason(agreed.wish.stop)
        return self._stop

    def heed_signals(self) -> None:
        """Let SIGTERM ask for a stop instead of ending the process.

        Called only by scripts that ask `should_stop`: any other would ignore SIGTERM until SIGKILL. A second SIGTERM ends it.
        """
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def finish(self) -> None:
        """See `phalanx.torch.finish`."""
        for saver in self.savers:
            saver.wait()
        try:
            self.agreement.settle()
        except RuntimeError:  # a peer has left already: nothing is decided by this last exchange
            pass
        if dist.is_initialized():
            dist.destroy_process_group()
        self.pipe.send(ReportKind.BUSY, what="finished")  # what follows (a last evaluation, an upload) makes no steps

    def _on_sigterm(self, _signal: int, _frame: object) -> None:
        self._signalled = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _wish(self, tick_us: int) -> Wish:
        return Wish(
            stop=self._wanted_stop(tick_us),
            checkpoints_asked=self.fence.checkpoints_asked(),
            save_due=int(self.rank == 0 and any(saver.due() for saver in self.savers)),
            saving=int(any(saver.saving for saver in self.savers)),
            tick_us=tick_us,
        )

    def _wanted_stop(self, tick_us: int) -> StopReason:
        asked = self.fence.stop()
        if asked:
            return asked
        if self._signalled:
            return StopReason.PREEMPTED
        left_s = self._left_s()
        save_s = sum(saver.save_s for saver in self.savers)
        if left_s is not None and left_s < 2.0 * save_s + _DEADLINE_MARGIN_S + 2e-6 * tick_us:
            return StopReason.DEADLINE
        return StopReason.NONE

    def _left_s(self) -> float | None:
        """Seconds until the job's time limit; None without one. The page's clock does not jump, so it goes before Unix time."""
        deadline_ns = self.fence.job_deadline_ns()
        if deadline_ns:
            return (deadline_ns - boottime_ns()) / 1e9
        if self.environment.deadline_unix_s is not None:
            return self.environment.deadline_unix_s - time.time()
        return None


def collective_timeout_s(environment: RankEnvironment) -> float:
    """The timeout of one collective in seconds."""
    return environment.collective_timeout_s or _DEFAULT_TIMEOUT_S


def start(environment: RankEnvironment, *, backend: str | None, timeout_s: float | None) -> Session:
    """Choose the device, join the process group and attach to the supervisor. Collective."""
    answer_with_stacks(environment.stacks, environment.rank)
    device = _select_device(environment)
    if not dist.is_initialized():
        _join(environment, backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"), timeout_s, device)
    return Session(environment, device=device)


def _select_device(environment: RankEnvironment) -> Any:
    """The CUDA device by local rank, else the CPU with its share of threads.

    Raises:
        RuntimeError: the node shows fewer devices than it has ranks.
    """
    if not environment.virtual and torch.cuda.is_available():
        count = torch.cuda.device_count()
        if environment.local_rank >= count:
            raise RuntimeError(
                f"local rank {environment.local_rank} has no device: this node shows {count}; "
                "start as many ranks per node as it has devices"
            )
        device = torch.device("cuda", environment.local_rank)
        torch.cuda.set_device(device)
        return device
    if "OMP_NUM_THREADS" not in os.environ:
        cores = 1 if environment.virtual else len(os.sched_getaffinity(0))  # virtual nodes share one machine's cores
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


_session: Session | None = None


def current() -> Session:
    """The session `init` made.

    Raises:
        RuntimeError: there is none yet.
    """
    if _session is None:
        raise RuntimeError("phalanx.torch.init() has not been called; call it first, in every rank")
    return _session


def open_session(make: Callable[[], Session]) -> Session:
    """Keep what `make` returns as the session of this process; a second call returns the first one's."""
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
    """At a normal end of the interpreter let a checkpoint in the making be finished, should the script have forgotten `finish`."""
    if _session is None or hasattr(sys, "last_value"):  # an uncaught exception: peers may be gone, do not wait for them
        return
    for saver in _session.savers:
        saver.wait(timeout_s=_EXIT_PATIENCE_S)


_EXIT_PATIENCE_S: Final = 10.0

"""What a function learns of its job, and how it is checkpointed when the job must stop.

A preempted job gets SIGTERM; Phalanx runs it again by itself. A job near its time limit gets notice from a thread that watches the limit,
which `phalanx update` may move, and asks the head to run it again.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import ClassVar, Final

from submitit.core import job_environment, utils

from phalanx.wire.rank import LEASE_PAGE_VARIABLE, LeasePage, RankStopReason, boottime_ns

_POLL_S: Final = 0.5
_SIGTERM_CODE: Final = 128 + signal.SIGTERM
_AGAIN: Final = frozenset({RankStopReason.PREEMPTED, RankStopReason.DRAIN, RankStopReason.RESTART, RankStopReason.HANG})
_log = logging.getLogger("submitit")


class PhalanxJobEnvironment(job_environment.JobEnvironment):
    """The variables of a task of Phalanx, under submitit's names."""

    _env: ClassVar[dict[str, str]] = {
        "job_id": "PHALANX_JOB_ID",
        "num_tasks": "WORLD_SIZE",
        "num_nodes": "PHALANX_NNODES",
        "node": "PHALANX_NODE_RANK",
        "global_rank": "RANK",
        "local_rank": "LOCAL_RANK",
        "array_job_id": "PHALANX_ARRAY_JOB_ID",
        "array_task_id": "PHALANX_ARRAY_TASK_ID",
    }

    @property
    def hostnames(self) -> list[str]:
        """The addresses of the job's nodes, by node rank."""
        return os.environ.get("PHALANX_NODE_IPS", "").split() or [self.hostname]

    def _handle_signals(self, paths: utils.JobPaths, submission: utils.DelayedSubmission) -> None:
        page = _lease_page()
        handler = StopHandler(self, paths, submission, page)
        signal.signal(signal.SIGTERM, handler.on_sigterm)
        signal.signal(signal.SIGCONT, handler.bypass)
        signal.signal(self._usr_sig(), handler.on_time_limit)
        if self.global_rank == 0:
            # of a save that a crash cut short: submitit would refuse to save again
            _temporary(paths.submitted_pickle).unlink(missing_ok=True)
            _temporary(paths.result_pickle).unlink(missing_ok=True)
            if page is not None:
                threading.Thread(target=_watch_time_limit, args=(page, self._usr_sig()), daemon=True).start()

    def _requeue(self, countdown: int) -> None:
        from phalanx.submitit.job import head_client

        head_client().requeue(self.job_id)
        _log.info("Requeued job %s (%d remaining timeouts)", self.job_id, countdown)


class StopHandler(job_environment.SignalHandler):
    """Checkpoints the function when its job must stop.

    Args:
        env: of the task.
        job_paths: the files of the task.
        delayed: the function.
        page: what the supervisor says; None outside of a job.
    """

    def __init__(
        self,
        env: job_environment.JobEnvironment,
        job_paths: utils.JobPaths,
        delayed: utils.DelayedSubmission,
        page: LeasePage | None,
    ) -> None:
        super().__init__(env, job_paths, delayed)
        self._page = page
        self._stopping = False
        self._timed_out = False
        self._pickle_at_start = _identity(job_paths.submitted_pickle)

    def has_timed_out(self) -> bool:
        """Return whether this stop is for the time limit: Phalanx says so, where submitit compares clocks."""
        return self._timed_out

    def on_time_limit(self, signum: int, frame: FrameType | None = None) -> None:
        """Checkpoint, and have the job run again with a fresh time limit, as often as the executor allows."""
        if self._stopping:
            return
        self._stopping = self.env.global_rank == 0
        self._timed_out = True
        self.checkpoint_and_try_requeue(signum, frame)

    def on_sigterm(self, signum: int, frame: FrameType | None = None) -> None:
        """Checkpoint if the job will run again, and end this task. A SIGTERM from elsewhere is ignored, as submitit does."""
        reason = RankStopReason.NONE if self._page is None else self._page.read("stop")
        if reason == RankStopReason.NONE:
            self.bypass(signum, frame)
        elif reason not in _AGAIN:
            _log.info("This job is being stopped for good.")
            sys.exit(_SIGTERM_CODE)
        elif self._stopping:
            pass  # it has saved, or is about to
        elif self.env.global_rank == 0:
            self._stopping = True
            _log.warning("This job is preempted, and will run again.")
            self.checkpoint_and_exit(signum, frame)
        elif hasattr(self._delayed.function, "checkpoint"):
            self._stopping = True
            threading.Thread(target=self._end_after_first_task, daemon=True).start()
        else:
            sys.exit(_SIGTERM_CODE)

    def _end_after_first_task(self) -> None:
        """End this task once the first one has saved, which may need the others for it. If it never does, the grace ends them."""
        while _identity(self._job_paths.submitted_pickle) == self._pickle_at_start:
            time.sleep(_POLL_S)
        os._exit(_SIGTERM_CODE)


def _watch_time_limit(page: LeasePage, signum: int) -> None:
    """Send this process a signal some time before its limit: `signal_delay_s`, or half of the time for a shorter limit."""
    started_ns = boottime_ns()
    delay_ns = int(float(os.environ.get("SUBMITIT_PHALANX_SIGNAL_DELAY_S", "90")) * 1e9)
    while True:
        limit_ns = page.read("job_deadline_ns")
        if limit_ns and boottime_ns() >= limit_ns - min(delay_ns, (limit_ns - started_ns) // 2):
            os.kill(os.getpid(), signum)
            return
        time.sleep(_POLL_S)


def _lease_page() -> LeasePage | None:
    path = os.environ.get(LEASE_PAGE_VARIABLE)
    return LeasePage.attach(path) if path else None


def _temporary(path: Path) -> Path:
    return path.with_suffix(f"{path.suffix}.save_tmp")


def _identity(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns

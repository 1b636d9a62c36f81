"""joblib on the GPUs of the cluster: `import phalanx.joblib` registers the backend "phalanx".

with joblib.parallel_config(backend="phalanx", n_jobs=8, gpus=1):
    joblib.Parallel()(joblib.delayed(fit)(x) for x in xs)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from joblib import register_parallel_backend
from joblib.parallel import AutoBatchingMixin, ParallelBackendBase

from phalanx.client import Client
from phalanx.executor.executor import Executor

_IDLE_S: Final = 60.0  # how long the workers stay after a call, for the next one


class PhalanxBackend(AutoBatchingMixin, ParallelBackendBase):
    """Runs the calls of `joblib.Parallel` in the workers of an Executor, which stays for the next `Parallel` of the same context.

    Args:
        gpus: GPUs of each worker.
        executor: use this one, and leave it open. None makes one, with a worker for each of `n_jobs`.
        idle_worker_timeout: seconds for which the workers stay after a call.
        client: to the cluster, of an Executor that is made here.
        nesting_level, inner_max_num_threads: joblib's own; the threads of each worker.
        job: more arguments of the Executor, such as queue, time or memory.
    """

    supports_retrieve_callback = True
    supports_inner_max_num_threads = True
    default_n_jobs = -1

    def __init__(
        self,
        *,
        gpus: int = 1,
        executor: Executor | None = None,
        idle_worker_timeout: float = _IDLE_S,
        client: Client | None = None,
        nesting_level: int | None = None,
        inner_max_num_threads: int | None = None,
        **job: Any,
    ) -> None:
        super().__init__(nesting_level=nesting_level, inner_max_num_threads=inner_max_num_threads)
        self.parallel: Any = None
        self._gpus, self._client, self._job = gpus, client, job
        self._given = executor
        self._own: tuple[int, Executor] | None = None
        self._idle_s = idle_worker_timeout
        self._idle: threading.Timer | None = None
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return the number of workers; a negative `n_jobs` counts from what the whole cluster has, as joblib does for CPUs.

        Raises:
            ValueError: it is 0.
        """
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None:
            return 1
        return n_jobs if n_jobs > 0 else max(1, self._workers_of_cluster() + 1 + n_jobs)

    def configure(self, n_jobs: int = 1, parallel: Any = None, **_: Any) -> int:
        """Make the Executor, unless that of the call before has as many workers, and return their number."""
        self.parallel = parallel
        if self._given is not None:
            return self.effective_n_jobs(n_jobs)
        with self._lock:
            self._stop_timer()
            if n_jobs < 0 and self._own is not None:
                return self._own[0]
        count = self.effective_n_jobs(n_jobs)
        with self._lock:
            if self._own is not None and self._own[0] != count:
                self._release()
            if self._own is None:
                self._own = (count, self._make_executor(count))
        return count

    def submit(self, func: Callable[[], Any], callback: Callable[[Future[Any]], object] | None = None) -> Future[Any]:
        """Run a batch of calls in a worker."""
        executor = self._given or (self._own[1] if self._own is not None else None)
        if executor is None:
            raise RuntimeError("this Parallel is over: its workers have ended")
        future: Future[Any] = executor.submit(_call, func)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def retrieve_result_callback(self, out: Future[Any]) -> Any:
        """Return the result of a batch, or raise its exception."""
        return out.result()

    def abort_everything(self, ensure_ready: bool = True) -> None:  # noqa: ARG002  # the workers stay ready in any case
        """Cancel the batches that no worker has; those that run go on, and their results are dropped."""
        for future in list(self._open):
            future.cancel()

    def terminate(self) -> None:
        """Keep the workers for a while, for the next call."""
        self.reset_batch_stats()
        with self._lock:
            self._stop_timer()
            self._idle = threading.Timer(self._idle_s, self.close)
            self._idle.daemon = True
            self._idle.start()

    def close(self) -> None:
        """End the workers now."""
        with self._lock:
            self._stop_timer()
            self._release()

    def _release(self) -> None:
        if self._own is not None:
            self._own[1].shutdown(wait=False)
            self._own = None

    def _stop_timer(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _make_executor(self, count: int) -> Executor:
        job = {"name": "joblib", **self._job}
        if self.inner_max_num_threads is not None:
            threads = dict.fromkeys(self.MAX_NUM_THREADS_VARS, str(self.inner_max_num_threads))
            job["env"] = {**threads, **job.get("env", {})}
        return Executor(gpus=self._gpus, max_workers=count, client=self._client, **job)

    def _workers_of_cluster(self) -> int:
        """Return how many workers the nodes that are up could hold together."""
        up = [node for node in (self._client or Client()).nodes() if node.state == "up"]
        if self._gpus:
            return sum(len(node.devices) // self._gpus for node in up)
        return sum(int(node.cpus) for node in up)


def _call(batch: Callable[[], Any]) -> Any:
    return batch()


with contextlib.suppress(ValueError):  # imported twice
    register_parallel_backend("phalanx", PhalanxBackend)

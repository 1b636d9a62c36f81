"""`phalanx.Executor`: a `concurrent.futures.Executor` whose tasks run in the warm workers of one job.

The Executor pickles, numbers and spreads tasks over the nodes of its job, evens out, and completes futures. It keeps what has no result, so
that nothing is lost when a node dies: the job's next attempt gets it again. Brokers keep results, so that nothing is lost when the Executor's
own process dies: `Executor.attach` finds them (docs/decisions/0072).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import shlex
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor as BaseExecutor
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain, islice
from typing import Any, Final, NamedTuple, Self

from phalanx.client import Client
from phalanx.client.api_calls import path_segment
from phalanx.core.errors import BadRequest, Conflict, NotFound, PhalanxError, TryLater, Unreachable
from phalanx.core.hints import Hint, HintCode
from phalanx.executor.broker_link import BrokerLink
from phalanx.executor.dispatcher import Dispatcher, Task
from phalanx.executor.frames import FrameKind, frame
from phalanx.executor.futures import ExecutorBroken, TaskFuture
from phalanx.executor.serializing import pickled_arguments, pickled_function

_ENDED: Final = frozenset({"succeeded", "failed", "cancelled", "timeout"})
_POLL_FIRST_S: Final = 0.01  # for the job to start, and for its next attempt; grows to the next constant
_POLL_MAX_S: Final = 0.5
_CHECK_S: Final = 5.0  # whether the job still runs, while all nodes are connected
_CLOSE_S: Final = 10.0  # for the job to end by itself
_CONNECTING_MAX: Final = 8  # nodes at a time
_WELCOME_S: Final = 10.0  # for a broker to answer; it starts within a second
_TELL_S: Final = 10.0  # after which the user learns that the job waits, and why
_RETRY: Final = 20  # attempts: a node that dies takes all workers with it


class Executor(BaseExecutor):
    """Run Python functions on GPUs of the cluster.

    The job is submitted with the first task, and ends with `shutdown`; without this process it ends ten minutes after its last task. A task
    runs once; only if its worker or node dies, it runs again, and a worker that dies twice in one task fails that task.

    Args:
        gpus: GPUs of each worker; 0 for none. Each worker sees its own only.
        max_workers: number of workers; the job starts once there is room for all.
        name: of the job.
        initializer: called in each worker before its first task. If it raises, the Executor is broken.
        initargs: its arguments.
        python: the interpreter of the workers, with Phalanx installed; this program's own if empty.
        client: to the cluster; `Client()` if None.
        job: more keys of a job file, such as queue, project, image, requirements, memory, time or env.

    Raises:
        BadRequest: an argument is invalid.
    """

    def __init__(
        self,
        *,
        gpus: int = 1,
        max_workers: int = 1,
        name: str = "executor",
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        python: str = "",
        client: Client | None = None,
        **job: Any,
    ) -> None:
        attached_to = job.pop("_attached_to", "")
        if type(gpus) is not int or gpus < 0:
            raise BadRequest(f"gpus is {gpus!r}", hint="use a number of GPUs for each worker, or 0")
        if type(max_workers) is not int or max_workers < 1:
            raise BadRequest(f"max_workers is {max_workers!r}", hint="use 1 or more")
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")
        self._python = python or sys.executable
        self._body = _job_body(self._python, gpus, max_workers, {"name": name, **job})
        self._client = client or Client()
        self._lock = threading.Condition(threading.RLock())
        self._job_id: str = attached_to
        self._name = os.urandom(8).hex()
        self._dispatcher = Dispatcher(self._lock, partial(self._break, None), attached=bool(attached_to))
        self._dispatcher.on_idle = self._wake
        self._initializer = (initializer, initargs) if initializer is not None else None
        self._numbers_from, self._count = 0, 0
        self._closing = False
        self._broken: ExecutorBroken | None = None
        self._links: dict[int, BrokerLink] = {}
        self._manager: threading.Thread | None = None
        self._epoch = 0
        self._trouble = ""
        _live.add(self)

    @classmethod
    def attach(cls, job_id: str, *, python: str = "", client: Client | None = None) -> Self:
        """Take over the Executor of a job whose program is gone. `futures` has its tasks once the nodes are connected, which this waits for.

        Raises:
            BadRequest: the job is no Executor's.
            ExecutorBroken: it has ended.
            NotFound: there is no such job.
        """
        client = client or Client()
        words = shlex.split(_look(client, job_id).command)
        if "phalanx.executor.broker" not in words:
            raise BadRequest(f"job {job_id} is no Executor's", hint="attach takes the job of an Executor")
        found = cls(python=python or words[0], client=client, _attached_to=job_id)
        found._numbers_from = int.from_bytes(os.urandom(3), "big") >> 2 << 40  # apart from those of the programs before
        found._start()
        found.wait_connected()
        return found

    # ------------------------------------------------------------------------------------------------------------- tasks

    @property
    def job_id(self) -> str:
        """The job; empty before it is submitted, just after the first task."""
        return self._job_id

    @property
    def futures(self) -> dict[int, TaskFuture]:
        """The futures of an attached Executor's earlier tasks, by number, which is their order."""
        with self._lock:
            return dict(sorted(self._dispatcher.earlier.items()))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> TaskFuture:
        """Run `fn(*args, **kwargs)` in a worker. Arguments that are futures are replaced by their results before it is sent.

        Raises:
            ExecutorBroken: the job has ended.
            RuntimeError: after `shutdown`.
        """
        with self._lock:
            if self._broken is not None:
                raise self._broken
            if self._closing:
                raise RuntimeError("cannot schedule new futures after shutdown")
            number = self._numbers_from + self._count
            self._count += 1
            future = TaskFuture(number, self._dispatcher.cancelled)
            self._dispatcher.expect(future)
        self._start()  # the job is submitted while the first function is pickled, for which cloudpickle is imported
        needed = [one for one in chain(args, kwargs.values()) if isinstance(one, Future)]
        if needed:
            _Inputs(needed, partial(self._send_with_results, future, fn, args, kwargs))
        else:
            self._send(future, fn, args, kwargs)
        return future

    def map(
        self, fn: Callable[..., Any], /, *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[Any]:
        """Return the results of `fn` for the items of the iterables, in their order, as `Executor.map`. With `chunksize`, so many calls are one task.

        Raises:
            TimeoutError: from the iterator, if a result is not there `timeout` seconds after this call.
            ValueError: `chunksize` is below 1.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout)
        chunks = _chunks(zip(*iterables, strict=False), chunksize)
        return chain.from_iterable(super().map(partial(_call_each, fn), chunks, timeout=timeout))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks, and end the job once those before are done.

        Args:
            wait: return only when all futures are done and the job was asked to end.
            cancel_futures: cancel those that no worker has.
        """
        with self._lock:
            self._closing = True
            manager = self._manager
        if cancel_futures:
            for future in self._dispatcher.open_futures():
                future.cancel()
        self._wake()
        if wait and manager is not None and manager is not threading.current_thread():
            manager.join()

    def wait_connected(self) -> None:
        """Wait until the job runs and all of its nodes are connected.

        Raises:
            ExecutorBroken: the job has ended.
        """
        self._start()
        with self._lock:
            while not self._dispatcher.complete:
                if self._broken is not None:
                    raise self._broken
                self._lock.wait(1.0)

    def _send(self, future: TaskFuture, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            digest, function = pickled_function(fn)
            arguments = pickled_arguments(args, kwargs)
        except Exception as error:  # noqa: BLE001  # of the user's objects
            self._dispatcher.fail(future, error)
            return
        self._dispatcher.add(Task(future, digest, arguments), function)

    def _send_with_results(
        self, future: TaskFuture, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        try:
            given = tuple(one.result() if isinstance(one, Future) else one for one in args)
            named = {name: one.result() if isinstance(one, Future) else one for name, one in kwargs.items()}
        except BaseException as error:  # noqa: BLE001  # an input failed or was cancelled: so does this task
            self._dispatcher.fail(future, error)
            return
        self._send(future, fn, given, named)

    # --------------------------------------------------------------------------------------------------------------- job

    def _start(self) -> None:
        if self._manager is not None:
            return
        with self._lock:
            if self._manager is None:
                self._manager = threading.Thread(target=self._manage, name="phalanx-executor", daemon=True)
                self._manager.start()

    def _wake(self) -> None:
        with self._lock:
            self._lock.notify_all()

    def _manage(self) -> None:
        """Submit the job, keep its nodes connected, and end it."""
        try:
            if not self._job_id:
                self._job_id = self._client.submit(self._body).id
                _import_early()
            self._keep_connected()
        except PhalanxError as error:
            self._break(error)
        except BaseException as error:
            self._break(ExecutorBroken(f"internal error: {error}"))
            raise
        finally:
            for link in list(self._links.values()):
                link.close()
            self._wake()

    def _keep_connected(self) -> None:
        pause_s, tell_at = _POLL_FIRST_S, time.monotonic() + _TELL_S
        while not self._is_done():
            try:
                if self._connect():
                    pause_s = _POLL_FIRST_S
                    self._wait(_CHECK_S)
                    continue
            except (Unreachable, TryLater, Conflict, NotFound) as error:
                if self._broken is not None or isinstance(error, NotFound):
                    raise
                self._trouble = error.message
            if time.monotonic() > tell_at:
                tell_at = float("inf")
                self._tell_waiting()
            if 0 < self._dispatcher.node_count <= len(self._links):
                pause_s = _POLL_MAX_S  # all are being connected: the last broker's answer wakes this
            self._wait(pause_s)
            pause_s = min(pause_s * 1.5, _POLL_MAX_S)
        self._end()

    def _tell_waiting(self) -> None:
        with contextlib.suppress(PhalanxError):
            job = _look(self._client, self._job_id)
            if job.state == "pending":
                _log.warning("job %s of the Executor waits: %s", job.id, job.detail)
            elif self._trouble:
                _log.warning("not all nodes of job %s are connected: %s", job.id, self._trouble)

    def _wait(self, limit_s: float) -> None:
        """Wait for a lost connection, the end of all tasks, or a while."""
        with self._lock:
            if not self._is_done() and (limit_s < _CHECK_S or self._dispatcher.complete):
                self._lock.wait(limit_s)

    def _is_done(self) -> bool:
        return self._broken is not None or (self._closing and not self._dispatcher.open_count)

    def _connect(self) -> bool:
        """Connect to nodes that are not connected; return whether all are.

        Raises:
            ExecutorBroken: the job has ended.
        """
        job = _look(self._client, self._job_id)
        if job.state in _ENDED:
            raise ExecutorBroken(
                f"job {job.id} of the Executor has ended, {job.state}" + (f": {job.detail}" if job.detail else ""),
                hint=Hint(HintCode.SHOW_JOB, job=job.id),
            )
        if job.attempt_state != "running":
            return False
        if job.epoch != self._epoch:
            self._epoch = job.epoch
            for link in list(self._links.values()):
                link.close()
            self._dispatcher.set_nodes(job.nodes)
        for link in list(self._links.values()):
            if not link.welcomed and time.monotonic() - link.opened_s > _WELCOME_S:
                link.close()  # the command was lost on its way: another connection is made
        missing = [rank for rank in range(len(job.nodes)) if rank not in self._links]
        with ThreadPoolExecutor(max_workers=_CONNECTING_MAX) as opening:
            list(opening.map(self._open, missing))
        return self._dispatcher.complete

    def _open(self, rank: int) -> None:
        hello = (self._name, self._dispatcher.received(rank))
        link = BrokerLink(self._client, self._job_id, rank, self._python, hello)
        self._links[rank] = link
        link.start(self._dispatcher.on_frames, self._on_lost, self._first_frames())

    def _first_frames(self) -> list[bytes]:
        """Return what each worker runs first."""
        if self._initializer is None:
            return []
        return self._dispatcher.initializer(*self._initializer)

    def _on_lost(self, link: BrokerLink) -> None:
        with self._lock:
            if self._links.get(link.rank) is link:
                del self._links[link.rank]
                self._dispatcher.lost(link.rank)
            self._lock.notify_all()

    def _break(self, error: PhalanxError | None, message: str = "") -> None:
        """Fail all tasks: the job has ended, or cannot begin."""
        broken = error if isinstance(error, ExecutorBroken) else ExecutorBroken(message or str(error))
        if error is not None and broken is not error:
            broken.hint = error.hint
            broken.__cause__ = error
        with self._lock:
            self._broken = self._broken or broken
        self._dispatcher.fail_all(broken)
        self._wake()

    def _end(self) -> None:
        """End the job: its brokers end when asked to, and it succeeds; one that does not run is cancelled."""
        if self._broken is not None:
            if self._job_id and not isinstance(self._broken.__cause__, PhalanxError):
                self._cancel()
            return
        for link in list(self._links.values()):
            link.send(frame(FrameKind.CLOSE))
        until = time.monotonic() + (_CLOSE_S if self._links else 0.0)
        with self._lock:
            while self._links and time.monotonic() < until:
                self._lock.wait(0.1)
        if not self._dispatcher.ever_complete or self._links:
            self._cancel()

    def _cancel(self) -> None:
        with contextlib.suppress(PhalanxError):
            self._client.cancel(self._job_id)


class _JobState(NamedTuple):
    """What the Executor needs of its job. The whole record takes 0.2 s to load."""

    id: str
    state: str
    attempt_state: str | None
    epoch: int
    nodes: list[str]
    detail: str
    command: str


def _look(client: Client, job_id: str) -> _JobState:
    job = json.loads(client.transport.json("GET", f"/v1/jobs/{path_segment(job_id)}"))["job"]
    return _JobState(
        id=job.get("id"),
        state=job.get("state"),
        attempt_state=job.get("attempt_state"),
        epoch=job.get("epoch", 0),
        nodes=job.get("nodes", []),
        detail=job.get("detail", ""),
        command=job.get("command"),
    )


def _import_early() -> None:
    """Import what the connections need, while the job starts: afterwards it would delay the first result."""
    import websockets.sync.client  # noqa: F401

    import phalanx.wire.api.execs  # noqa: F401


class _Inputs:
    """Calls back once all futures are done."""

    def __init__(self, needed: list[Future[Any]], then: Callable[[], None]) -> None:
        self._left, self._then, self._lock = len(needed), then, threading.Lock()
        for one in needed:
            one.add_done_callback(self._done)

    def _done(self, _: Future[Any]) -> None:
        with self._lock:
            self._left -= 1
            ready = self._left == 0
        if ready:
            self._then()


def _job_body(python: str, gpus: int, workers: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the job: one broker on each node, with as many workers as the node's GPUs allow.

    Raises:
        BadRequest: `job` contradicts the other arguments.
    """
    for name in ("run", "gpus_per_node", "tasks_per_node", "array", "checkpoint"):
        if name in job:
            raise BadRequest(f"{name} is not for an Executor", hint="use gpus and max_workers")
    nodes = job.get("nodes", 1)
    on_each = 0 if gpus else -(-workers // nodes)
    run = [python, "-m", "phalanx.executor.broker", str(gpus), str(on_each)]
    size: dict[str, Any] = {"gpus": gpus * workers}
    if not gpus:
        size = {"gpus": 0, "nodes": nodes}
    return {"run": run, **size, "tasks_per_node": 1, "workdir": os.getcwd(), "retry": _RETRY, "grace": "2s", **job}


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    source = iter(items)
    while chunk := list(islice(source, size)):
        yield chunk


def _call_each(function: Callable[..., Any], chunk: list[tuple[Any, ...]]) -> list[Any]:
    return [function(*given) for given in chunk]


_log = logging.getLogger(__name__)
_live: weakref.WeakSet[Executor] = weakref.WeakSet()


@atexit.register
def _shut_down_all() -> None:
    """Wait for the tasks of Executors that were not shut down, as a process pool does."""
    for executor in list(_live):
        executor.shutdown()

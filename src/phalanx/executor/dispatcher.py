"""Spreads the tasks of an Executor over its nodes, evens out, and completes futures. Called by several threads, under one lock.

Futures are completed outside the lock, because their callbacks may submit tasks. No dataclass: a program that imports this waits for a first result.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from functools import partial
from typing import Any, Final

from phalanx.executor.broker_link import BrokerLink
from phalanx.executor.frames import (
    INITIALIZER,
    PIECE_BYTES,
    FrameKind,
    ResultStatus,
    fetch_frame,
    frame,
    numbers_frame,
    split_numbers,
    split_piece,
    split_result,
    task_frame,
)
from phalanx.executor.futures import RemoteTraceback, TaskFuture, WorkerDied
from phalanx.executor.serializing import pickled_arguments, pickled_function

_PIECES_AHEAD: Final = 4
_AHEAD_S: Final = 0.1  # a node with less work than this is given some of another's
_AHEAD_MAX: Final = 200  # tasks for each worker
_WEIGHT: Final = 0.1  # of the last task in the mean duration


class Task:
    """One task. `arguments` is None for one that an earlier program submitted. `index`: of its last sending to its node."""

    __slots__ = ("arguments", "digest", "future", "index", "node")

    def __init__(self, future: TaskFuture, digest: bytes = b"", arguments: bytes | None = None) -> None:
        self.future, self.digest, self.arguments = future, digest, arguments
        self.node: _Node | None = None
        self.index = -1


class _Fetch:
    """A large result on its way. `asked`: offset up to which it was asked for."""

    __slots__ = ("asked", "pieces", "received", "total")

    def __init__(self, total: int) -> None:
        self.total, self.asked, self.received = total, 0, 0
        self.pieces: list[bytes] = []


class _Node:
    """A node of the job, while it is connected and while it is not.

    Attributes:
        link: None while it is not connected, or has not answered yet.
        run: of its broker.
        tasks: that it has, by number.
        sent: how many tasks were sent to this run.
        received: how many results came from this run.
        results_before: how many results its broker had when it was connected.
        functions: digests of those that it has.
        doubtful: tasks of an earlier program that its broker may have lost.
        taking: it was asked to give tasks back.
    """

    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.name, self.run, self.workers = rank, name, "", 1
        self.link: BrokerLink | None = None
        self.tasks: dict[int, Task] = {}
        self.sent = self.received = self.results_before = 0
        self.functions: set[bytes] = set()
        self.fetches: dict[int, _Fetch] = {}
        self.doubtful: set[int] = set()
        self.taking = False

    @property
    def load(self) -> float:
        """Tasks for each worker."""
        return len(self.tasks) / self.workers


class Dispatcher:
    """See the module. `on_broken`: called with the reason if an initializer failed; `on_idle`: when no task is left."""

    def __init__(self, lock: threading.Condition, on_broken: Callable[[str], None], *, attached: bool) -> None:
        self._lock, self._on_broken, self._attached = lock, on_broken, attached
        self.on_idle: Callable[[], None] = lambda: None
        self.earlier: dict[int, TaskFuture] = {}
        self.ever_complete = False
        self._nodes: list[_Node] = []
        self._tasks: dict[int, Task] = {}
        self._expected: dict[int, TaskFuture] = {}
        self._homeless: deque[Task] = deque()
        self._functions: dict[bytes, tuple[bytes, int]] = {}
        self._mean_s = 1.0

    # ------------------------------------------------------------------------------------------------- the Executor's side

    @property
    def open_count(self) -> int:
        """How many futures are not done."""
        return len(self._expected)

    @property
    def node_count(self) -> int:
        """How many nodes the job's attempt has."""
        return len(self._nodes)

    @property
    def complete(self) -> bool:
        """Whether all nodes are connected."""
        return bool(self._nodes) and all(node.link is not None for node in self._nodes)

    def open_futures(self) -> list[TaskFuture]:
        """The futures that are not done."""
        with self._lock:
            return list(self._expected.values())

    def expect(self, future: TaskFuture) -> None:
        """Count a future from now on, also while its inputs are not there."""
        with self._lock:
            self._expected[future.number] = future

    def add(self, task: Task, function: bytes) -> None:
        """Send a task to the node with the least work."""
        with self._lock:
            if task.future.number not in self._expected:
                return  # cancelled
            self._tasks[task.future.number] = task
            known, uses = self._functions.get(task.digest, (function, 0))
            self._functions[task.digest] = known, uses + 1
            self._place(task)

    def fail(self, future: TaskFuture, error: BaseException) -> None:
        """Fail a task that was not sent."""
        with self._lock:
            self._forget(future.number)
        _complete(future, error=error)
        self._tell_idle()

    def fail_all(self, error: BaseException) -> None:
        """Fail all tasks."""
        with self._lock:
            futures = list(self._expected.values())
            self._expected.clear()
            self._tasks.clear()
            self._homeless.clear()
            for node in self._nodes:
                node.tasks.clear()
        for future in futures:
            _complete(future, error=error)

    def cancelled(self, number: int) -> None:
        """Do not start a task, if that is still possible."""
        with self._lock:
            task = self._tasks.get(number)
            if task is not None and task.node is not None and task.node.link is not None:
                task.node.link.send(numbers_frame(FrameKind.DROP, [number]))
            self._forget(number)
        self._tell_idle()

    def initializer(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[bytes]:
        """Return the frames of the task that each worker runs first."""
        digest, data = pickled_function(function)
        return [
            frame(FrameKind.FUNCTION, digest, data),
            task_frame(INITIALIZER, digest, pickled_arguments(arguments, {})),
        ]

    def set_nodes(self, names: Sequence[str]) -> None:
        """The job's attempt has these nodes: tasks of nodes that it has no longer go to others."""
        with self._lock:
            gone = self._nodes[len(names) :]
            del self._nodes[len(names) :]
            for rank in range(len(self._nodes), len(names)):
                self._nodes.append(_Node(rank, names[rank]))
            for node, name in zip(self._nodes, names, strict=True):
                node.link, node.name = None, name
            for node in gone:
                for task in node.tasks.values():
                    self._place(task)

    def received(self, rank: int) -> int:
        """How many results of the broker's run are here."""
        with self._lock:
            return self._nodes[rank].received

    def lost(self, rank: int) -> None:
        """A node is not connected any more."""
        with self._lock:
            if rank < len(self._nodes):
                self._nodes[rank].link = None
                self._nodes[rank].taking = False

    def _forget(self, number: int) -> None:
        self._expected.pop(number, None)
        task = self._tasks.pop(number, None)
        if task is None:
            return
        if task.node is not None:
            task.node.tasks.pop(number, None)
        if task.arguments is not None:
            data, uses = self._functions[task.digest]
            if uses > 1:
                self._functions[task.digest] = data, uses - 1
            else:
                del self._functions[task.digest]

    def _tell_idle(self) -> None:
        if not self._expected:
            self.on_idle()

    # -------------------------------------------------------------------------------------------------------- the nodes' side

    def on_frames(self, link: BrokerLink, frames: list[tuple[FrameKind, bytes]]) -> None:
        """Handle what a node sent; called on its reading thread."""
        done: list[Callable[[], None]] = []
        with self._lock:
            if link.rank >= len(self._nodes):
                return
            node = self._nodes[link.rank]
            for kind, body in frames:
                if kind is FrameKind.WELCOME:
                    self._on_welcome(node, link, json.loads(body))
                elif kind is FrameKind.HELD:
                    self._on_held(node, split_numbers(body))
                elif kind is FrameKind.STARTED:
                    self._on_started(split_numbers(body), done)
                elif kind is FrameKind.RESULT:
                    self._on_result(node, body, done)
                elif kind is FrameKind.GIVEN:
                    self._on_given(node, split_numbers(body))
                elif kind is FrameKind.PIECE:
                    self._on_piece(node, body, done)
            if node.doubtful:
                self._fail_doubtful(node, done)
            self._even_out(node)
        for complete in done:
            complete()
        self._tell_idle()

    def _on_welcome(self, node: _Node, link: BrokerLink, welcome: dict[str, Any]) -> None:
        again = welcome["run"] == node.run
        link.welcomed = True
        node.link, node.workers = link, max(1, welcome["workers"])
        node.results_before = welcome["results"]
        accepted = welcome["accepted"] if again else 0
        if not again:
            node.run, node.sent, node.received = welcome["run"], 0, 0
            node.functions.clear()
            node.fetches.clear()
        unknown = [task for task in node.tasks.values() if not again or task.index >= accepted]
        node.sent = accepted
        for task in unknown:
            if task.arguments is not None:
                self._send(node, task)
        for number, fetch in node.fetches.items():
            fetch.asked = fetch.received
            self._ask_pieces(node, number, fetch)
        if self.complete:
            self.ever_complete = True
            self._lock.notify_all()
        waiting = len(self._homeless)
        for _ in range(waiting):
            self._place(self._homeless.popleft())

    def _on_held(self, node: _Node, numbers: tuple[int, ...]) -> None:
        """Tasks that an earlier program submitted: their futures are `earlier`."""
        held = set(numbers)
        for number in numbers:
            if number not in self._tasks and self._attached:
                task = self._tasks[number] = Task(self._earlier(number))
                task.node = node
                node.tasks[number] = task
                self._expected[number] = task.future
        node.doubtful = {number for number, task in node.tasks.items() if task.arguments is None} - held

    def _fail_doubtful(self, node: _Node, done: list[Callable[[], None]]) -> None:
        """Fail tasks of an earlier program whose node died before they had a result, and whose arguments died with it."""
        if node.received >= node.results_before:
            for number in node.doubtful:
                error = WorkerDied(f"task {number} was lost with its node, and the program that submitted it was gone")
                done.append(partial(_complete, self._finished(number), error=error))
            node.doubtful.clear()

    def _earlier(self, number: int) -> TaskFuture:
        if number not in self.earlier:
            self.earlier[number] = TaskFuture(number, self.cancelled)
        return self.earlier[number]

    def _on_started(self, numbers: tuple[int, ...], done: list[Callable[[], None]]) -> None:
        for number in numbers:
            task = self._tasks.get(number)
            if task is not None and not task.future.running():
                done.append(task.future.start)

    def _on_result(self, node: _Node, body: bytes, done: list[Callable[[], None]]) -> None:
        place, number, status, worker, seconds, payload = split_result(body)
        if number == INITIALIZER:
            _, text = pickle.loads(payload)  # noqa: S301  # of the user's own worker
            done.append(lambda: self._on_broken(f"the initializer failed: {text.strip().splitlines()[-1]}"))
            return
        node.received = max(node.received, place + 1)
        node.doubtful.discard(number)
        self._mean_s += _WEIGHT * (seconds - self._mean_s)
        task = self._tasks.get(number)
        if task is None and (not self._attached or number in self.earlier):
            return  # its result came already
        future = self._earlier(number) if task is None else task.future
        future.node, future.worker, future.seconds = node.name, worker, seconds
        if status is ResultStatus.FILE:
            self._expected[number] = future
            fetch = node.fetches[number] = _Fetch(int.from_bytes(payload, "big"))
            self._ask_pieces(node, number, fetch)
            return
        self._forget(number)
        done.append(partial(_complete_with, future, status, payload))

    def _on_given(self, node: _Node, numbers: tuple[int, ...]) -> None:
        node.taking = False
        for number in numbers:
            task = node.tasks.pop(number, None)
            if task is not None:
                task.node = None
                self._place(task)

    def _on_piece(self, node: _Node, body: bytes, done: list[Callable[[], None]]) -> None:
        number, offset, total, data = split_piece(body)
        fetch = node.fetches.get(number)
        if fetch is None or offset != fetch.received:
            return
        if not total:
            del node.fetches[number]
            error = WorkerDied(f"the large result of task {number} is not on {node.name} any more")
            done.append(partial(_complete, self._finished(number), error=error))
            return
        fetch.pieces.append(data)
        fetch.received += len(data)
        if fetch.received < total:
            self._ask_pieces(node, number, fetch)
            return
        del node.fetches[number]
        finished = self._finished(number)
        if finished is not None:
            done.append(partial(_complete_with, finished, ResultStatus.VALUE, b"".join(fetch.pieces)))

    def _finished(self, number: int) -> TaskFuture | None:
        future = self._expected.get(number)
        self._forget(number)
        return future

    def _ask_pieces(self, node: _Node, number: int, fetch: _Fetch) -> None:
        """Keep some pieces on their way."""
        while node.link is not None and fetch.asked < min(fetch.total, fetch.received + _PIECES_AHEAD * PIECE_BYTES):
            node.link.send(fetch_frame(number, fetch.asked))
            fetch.asked += PIECE_BYTES

    # ---------------------------------------------------------------------------------------------------------- spreading

    def _place(self, task: Task) -> None:
        """Give a task to the connected node with the least work."""
        task.node = None
        connected = [node for node in self._nodes if node.link is not None]
        if not connected:
            self._homeless.append(task)
            return
        if task.future.number in self._tasks:
            self._send(min(connected, key=lambda node: node.load), task)

    def _send(self, node: _Node, task: Task) -> None:
        assert node.link is not None
        assert task.arguments is not None
        frames = [task_frame(task.future.number, task.digest, task.arguments)]
        if task.digest not in node.functions:
            node.functions.add(task.digest)
            frames.insert(0, frame(FrameKind.FUNCTION, task.digest, self._functions[task.digest][0]))
        task.node, task.index = node, node.sent
        node.sent += 1
        node.tasks[task.future.number] = task
        node.link.send(*frames)

    def _even_out(self, node: _Node) -> None:
        """Take waiting tasks of the node with the most for one that will soon have none. Not of an earlier program: their arguments are not here."""
        ahead = 1 + min(_AHEAD_MAX, _AHEAD_S / max(self._mean_s, 1e-6))
        if self._attached or node.link is None or node.load >= ahead:
            return
        rich = max((one for one in self._nodes if one.link is not None), key=lambda one: one.load)
        count = (len(rich.tasks) - len(node.tasks)) * node.workers // (node.workers + rich.workers)
        if rich is node or rich.taking or rich.link is None or count < 1 or rich.load < node.load + 2:
            return
        rich.taking = True
        rich.link.send(frame(FrameKind.TAKE, count.to_bytes(4, "big")))


def _complete(future: TaskFuture | None, value: Any = None, error: BaseException | None = None) -> None:
    """Complete a future, unless it was cancelled meanwhile."""
    if future is None:
        return
    with contextlib.suppress(InvalidStateError):
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)


def _complete_with(future: TaskFuture, status: ResultStatus, payload: bytes) -> None:
    """Complete a future with what its worker sent. The pickles come from the user's own processes."""
    if status is ResultStatus.WORKER_DIED:
        hint = "the job's log has its last words; --memory of the job may be too little"
        _complete(future, error=WorkerDied(payload.decode(errors="replace"), hint=hint))
        return
    try:
        value = pickle.loads(payload)  # noqa: S301
    except BaseException as error:  # noqa: BLE001  # a class that is not here
        _complete(future, error=error)
        return
    if status is ResultStatus.ERROR:
        raised, text = value
        raised.__cause__ = RemoteTraceback(text)
        _complete(future, error=raised)
    else:
        _complete(future, value)

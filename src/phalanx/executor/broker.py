"""The broker: `python -m phalanx.executor.broker GPUS WORKERS`, the only task of an Executor's job on each node.

It takes tasks from the Executor, hands them to its workers, which it forks, and keeps their results. The Executor connects by an exec session
and the socket `executor.sock` in the attempt's own folder: no port is open. It may leave and come back: work goes on, and results stay in the
journal. A task whose worker dies runs once more. One thread; standard library only, and it loads no pickle.
Its start is most of the time to a first result, so that it builds no dataclass: every process compiles each of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from phalanx.executor.frames import (
    DIGEST_BYTES,
    INITIALIZER,
    ORDER_BYTES,
    PIECE_BYTES,
    FrameKind,
    FrameReader,
    InvalidFrame,
    Order,
    ResultStatus,
    frame,
    numbers_frame,
    pack_order,
    piece_frame,
    result_frame,
    split_fetch,
    split_numbers,
    split_result,
    split_task,
    unpack_order,
)
from phalanx.executor.journal import Journal
from phalanx.executor.relay import PAGE, SOCKET
from phalanx.executor.worker import Worker, result_path
from phalanx.wire.rank import LOCAL_CHECKPOINTS_VARIABLE

IDLE_S: Final = 600.0  # without an Executor and without tasks, the job ends
_OUT_BYTES_MAX: Final = 1 << 20  # to the client; results beyond it wait in the journal
_AHEAD_MAX: Final = 64  # orders for each worker beyond the one that it runs, if tasks are short
_AHEAD_S: Final = 0.02  # work that is ahead of a worker
_READ_BYTES: Final = 1 << 18
_WAKE_S: Final = 1.0
_MISSING_S: Final = 1.0  # a live worker says within milliseconds what it has taken
_END_S: Final = 2.0  # for the client to read the last results
_WEIGHT: Final = 0.2  # of the last task in the mean duration


class _Peer:
    """One end of a connection. `out`: bytes that the other end has not taken yet."""

    __slots__ = ("connection", "out", "reader")

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.reader, self.out = connection, FrameReader(), bytearray()


class _WorkerProcess(_Peer):
    """A worker. `task`: that it runs."""

    __slots__ = ("number", "pid", "task")

    def __init__(self, connection: socket.socket, number: int, pid: int) -> None:
        super().__init__(connection)
        self.number, self.pid = number, pid
        self.task: int | None = None


class _Client(_Peer):
    """The Executor. `sent`: how many results it got."""

    __slots__ = ("sent", "welcomed")

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.welcomed, self.sent = False, 0


class Broker:
    """See the module. Workers take orders from one queue, each when it is free, so that no task waits behind a long one."""

    def __init__(
        self, listener: socket.socket, journal: Journal, *, workers: int, devices: Sequence[str], per_worker: int
    ) -> None:
        self._listener, self._journal = listener, journal
        self._devices, self._per_worker = devices, per_worker
        self._run = os.urandom(8).hex()
        self._client_name, self._accepted = "", 0
        self._client: _Client | None = None
        self._waiting: deque[int] = deque(journal.waiting)
        self._dropped: set[int] = set()
        self._handed: dict[int, None] = {}
        self._deaths: dict[int, str] = {}
        self._missing: tuple[float, set[int]] = 0.0, set()
        self._mean_s = 1.0
        self._closing = False
        self._idle_since = time.monotonic()
        self._chooser = selectors.DefaultSelector()
        self._chooser.register(self._listener, selectors.EVENT_READ, None)
        self._orders, self._queue = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setblocking(False)
        self._workers = [self._fork(number) for number in range(workers)]

    def run(self) -> int:
        """Serve until the Executor closes, or none connects."""
        while True:
            for key, events in self._chooser.select(_WAKE_S):
                if key.data is None:
                    self._accept()
                else:
                    self._serve(key.data, events)
            self._find_missing()
            self._hand_out()
            self._flush()
            if not self._closing and (self._client or self._journal.waiting):
                self._idle_since = time.monotonic()
            if time.monotonic() - self._idle_since > IDLE_S or (self._closing and not self._journal.waiting):
                return self._end()

    # ------------------------------------------------------------------------------------------------------- connections

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        self._chooser.register(connection, selectors.EVENT_READ, _Client(connection))

    def _serve(self, peer: _Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._write(peer)
        if not events & selectors.EVENT_READ:
            return
        try:
            data = peer.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost(peer)
            return
        try:
            for kind, body in peer.reader.feed(data):
                if isinstance(peer, _WorkerProcess):
                    self._on_answer(peer, kind, body)
                else:
                    assert isinstance(peer, _Client)
                    self._on_frame(peer, kind, body)
        except InvalidFrame as error:
            sys.stderr.write(f"broker: {error}\n")
            self._lost(peer)

    def _lost(self, peer: _Peer) -> None:
        if peer.connection.fileno() < 0:
            return
        self._chooser.unregister(peer.connection)
        peer.connection.close()
        if peer is self._client:
            self._client = None
        if isinstance(peer, _WorkerProcess):
            self._on_death(peer)

    def _write(self, peer: _Peer) -> None:
        if peer.connection.fileno() < 0:
            return
        try:
            while peer.out:
                del peer.out[: peer.connection.send(peer.out)]
        except BlockingIOError:
            pass
        except OSError:
            self._lost(peer)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
        if self._chooser.get_key(peer.connection).events != wanted:
            self._chooser.modify(peer.connection, wanted, peer)

    def _flush(self) -> None:
        """Make what was accepted and finished last, then tell it."""
        self._journal.flush()
        client = self._client
        if client is None:
            return
        while client.sent < self._journal.results and len(client.out) < _OUT_BYTES_MAX:
            data = self._journal.result(client.sent)
            self._journal.delivered(data)
            client.out += data
            client.sent += 1
        self._write(client)
        if self._journal.is_long and not self._handed and not client.out:
            self._journal.compact(client.sent)

    # -------------------------------------------------------------------------------------------------------- the client

    def _on_frame(self, client: _Client, kind: FrameKind, body: bytes) -> None:
        if kind is FrameKind.HELLO:
            self._welcome(client, body)
        elif not client.welcomed:
            raise InvalidFrame(f"{kind.name} before HELLO")
        elif kind is FrameKind.TASK:
            self._on_task(body)
        elif kind is FrameKind.FUNCTION:
            digest = body[:DIGEST_BYTES]
            if digest not in self._journal.functions:
                self._journal.add_function(digest, frame(kind, body))
        elif kind is FrameKind.DROP:
            self._give_back(client, split_numbers(body))
        elif kind is FrameKind.TAKE:
            self._recall()
            waiting = [task for task in self._waiting if task not in self._dropped]
            self._give_back(client, waiting[len(waiting) - min(int.from_bytes(body, "big"), len(waiting)) :])
        elif kind is FrameKind.FETCH:
            self._send_piece(client, *split_fetch(body))
        elif kind is FrameKind.CLOSE:
            self._closing = True

    def _welcome(self, client: _Client, body: bytes) -> None:
        try:
            hello = json.loads(body)
            name, after = str(hello["client"]), int(hello["after"])
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidFrame("HELLO is no JSON") from error
        if self._client is not None:  # the newest client counts
            self._lost(self._client)
        known = name == self._client_name
        if not known:
            self._client_name, self._accepted = name, 0
        self._client, client.welcomed = client, True
        client.sent = max(after if known and after <= self._journal.results else 0, self._journal.first)
        welcome = {
            "run": self._run,
            "workers": len(self._workers),
            "accepted": self._accepted,
            "results": self._journal.results,
        }
        client.out += frame(FrameKind.WELCOME, json.dumps(welcome).encode())
        if not known:
            client.out += numbers_frame(FrameKind.HELD, self._journal.waiting)
        self._tell_started([worker.task for worker in self._workers if worker.task is not None])

    def _on_task(self, body: bytes) -> None:
        task, digest, _ = split_task(body)
        data = frame(FrameKind.TASK, body)
        if task == INITIALIZER:
            if not self._journal.initializer:
                self._journal.add_initializer(data)
            return
        self._accepted += 1
        if task not in self._journal:
            self._journal.add_task(task, digest, data)
            self._waiting.append(task)

    def _give_back(self, client: _Client, tasks: Sequence[int]) -> None:
        """Give back those of the tasks that no worker has."""
        self._recall()
        free = [
            task
            for task in tasks
            if task in self._journal.waiting and task not in self._handed and task not in self._dropped
        ]
        self._dropped.update(free)
        self._journal.drop(free)
        client.out += numbers_frame(FrameKind.GIVEN, free)

    def _send_piece(self, client: _Client, task: int, offset: int) -> None:
        path = result_path(self._journal.path, task)
        try:
            with open(path, "rb") as file:
                total = os.fstat(file.fileno()).st_size
                file.seek(offset)
                data = file.read(PIECE_BYTES)
        except OSError:
            total, data = 0, b""
        client.out += piece_frame(task, offset, total, data)
        if total and offset + len(data) >= total:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _tell_started(self, tasks: list[int]) -> None:
        if self._client is not None and tasks:
            self._client.out += numbers_frame(FrameKind.STARTED, tasks)

    # ------------------------------------------------------------------------------------------------------- the workers

    def _fork(self, number: int) -> _WorkerProcess:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                self._be_worker(number, theirs)
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        ours.setblocking(False)
        worker = _WorkerProcess(ours, number, pid)
        self._chooser.register(ours, selectors.EVENT_READ, worker)
        return worker

    def _be_worker(self, number: int, answers: socket.socket) -> None:
        self._chooser.close()
        kept = {answers.fileno(), self._queue.fileno()}
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in kept:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        own = slice(number * self._per_worker, (number + 1) * self._per_worker)
        os.environ["PHALANX_DEVICES"] = ",".join(self._devices[own])
        os.environ["PHALANX_WORKER"] = str(number)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")  # empty where devices are virtual
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[own])
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  # as long as the process
        Worker(self._queue, answers, number, self._journal.path).run()

    def _hand_out(self) -> None:
        """Queue work for some milliseconds, or one task for each worker."""
        journal = self._journal
        if journal.is_long and self._client is not None:
            return  # until workers are idle, and the file is rewritten
        limit = len(self._workers) * (1 + min(int(_AHEAD_S / max(self._mean_s, 1e-6)), _AHEAD_MAX))
        if self._waiting and len(self._handed) < limit:
            journal.flush()  # workers read there
        first = journal.initializer_function
        while self._waiting and len(self._handed) < limit:
            task = self._waiting[0]
            if task in self._dropped:
                self._dropped.discard(task)
                self._waiting.popleft()
                continue
            place, function = journal.waiting[task], journal.function_of(task)
            order = Order(task, place, function, journal.initializer, first, journal.generation)
            try:
                self._orders.send(pack_order(order))
            except BlockingIOError:
                return
            self._handed[self._waiting.popleft()] = None

    def _recall(self) -> None:
        """Take back what no worker has taken."""
        back = []
        while True:
            try:
                data = self._queue.recv(ORDER_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            back.append(unpack_order(data).task)
        for task in reversed(back):
            del self._handed[task]
            self._waiting.appendleft(task)

    def _on_answer(self, worker: _WorkerProcess, kind: FrameKind, body: bytes) -> None:
        if kind is FrameKind.STARTED:
            (worker.task,) = split_numbers(body)
            self._missing[1].discard(worker.task)
            self._tell_started([worker.task])
            return
        _, task, status, number, seconds, payload = split_result(body)
        worker.task = None
        if task == INITIALIZER:
            if self._client is not None:
                self._client.out += frame(FrameKind.RESULT, body)
            return
        self._mean_s += _WEIGHT * (seconds - self._mean_s)
        self._finish(task, status, number, seconds, payload)

    def _finish(self, task: int, status: ResultStatus, worker: int, seconds: float, payload: bytes) -> None:
        self._handed.pop(task, None)
        if task in self._journal.waiting:
            done = result_frame(self._journal.results, task, status, worker, seconds, payload)
            self._journal.add_result(task, done)

    def _on_death(self, worker: _WorkerProcess) -> None:
        """Start another worker. The task that the dead one ran runs once more, first of all."""
        _, status = os.waitpid(worker.pid, 0)
        how = _how_it_ended(status)
        sys.stderr.write(f"broker: worker {worker.number} {how}; another one starts\n")
        if worker.task is not None and worker.task in self._handed:
            self._run_again(worker.task, how, worker.number)
        # It may have taken an order and died before it said so: of another worker that has, we hear soon.
        self._recall()
        running = {one.task for one in self._workers if one is not worker}
        self._missing = time.monotonic() + _MISSING_S, {task for task in self._handed if task not in running}
        self._workers[worker.number] = self._fork(worker.number)

    def _run_again(self, task: int, how: str, worker: int) -> None:
        if task in self._deaths:
            text = f"its worker ended twice while it ran: {self._deaths.pop(task)}, then {how}"
            self._finish(task, ResultStatus.WORKER_DIED, worker, 0.0, text.encode())
            return
        self._deaths[task] = how
        del self._handed[task]
        self._waiting.appendleft(task)

    def _find_missing(self) -> None:
        """Run tasks again that a dead worker took without a word."""
        due_s, tasks = self._missing
        if not tasks or time.monotonic() < due_s:
            return
        for task in tasks & self._handed.keys():
            del self._handed[task]
            self._waiting.appendleft(task)
        tasks.clear()

    # --------------------------------------------------------------------------------------------------------------- end

    def _end(self) -> int:
        until = time.monotonic() + _END_S
        while (client := self._client) is not None and time.monotonic() < until:
            self._flush()
            if client.sent >= self._journal.results and not client.out:
                break
            time.sleep(0.01)
        for worker in self._workers:
            with contextlib.suppress(OSError):
                os.kill(worker.pid, signal.SIGTERM)
                os.waitpid(worker.pid, 0)
        self._journal.remove()
        return 0


def listen(folder: str) -> socket.socket:
    """Listen on the socket in the attempt's own folder, by a relative path: a socket's path may have 107 bytes at most."""
    listener = socket.socket(socket.AF_UNIX)
    back = os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SOCKET)
        listener.bind(SOCKET)
    finally:
        os.chdir(back)
    listener.listen(4)
    listener.setblocking(False)
    return listener


def _how_it_ended(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with code {code}"
    return f"was ended by {signal.Signals(-code).name}" + (" (out of memory?)" if code == -signal.SIGKILL else "")


def _journal_path(folder: str) -> str:
    """Return a path that a later attempt of the job finds again, where its nodes see the head's output folder.

    Elsewhere a copy of the output folder goes to the head while the job runs: the journal would go there again and again.
    """
    output = "" if os.environ.get(LOCAL_CHECKPOINTS_VARIABLE) else os.environ.get("PHALANX_OUTPUT_DIR", "")
    rank = os.environ.get("PHALANX_NODE_RANK", "0")
    if output and os.access(output, os.W_OK):
        return os.path.join(output, f".executor-{rank}")
    return os.path.join(folder, ".executor")


def main(words: Sequence[str]) -> int:
    """Start the workers, and serve. `words`: GPUs of each worker, and workers on each node, or 0 for as many as its GPUs allow."""
    per_worker, workers = int(words[0]), int(words[1])  # no argparse: it would be a tenth of the start
    folder = os.path.dirname(os.environ[PAGE])
    devices = [name for name in os.environ.get("PHALANX_DEVICES", "").split(",") if name]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    listener = listen(folder)
    with contextlib.suppress(ImportError):
        import cloudpickle  # noqa: F401  # once, before the workers are forked
    count = workers or max(1, len(devices) // max(per_worker, 1))
    journal = Journal(_journal_path(folder))
    return Broker(listener, journal, workers=count, devices=devices, per_worker=per_worker).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

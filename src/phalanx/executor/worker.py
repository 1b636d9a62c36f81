"""A worker: a process of the user that runs tasks one after the other, forked by the broker of its node.

It loads functions and arguments, and pickles results. Nothing here is imported by the head or the client.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import time
from collections import OrderedDict
from typing import Any, Final

from phalanx.executor.frames import (
    DIGEST_BYTES,
    FILE_BYTES_MIN,
    INITIALIZER,
    ORDER_BYTES,
    FrameKind,
    Order,
    ResultStatus,
    numbers_frame,
    result_frame,
    split_task,
    unpack_order,
)
from phalanx.executor.journal import read_frame
from phalanx.executor.serializing import dumps

_FUNCTIONS_MAX: Final = 256  # that a worker keeps
_NOTHING: Final = b"-"


class Worker:
    """One worker; `run` returns when the broker is gone.

    Args:
        queue: from which all workers of the node take orders, each when it is free.
        answers: to the broker.
        number: of this worker.
        journal: path of the broker's file, which has functions and arguments.
    """

    def __init__(self, queue: socket.socket, answers: socket.socket, number: int, journal: str) -> None:
        self._queue, self._answers, self._number, self._journal = queue, answers, number, journal
        self._file, self._generation = -1, -1
        self._functions: OrderedDict[bytes, Any] = OrderedDict()
        self._initialized = False

    def run(self) -> None:
        """Run tasks until the broker is gone."""
        finished = b""
        while data := self._next(waits=not finished):
            if data == _NOTHING:
                self._answers.sendall(finished)
                finished = b""
                continue
            order = unpack_order(data)
            self._answers.sendall(finished + numbers_frame(FrameKind.STARTED, (order.task,)))
            finished = self._run_order(order)

    def _next(self, *, waits: bool) -> bytes:
        """Return the next order; nothing if the queue is empty and this does not wait; empty once the broker is gone."""
        try:
            return self._queue.recv(ORDER_BYTES, 0 if waits else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return _NOTHING

    def _run_order(self, order: Order) -> bytes:
        began_s = time.monotonic()
        if order.generation != self._generation:
            if self._file >= 0:
                os.close(self._file)
            self._file, self._generation = os.open(self._journal, os.O_RDONLY | os.O_CLOEXEC), order.generation
        if order.initializer and not self._initialized:
            digest, arguments = self._task_at(order.initializer, order.initializer_function)
            status, payload = self._result_of(digest, arguments, INITIALIZER)
            if status is ResultStatus.ERROR:
                return result_frame(0, INITIALIZER, status, self._number, 0.0, payload)
            self._initialized = True
        digest, arguments = self._task_at(order.arguments, order.function)
        status, payload = self._result_of(digest, arguments, order.task)
        return result_frame(0, order.task, status, self._number, time.monotonic() - began_s, payload)

    def _task_at(self, place: int, function: int) -> tuple[bytes, bytes]:
        """Read a task and, unless it is known, its function."""
        _, digest, arguments = split_task(read_frame(self._file, place))
        if digest not in self._functions:
            self._functions[digest] = read_frame(self._file, function)[DIGEST_BYTES:]
        return digest, arguments

    def _result_of(self, digest: bytes, arguments: bytes, task: int) -> tuple[ResultStatus, bytes]:
        try:
            payload = dumps(self._call(digest, arguments))
        except BaseException as error:  # noqa: BLE001  # of the user's function, SystemExit too, as a process pool does
            return ResultStatus.ERROR, _pickled_error(error)
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
        if len(payload) < FILE_BYTES_MIN:
            return ResultStatus.VALUE, payload
        try:
            path = result_path(self._journal, task)
            with open(f"{path}.part", "wb") as file:
                file.write(payload)
            os.replace(f"{path}.part", path)
        except OSError as error:
            return ResultStatus.ERROR, _pickled_error(error)
        return ResultStatus.FILE, len(payload).to_bytes(8, "big")

    def _call(self, digest: bytes, arguments: bytes) -> Any:
        function = self._functions[digest]
        if isinstance(function, bytes):
            function = self._functions[digest] = pickle.loads(function)  # noqa: S301  # made by the same user
            if len(self._functions) > _FUNCTIONS_MAX:
                self._functions.popitem(last=False)
        given, named = pickle.loads(arguments)  # noqa: S301
        return function(*given, **named)


def result_path(journal: str, task: int) -> str:
    """Return the file of a large result, beside the journal."""
    return f"{journal}-result-{task}"


def _pickled_error(error: BaseException) -> bytes:
    import traceback

    text = "".join(traceback.format_exception(error)[1:] or [str(error)])
    error.__traceback__ = None
    try:
        pickled = dumps((error, text))
        pickle.loads(pickled)  # noqa: S301  # an exception whose constructor needs more arguments fails only here
    except Exception:  # noqa: BLE001  # of the user's class
        return pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), text), 5)
    return pickled

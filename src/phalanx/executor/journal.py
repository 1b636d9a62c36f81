"""What a broker has accepted and finished, in one file: frames in the order in which they happened. It outlives the broker's process.

A frame that the process could not finish is cut off when the next one opens the file. What is no longer needed, tasks with results that the
Executor has, is left out when the file is rewritten.
"""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from typing import Final

from phalanx.executor.frames import (
    DIGEST_BYTES,
    HEADER_BYTES,
    INITIALIZER,
    FrameKind,
    FrameReader,
    InvalidFrame,
    numbers_frame,
    split_numbers,
    split_result,
    split_task,
)

_READ_BYTES: Final = 1 << 20
_LENGTH: Final = slice(1, HEADER_BYTES)
COMPACT_BYTES: Final = 1 << 28  # of results that the Executor has, before the file is rewritten


def read_frame(file: int, place: int) -> bytes:
    """Return the body of the frame at a place of a journal's file."""
    size = int.from_bytes(os.pread(file, HEADER_BYTES, place)[_LENGTH], "big")
    return os.pread(file, size, place + HEADER_BYTES)


class Journal:
    """See the module.

    Attributes:
        path: of the file.
        generation: how often the file was rewritten.
        waiting: places of tasks without a result, by number, in the order in which they came.
        functions: places of functions, by digest.
        initializer: place of the task that each worker runs first; 0 for none.
    """

    def __init__(self, path: str) -> None:
        self.waiting: OrderedDict[int, int] = OrderedDict()
        self.functions: dict[bytes, int] = {}
        self.initializer = 0
        self._digests: dict[int, bytes] = {}
        self._results = array("Q")
        self._first = 0  # number of the first result that is kept
        self._delivered_bytes = 0
        self._finished: set[int] = set()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.path, self.generation, self._end = path, 0, 0
        self._load()

    def __contains__(self, task: int) -> bool:
        return task in self.waiting or task in self._finished

    @property
    def results(self) -> int:
        """How many results there are."""
        return self._first + len(self._results)

    def add_function(self, digest: bytes, data: bytes) -> None:
        """Record a FUNCTION frame."""
        self.functions[digest] = self._append(data)

    def add_task(self, task: int, digest: bytes, data: bytes) -> None:
        """Record a TASK frame."""
        self.waiting[task] = self._append(data)
        self._digests[task] = digest

    def function_of(self, task: int) -> int:
        """Return the place of a waiting task's function."""
        return self.functions[self._digests[task]]

    @property
    def initializer_function(self) -> int:
        """Place of the function that each worker calls first; 0 for none."""
        return self.functions[split_task(self.read(self.initializer)[HEADER_BYTES:])[1]] if self.initializer else 0

    def add_initializer(self, data: bytes) -> None:
        """Record the TASK that each worker runs first."""
        self.initializer = self._append(data)

    def add_result(self, task: int, data: bytes) -> None:
        """Record a RESULT frame: the task is no longer waiting."""
        self.waiting.pop(task, None)
        self._digests.pop(task, None)
        self._finished.add(task)
        self._results.append(self._append(data))

    def drop(self, tasks: list[int]) -> None:
        """Record tasks that are given back."""
        for task in tasks:
            self.waiting.pop(task, None)
            self._digests.pop(task, None)
        self._append(numbers_frame(FrameKind.GIVEN, tasks))

    def read(self, place: int) -> bytes:
        """Return the frame at a place, header included."""
        self.flush()
        head = os.pread(self._file, HEADER_BYTES, place)
        return head + os.pread(self._file, int.from_bytes(head[_LENGTH], "big"), place + HEADER_BYTES)

    def result(self, number: int) -> bytes:
        """Return a RESULT frame by its place among the results."""
        return self.read(self._results[number - self._first])

    @property
    def first(self) -> int:
        """Number of the first result that is kept."""
        return self._first

    def delivered(self, data: bytes) -> None:
        """Count a result that the Executor has."""
        self._delivered_bytes += len(data)

    @property
    def is_long(self) -> bool:
        """Whether results that the Executor has take much room."""
        return self._delivered_bytes >= COMPACT_BYTES

    def compact(self, delivered: int) -> None:
        """Rewrite the file without the first `delivered` results and their tasks. Places change."""
        kept = [self.result(number) for number in range(delivered, self.results)]
        functions = {digest: self.read(place) for digest, place in self.functions.items()}
        tasks = [(task, self._digests[task], self.read(place)) for task, place in self.waiting.items()]
        first = self.read(self.initializer) if self.initializer else b""
        before, path, fresh = self._file, self.path, f"{self.path}.new"
        file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._file, self._end, self._delivered_bytes = file, 0, 0
        self._results, self._first = array("Q"), delivered
        self._finished.clear()
        self.waiting.clear()
        for digest, data in functions.items():
            self.add_function(digest, data)
        if first:
            self.add_initializer(first)
        for task, digest, data in tasks:
            self.add_task(task, digest, data)
        for data in kept:
            self.add_result(split_result(data[HEADER_BYTES:])[1], data)
        self.flush()
        os.replace(fresh, path)
        os.close(before)
        self.generation += 1

    def flush(self) -> None:
        """Write what was recorded. Survives the process, not a power cut.

        Raises:
            OSError: the disk is full.
        """
        if self._pending:
            data = b"".join(self._pending)
            self._pending.clear()
            self._pending_bytes = 0
            while data:
                written = os.pwrite(self._file, data, self._end)
                self._end += written
                data = data[written:]

    def remove(self) -> None:
        """Close and delete it: its results are no longer needed."""
        os.close(self._file)
        os.unlink(self.path)

    def _append(self, data: bytes) -> int:
        place = self._end + self._pending_bytes
        self._pending.append(data)
        self._pending_bytes += len(data)
        return place

    def _load(self) -> None:
        reader, place = FrameReader(), 0
        while data := os.pread(self._file, _READ_BYTES, self._end):
            self._end += len(data)
            try:
                frames = reader.feed(data)
            except InvalidFrame:
                break
            for kind, body in frames:
                self._replay(kind, body, place)
                place += HEADER_BYTES + len(body)
        os.ftruncate(self._file, place)
        self._end = place

    def _replay(self, kind: FrameKind, body: bytes, place: int) -> None:
        if kind is FrameKind.FUNCTION:
            self.functions[body[:DIGEST_BYTES]] = place
        elif kind is FrameKind.TASK:
            task, digest, _ = split_task(body)
            if task == INITIALIZER:
                self.initializer = place
            else:
                self.waiting[task], self._digests[task] = place, digest
        elif kind is FrameKind.RESULT:
            task = split_result(body)[1]
            self.waiting.pop(task, None)
            self._digests.pop(task, None)
            self._finished.add(task)
            self._results.append(place)
        elif kind is FrameKind.GIVEN:
            for task in split_numbers(body):
                self.waiting.pop(task, None)
                self._digests.pop(task, None)

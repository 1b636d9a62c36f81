"""The messages between an Executor and its brokers, one per node: frames over an exec session, and over a socket to each worker.

A frame is its kind (one byte), the length of its body (4 bytes, big endian) and the body. Functions, arguments and results are pickles that only
the user's own processes load; brokers and the head carry them as bytes. Standard library only: every node imports it.

    HELLO     to the broker    JSON {client, after}: the client's random name, and the number of results that it already has from this run
    WELCOME   to the client    JSON {run, workers, accepted, results}: `run` is random for each start of the broker
    FUNCTION  to the broker    digest (16 bytes), the function's pickle
    TASK      to the broker    task (8), digest of its function (16), the pickle of its arguments
    HELD      to the client    numbers of tasks (8 each) that an earlier client submitted and that have no result yet
    STARTED   to the client    numbers of tasks that a worker has
    RESULT    to the client    place in the broker's results (8), task (8), status (1), worker (2), seconds (4, float), the result's pickle
    DROP      to the broker    numbers of tasks that it shall not start
    TAKE      to the broker    how many waiting tasks (4) it shall give back, the last first
    GIVEN     to the client    numbers of tasks that were dropped or given back
    FETCH     to the broker    task (8), offset (8): send the next piece of a result that is a file
    PIECE     to the client    task (8), offset (8), total bytes (8), bytes
    CLOSE     to the broker    empty: end once no task is left
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

BODY_BYTES_MAX: Final = 1 << 31
PIECE_BYTES: Final = 1 << 18
FILE_BYTES_MIN: Final = 1 << 20  # a larger result is a file, fetched in pieces
DIGEST_BYTES: Final = 16
INITIALIZER: Final = (1 << 64) - 1  # number of the task that each worker runs first

_HEADER: Final = struct.Struct(">BI")
_TASK: Final = struct.Struct(">Q16s")
_RESULT: Final = struct.Struct(">QQBHf")
_PIECE: Final = struct.Struct(">QQQ")
_FETCH: Final = struct.Struct(">QQ")
HEADER_BYTES: Final = _HEADER.size
RESULT_HEAD_BYTES: Final = _RESULT.size


class Order(NamedTuple):
    """What a worker takes from the queue of its node: a task, and where the journal has it, its function, and what a worker runs first.

    `generation`: of the journal's file; 0 as `initializer` for none.
    """

    task: int
    arguments: int
    function: int
    initializer: int
    initializer_function: int
    generation: int


_ORDER: Final = struct.Struct(">QQQQQI")
ORDER_BYTES: Final = _ORDER.size


def pack_order(order: Order) -> bytes:
    """Encode an order."""
    return _ORDER.pack(*order)


def unpack_order(data: bytes) -> Order:
    """Decode an order."""
    return Order(*_ORDER.unpack(data))


class FrameKind(enum.IntEnum):
    """Kinds of frames; the module describes them."""

    HELLO = 1
    WELCOME = 2
    FUNCTION = 3
    TASK = 4
    HELD = 5
    STARTED = 6
    RESULT = 7
    DROP = 8
    TAKE = 9
    GIVEN = 10
    FETCH = 11
    PIECE = 12
    CLOSE = 13


class ResultStatus(enum.IntEnum):
    """What a result's bytes are."""

    VALUE = 0  # pickle of the value
    ERROR = 1  # pickle of (exception, its traceback as text)
    FILE = 2  # size of the value's pickle (8 bytes), which is fetched
    WORKER_DIED = 3  # text: how its worker ended, twice


class InvalidFrame(ValueError):
    """The other side sent what is no frame."""


def frame(kind: FrameKind, *parts: bytes) -> bytes:
    """Encode one frame.

    Raises:
        ValueError: the body is over BODY_BYTES_MAX.
    """
    size = sum(map(len, parts))
    if size > BODY_BYTES_MAX:
        raise ValueError(f"{size} bytes in one message; at most {BODY_BYTES_MAX} are possible")
    return b"".join((_HEADER.pack(kind, size), *parts))


def task_frame(task: int, digest: bytes, arguments: bytes) -> bytes:
    """Encode a TASK."""
    return frame(FrameKind.TASK, _TASK.pack(task, digest), arguments)


def split_task(body: bytes) -> tuple[int, bytes, bytes]:
    """Decode a TASK into its number, the digest of its function, and the pickle of its arguments."""
    try:
        task, digest = _TASK.unpack_from(body)
    except struct.error as error:
        raise InvalidFrame(f"task of {len(body)} bytes") from error
    return task, digest, body[_TASK.size :]


def result_frame(place: int, task: int, status: ResultStatus, worker: int, seconds: float, payload: bytes) -> bytes:
    """Encode a RESULT."""
    return frame(FrameKind.RESULT, _RESULT.pack(place, task, status, worker, seconds), payload)


def split_result(body: bytes) -> tuple[int, int, ResultStatus, int, float, bytes]:
    """Decode a RESULT into place, task, status, worker, seconds and payload."""
    try:
        place, task, status, worker, seconds = _RESULT.unpack_from(body)
        return place, task, ResultStatus(status), worker, seconds, body[_RESULT.size :]
    except (struct.error, ValueError) as error:
        raise InvalidFrame(f"result of {len(body)} bytes") from error


def numbers_frame(kind: FrameKind, numbers: Iterable[int]) -> bytes:
    """Encode numbers of tasks."""
    listed = tuple(numbers)
    return frame(kind, struct.pack(f">{len(listed)}Q", *listed))


def split_numbers(body: bytes) -> tuple[int, ...]:
    """Decode numbers of tasks."""
    if len(body) % 8:
        raise InvalidFrame(f"numbers of {len(body)} bytes")
    return struct.unpack(f">{len(body) // 8}Q", body)


def piece_frame(task: int, offset: int, total: int, data: bytes) -> bytes:
    """Encode a PIECE."""
    return frame(FrameKind.PIECE, _PIECE.pack(task, offset, total), data)


def split_piece(body: bytes) -> tuple[int, int, int, bytes]:
    """Decode a PIECE into task, offset, total and bytes."""
    try:
        task, offset, total = _PIECE.unpack_from(body)
    except struct.error as error:
        raise InvalidFrame(f"piece of {len(body)} bytes") from error
    return task, offset, total, body[_PIECE.size :]


def fetch_frame(task: int, offset: int) -> bytes:
    """Encode a FETCH."""
    return frame(FrameKind.FETCH, _FETCH.pack(task, offset))


def split_fetch(body: bytes) -> tuple[int, int]:
    """Decode a FETCH into task and offset."""
    try:
        task, offset = _FETCH.unpack(body)
    except struct.error as error:
        raise InvalidFrame(f"fetch of {len(body)} bytes") from error
    return task, offset


class FrameReader:
    """Cuts bytes into frames, however they arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[FrameKind, bytes]]:
        """Add bytes; return the frames that are complete, as kind and body.

        Raises:
            InvalidFrame: the bytes are no frames.
        """
        self._buffer += data
        start, end = 0, len(self._buffer)
        view = memoryview(self._buffer)
        found = []
        try:
            while end - start >= HEADER_BYTES:
                kind, size = _HEADER.unpack_from(view, start)
                if size > BODY_BYTES_MAX:
                    raise InvalidFrame(f"a message of {size} bytes")
                try:
                    known = FrameKind(kind)
                except ValueError as error:
                    raise InvalidFrame(f"a message of kind {kind}") from error
                if end - start - HEADER_BYTES < size:
                    break
                body = start + HEADER_BYTES
                found.append((known, bytes(view[body : body + size])))
                start = body + size
        finally:
            view.release()
        del self._buffer[:start]
        return iter(found)

"""Uploads output and reports of ranks to the head, by offset: at once on new data, repeated until the head holds it.

One thread. The head's end of a stream is authoritative, so a lost answer neither duplicates nor loses a byte.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from phalanx.core.ids import Epoch, JobId, SupervisorId
from phalanx.node.head_link.channels import Backoff, Registrar
from phalanx.node.head_link.head_connection import (
    HeadAccess,
    HeadConnection,
    HeadUnavailable,
    RegistrationRequired,
    RequestRejected,
)
from phalanx.node.transfer.spool import Spool
from phalanx.wire import supervisor as wire

COALESCE_S: Final = 0.01  # collects lines into one request; a hundredth of a second is not noticeable
REQUEST_BYTES_MAX: Final = 4 << 20  # the head takes 8 MiB, in base64 with its frame
CHUNKS_MAX: Final = 24  # the head takes 32
_ASK_S: Final = 30.0  # for a durable answer
_WAITING_S: Final = 0.5  # delay until a timeout of `notify_when_uploaded` is noticed
_IDLE_S: Final = 5.0  # new bytes end this wait; so the thread also ends with its supervisor
_log = logging.getLogger(__name__)


class StreamName(NamedTuple):
    """One stream of one attempt; its key names it in the spool."""

    job_id: JobId
    epoch: Epoch
    stream: str

    @property
    def key(self) -> str:
        """The spool's key."""
        return f"{self.job_id}.{self.epoch}.{self.stream}"


@dataclass(slots=True)
class _Shipped:
    name: StreamName
    end: int = 0  # bytes that the head holds
    given_up: bool = False


@dataclass(slots=True)
class _Waiter:
    ends: dict[str, int]
    until_s: float
    done: Callable[[], None]


class StreamUploader:
    """See the module. Call `set_spool` before `run`: spool and shipper refer to each other."""

    def __init__(
        self, access: HeadAccess, registrar: Registrar, *, supervisor_id: SupervisorId, ended: threading.Event
    ) -> None:
        self._connection = HeadConnection(access)
        self._registrar = registrar
        self._supervisor_id = supervisor_id
        self._ended = ended
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._hurry = threading.Event()
        self._dirty: dict[str, None] = {}  # in the order in which they grew
        self._streams: dict[str, _Shipped] = {}
        self._waiters: list[_Waiter] = []
        self._spool: Spool | None = None

    def set_spool(self, spool: Spool) -> None:
        """Set the spool to read from."""
        self._spool = spool

    def add(self, name: StreamName, end: int = 0) -> None:
        """Upload this stream from now on. Idempotent. `end`: bytes that the head is known to hold."""
        with self._lock:
            self._streams.setdefault(name.key, _Shipped(name=name, end=end))

    def streams_of(self, job_id: JobId, epoch: Epoch) -> list[str]:
        """The keys of an attempt's streams, sorted."""
        with self._lock:
            names = [shipped.name for shipped in self._streams.values()]
        return sorted(name.key for name in names if name.job_id == job_id and name.epoch == epoch)

    def mark_grown(self, key: str) -> None:
        """Note new bytes of a stream. Called by the spool; never blocks."""
        with self._lock:
            self._dirty[key] = None
        self._wake.set()

    def remove(self, keys: Iterable[str]) -> None:
        """Stop uploading these streams."""
        with self._lock:
            for key in keys:
                self._streams.pop(key, None)
                self._dirty.pop(key, None)

    def notify_when_uploaded(self, keys: Iterable[str], timeout_s: float, done: Callable[[], None]) -> None:
        """Call `done` once the head holds all current bytes of these streams, or on timeout; at once if it does now. `done` must not block."""
        ends: dict[str, int] = {}
        with self._lock:
            for key in keys:
                shipped = self._streams.get(key)
                if shipped is not None and not shipped.given_up and shipped.end < (end := self._length(key)):
                    ends[key] = end
                    self._dirty[key] = None
            if ends:
                self._waiters.append(_Waiter(ends=ends, until_s=time.monotonic() + timeout_s, done=done))
        if not ends:
            done()
            return
        self._hurry.set()
        self._wake.set()

    def unsent(self, keys: Iterable[str]) -> tuple[tuple[str, int], ...]:
        """Those of the streams of which the head does not have all bytes and still takes them: their names and lengths."""
        with self._lock:
            known = [self._streams[key] for key in keys if key in self._streams and not self._streams[key].given_up]
            lengths = [(one, self._length(one.name.key)) for one in known]
            return tuple((one.name.stream, length) for one, length in lengths if one.end < length)

    def wait_sent(self, timeout_s: float) -> None:
        """Wait until the head has all streams, or will not take the rest."""
        with self._lock:
            keys = list(self._streams)
        sent = threading.Event()
        self.notify_when_uploaded(keys, timeout_s, sent.set)
        sent.wait(timeout_s)

    def _length(self, key: str) -> int:
        """The bytes of a stream in the spool; 0 if it was removed: a late note of an ended attempt may add it here just after that."""
        assert self._spool is not None
        try:
            return self._spool.length(key)
        except KeyError:
            return 0

    def run(self) -> None:
        """Run until the supervisor ends."""
        backoff = Backoff(self._ended)
        while not self._ended.is_set():
            self._wake.wait(self._idle_s())
            if not self._wake.is_set():
                self._complete_waiters()
                continue
            if not self._hurry.is_set():
                self._hurry.wait(COALESCE_S)
            self._hurry.clear()
            self._wake.clear()
            seen = self._registrar.registrations
            try:
                more = self._ship()
            except RegistrationRequired:
                self._registrar.register(seen)
                more = True
            except (HeadUnavailable, msgspec.MsgspecError) as error:
                _log.debug("streams: %s", error)
                backoff.pause()
                more = True
            else:
                backoff.reset()
            self._complete_waiters()
            if more:
                self._hurry.set()
                self._wake.set()

    def _ship(self) -> bool:
        """Send one request; True if more data is waiting. Failed streams stay dirty."""
        keys, chunks = self._collect()
        if not chunks:
            return False
        try:
            ends = self._send(chunks)
        except RequestRejected as error:
            if len(chunks) > 1:
                for key, chunk in zip(keys, chunks, strict=True):
                    self._ship_alone(key, chunk)
            else:
                self._give_up(keys[0], error)
            return True
        return self._apply_ends(keys, ends)

    def _collect(self) -> tuple[list[str], list[wire.StreamChunk]]:
        assert self._spool is not None
        with self._lock:
            dirty = [self._streams[key] for key in self._dirty if key in self._streams]
            self._dirty = {key: None for key in self._dirty if key in self._streams}
        keys: list[str] = []
        chunks: list[wire.StreamChunk] = []
        size = 0
        for shipped in dirty:
            key = shipped.name.key
            try:
                data = b"" if shipped.given_up else self._spool.read(key, shipped.end, wire.STREAM_CHUNK_BYTES_MAX)
            except KeyError:  # removed meanwhile
                data = b""
            if not data:
                with self._lock:
                    self._dirty.pop(key, None)
                continue
            name = shipped.name
            keys.append(key)
            chunks.append(
                wire.StreamChunk(
                    job_id=name.job_id, epoch=name.epoch, stream=name.stream, offset=shipped.end, data=data
                )
            )
            size += len(data)
            if size >= REQUEST_BYTES_MAX or len(chunks) >= CHUNKS_MAX:
                break
        return keys, chunks

    def _send(self, chunks: list[wire.StreamChunk]) -> dict[str, int]:
        request = wire.StreamsRequest(supervisor_id=self._supervisor_id, chunks=chunks)
        body = self._connection.call("POST", "/v1/node/streams", wire.encode(request), timeout_s=_ASK_S)
        return {StreamName(e.job_id, e.epoch, e.stream).key: e.end for e in wire.decode(body, wire.StreamsReply).ends}

    def _apply_ends(self, keys: list[str], ends: dict[str, int]) -> bool:
        """Apply the head's ends; True if data is left to upload."""
        assert self._spool is not None
        with self._lock:
            for key in keys:
                shipped, end = self._streams.get(key), ends.get(key)
                if shipped is None or end is None:
                    continue
                shipped.end = end
                try:
                    self._spool.acknowledge(key, end)  # may add a line about dropped bytes
                    if end >= self._spool.length(key):
                        self._dirty.pop(key, None)
                except KeyError:  # removed meanwhile
                    self._dirty.pop(key, None)
            return bool(self._dirty)

    def _ship_alone(self, key: str, chunk: wire.StreamChunk) -> None:
        try:
            self._apply_ends([key], self._send([chunk]))
        except RequestRejected as error:
            self._give_up(key, error)

    def _give_up(self, key: str, error: RequestRejected) -> None:
        _log.warning("the head accepts no more of stream %s: %s", key, error)
        with self._lock:
            self._dirty.pop(key, None)
            if key in self._streams:
                self._streams[key].given_up = True

    def _idle_s(self) -> float:
        """How long to wait for new bytes."""
        with self._lock:
            return _WAITING_S if any(waiter.until_s < math.inf for waiter in self._waiters) else _IDLE_S

    def _complete_waiters(self) -> None:
        now_s = time.monotonic()
        completed = []
        with self._lock:
            for waiter in self._waiters:
                waiter.ends = {key: end for key, end in waiter.ends.items() if not self._holds(key, end)}
                if not waiter.ends or now_s >= waiter.until_s:
                    completed.append(waiter)
            self._waiters = [waiter for waiter in self._waiters if waiter not in completed]
        for waiter in completed:
            waiter.done()

    def _holds(self, key: str, end: int) -> bool:
        shipped = self._streams.get(key)
        return shipped is None or shipped.given_up or shipped.end >= end

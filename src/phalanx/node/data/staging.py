"""Brings the missing chunks of one dataset to this node: its own part from the source, the rest from peers that have it.

Of N nodes that stage together, node k reads the chunks k, k + N, k + 2N ... from the source. A chunk of another node is read from the source
only if no peer has it and its node is silent, so that the source is read about once. Chunks are taken from peers in random order, each from
the peer with the fewest requests.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from phalanx.node.data.sources import DataSource, SourceUnavailable
from phalanx.node.data.stored_dataset import ChunkCorrupt, StoredDataset

_TRIES: Final = 6  # of a read of the source, with pauses of 1, 2, 4, 8 and 16 s
_SILENT_S: Final = 10.0  # without a new chunk of a node before others read its part: several chunks at 10 Mbit/s
_PEER_THREADS: Final = 6  # one chunk on its way, one behind it, from three peers
_SOURCE_READS_MAX: Final = 16  # of all nodes together: more would all end at the same late moment on a slow link
_SOURCE_ROUNDS_MIN: Final = 8  # reads of each thread; the last are exchanged after the source has sent everything
_WINDOW_S: Final = 5.0  # over which the rate is measured
_PAUSE_S: Final = 0.1
_REPORT_S: Final = 0.5
_POLL_S: Final = 0.5  # how late a node learns of the chunks of another; a poll takes both some 1 ms of CPU
_POLLS_PER_S: Final = 20  # of all peers together
_FIRST_POLL_S: Final = 2.0  # before the source is read: a peer may have all of it
_GONE_S: Final = 1.0  # until a peer that did not answer is asked again


class PeerGone(Exception):
    """The peer does not answer, or no longer has the chunk."""


class Peer(Protocol):
    """Another node that has chunks. `rank`: its number among the nodes that stage together; None for one outside."""

    name: str
    rank: int | None
    digests: dict[int, bytes]

    def poll(self) -> bool:
        """Learn of new chunks; returns whether there are any.

        Raises:
            PeerGone: no answer.
        """

    def read(self, index: int) -> bytes:
        """The bytes of a chunk. Thread-safe.

        Raises:
            PeerGone: no answer.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingProgress:
    """How far it is. `rate_bytes_per_s`: over the last seconds; `from_source`, `from_peers`: bytes that came from there in this run."""

    done_bytes: int
    total_bytes: int
    rate_bytes_per_s: float
    from_source: int
    from_peers: int


@dataclass(slots=True, kw_only=True)
class Staging:
    """One run of it. `rank`, `nodes`: the place of this node among those that stage together; `peers`: reads the peers known now."""

    stored: StoredDataset
    source: DataSource
    rank: int = 0
    nodes: int = 1
    peers: Callable[[], Sequence[Peer]] = tuple
    on_progress: Callable[[StagingProgress], None] = lambda _: None
    log: Callable[[str], None] = lambda _: None
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _left: set[int] = field(default_factory=set)
    _waiting: set[int] = field(default_factory=set)
    _last_news_s: dict[int, float] = field(default_factory=dict)
    _known: dict[str, Peer] = field(default_factory=dict)
    _requests: Counter[str] = field(default_factory=Counter)
    _bad: dict[int, set[str]] = field(default_factory=dict)
    _polled: bool = False
    _own: deque[int] = field(default_factory=deque)
    _answered: set[str] = field(default_factory=set)
    _error: Exception | None = None
    _from_source: int = 0
    _from_peers: int = 0
    _marks: list[tuple[float, int]] = field(default_factory=list)

    def run(self) -> StagingProgress:
        """Bring all chunks; returns the last progress.

        Raises:
            DatasetInvalid: the source changed, or may not be read.
            SourceUnavailable: it does not answer, even after several tries.
            OSError: this node's disk failed.
        """
        self._left = set(self.stored.missing())
        self._waiting = set(self._left)
        self._own = deque(index for index in sorted(self._left) if index % self.nodes == self.rank)
        began_s = time.monotonic()
        self._last_news_s = dict.fromkeys(range(self.nodes), began_s)
        readers = self.source.threads
        if self.nodes > 1:
            at_once = min(_SOURCE_READS_MAX, self.stored.dataset.chunks // _SOURCE_ROUNDS_MIN)
            readers = max(1, min(readers, at_once // self.nodes))
        works = [self._read_source] * readers + [self._read_peers] * _PEER_THREADS + [self._watch_peers]
        threads = [threading.Thread(target=self._guarded, args=(work,), daemon=True) for work in works]
        if self._left:
            for thread in threads:
                thread.start()
        while self._waiting and self._error is None:
            time.sleep(_PAUSE_S)
            if not self._marks or time.monotonic() - self._marks[-1][0] >= _REPORT_S:
                self.on_progress(self._progress())
        if self._error is not None:
            raise self._error
        last = self._progress()
        self.on_progress(last)
        return last

    # ------------------------------------------------------------------------------------------------------ threads

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  `run` raises it
            self._error = self._error or error

    @property
    def _over(self) -> bool:
        return not self._waiting or self._error is not None

    def _read_source(self) -> None:
        while not self._over:
            index = self._next_of_source()
            if index is None:
                time.sleep(_PAUSE_S)
                continue
            data = b"".join(
                self._read_piece(piece.file, piece.offset, piece.size_bytes)
                for piece in self.stored.dataset.pieces(index)
            )
            self._from_source += len(data)
            self.stored.put(index, data)
            self._waiting.discard(index)

    def _read_piece(self, file: int, offset: int, size_bytes: int) -> bytes:
        for number in range(_TRIES):
            try:
                data = self.source.read(self.stored.dataset.files[file], offset, size_bytes)
                if len(data) == size_bytes:
                    return data
                raise SourceUnavailable(f"{self.stored.dataset.source}: {len(data)} bytes came instead of {size_bytes}")
            except SourceUnavailable as error:
                if number == _TRIES - 1:
                    raise
                self.log(f"{error}; trying again")
                time.sleep(2.0**number)
        raise AssertionError

    def _read_peers(self) -> None:
        while not self._over:
            found = self._next_of_peers()
            if found is None:
                time.sleep(_PAUSE_S)
                continue
            peer, index, digest = found
            try:
                data = peer.read(index)
                self.stored.put(index, data, expected=digest)
            except ChunkCorrupt as error:
                self.log(f"node {peer.name}: {error}; it is read elsewhere")
                with self._lock:
                    self._bad.setdefault(index, set()).add(peer.name)
                self._give_back(index)
            except PeerGone as error:
                self.log(f"node {peer.name}: {error}")
                peer.digests.pop(index, None)
                self._give_back(index)
            else:
                self._from_peers += len(data)
                self._waiting.discard(index)
            finally:
                with self._lock:
                    self._requests[peer.name] -= 1

    def _watch_peers(self) -> None:
        """Start a poll of each peer that appears."""
        while not self._over:
            found = {peer.name: peer for peer in self.peers()}
            fresh = [peer for name, peer in found.items() if self._known.get(name) is not peer]
            with self._lock:
                self._known = found
            polls = [
                threading.Thread(target=self._guarded, args=(partial(self._poll, peer),), daemon=True) for peer in fresh
            ]
            for poll in polls:
                poll.start()
            if not self._polled:
                until_s = time.monotonic() + _FIRST_POLL_S
                while (
                    any(peer.name not in self._answered for peer in fresh)
                    and time.monotonic() < until_s
                    and not self._over
                ):
                    time.sleep(_PAUSE_S / 10)
                self._polled = True
            time.sleep(_PAUSE_S)

    def _poll(self, peer: Peer) -> None:
        while not self._over and self._known.get(peer.name) is peer:
            try:
                if peer.poll() and peer.rank is not None:
                    self._last_news_s[peer.rank] = time.monotonic()
            except PeerGone:
                time.sleep(_GONE_S)
            self._answered.add(peer.name)
            time.sleep(max(_POLL_S, len(self._known) / _POLLS_PER_S))

    # ------------------------------------------------------------------------------------------------------ choices

    def _next_of_source(self) -> int | None:
        """Take the next chunk of our part that no peer has; else one of a silent node, from a random place, since others do the same."""
        with self._lock:
            while self._polled and self._own:
                index = self._own.popleft()
                if index in self._left and not self._holders(index):
                    self._left.discard(index)
                    return index
            if not self._polled:
                return None
            now_s = time.monotonic()
            silent = {rank for rank, last_s in self._last_news_s.items() if now_s - last_s > _SILENT_S}
            orphans = [
                index
                for index in self._left
                if (index % self.nodes in silent or index in self._bad) and not self._holders(index)
            ]
            if not orphans:
                return None
            index = random.choice(orphans)
            self._left.discard(index)
            return index

    def _next_of_peers(self) -> tuple[Peer, int, bytes] | None:
        """Take a random chunk of the peer with the fewest requests that has one."""
        with self._lock:
            peers = list(self._known.values())
            random.shuffle(peers)
            for peer in sorted(peers, key=lambda one: self._requests[one.name]):
                held = [
                    index for index in peer.digests.keys() & self._left if peer.name not in self._bad.get(index, ())
                ]
                if held:
                    index = random.choice(held)
                    self._left.discard(index)
                    self._requests[peer.name] += 1
                    return peer, index, peer.digests[index]
        return None

    def _give_back(self, index: int) -> None:
        with self._lock:
            self._left.add(index)

    def _holders(self, index: int) -> list[Peer]:
        bad = self._bad.get(index, ())
        return [peer for peer in self._known.values() if index in peer.digests and peer.name not in bad]

    def _progress(self) -> StagingProgress:
        now_s, moved = time.monotonic(), self._from_source + self._from_peers
        self._marks.append((now_s, moved))
        while now_s - self._marks[0][0] > _WINDOW_S:
            self._marks.pop(0)
        first_s, before = self._marks[0]
        return StagingProgress(
            done_bytes=self.stored.stored_bytes,
            total_bytes=self.stored.dataset.size_bytes,
            rate_bytes_per_s=(moved - before) / (now_s - first_s) if now_s > first_s else 0.0,
            from_source=self._from_source,
            from_peers=self._from_peers,
        )

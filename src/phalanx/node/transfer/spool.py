"""The spool: output of ranks, on disk until the head has it. One thread reads all pipes; no rank can block another or fill the disk.

A stream is one file, addressed by offset; uploads use `read` and report `acked`. The pipes of later generations append to the same
stream. At its cap a stream gets one marker line; further output is counted, and its last `LAST_BYTES` follow at the end of the stream, since
they say how a program ended. A full disk is handled like the cap until it has room: each file reserves some space past its end, so that the
line about the gap, and the one with its size, always fit. A file is made with its first byte: most tasks of a large array print nothing.
If the disk is full by then, these lines are in memory until it has room.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from phalanx.file_space import free_range, reserve_range
from phalanx.node.head_link.channels import start_thread
from phalanx.node.logic.accounts import NodeAccount
from phalanx.node.logic.output_mask import OutputMasker
from phalanx.node.member.rank_reports import RankReport, ReportPipeReader

CAP_BYTES: Final = 256 * 1024 * 1024  # per task
TAIL_BYTES: Final = 1024 * 1024  # acknowledged bytes kept on disk, for inspection on the node
LAST_BYTES: Final = 64 * 1024  # of the output past the cap, kept in memory until the stream ends
_CHUNK_BYTES: Final = 1024 * 1024  # read at a time; one rank's turn
_PIPE_BYTES: Final = 1024 * 1024  # the most an unprivileged process may ask for
_BLOCK_BYTES: Final = 4096  # holes are punched in whole blocks
_RESERVE_BYTES: Final = 512  # past the end of each file: room for our lines about dropped output
# Space left free for the head, which may store the uploads on the same disk; at most an eighth of the disk.
_LEAVE_BYTES: Final = 16 * 1024 * 1024
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Stream:
    name: str
    path: str
    file: int  # -1 until the first byte
    in_memory: bool = False  # the disk was full at the first byte: `file` is in memory, with our lines alone
    cap_bytes: int
    end: int
    rolling: bool = False  # the cap counts only what the head does not have
    dropped: int = 0
    marked: bool = False  # a marker line for the bytes dropped since is in the file
    missing: int = 0  # bytes dropped on a full disk since the last line with their number
    reserved: int = 0  # disk space is reserved up to here
    freed: int = 0  # everything below was punched out
    refused: bool = False  # its file could not be made, which the log says
    last: bytearray = field(default_factory=bytearray)  # the newest output past the cap, at most twice LAST_BYTES
    pipes: set[int] = field(default_factory=set)


class Spool:
    """All streams of one supervisor. Calls may come from any thread.

    `on_bytes(stream)` is called on the spool's own thread (for `write`, on the caller's) when a stream grew or its last pipe ended.
    `on_missing(stream, describe)` likewise, when a stream's output is dropped on a full disk and when that ends; it may call `write`.
    """

    def __init__(
        self,
        *,
        on_bytes: Callable[[str], None],
        on_missing: Callable[[str, str], None] = lambda _stream, _text: None,
        cap_bytes: int = CAP_BYTES,
        tail_bytes: int = TAIL_BYTES,
    ) -> None:
        self._on_bytes = on_bytes
        self._on_missing = on_missing
        self._notices: list[tuple[str, str]] = []
        self._cap_bytes = cap_bytes
        self._tail_bytes = tail_bytes
        self._lock = threading.Lock()
        self._streams: dict[str, _Stream] = {}
        self._by_pipe: dict[int, _Stream] = {}
        self._maskers: dict[int, OutputMasker] = {}
        self._reports: dict[int, ReportPipeReader] = {}
        self._drains: list[tuple[set[int], threading.Event]] = []
        self._closing = False
        self._epoll = select.epoll()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._epoll.register(self._wake_read, select.EPOLLIN)
        self._thread = start_thread("phalanx-spool", self._run)

    def add(self, stream: str, path: str, *, cap_bytes: int | None = None, rolling: bool = False) -> None:
        """Begin a stream in the file at `path`; existing content is its beginning. Idempotent.

        With `rolling` the stream never ends by itself: the cap counts only what the head has not stored, and the head keeps the newest part.

        Raises:
            OSError: the file cannot be opened, or its folder does not exist.
        """
        with self._lock:
            if stream in self._streams:
                return
            try:
                file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                os.stat(os.path.dirname(path))
                file = -1
            state = _Stream(
                name=stream,
                path=path,
                file=file,
                cap_bytes=self._cap_bytes if cap_bytes is None else cap_bytes,
                end=0 if file < 0 else os.fstat(file).st_size,
                rolling=rolling,
            )
            if file >= 0:
                _reserve(state, _RESERVE_BYTES)
            self._streams[stream] = state

    def open_pipe(self, stream: str, owner: int | None = None, masker: OutputMasker | None = None) -> int:
        """A new pipe into the stream: returns its write end, which the caller passes to a task and then closes.

        `owner`: user id of the task; `masker`: of the values that must not reach the stream.
        """
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        if owner is not None:
            os.fchown(write_end, owner, -1)  # otherwise the task could not open its own /dev/stdout
        os.set_blocking(read_end, False)
        with contextlib.suppress(OSError):  # over the user's pipe budget: the default of 64 KiB works too
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        with self._lock:
            state = self._streams[stream]
            state.pipes.add(read_end)
            self._by_pipe[read_end] = state
            if masker is not None:
                self._maskers[read_end] = masker
        self._epoll.register(read_end, select.EPOLLIN)
        return write_end

    def open_reports(
        self, path: str, on_report: Callable[[RankReport], None], account: NodeAccount | None = None
    ) -> ReportPipeReader:
        """Create a report pipe at `path`, owned by the account, and pass reports to `on_report` on the spool's thread.

        Raises:
            OSError: the FIFO cannot be created.
        """
        pipe = ReportPipeReader(path, on_report, self._remove_reports, self._drain_reports, account)
        with self._lock:
            self._reports[pipe.descriptor] = pipe
        self._epoll.register(pipe.descriptor, select.EPOLLIN)
        return pipe

    def write(self, stream: str, data: bytes) -> None:
        """Append text of the supervisor."""
        with self._lock:
            self._append(self._streams[stream], data, share=4)
        self._on_bytes(stream)
        self._send_notices()

    def read(self, stream: str, offset: int, max_bytes: int) -> bytes:
        """Up to `max_bytes` from `offset`; nothing at the end. Freed bytes read as zeros.

        Raises:
            KeyError: unknown stream.
        """
        with self._lock:
            state = self._streams[stream]
            if state.file < 0:
                return b""
            return os.pread(state.file, max(0, min(max_bytes, state.end - offset)), offset)

    def tail(self, stream: str, max_bytes: int, begin: int = 0) -> bytes:
        """The newest output, also past the cap: at most `max_bytes` (up to LAST_BYTES past the cap), and nothing below `begin`.

        Raises:
            KeyError: unknown stream.
        """
        with self._lock:
            state = self._streams[stream]
            if state.last:
                return bytes(state.last[-max_bytes:])
            begin = max(begin, state.end - max_bytes)
            if state.file < 0:
                return b""
            return os.pread(state.file, max(0, state.end - begin), begin)

    def length(self, stream: str) -> int:
        """The length of the stream in bytes."""
        return self._streams[stream].end

    def closed(self, stream: str) -> bool:
        """True once all its pipes are closed and read to their ends, and the stream has its last line."""
        with self._lock:  # held from the end of the last pipe until that line is written
            return not self._streams[stream].pipes

    def dropped(self, stream: str) -> int:
        """How many bytes were dropped, past the cap or on a full disk."""
        return self._streams[stream].dropped

    def drain(self, stream: str, timeout_s: float = 5.0) -> bool:
        """Wait until the current content of its pipes is in the stream; False on timeout.

        A daemon that keeps printing does not delay it: it waits only for one pipe's capacity.
        """
        with self._lock:
            pipes = set(self._streams[stream].pipes)
        return self._drain(pipes, timeout_s)

    def acknowledge(self, stream: str, offset: int) -> None:
        """The head has stored everything below `offset`: free the disk space, except for a tail."""
        with self._lock:
            state = self._streams[stream]
            tail_bytes = 0 if state.missing else self._tail_bytes  # the disk is full: free the tail too
            limit = (min(offset, state.end) - tail_bytes) // _BLOCK_BYTES * _BLOCK_BYTES
            if limit > state.freed and free_range(state.file, state.freed, limit - state.freed):
                state.freed = limit
            if state.missing and not state.pipes:
                self._write_total_dropped(state)

    def remove(self, stream: str) -> None:
        """Drop a stream; a process that still writes to it gets SIGPIPE. The file stays."""
        with self._lock:
            state = self._streams.pop(stream, None)
            if state is not None:
                for pipe in list(state.pipes):
                    self._close_pipe(pipe, state)
                self._write_total_dropped(state)
                if state.file >= 0:
                    os.close(state.file)
        self._send_notices()

    def close(self) -> None:
        """Stop reading and close everything."""
        with self._lock:
            self._closing = True
        self._wake()
        self._thread.join()
        for pipe in list(self._reports.values()):
            pipe.close()
        for stream in list(self._streams):
            self.remove(stream)
        self._epoll.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        buffer = bytearray(_CHUNK_BYTES)
        while True:
            ready = [descriptor for descriptor, _ in self._epoll.poll()]
            with self._lock:
                if self._closing:
                    for _, event in self._drains:
                        event.set()
                    return
                drains, self._drains = self._drains, []
            for descriptor in ready:
                self._serve_safely(descriptor, buffer)
            for descriptors, event in drains:
                # Each turn empties what a pipe can hold at once; those that were not ready were empty.
                for descriptor in descriptors.difference(ready):
                    self._serve_safely(descriptor, buffer)
                event.set()

    def _serve_safely(self, descriptor: int, buffer: bytearray) -> None:
        """Serve one pipe; an error affects only the content of that pipe."""
        try:
            self._serve(descriptor, buffer)
        except Exception:  # noqa: BLE001  an error in one stream must not stop the others
            _log.exception("reading pipe %d failed; its content is discarded", descriptor)
            self._discard(descriptor, buffer)

    def _discard(self, descriptor: int, buffer: bytearray) -> None:
        """Discard a pipe's content, so that its writers do not block, and the same error does not repeat."""
        with self._lock:
            state = self._by_pipe.get(descriptor)
            if state is None and descriptor not in self._reports:
                return
            try:
                count = os.readv(descriptor, [buffer])
            except BlockingIOError:
                return
            if state is None:
                return
            state.dropped += count
            if count == 0:
                self._close_pipe(descriptor, state)

    def _serve(self, descriptor: int, buffer: bytearray) -> None:
        """Serve one pipe."""
        if descriptor == self._wake_read:
            with contextlib.suppress(BlockingIOError):
                os.read(descriptor, 4096)
            return
        with self._lock:
            reports = self._reports.get(descriptor)
            state = self._by_pipe.get(descriptor)
            changed = state is not None and self._read_pipe(descriptor, state, buffer)
        if reports is not None:
            reports.read()
        if changed and state is not None:
            self._on_bytes(state.name)
        self._send_notices()

    def _read_pipe(self, pipe: int, state: _Stream, buffer: bytearray) -> bool:
        """Read at most one pipe's capacity; True if the stream grew or ended."""
        view = memoryview(buffer)
        taken = 0
        before, masker = state.end, self._maskers.get(pipe)
        while taken < _CHUNK_BYTES:
            try:
                count = os.readv(pipe, [view[: _CHUNK_BYTES - taken]])
            except BlockingIOError:
                break
            if count == 0:
                self._close_pipe(pipe, state)
                if not state.pipes:
                    self._write_total_dropped(state)
                return True
            taken += count
            self._append(state, view[:count] if masker is None else masker.feed(bytes(view[:count])))
        return state.end > before

    def _append(self, state: _Stream, data: bytes | memoryview, share: int = 1) -> None:
        """Write as much as cap and disk allow, count the rest. `share`: divisor of the free space to leave; our own text may use more."""
        room = state.cap_bytes + (state.freed if state.rolling else 0) - state.end
        if state.rolling and state.marked and state.last and room > state.cap_bytes // 2:
            self._write_total_dropped(state)  # the head caught up: the output goes on behind its last lines
            room = state.cap_bytes + state.freed - state.end
        kept = data[: max(0, room)]
        if state.missing and kept and not self._close_gap(state, len(kept), share):
            state.dropped += len(data)
            state.missing += len(data)
            return
        written = self._write(state, kept, share)
        lost = len(data) - written
        if not lost:
            return
        state.dropped += lost
        if written < len(kept):
            self._open_gap(state, lost)
            return
        state.last += data[max(written, len(data) - LAST_BYTES) :]
        if len(state.last) > 2 * LAST_BYTES:
            del state.last[:-LAST_BYTES]
        if not state.marked:
            over = f"output over the cap of {state.cap_bytes} bytes is dropped from here on"
            state.marked = self._write_line(state, f"\n[phalanx] {over}\n")

    def _write(self, state: _Stream, data: bytes | memoryview, share: int) -> int:
        """Append what fits on the disk besides the reserve; returns the number of bytes."""
        if not data or not _open(state):
            return 0
        size = min(len(data), _room(state.file, share))
        while size and not _reserve(state, size + _RESERVE_BYTES):
            size = size // 2 if size > _BLOCK_BYTES else 0
        written = 0
        try:
            while written < size:
                written += os.pwrite(state.file, data[written:size], state.end + written)
        except OSError as error:  # keep reading on any disk error, or the ranks would block
            if error.errno != errno.ENOSPC:
                _log.warning("stream %s cannot be written: %s", state.name, error)
        state.end += written
        return written

    def _open_gap(self, state: _Stream, lost: int) -> None:
        """The disk is full: mark the position of the gap."""
        state.missing += lost
        state.marked = self._write_line(state, "\n[phalanx] the node's disk is full: output is missing here\n")
        self._notices.append((state.name, "the node's disk is full: output is dropped from here on"))

    def _close_gap(self, state: _Stream, size: int, share: int) -> bool:
        """If the disk has room for `size` bytes and a new reserve: write how much is missing here."""
        if not _open(state) or _room(state.file, share) < size or not _reserve(state, size + 2 * _RESERVE_BYTES):
            return False
        begin = "" if state.marked else "\n"
        if not self._write_line(
            state, f"{begin}[phalanx] {state.missing} bytes of output are missing here: the node's disk was full\n"
        ):
            return False
        text = f"the node's disk has room again: {state.missing} bytes of output are missing"
        self._notices.append((state.name, text))
        state.missing = 0
        state.marked = False
        return True

    def _write_total_dropped(self, state: _Stream) -> None:
        """Write the number of dropped bytes at the end of a stream, and the last ones if they were past the cap."""
        if not (state.marked or state.missing) or self._write_last(state):
            return
        if state.missing:
            text = f"the node's disk was full: {state.dropped} bytes of output were dropped in all"
            self._notices.append((state.name, text))
        if self._write_line(state, f"[phalanx] {state.dropped} bytes of output were dropped in all\n"):
            state.marked = False
            state.missing = 0

    def _write_last(self, state: _Stream) -> bool:
        """Write the last lines past the cap with the number of bytes that are missing before them; False if none fit on the disk."""
        last = bytes(state.last[-LAST_BYTES:])
        state.last.clear()
        if len(last) < state.dropped:
            last = last[last.find(b"\n", 0, len(last) // 2) + 1 :]  # from the begin of a line, unless one is very long
        size = len(last) + 2 * _RESERVE_BYTES
        if not last or state.missing or _room(state.file, 1) < size or not _reserve(state, size):
            return False
        lost = state.dropped - len(last)
        if not self._write_line(
            state, f"[phalanx] {lost} bytes of output were dropped in all; its last lines follow\n"
        ):
            return False
        state.dropped -= self._write(state, last, 1)
        state.marked = False
        return True

    def _write_line(self, state: _Stream, line: str) -> bool:
        """Append our line past the cap and into the reserve; False if it does not fit on the disk."""
        text = line.encode()
        if not _open(state) and not _open_in_memory(state):
            return False
        try:
            written = os.pwrite(state.file, text, state.end)
        except OSError:
            return False
        if written < len(text):
            os.ftruncate(state.file, state.end)
            state.reserved = 0
            return False
        state.end += written
        return True

    def _send_notices(self) -> None:
        """Call `on_missing` for all notices, with no lock held."""
        while self._notices:
            with self._lock:
                notices, self._notices = self._notices, []
            for stream, text in notices:
                self._on_missing(stream, text)

    def _close_pipe(self, pipe: int, state: _Stream) -> None:
        self._epoll.unregister(pipe)
        os.close(pipe)
        state.pipes.discard(pipe)
        del self._by_pipe[pipe]
        masker = self._maskers.pop(pipe, None)
        if masker is not None:
            self._append(state, masker.finish())

    def _remove_reports(self, descriptor: int) -> None:
        with self._lock:
            del self._reports[descriptor]
        self._epoll.unregister(descriptor)

    def _drain_reports(self, descriptor: int, timeout_s: float) -> bool:
        return self._drain({descriptor}, timeout_s)

    def _drain(self, descriptors: set[int], timeout_s: float) -> bool:
        done = threading.Event()
        with self._lock:
            if self._closing:
                return False
            self._drains.append((descriptors, done))
        self._wake()
        return done.wait(timeout_s)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b".")


def _open(state: _Stream) -> bool:
    """Make the stream's file on the disk if it has none there yet; False if the disk refuses it, or has no room for our lines."""
    if state.file >= 0 and not state.in_memory:
        return True
    try:
        file = _make_file(state.path)
    except OSError as error:
        if error.errno not in _FULL and not state.refused:
            state.refused = True  # said once: it is tried again with each piece of output
            _log.warning("stream %s cannot be written: %s", state.name, error)
        return False
    lines, state.file, state.reserved = state.file, file, 0
    try:
        room = _reserve(state, _RESERVE_BYTES)
        if room and lines >= 0:
            os.pwrite(file, os.pread(lines, state.end, 0), 0)
    except OSError:
        room = False
    unused = lines if room else file
    if not room:
        state.file, state.reserved = lines, 0
    if unused >= 0:
        os.close(unused)
    state.in_memory = state.in_memory and not room
    return room


def _open_in_memory(state: _Stream) -> bool:
    """Make a file in memory for our lines about output that a full disk refused; False if the disk is not full."""
    if state.file < 0 and not state.refused:
        with contextlib.suppress(OSError):
            state.file = os.memfd_create(state.name, os.MFD_CLOEXEC)
            state.in_memory = True
    return state.in_memory


def _make_file(path: str) -> int:
    """Make a stream's file. If the job has removed the folder, the file has no name: its output is kept until the stream ends all the same.

    Raises:
        OSError: it cannot be made.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o600)  # the job may have put a link there
    except FileNotFoundError:
        folder = os.path.dirname(os.path.abspath(path))
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        return os.open(folder, flags | os.O_TMPFILE, 0o600)


def _reserve(state: _Stream, size: int) -> bool:
    """Reserve disk space for `size` bytes past the end; False if the disk is full. One system call per block."""
    wanted = -(-(state.end + size) // _BLOCK_BYTES) * _BLOCK_BYTES
    if wanted <= state.reserved:
        return True
    start = max(state.end, state.reserved) // _BLOCK_BYTES * _BLOCK_BYTES
    error = reserve_range(state.file, start, wanted - start)
    if error in _FULL:
        return state.end + size <= state.reserved
    if error:
        return True  # the file system cannot reserve: the write will report
    state.reserved = wanted
    return True


def _room(file: int, share: int) -> int:
    """How many bytes the disk has for us; 0 if unknown."""
    try:
        disk = os.fstatvfs(file)
    except OSError:
        return 0
    left_free = min(_LEAVE_BYTES, disk.f_blocks * disk.f_frsize // 8) // share
    return max(0, disk.f_bavail * disk.f_frsize - left_free)

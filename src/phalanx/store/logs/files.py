"""The Logs port on files: <root>/<folder of the attempt>/<stream>.log, appended at an offset and synced before it is acknowledged.

A file may be longer than its acknowledged part (a crash between write and sync): the end of the file counts, and chunks that are sent again
are trimmed to their new bytes. Bytes that an earlier head process wrote are acknowledged only after another sync.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import Final

from phalanx.core.ids import JobId
from phalanx.core.work.attempt import Attempt
from phalanx.durable_files import (
    create_file,
    make_directory,
    remove_file,
    remove_tree,
    sync_content,
    sync_directory,
    truncate_file,
    write_at,
)
from phalanx.failpoints import hit
from phalanx.file_space import free_range
from phalanx.ports.logs import StreamKey, stream_key
from phalanx.ports.store import StoreRefused
from phalanx.store.disk_usage import job_folders, tree_bytes
from phalanx.store.logs.names import (
    STREAM,
    sort_key,
    validated,
    validated_job,
)
from phalanx.store.logs.open_files import OpenFile, OpenFiles

_BATCH_STREAMS: Final = 64  # streams written before they are synced; bounds the locks and descriptors held by one call
_SYNC_THREADS: Final = 8  # measured: 4 to 16 perform the same
_SUFFIX: Final = ".log"
_STEP_BYTES: Final = 16 << 20  # freed at once
KEPT_BYTES: Final = (256 << 20) + _STEP_BYTES
"""Of a stream. More than nodes send of one that ends: the cap, its last 64 KiB and lines of the supervisor."""
Pieces = list[tuple[int, bytes]]  # (offset, bytes)


class FileLogs:
    """Streams in files. Thread-safe; one thread at a time writes a stream.

    Args:
        root: the folder, created if missing.

    Raises:
        StoreRefused: the folder cannot be created.
    """

    def __init__(self, root: str) -> None:
        self._root = os.path.abspath(root)
        self._files = OpenFiles()
        self._pool = ThreadPoolExecutor(_SYNC_THREADS, thread_name_prefix="logs-sync")
        self._closed = False
        try:
            make_directory("logs.open", self._root)
        except OSError as error:
            raise _refusal(error, self._root) from error

    def append(self, chunks: list[tuple[StreamKey, int, bytes]]) -> dict[StreamKey, int]:
        """Append the new bytes of each chunk and return the end of each stream; durable when this returns.

        Raises:
            StoreRefused: the disk is full or failed; streams are truncated to their previous ends.
            BadRequest: an invalid stream name.
        """
        pieces: dict[StreamKey, Pieces] = {validated(key): [] for key, _, _ in chunks}
        for key, offset, content in chunks:
            pieces[key].append((offset, content))
        if self._closed:
            raise StoreRefused("the store is closed", hint="the head is stopping")
        keys = sorted(pieces)  # the order in which locks are taken
        ends: dict[StreamKey, int] = {}
        for first in range(0, len(keys), _BATCH_STREAMS):
            with ExitStack() as held:
                entries = [held.enter_context(self._files.lock(key)) for key in keys[first : first + _BATCH_STREAMS]]
                self._append(entries, pieces)
                ends.update((entry.key, entry.end if entry.fd >= 0 else 0) for entry in entries)
        hit("logs.append.done")
        return ends

    def end(self, key: StreamKey) -> int:
        """Length in bytes; 0 for an unknown stream."""
        durable = self._files.durable_end(validated(key))
        if durable is not None:
            return durable
        try:
            return os.stat(self._path(key), follow_symlinks=False).st_size
        except FileNotFoundError:
            return 0

    def begin(self, key: StreamKey) -> int:
        """Offset of the first byte that is stored: the older part of a long stream was removed."""
        if self.end(key) <= KEPT_BYTES:
            return 0
        try:
            fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return 0
        try:
            return os.lseek(fd, 0, os.SEEK_DATA)
        except OSError:  # it has no byte
            return 0
        finally:
            os.close(fd)

    def read(self, key: StreamKey, offset: int, limit: int) -> bytes:
        """At most `limit` bytes from `offset`; empty at the end. Does not return bytes that are not durable yet."""
        durable = self._files.durable_end(validated(key))
        start = max(0, offset)
        wanted = max(0, limit if durable is None else min(limit, durable - start))
        try:
            fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return b""
        try:
            return os.pread(fd, wanted, start)
        finally:
            os.close(fd)

    def streams(self, attempts: Iterable[Attempt]) -> list[StreamKey]:
        """All streams of these attempts, ordered by epoch, name and number."""
        found: list[StreamKey] = []
        for attempt in attempts:
            for name in _listed(os.path.join(self._root, attempt.folder)):
                stream = name.removesuffix(_SUFFIX)
                if stream != name and STREAM.fullmatch(stream):
                    found.append(stream_key(attempt, stream))
        return sorted(found, key=sort_key)

    def job_folders(self) -> list[tuple[str, JobId]]:
        """The folders of all jobs that have streams, by name, with the id of the job."""
        return job_folders(self._root)

    def stored_bytes(self, job_folder: str) -> int:
        """What the streams of a job occupy on the disk."""
        return tree_bytes(os.path.join(self._root, validated_job(job_folder)))

    def delete(self, job_folder: str) -> None:
        """Remove all streams of a job. Idempotent.

        Raises:
            StoreRefused: a file could not be removed.
        """
        folder = os.path.join(self._root, validated_job(job_folder))
        with ExitStack() as held:
            for key in self._files.of(job_folder):
                held.enter_context(self._files.lock(key)).close()
            try:
                remove_tree("logs.delete", folder, ignore_errors=False)
            except FileNotFoundError:
                pass
            except OSError as error:
                raise _refusal(error, folder) from error

    def close(self) -> None:
        """Close all files. Idempotent."""
        self._closed = True
        self._files.close()
        self._pool.shutdown()

    # ---- appending, with the streams' locks held --------------------------------------------------------------------

    def _append(self, entries: Sequence[OpenFile], pieces: dict[StreamKey, Pieces]) -> None:
        ends_before: dict[StreamKey, int | None] = {}  # None: there was no file
        try:
            for entry in entries:
                exists = entry.fd >= 0 or self._open(entry)
                ends_before[entry.key] = entry.end if exists else None
                self._write(entry, pieces[entry.key])
            self._sync([entry for entry in entries if entry.fd >= 0 and entry.durable != entry.end])
            for entry in entries:
                _remove_oldest(entry, len(pieces[entry.key]))
        except OSError as error:
            for entry in entries:
                if entry.durable != entry.end and entry.key in ends_before:
                    self._truncate(entry, ends_before[entry.key])
            raise _refusal(error, self._root) from error

    def _open(self, entry: OpenFile) -> bool:
        try:
            entry.fd = os.open(self._path(entry.key), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        entry.end = os.fstat(entry.fd).st_size
        return True

    def _create(self, entry: OpenFile) -> None:
        path = self._path(entry.key)
        make_directory("logs.append", os.path.dirname(path))
        entry.fd = create_file("logs.append", path, os.O_RDWR | os.O_NOFOLLOW)
        entry.end = 0

    def _write(self, entry: OpenFile, pieces: Pieces) -> None:
        for offset, content in pieces:
            held = entry.end if entry.fd >= 0 else 0
            if 0 <= offset <= held < offset + len(content):
                if entry.fd < 0:
                    self._create(entry)
                new = memoryview(content)[held - offset :]
                write_at("logs.append", entry.fd, new, held)
                entry.end = held + len(new)

    def _sync(self, entries: Sequence[OpenFile]) -> None:
        """Sync files, and the folders of those that this process has not synced yet. Returns when all syncs succeeded or failed.

        In parallel, since a journalling file system combines concurrent syncs: 64 files in 5 ms instead of 138 (ext4, virtual disk).
        """
        folders: set[str] = set()
        for entry in entries:
            if entry.durable is None:
                epoch_folder = os.path.dirname(self._path(entry.key))
                folders.update((epoch_folder, os.path.dirname(epoch_folder), self._root))
        if len(entries) == 1 and not folders:
            _sync_file(entries[0].fd)
        else:
            syncs = [self._pool.submit(_sync_file, entry.fd) for entry in entries]
            syncs += [self._pool.submit(sync_directory, "logs.append", folder) for folder in sorted(folders)]
            wait(syncs)
            for sync in syncs:
                sync.result()
        for entry in entries:
            entry.durable = entry.end

    def _truncate(self, entry: OpenFile, end_before: int | None) -> None:
        """Undo a failed append. Best effort: if this fails too, the file stays longer, and its end is read again."""
        try:
            if entry.fd >= 0 and end_before is None:
                remove_file("logs.take_back", self._path(entry.key))
            elif entry.fd >= 0 and end_before is not None:
                truncate_file("logs.take_back", entry.fd, end_before)
        except OSError:
            pass
        finally:
            entry.close()

    def _path(self, key: StreamKey) -> str:
        return os.path.join(self._root, key.folder, key.stream + _SUFFIX)


def _remove_oldest(entry: OpenFile, pieces: int) -> None:
    """Free the disk space of what is older than the newest KEPT_BYTES, a step at a time. Where the file system cannot, all is kept.

    The nodes end the output of a job at a cap, so that only streams of services are longer.
    """
    if not pieces or entry.fd < 0 or entry.end <= KEPT_BYTES + _STEP_BYTES:
        return
    limit = (entry.end - KEPT_BYTES) // _STEP_BYTES * _STEP_BYTES
    if limit > entry.freed and free_range(entry.fd, entry.freed, limit - entry.freed):
        entry.freed = limit


def _sync_file(fd: int) -> None:
    sync_content("logs.append", fd)


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _refusal(error: OSError, path: str) -> StoreRefused:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return StoreRefused(
            f"the disk is full: cannot write output to {path}",
            hint="free some space; supervisors resend automatically",
        )
    return StoreRefused(f"{path} cannot be written: {error}", hint="check the disk")

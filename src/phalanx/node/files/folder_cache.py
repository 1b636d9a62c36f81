"""Cached folders of one kind on this node (environments with jobs' packages, datasets): complete or not, kept while in use, evicted by last use.

    <cache>/<kind>/<name>/               a folder; complete once `.phalanx-complete` is in it
    <cache>/<kind>/locks/<name>.making   held by the process that creates it; others wait
    <cache>/<kind>/locks/<name>.used     shared by the supervisors of attempts that use it: no sweep removes it

The locks are flock(2): they end with their process. Both the creating program and the supervisor use this module; neither trusts the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Final

from phalanx.durable_files import replace_file
from phalanx.node.logic.requirements import VENVS_BYTES_MAX, environments_to_evict

# A sweep locks an environment while it removes it: 100,000 files of torch on a slow disk take a minute or two.
SWEPT_WITHIN_S: Final = 300.0
_POLL_S: Final = 0.1
_COMPLETE: Final = ".phalanx-complete"
_LOCKS: Final = "locks"
_libc: Final = ctypes.CDLL(None, use_errno=True)


class FolderCache:
    """See the module. Creating an instance creates no files."""

    def __init__(self, cache: str, kind: str = "venvs") -> None:
        self.folder = os.path.join(cache, kind)

    def path(self, name: str) -> str:
        """Its folder, which may not exist."""
        return os.path.join(self.folder, name)

    def complete(self, name: str) -> bool:
        """Whether it is complete."""
        return os.path.exists(self.marker(name))

    def acquire(self, name: str, cancelled: Callable[[], bool] = lambda: False) -> int:
        """Mark it as used now; returns a descriptor that protects it from sweeps until closed.

        Waits while a sweep removes it, until `cancelled`: the owner of the folder may hold the lock arbitrarily long.

        Raises:
            TimeoutError: cancelled, or locked for SWEPT_WITHIN_S.
            OSError: the folder cannot be written.
        """
        descriptor = self._lock_file(name, "used")
        until_s = time.monotonic() + SWEPT_WITHIN_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if cancelled() or time.monotonic() >= until_s:
                    os.close(descriptor)
                    raise TimeoutError(errno.ETIMEDOUT, "another process holds it", self.path(name)) from None
            time.sleep(_POLL_S)
        with contextlib.suppress(OSError):
            os.utime(self.marker(name))
        return descriptor

    @contextlib.contextmanager
    def creation_lock(self, name: str, *, wait: bool) -> Iterator[bool]:
        """Lock it for creation; yields False if another process has the lock and `wait` is false.

        Raises:
            OSError: the folder cannot be written.
        """
        descriptor = self._lock_file(name, "making")
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True
        finally:
            os.close(descriptor)

    def clear(self, name: str) -> str:
        """Remove the rest of an interrupted creation; returns the path of the folder to create. Needs the `making` lock.

        Raises:
            OSError: the disk failed.
        """
        path = self.path(name)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        return path

    def mark_complete(self, name: str) -> None:
        """Mark it as complete, after syncing all of it. A power cut leaves a complete environment or an unfinished one.

        Raises:
            OSError: the disk failed.
        """
        path = self.path(name)
        folder = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _libc.syncfs(folder) != 0:
                os.sync()
        finally:
            os.close(folder)
        replace_file("", self.marker(name), json.dumps({"bytes": size_on_disk(path)}).encode())

    def sweep(self, bytes_max: int = VENVS_BYTES_MAX) -> list[str]:
        """Remove the least recently used until the rest fits, and unfinished ones; returns their names. Those in use stay."""
        stored: list[tuple[str, float, int]] = []
        unfinished: list[str] = []
        for name in self.names():
            try:
                stored.append((name, os.stat(self.marker(name)).st_mtime, self._bytes(name)))
            except OSError:
                unfinished.append(name)
        return [name for name in [*unfinished, *environments_to_evict(stored, bytes_max)] if self._drop(name)]

    def _drop(self, name: str) -> bool:
        with self.creation_lock(name, wait=False) as mine:
            if not mine:
                return False
            descriptor = self._lock_file(name, "used")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.marker(name))  # first: an environment that is partly removed is not complete
                shutil.rmtree(self.path(name), ignore_errors=True)
                return True
            finally:
                os.close(descriptor)

    def names(self) -> list[str]:
        """All folders, complete or not, sorted."""
        try:
            return sorted(name for name in os.listdir(self.folder) if name != _LOCKS)
        except FileNotFoundError:
            return []

    def _bytes(self, name: str) -> int:
        with open(self.marker(name), encoding="ascii") as file:
            try:
                return int(json.load(file)["bytes"])
            except (ValueError, KeyError, TypeError):
                return 0

    def marker(self, name: str) -> str:
        """The file that exists while the folder is complete."""
        return os.path.join(self.folder, name, _COMPLETE)

    def _lock_file(self, name: str, kind: str) -> int:
        # Never unlinked: a lock on a replaced file would have no effect. One empty file per name ever used.
        locks = os.path.join(self.folder, _LOCKS)
        os.makedirs(locks, mode=0o700, exist_ok=True)
        return os.open(os.path.join(locks, f"{name}.{kind}"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def size_on_disk(path: str) -> int:
    """The folder's size on disk; a file with several names is counted once per name, a sparse one as far as it is written."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                # st_blocks is in units of 512 bytes, see stat(2)
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total

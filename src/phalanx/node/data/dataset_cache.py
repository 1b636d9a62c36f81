"""The datasets on this node, and the bound on them: the least recently used go when another needs room, those in use stay."""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import Final

from phalanx.node.files.folder_cache import FolderCache, size_on_disk

_KIND: Final = "data"
_FREE_SHARE: Final = 0.05  # of the disk that stays free: logs, checkpoints and outputs need some
DEFAULT_SHARE: Final = 0.5  # of the disk that the datasets of one account may take


class NoRoom(Exception):
    """The dataset does not fit; says why, and what to do."""


class DatasetCache(FolderCache):
    """See the module. `bytes_max`: of all datasets together; 0 for half of the disk."""

    def __init__(self, cache: str, bytes_max: int = 0) -> None:
        super().__init__(cache, _KIND)
        self._bytes_max = bytes_max

    def make_room(self, name: str, size_bytes: int) -> list[str]:
        """Evict datasets until one of this size fits beside the rest; returns the names of the evicted.

        Raises:
            NoRoom: it does not fit even then.
            OSError: the disk failed.
        """
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        disk = shutil.disk_usage(self.folder)
        limit = self._bytes_max or int(disk.total * DEFAULT_SHARE)
        if size_bytes > limit:
            raise NoRoom(f"it has {size_bytes} bytes, and datasets may use {limit} bytes of this node's disk")
        own_bytes = self._stored_bytes(name)
        stored = sorted((self._used_s(one), one) for one in self.names() if one != name)
        sizes = {one: self._stored_bytes(one) for _, one in stored}
        evicted = []
        for _, one in stored:
            free = shutil.disk_usage(self.folder).free - disk.total * _FREE_SHARE
            if sum(sizes.values()) + size_bytes <= limit and size_bytes - own_bytes <= free:
                break
            if self._drop(one):
                evicted.append(one)
                del sizes[one]
        free = int(shutil.disk_usage(self.folder).free - disk.total * _FREE_SHARE)
        if size_bytes - own_bytes > free:
            raise NoRoom(
                f"it needs {size_bytes - own_bytes} bytes, and {max(0, free)} bytes of this node's disk are free"
            )
        if sum(sizes.values()) + size_bytes > limit:
            raise NoRoom(f"the datasets of running jobs and this one exceed {limit} bytes")
        return evicted

    def mark_incomplete(self, name: str) -> None:
        """Mark it as incomplete: its files do not have the listed bytes. Needs the `making` lock."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.marker(name))

    def _used_s(self, name: str) -> float:
        for path in (self.marker(name), self.path(name)):
            with contextlib.suppress(OSError):
                return os.stat(path).st_mtime
        return 0.0

    def _stored_bytes(self, name: str) -> int:
        with contextlib.suppress(OSError):
            return self._bytes(name)
        return size_on_disk(self.path(name))

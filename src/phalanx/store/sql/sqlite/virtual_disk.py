"""A simulated disk for SQLite with injectable power failures, full disk and failing syncs: an apsw VFS, for drills.

Files are real (on a RAM disk, if one exists). In addition, the disk tracks synced content and unsynced writes. After a power failure,
`image` writes what a machine may find at its restart: each sector of an unsynced write is there or not.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from random import Random
from typing import Final

import apsw

SECTOR_BYTES: Final = 512  # the unit that a disk writes atomically
_names = itertools.count()


class VirtualDisk(apsw.VFS):
    """Open a store with `vfs=disk.name`. One per incarnation of a head.

    Attributes:
        room: bytes that may still be added to the WAL; None for no limit. The database file grows only in checkpoints. SQLite ignores their
            failure after a commit, but a VFS in Python would report it as if the commit had failed.
        fail_syncs: whether syncs fail.
        operations: writes, syncs and truncations so far.
        cut_at: the operation before which the power fails; from then on every call fails.
        syncs: number of successful syncs.
    """

    def __init__(self) -> None:
        self.name = f"phalanx-virtual-{os.getpid()}-{next(_names)}"
        self.room: int | None = None
        self.fail_syncs = False
        self.operations = 0
        self.cut_at: int | None = None
        self.syncs = 0
        self.files: dict[str, _Content] = {}
        super().__init__(self.name, base="")

    @property
    def powered_off(self) -> bool:
        """Whether the power has failed."""
        return self.cut_at is not None and self.operations >= self.cut_at

    def cut(self) -> None:
        """Cut the power now."""
        self.cut_at = self.operations

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:  # noqa: N802  # apsw's name
        """SQLite opens a file."""
        return _File(self, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802  # apsw's name
        """SQLite removes a file."""
        self.count_operation()
        super().xDelete(filename, syncdir)
        self.files.pop(filename, None)

    def count_operation(self) -> None:
        """Count one operation.

        Raises:
            apsw.IOError: there is no power.
        """
        if self.powered_off:
            raise apsw.IOError("no power")
        self.operations += 1

    def image(self, folder: str, dice: Random | None) -> None:
        """Write the remaining files into `folder`: all writes (the process died), or with `rng` those that survive a power failure."""
        for path, content in sorted(self.files.items()):
            with open(os.path.join(folder, os.path.basename(path)), "wb") as file:
                file.write(content.left(dice))


class _Content:
    """Content of one file: synced content, and unsynced writes."""

    def __init__(self, begun: bytes) -> None:
        self.synced = bytearray(begun)
        self.written: list[tuple[int, bytes]] = []  # offset and bytes; no bytes: truncated to this size

    def sync(self) -> None:
        _apply(self.synced, self.written)
        self.written.clear()

    def left(self, dice: Random | None) -> bytearray:
        content = bytearray(self.synced)
        _apply(content, self.written if dice is None else _survivors(self.written, dice))
        return content


def _apply(content: bytearray, written: Iterable[tuple[int, bytes]]) -> None:
    for offset, piece in written:
        if not piece:
            del content[offset:]
            continue
        if len(content) < offset:
            content.extend(b"\0" * (offset - len(content)))
        content[offset : offset + len(piece)] = piece


def _survivors(written: Iterable[tuple[int, bytes]], dice: Random) -> Iterator[tuple[int, bytes]]:
    """The writes that survive: each sector independently, with probability 1/2."""
    for offset, piece in written:
        for start in range(0, max(1, len(piece)), SECTOR_BYTES):
            if dice.random() < 0.5:
                yield offset + start, piece[start : start + SECTOR_BYTES]


class _File(apsw.VFSFile):
    def __init__(self, disk: VirtualDisk, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        self._disk = disk
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        super().__init__("", name, flags)
        self._content: _Content | None = None
        self._is_wal = path is not None and path.endswith("-wal")
        if path:
            if path not in disk.files:
                begun = b""
                if os.path.exists(path):
                    with open(path, "rb") as file:
                        begun = file.read()
                disk.files[path] = _Content(begun)
            self._content = disk.files[path]

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802  # apsw's name
        disk = self._disk
        disk.count_operation()
        if disk.room is not None and self._is_wal:
            growth = max(0, offset + len(data) - super().xFileSize())
            if growth > disk.room:
                raise apsw.FullError("disk full")
            disk.room -= growth
        super().xWrite(data, offset)
        if self._content is not None:
            self._content.written.append((offset, bytes(data)))

    def xTruncate(self, newsize: int) -> None:  # noqa: N802  # apsw's name
        self._disk.count_operation()
        super().xTruncate(newsize)
        if self._content is not None:
            self._content.written.append((newsize, b""))

    def xSync(self, flags: int) -> None:  # noqa: N802, ARG002  # apsw's name; every sync is whole here
        disk = self._disk
        disk.count_operation()
        if disk.fail_syncs:
            raise apsw.IOError("sync failed")
        disk.syncs += 1
        if self._content is not None:
            self._content.sync()

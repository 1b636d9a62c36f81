"""A disk for SQLite that can be filled, broken, or cut from its power, as an apsw VFS.

It passes everything on to the real files and remembers, for each file, what was synced and what was only written. After a power cut
any part of what was only written may be there: `image` makes one such outcome, sector by sector, from a seed.
"""

import itertools
import os
import random

import apsw

SECTOR = 512
_names = itertools.count()


class Disk(apsw.VFS):
    """Register one per test; open databases with `vfs=disk.name`.

    Attributes:
        room: bytes that may still be added to files; None for no end.
        fail_syncs: whether syncs fail.
        operations: writes, syncs and truncations so far.
        cut_at: operation before which the power goes; from then on every call fails.
    """

    def __init__(self):
        self.name = f"failing-{next(_names)}"
        self.room = None
        self.fail_syncs = False
        self.operations = 0
        self.cut_at = None
        self.synced = {}  # path -> bytes
        self.written = {}  # path -> [(offset, bytes) or size]
        self.syncs = []  # paths, in order
        super().__init__(self.name, base="")

    def xOpen(self, name, flags):  # noqa: N802  # apsw's name
        return _File(self, name, flags)

    def xDelete(self, path, sync_directory):  # noqa: N802  # apsw's name
        self.operate()
        super().xDelete(path, sync_directory)
        self.synced.pop(path, None)
        self.written.pop(path, None)

    def operate(self):
        if self.cut_at is not None and self.operations >= self.cut_at:
            raise apsw.IOError("no power")
        self.operations += 1

    def image(self, folder, seed):
        """Write into `folder` what a power cut may have left."""
        dice = random.Random(seed)
        for path in sorted({*self.synced, *self.written}):
            if path.endswith("-shm"):
                continue
            content = bytearray(self.synced.get(path, b""))
            for what in self.written.get(path, ()):
                if isinstance(what, int):
                    if dice.random() < 0.5:
                        del content[what:]
                    continue
                offset, data = what
                for start in range(0, len(data), SECTOR):
                    if dice.random() < 0.5:
                        continue
                    piece = data[start : start + SECTOR]
                    content.extend(b"\0" * (offset + start + len(piece) - len(content)))
                    content[offset + start : offset + start + len(piece)] = piece
            with open(os.path.join(folder, os.path.basename(path)), "wb") as file:
                file.write(content)


class _File(apsw.VFSFile):
    def __init__(self, disk, name, flags):
        self.disk = disk
        self.path = name.filename() if isinstance(name, apsw.URIFilename) else name
        super().__init__("", name, flags)
        if self.path and self.path not in disk.synced and os.path.exists(self.path):
            with open(self.path, "rb") as file:
                disk.synced[self.path] = file.read()

    def xWrite(self, data, offset):  # noqa: N802  # apsw's name
        self.disk.operate()
        growth = max(0, offset + len(data) - super().xFileSize())
        if self.disk.room is not None:
            if growth > self.disk.room:
                raise apsw.FullError("disk full")
            self.disk.room -= growth
        super().xWrite(data, offset)
        self.disk.written.setdefault(self.path, []).append((offset, bytes(data)))

    def xTruncate(self, size):  # noqa: N802  # apsw's name
        self.disk.operate()
        super().xTruncate(size)
        self.disk.written.setdefault(self.path, []).append(size)

    def xSync(self, flags):  # noqa: N802  # apsw's name
        self.disk.operate()
        if self.disk.fail_syncs:
            raise apsw.IOError("sync failed")
        super().xSync(flags)
        self.disk.syncs.append(self.path)
        with open(self.path, "rb") as file:
            self.disk.synced[self.path] = file.read()
        self.disk.written.pop(self.path, None)

"""A dataset as its source lists it: files, and chunks of equal size over all of them in order. Nodes that list the same source agree on both."""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

CHUNK_BYTES_MIN: Final = 1 << 20
CHUNK_BYTES_USUAL: Final = 4 << 20  # one request to an object store takes some 30 ms, and 4 MiB at 1 Gbit/s as long
CHUNKS_MIN: Final = 1 << 10  # with fewer, the last chunk of a node delays the others
CHUNKS_MAX: Final = 1 << 15  # so that the list of digests stays at 1 MiB
FILES_MAX: Final = 1_000_000
_PATH_MAX: Final = 1024


class DatasetInvalid(Exception):
    """The source cannot be staged; says why."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file. `path`: relative to the source, as keys of object stores are; `version`: changes when the file changes."""

    path: str
    size_bytes: int
    version: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one file: `file` is its index."""

    file: int
    offset: int
    size_bytes: int


class Dataset:
    """See the module. `single`: the source is one file and not a folder."""

    def __init__(self, source: str, files: Iterable[DataFile], *, single: bool = False) -> None:
        """Sort and check the files.

        Raises:
            DatasetInvalid: it has no files, too many, or a path that is not a place below a folder.
        """
        self.source = source
        self.single = single
        self.files: Sequence[DataFile] = sorted(files, key=lambda file: file.path)
        if not self.files:
            raise DatasetInvalid(f"{source}: no files there")
        if len(self.files) > FILES_MAX:
            raise DatasetInvalid(f"{source}: {len(self.files)} files; at most {FILES_MAX} are staged")
        names = {file.path for file in self.files}
        for file in self.files:
            parts = file.path.split("/")
            above = accumulate(parts[:-1], lambda a, b: f"{a}/{b}")
            if {"", ".", ".."} & set(parts) or "\0" in file.path or len(file.path) > _PATH_MAX:
                raise DatasetInvalid(f"{source}: {file.path[:80]!r} cannot be the name of a file")
            if any(folder in names for folder in above):
                raise DatasetInvalid(f"{source}: {file.path[:80]!r} lies below another file")
        self._ends = list(accumulate(file.size_bytes for file in self.files))
        self.size_bytes = self._ends[-1]
        chunk = CHUNK_BYTES_MIN
        while chunk * CHUNKS_MAX < self.size_bytes or (
            chunk < CHUNK_BYTES_USUAL and chunk * CHUNKS_MIN < self.size_bytes
        ):
            chunk *= 2
        self.chunk_bytes = chunk
        self.chunks = -(-self.size_bytes // chunk)
        listed = [[file.path, file.size_bytes, file.version] for file in self.files]
        text = json.dumps([1, source, single, chunk, listed], ensure_ascii=True, separators=(",", ":"))
        self.id = hashlib.sha256(text.encode()).hexdigest()[:32]

    def chunk_size(self, index: int) -> int:
        """The size of a chunk in bytes; the last may be shorter."""
        return min(self.chunk_bytes, self.size_bytes - index * self.chunk_bytes)

    def pieces(self, index: int) -> list[Piece]:
        """The parts of files that a chunk consists of, in order; empty files are in none."""
        begin, left = index * self.chunk_bytes, self.chunk_size(index)
        at = bisect.bisect_right(self._ends, begin)
        found = []
        while left:
            start = self._ends[at] - self.files[at].size_bytes
            size = min(left, self._ends[at] - begin)
            if size:
                found.append(Piece(at, begin - start, size))
            begin, left, at = begin + size, left - size, at + 1
        return found

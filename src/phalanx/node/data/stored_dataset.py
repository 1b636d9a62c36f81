"""One dataset in the cache: its files, and the journal of the chunks that are here.

    <dataset>/files/...   sparse files while chunks are missing, read-only once all are here
    <dataset>/chunks      the journal: for each chunk its index and SHA-256, appended once its bytes are written
    <dataset>/dataset.json  what the source listed
    <dataset>/about.json  its address, size, and how fast it came
    <dataset>/boot        the boot of the machine in which the journal was written
    <dataset>/stat        what the complete files look like, to find one that was changed

A killed program loses no chunk that the journal names: the kernel has its bytes. After a restart of the machine all named chunks are
hashed again. The journal is also what other nodes read to learn which chunks are here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import threading
from collections.abc import Iterator
from typing import Final

import msgspec

from phalanx.durable_files import replace_file
from phalanx.node.logic.dataset import DataFile, Dataset, DatasetInvalid

RECORD: Final = struct.Struct(">I32s")  # index and SHA-256 of a chunk
_LIST: Final = "dataset.json"
ABOUT_FILE: Final = "about.json"
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"


class StagedCopy(msgspec.Struct, frozen=True):
    """What is known of a complete copy. `bytes_per_s`: 0 if unknown."""

    source: str
    size_bytes: int
    bytes_per_s: float = 0.0


class ChunkCorrupt(Exception):
    """The bytes of a chunk do not have its digest."""


class StoredDataset:
    """See the module. Thread-safe; one process writes it, under the cache's `making` lock.

    `digests`: SHA-256 of the chunks that are here, by index.
    """

    def __init__(self, folder: str, dataset: Dataset, *, writes: bool = True) -> None:
        """Make the folders and empty files, and read the journal; without `writes` nothing is made, and only `read` and `journal` work.

        Raises:
            OSError: the disk failed.
        """
        self.dataset = dataset
        self.folder = folder
        self.files = os.path.join(folder, "files")
        self.digests: dict[int, bytes] = {}
        self._journal = os.path.join(folder, "chunks")
        self._lock = threading.Lock()
        self._descriptor = -1
        if not writes:
            return
        self._make_files()
        self._write_list()
        self._read_journal()
        self._descriptor = os.open(self._journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        """Close the journal."""
        os.close(self._descriptor)

    @property
    def stored_bytes(self) -> int:
        """The bytes of the chunks that are here."""
        return sum(map(self.dataset.chunk_size, list(self.digests)))

    def missing(self) -> list[int]:
        """The chunks that are not here, in order."""
        return [index for index in range(self.dataset.chunks) if index not in self.digests]

    def put(self, index: int, data: bytes, expected: bytes | None = None) -> None:
        """Store a chunk. `expected`: its SHA-256 by another node.

        Raises:
            ChunkCorrupt: the bytes have another digest, or another number.
            OSError: the disk failed.
        """
        digest = hashlib.sha256(data).digest()
        if len(data) != self.dataset.chunk_size(index) or (expected is not None and digest != expected):
            raise ChunkCorrupt(
                f"chunk {index} of {self.dataset.source} has {len(data)} bytes and SHA-256 {digest.hex()[:12]}"
            )
        at = 0
        view = memoryview(data)
        for piece in self.dataset.pieces(index):
            descriptor = os.open(self._path(piece.file), os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                done = 0
                while done < piece.size_bytes:
                    part = view[at + done : at + piece.size_bytes]
                    done += os.pwrite(descriptor, part, piece.offset + done)
            finally:
                os.close(descriptor)
            at += piece.size_bytes
        with self._lock:
            os.write(self._descriptor, RECORD.pack(index, digest))
            self.digests[index] = digest

    def read(self, index: int) -> bytes:
        """The bytes of a chunk as they are on the disk.

        Raises:
            OSError: a file is gone.
        """
        data = bytearray()
        for piece in self.dataset.pieces(index):
            with open(self._path(piece.file), "rb", buffering=0) as file:
                data += os.pread(file.fileno(), piece.size_bytes, piece.offset)
        return bytes(data)

    def journal(self, after: int, bytes_max: int) -> bytes:
        """The journal from a byte on, at most so much of it.

        Raises:
            OSError: it is not here.
        """
        with open(self._journal, "rb") as file:
            file.seek(after)
            return file.read(bytes_max)

    def verify(self) -> list[int]:
        """Hash all chunks again; those that do not match are missing from now on, and returned.

        Raises:
            OSError: the disk failed.
        """
        bad = []
        for index, digest in sorted(self.digests.items()):
            data = b""
            with contextlib.suppress(OSError):
                data = self.read(index)
            if hashlib.sha256(data).digest() != digest:
                bad.append(index)
                del self.digests[index]
        if bad:
            self._make_files()
            self._write_journal()
        return bad

    def finish(self, bytes_per_s: float = 0.0) -> None:
        """Make the complete files read-only, and record what they look like, and how fast they came.

        Raises:
            OSError: the disk failed.
        """
        for path in self._paths():
            os.chmod(path, 0o444)
        about = StagedCopy(self.dataset.source, self.dataset.size_bytes, bytes_per_s)
        replace_file("", os.path.join(self.folder, ABOUT_FILE), msgspec.json.encode(about))
        replace_file("", os.path.join(self.folder, "stat"), _looks(self.files, self.dataset).encode())

    def _make_files(self) -> None:
        """Make the files that are not here or are of another size; the others keep their bytes."""
        os.makedirs(self.files, mode=0o700, exist_ok=True)
        for path, file in zip(self._paths(), self.dataset.files, strict=True):
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.chmod(path, 0o600)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if os.fstat(descriptor).st_size != file.size_bytes:
                    os.ftruncate(descriptor, file.size_bytes)
            finally:
                os.close(descriptor)

    def _write_list(self) -> None:
        """Write what the server for other nodes needs to find the chunks in the files."""
        path, dataset = os.path.join(self.folder, _LIST), self.dataset
        if not os.path.exists(path):
            files = [[file.path, file.size_bytes, file.version] for file in dataset.files]
            record = {"source": dataset.source, "single": dataset.single, "files": files}
            replace_file("", path, json.dumps(record).encode())

    def _read_journal(self) -> None:
        boot = read_text(_BOOT_ID)
        with contextlib.suppress(FileNotFoundError), open(self._journal, "rb") as file:
            data = file.read()
            whole = len(data) - len(data) % RECORD.size
            for index, digest in RECORD.iter_unpack(data[:whole]):
                if index < self.dataset.chunks:
                    self.digests[index] = digest
            if whole != len(data):
                os.truncate(self._journal, whole)
        if read_text(os.path.join(self.folder, "boot")) != boot:
            self.verify()
            replace_file("", os.path.join(self.folder, "boot"), boot.encode())

    def _write_journal(self) -> None:
        records = b"".join(RECORD.pack(index, digest) for index, digest in self.digests.items())
        replace_file("", self._journal, records)
        if self._descriptor >= 0:
            fresh = os.open(self._journal, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            os.dup2(fresh, self._descriptor, inheritable=False)
            os.close(fresh)

    def _paths(self) -> Iterator[str]:
        return (self._path(index) for index in range(len(self.dataset.files)))

    def _path(self, index: int) -> str:
        return os.path.join(self.files, self.dataset.files[index].path)


def open_reader(folder: str) -> StoredDataset:
    """A dataset for reading, as another process stores it.

    Raises:
        OSError: it is not here.
        ValueError: its list is damaged.
    """
    with open(os.path.join(folder, _LIST), "rb") as file:
        found = json.loads(file.read())
    try:
        files = [DataFile(path, size, version) for path, size, version in found["files"]]
        return StoredDataset(folder, Dataset(found["source"], files, single=found["single"]), writes=False)
    except (DatasetInvalid, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: {error}") from error


def is_unchanged(folder: str, dataset: Dataset) -> bool:
    """Whether the complete files of a dataset look as they did: size, time of change and inode."""
    try:
        return read_text(os.path.join(folder, "stat")) == _looks(os.path.join(folder, "files"), dataset)
    except OSError:
        return False


def _looks(files: str, dataset: Dataset) -> str:
    found = hashlib.sha256()
    for file in dataset.files:
        one = os.lstat(os.path.join(files, file.path))
        found.update(f"{one.st_size} {one.st_mtime_ns} {one.st_ino}\n".encode())
    return found.hexdigest()


def read_text(path: str) -> str:
    """The text of a small file; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(4096)
    except (OSError, UnicodeDecodeError):
        return ""

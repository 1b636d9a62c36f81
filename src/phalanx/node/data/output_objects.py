"""Outputs of a job in an object store: each file is one object with its own name, so that any other program reads it.

    <address>/<folder of the job>/<path>                    a file of node rank 0
                                 /node-<rank>/<path>        a file of another node
                                 /.phalanx/node-<rank>.json the list of a node's files: bytes, SHA-256, ETag

A pass sends the files that changed since the list was written, and writes the list again from time to time. So a program that was killed goes on
with the next file. A list names the newest attempt: an older one that finds a newer number in it sends nothing more.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from phalanx.node.data.sources import ObjectMissing, ObjectsRefused, SourceUnavailable

if TYPE_CHECKING:
    from phalanx.node.data.object_store import ObjectFolder

FILES_MAX: Final = 100_000  # of one node
LISTS: Final = ".phalanx"
SETTLED_BYTES: Final = (
    64 << 20
)  # a larger file that is still written is sent at the end only, since a store cannot append
SETTLED_S: Final = 60.0
_FORMAT: Final = "phalanx-outputs-1"
_READ_BYTES: Final = 8 << 20
_RANGE_BYTES: Final = 16 << 20
_LIST_EVERY_S: Final = 10.0
_RESERVED: Final = re.compile(r"(\.phalanx|node-\d+)(/|$)")
_PARTIAL: Final = ".partial"


class AttemptOver(Exception):
    """A newer attempt of the job has begun to store its outputs."""


@dataclass(slots=True, kw_only=True)
class StoredFileList:
    """The list of one node's files: by path size, time of the last change here (ns), SHA-256, ETag and whether it is executable."""

    rank: int
    epoch: int
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Its own name in the store."""
        return f"{LISTS}/node-{self.rank}.json"

    def object_of(self, path: str) -> str:
        """The name of a file's object."""
        return f"node-{self.rank}/{path}" if self.rank else path

    def encode(self) -> bytes:
        """As it is stored."""
        return json.dumps({"format": _FORMAT, "epoch": self.epoch, "files": self.files}, sort_keys=True).encode()


def read_list(store: ObjectFolder, rank: int) -> StoredFileList | None:
    """Read a node's list; None if it has none.

    Raises:
        ObjectsRefused: it is not such a list.
    """
    try:
        found = json.loads(store.get(f"{LISTS}/node-{rank}.json"))
    except ObjectMissing:
        return None
    except ValueError as error:
        raise ObjectsRefused(f"{store.url}/{LISTS}/node-{rank}.json is not a list of outputs: {error}") from error
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise ObjectsRefused(f"{store.url}/{LISTS}/node-{rank}.json is not a list of outputs")
    for path in found["files"]:
        if "\0" in path or any(word in {"", ".", ".."} for word in path.split("/")):
            raise ObjectsRefused(f"the list of outputs names {path[:100]!r}, which is no path below a folder")
    return StoredFileList(rank=rank, epoch=int(found["epoch"]), files=found["files"])


def read_lists(store: ObjectFolder) -> list[StoredFileList]:
    """The lists of all nodes, by rank."""
    names = (re.fullmatch(rf"{re.escape(LISTS)}/node-(\d+)\.json", path) for path in store.list(LISTS))
    found = (read_list(store, int(one[1])) for one in names if one is not None)
    return sorted((one for one in found if one is not None), key=lambda one: one.rank)


def written(store: ObjectFolder) -> dict[str, int]:
    """Names and bytes of the objects that the job stored and that were not replaced since, each before the list that names it.

    Raises:
        ObjectsRefused, SourceUnavailable: it is not known.
    """
    lists, found = read_lists(store), store.list()
    names = [
        one.object_of(path)
        for one in lists
        for path, entry in one.files.items()
        if found.get(one.object_of(path)) == (entry["size"], entry["etag"])
    ]
    return {name: found[name][0] for name in [*names, *(one.path for one in lists)]}


def begin(store: ObjectFolder, folder: str, *, rank: int, epoch: int, on_bytes: Callable[[int], None]) -> int:
    """Bring this node's files of earlier attempts into an empty folder, and note the new attempt, which proves that the job may write here.

    Returns:
        The number of files.

    Raises:
        AttemptOver, ObjectsRefused, SourceUnavailable, OSError: it is not done.
    """
    known = read_list(store, rank) or StoredFileList(rank=rank, epoch=epoch)
    if known.epoch > epoch:
        raise AttemptOver
    for path, entry in list(known.files.items()):
        place = inside(folder, path)
        os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
        try:
            fetch(store, known.object_of(path), entry, place, on_bytes)
        except ObjectMissing:  # the user deleted it there
            del known.files[path]
            continue
        os.utime(place, ns=(entry["mtime_ns"], entry["mtime_ns"]))
    store.replace((written := StoredFileList(rank=rank, epoch=epoch, files=known.files)).path, written.encode())
    return len(written.files)


def send(
    store: ObjectFolder, folder: str, *, rank: int, epoch: int, final: bool, on_bytes: Callable[[int], None]
) -> list[list[str]]:
    """Send what changed since the last pass, and remove what is gone. With `final`, prove that the store has all files.

    Returns:
        Files that are not stored, each with the reason.

    Raises:
        AttemptOver, ObjectsRefused, SourceUnavailable, OSError: a part may be stored.
    """
    known = read_list(store, rank) or StoredFileList(rank=rank, epoch=epoch)
    if known.epoch > epoch:
        raise AttemptOver
    known.epoch = epoch
    refused: list[list[str]] = []
    found, whole = _walk(folder, refused)
    written_s, changed = time.monotonic(), False
    for path, seen in found.items():
        entry = known.files.get(path)
        if entry is not None and (entry["size"], entry["mtime_ns"]) == (seen.st_size, seen.st_mtime_ns):
            continue
        if not final and seen.st_size > SETTLED_BYTES and time.time() - seen.st_mtime < SETTLED_S:
            continue
        sent = _send_file(store, known.object_of(path), os.path.join(folder, path), on_bytes)
        if sent is None:
            continue
        known.files[path], changed = sent, True
        if time.monotonic() - written_s > _LIST_EVERY_S:
            _write(store, known)
            written_s, changed = time.monotonic(), False
    gone = [path for path in known.files if path not in found] if whole else []
    if gone:
        store.delete([known.object_of(path) for path in gone])
        known.files = {path: entry for path, entry in known.files.items() if path in found}
    if changed or gone:
        _write(store, known)
    if final:
        _prove(store, known)
    return refused


def fetch(store: ObjectFolder, name: str, entry: dict[str, Any], place: str, on_bytes: Callable[[int], None]) -> None:
    """Make a file complete at `place`. What an interrupted call brought stays, in a file beside it; the SHA-256 decides.

    Raises:
        ObjectMissing, ObjectsRefused, SourceUnavailable, OSError: it is not complete.
    """
    size, partial = int(entry["size"]), f"{place}{_PARTIAL}"
    if _is_file(place, size) and _sha256_of(place) == entry["sha256"]:
        return
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        begin_at = min(os.fstat(descriptor).st_size, size)
        os.lseek(descriptor, begin_at, os.SEEK_SET)
        while begin_at < size:
            data = store.read_range(name, begin_at, min(size, begin_at + _RANGE_BYTES))
            if not data:
                break
            os.pwrite(descriptor, data, begin_at)
            begin_at += len(data)
            on_bytes(len(data))
        os.ftruncate(descriptor, begin_at)
        os.fsync(descriptor)
        if entry.get("executable"):
            mode = os.fstat(descriptor).st_mode
            os.fchmod(descriptor, mode | ((mode & 0o444) >> 2))  # for those that may read it
    finally:
        os.close(descriptor)
    if _sha256_of(partial) != entry["sha256"]:
        os.unlink(partial)
        raise ObjectsRefused(f"{store.url}/{name} has other bytes than its list says")
    os.replace(partial, place)


def inside(folder: str, path: str) -> str:
    """The place of a listed path below a folder.

    Raises:
        ObjectsRefused: a link leads outside.
    """
    place = os.path.join(folder, *path.split("/"))
    root = os.path.realpath(folder)
    if os.path.commonpath([root, os.path.realpath(os.path.dirname(place))]) != root:
        raise ObjectsRefused(f"{path[:100]!r} leads outside of {folder} through a link")
    return place


def _send_file(store: ObjectFolder, name: str, path: str, on_bytes: Callable[[int], None]) -> dict[str, Any] | None:
    """Store a file as it is now; None if it was removed, or changed while it was read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        seen = os.fstat(file.fileno())
        if not stat.S_ISREG(seen.st_mode):
            return None
        sha256 = hashlib.sha256()

        def pieces() -> Iterator[bytes]:
            left = seen.st_size
            while left and (piece := file.read(min(_READ_BYTES, left))):
                left -= len(piece)
                sha256.update(piece)
                yield piece
                on_bytes(len(piece))

        tag = store.replace(name, pieces(), size_bytes=seen.st_size)
        after = os.fstat(file.fileno())
    if after.st_size < seen.st_size:
        return None
    return {
        "size": seen.st_size,
        "mtime_ns": seen.st_mtime_ns,
        "sha256": sha256.hexdigest(),
        "etag": tag,
        "executable": bool(seen.st_mode & stat.S_IXUSR),
    }


def _write(store: ObjectFolder, known: StoredFileList) -> None:
    newest = read_list(store, known.rank)
    if newest is not None and newest.epoch > known.epoch:
        raise AttemptOver
    store.replace(known.path, known.encode())


def _prove(store: ObjectFolder, known: StoredFileList) -> None:
    """Compare size and ETag of every file with what the store lists. One that differs leaves the list, so that the next pass sends it again."""
    found = store.list()
    wrong = [
        path
        for path, entry in known.files.items()
        if found.get(known.object_of(path)) != (entry["size"], entry["etag"])
    ]
    if wrong:
        for path in wrong:
            del known.files[path]
        _write(store, known)
        raise SourceUnavailable(f"{store.url}/{known.object_of(wrong[0])}: the store has another file than it received")


def _walk(folder: str, refused: list[list[str]]) -> tuple[dict[str, os.stat_result], bool]:
    """Regular files below a folder by path, and whether the list is complete. Links are not followed."""
    found: dict[str, os.stat_result] = {}
    waiting, whole = [folder], True
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            whole = False
            continue
        for entry in listed:
            try:
                seen = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            path = os.path.relpath(entry.path, folder)
            if stat.S_ISDIR(seen.st_mode):
                waiting.append(entry.path)
            elif stat.S_ISREG(seen.st_mode) and not path.isprintable():
                refused.append([ascii(path), "its name is not printable text"])
            elif stat.S_ISREG(seen.st_mode) and _RESERVED.match(path):
                refused.append([path, "names that begin with .phalanx or node-<number> are those of Phalanx"])
            elif stat.S_ISREG(seen.st_mode):
                if len(found) >= FILES_MAX:
                    refused.append(["*", f"at most {FILES_MAX} files of a node are stored"])
                    return found, False
                found[path] = seen
    return found, whole


def _is_file(path: str, size: int) -> bool:
    try:
        seen = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(seen.st_mode) and seen.st_size == size


def _sha256_of(path: str) -> str:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

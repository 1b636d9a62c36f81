"""A job's output folder, listed and packed without ever leaving it: each step down is opened by descriptor, links are never followed."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from typing import Final

from phalanx.core.errors import BadRequest, NotFound
from phalanx.wire.api.output import FileEntry, FilesReply

ENTRIES_MAX: Final = 10_000  # of one listing
DEPTH_MAX: Final = 64
_CHUNK_BYTES: Final = 1 << 18
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def list_folder(root: str, path: str) -> FilesReply:
    """Entries of one folder under `root`, folders first; a file lists itself.

    Raises:
        NotFound: no such file or folder.
        BadRequest: the path would leave the root.
    """
    words = _words(path)
    try:
        parent = _open(root, words[:-1])
    except NotFound:
        if words:
            raise
        return FilesReply(path="", entries=[])  # a job that never started has no folder yet
    try:
        if words and not stat.S_ISDIR((itself := _stat(parent, words[-1], path)).st_mode):
            return FilesReply(path="/".join(words), entries=[_entry("/".join(words), itself)])
        folder = _down(parent, words[-1], path) if words else os.dup(parent)
    finally:
        os.close(parent)
    try:
        names = sorted(os.listdir(folder))
        entries = [
            _entry("/".join([*words, name]), seen) for name in names[:ENTRIES_MAX] if (seen := _maybe(folder, name))
        ]
    finally:
        os.close(folder)
    entries.sort(key=lambda entry: (entry.kind != "folder", entry.path))
    return FilesReply(path="/".join(words), entries=entries, truncated=len(names) > ENTRIES_MAX)


def pack(root: str, path: str) -> Iterator[bytes]:
    """A tar archive of a folder or file under `root`, names relative to it, in order of name.

    A file that grows meanwhile is taken as long as it was, one that shrinks is filled with zeros as tar does. Links are packed as links,
    and only those that stay inside; sockets and devices are left out.

    Raises:
        NotFound, BadRequest: as above, before the first byte.
    """
    words = _words(path)
    parent = _open(root, words[:-1])
    try:
        seen = _stat(parent, words[-1], path) if words else os.fstat(parent)
        if stat.S_ISDIR(seen.st_mode):
            folder = _down(parent, words[-1], path) if words else os.dup(parent)
            pieces = _pack_folder(folder, "", 0)
        else:
            pieces = _pack_one(os.dup(parent), words[-1], words[-1], seen, close=True)
    finally:
        os.close(parent)
    # Begun here, so that its descriptor is closed even if nobody reads on.
    return _closed_archive(next(pieces, b""), pieces)


def _closed_archive(first: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from pieces
    yield bytes(2 * tarfile.BLOCKSIZE)


def _pack_folder(folder: int, prefix: str, depth: int) -> Iterator[bytes]:
    try:
        for name in sorted(os.listdir(folder)):
            seen = _maybe(folder, name)
            if seen is None:
                continue
            if stat.S_ISDIR(seen.st_mode):
                yield _header(prefix + name, seen, tarfile.DIRTYPE, 0)
                if depth < DEPTH_MAX:
                    try:
                        below = os.open(name, _FOLDER, dir_fd=folder)
                    except OSError:  # gone, or a link by now
                        continue
                    yield from _pack_folder(below, f"{prefix}{name}/", depth + 1)
            else:
                yield from _pack_one(folder, name, prefix + name, seen, close=False)
    finally:
        os.close(folder)


def _pack_one(folder: int, name: str, shown: str, seen: os.stat_result, *, close: bool) -> Iterator[bytes]:
    try:
        if stat.S_ISLNK(seen.st_mode):
            target = os.readlink(name, dir_fd=folder)
            if _stays_inside(shown, target):
                yield _header(shown, seen, tarfile.SYMTYPE, 0, target)
        elif stat.S_ISREG(seen.st_mode):
            yield from _pack_bytes(folder, name, shown, seen)
    except OSError:  # gone since it was listed
        return
    finally:
        if close:
            os.close(folder)


def _pack_bytes(folder: int, name: str, shown: str, seen: os.stat_result) -> Iterator[bytes]:
    file = os.open(name, _FILE, dir_fd=folder)
    try:
        size = left = os.fstat(file).st_size
        yield _header(shown, seen, tarfile.REGTYPE, size)
        while left > 0:
            piece = os.read(file, min(_CHUNK_BYTES, left)) or bytes(min(_CHUNK_BYTES, left))
            left -= len(piece)
            yield piece
        yield bytes(-size % tarfile.BLOCKSIZE)
    finally:
        os.close(file)


def _header(shown: str, seen: os.stat_result, kind: bytes, size: int, target: str = "") -> bytes:
    entry = tarfile.TarInfo(shown)
    entry.type, entry.size, entry.linkname = kind, size, target
    entry.mode, entry.mtime = stat.S_IMODE(seen.st_mode) & 0o777, int(seen.st_mtime)
    return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _stays_inside(shown: str, target: str) -> bool:
    """Whether a link at `shown` leads to a place under the archive's own root."""
    if target.startswith("/"):
        return False
    level = shown.count("/")
    for word in target.split("/"):
        level += -1 if word == ".." else word not in ("", ".")
        if level < 0:
            return False
    return True


def _words(path: str) -> list[str]:
    words = [word for word in path.split("/") if word not in ("", ".")]
    if ".." in words or "\0" in path or len(words) > DEPTH_MAX:
        raise BadRequest(f"path: {path[:100]!r} leaves the job's output folder", hint="name a path below it")
    return words


def _open(root: str, words: list[str]) -> int:
    """A descriptor of the folder `words` under `root`. The root itself may be reached through links: it is the head's own."""
    try:
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise NotFound(
            "the job has no output folder", hint="PHALANX_OUTPUT_DIR is made when it first starts"
        ) from error
    for word in words:
        try:
            below = _down(folder, word, "/".join(words))
        finally:
            os.close(folder)
        folder = below
    return folder


def _down(folder: int, word: str, path: str) -> int:
    try:
        return os.open(word, _FOLDER, dir_fd=folder)
    except OSError as error:
        raise NotFound(f"{path!r}: no such folder among the job's outputs", hint="links are not followed") from error


def _stat(folder: int, name: str, path: str) -> os.stat_result:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        raise NotFound(f"{path!r}: no such file among the job's outputs") from error


def _maybe(folder: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:  # removed since it was listed
        return None


def _entry(path: str, seen: os.stat_result) -> FileEntry:
    mode = seen.st_mode
    kind = (
        "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "link" if stat.S_ISLNK(mode) else "other"
    )
    shown = path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return FileEntry(path=shown, kind=kind, size_bytes=seen.st_size if kind == "file" else 0, modified_s=seen.st_mtime)

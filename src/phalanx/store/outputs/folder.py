"""Lists and packs a job's output folder without ever leaving it: each folder is opened by descriptor, links are not followed."""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
from collections.abc import Generator, Iterator
from itertools import islice
from typing import Final

from phalanx.core.errors import BadRequest, NotFound
from phalanx.wire.api.output import ARCHIVE_OFFSET, ARCHIVE_SHA256, FileEntry, FilesReply

ENTRIES_MAX: Final = 10_000  # in one listing
DEPTH_MAX: Final = 64
_CHUNK_BYTES: Final = 1 << 18
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def list_folder(root: str, path: str) -> FilesReply:
    """List the entries of one folder under `root`, folders first; for a file, list the file status.

    Raises:
        NotFound: the file or folder does not exist.
        BadRequest: the path leaves the root.
    """
    words = _words(path)
    try:
        parent = _open(root, words[:-1])
    except NotFound:
        if words:
            raise
        return FilesReply(path="", entries=[])  # a job that has not started has no folder yet
    try:
        if words and not stat.S_ISDIR((status := _stat(parent, words[-1], path)).st_mode):
            return FilesReply(path="/".join(words), entries=[_entry("/".join(words), status)])
        folder = _open_below(parent, words[-1], path) if words else os.dup(parent)
    finally:
        os.close(parent)
    try:
        names = sorted(os.listdir(folder))
        entries = [
            _entry("/".join([*words, name]), seen)
            for name in names[:ENTRIES_MAX]
            if (seen := _stat_or_none(folder, name))
        ]
    finally:
        os.close(folder)
    entries.sort(key=lambda entry: (entry.kind != "folder", entry.path))
    return FilesReply(path="/".join(words), entries=entries, truncated=len(names) > ENTRIES_MAX)


class ArchiveRest:
    """What is left of an archive for a receiver that has a part of it, and the digests that it checks.

    Args:
        after: name of the file at which the receiver was interrupted; files before it are left out; "" for a whole archive.
        offset: bytes of that file that the receiver has.
        since_s: files before it that changed after this Unix time are sent again.
        digests: each entry has the SHA-256 of the whole file before it, in the PAX key `ARCHIVE_SHA256`, and a folder `.` ends the archive.
            Only our own client asks for them. It unpacks no links to the outside, sockets and devices, so it gets their names to report them.
    """

    def __init__(self, after: str = "", offset: int = 0, since_s: float = 0.0, *, digests: bool = False) -> None:
        self._after = tuple(after.split("/")) if after else ()
        self._offset = offset
        self._since_s = since_s
        self._sha256 = ""
        self.digests = digests
        self.base = ""  # path of the folder that is packed

    def has(self, shown: str, seen: os.stat_result) -> bool:
        """Whether the receiver has this entry. Links cost nothing and are sent again."""
        if not self._after or tuple(shown.split("/")) >= self._after or stat.S_ISLNK(seen.st_mode):
            return False
        return stat.S_ISDIR(seen.st_mode) or seen.st_ctime <= self._since_s

    def offset_in(self, shown: str, size: int) -> int:
        """Bytes of this file that the receiver has; 0 if the file is shorter by now."""
        return self._offset if self._offset <= size and tuple(shown.split("/")) == self._after else 0

    def set_digest(self, sha256: str) -> None:
        """Keep the digest of a file for the next entry."""
        self._sha256 = sha256

    def take_headers(self, offset: int = 0) -> dict[str, str]:
        """PAX headers of the next entry, of which the receiver has `offset` bytes."""
        found = {ARCHIVE_SHA256: self._sha256} if self._sha256 else {}
        self._sha256 = ""
        return found | ({ARCHIVE_OFFSET: str(offset)} if offset else {})


def tar_archive(root: str, path: str, rest: ArchiveRest | None = None) -> Iterator[bytes]:
    """Return a tar archive of a folder or file under `root`, with relative names, sorted by name; or only the `rest` of it.

    A file keeps the size it has when it is opened: if it grows, the rest is left out; if it shrinks, it is padded with zeros, as tar
    does. Links are packed as links if they stay inside the archive, absolute ones into it as relative ones. Others, sockets, pipes and
    devices are left out, or packed for a receiver that reports them.

    Raises:
        NotFound, BadRequest: as in `list_folder`, before the first byte.
    """
    words = _words(path)
    rest = rest or ArchiveRest()
    parent = _open(root, words[:-1])
    try:
        seen = _stat(parent, words[-1], path) if words else os.fstat(parent)
        if stat.S_ISDIR(seen.st_mode):
            folder = _open_below(parent, words[-1], path) if words else os.dup(parent)
            rest.base = os.path.join(root, *words)
            pieces = _pack_folder(folder, "", 0, rest)
        else:
            pieces = _pack_one(os.dup(parent), words[-1], words[-1], seen, rest, close=True)
    finally:
        os.close(parent)
    # Start the generator here, so that its descriptor is closed even if no more is read.
    return _closed_archive(next(pieces, b""), pieces, rest)


def archive_bytes(root: str, path: str, rest: ArchiveRest | None = None) -> int | None:
    """Return about how long an archive of `path` is now, for a progress bar; None if it has too many entries to count quickly.

    Raises:
        NotFound, BadRequest: as in `list_folder`.
    """
    words = _words(path)
    rest = rest or ArchiveRest()
    parent = _open(root, words[:-1])
    try:
        seen = _stat(parent, words[-1], path) if words else os.fstat(parent)
        if not stat.S_ISDIR(seen.st_mode):
            return _packed_bytes(words[-1], seen, rest)
        sizes = _entry_sizes(_open_below(parent, words[-1], path) if words else os.dup(parent), "", 0, rest)
        found = list(islice(sizes, ENTRIES_MAX + 1))
        sizes.close()
        return sum(found) + 2 * tarfile.BLOCKSIZE if len(found) <= ENTRIES_MAX else None
    finally:
        os.close(parent)


def _entry_sizes(folder: int, prefix: str, depth: int, rest: ArchiveRest) -> Generator[int, None, None]:
    try:
        for name in os.listdir(folder):
            seen = _stat_or_none(folder, name)
            if seen is None:
                continue
            if not rest.has(prefix + name, seen):
                yield _packed_bytes(prefix + name, seen, rest)
            if stat.S_ISDIR(seen.st_mode) and depth < DEPTH_MAX:
                try:
                    below = os.open(name, _FOLDER, dir_fd=folder)
                except OSError:  # removed, or replaced by a link
                    continue
                yield from _entry_sizes(below, f"{prefix}{name}/", depth + 1, rest)
    finally:
        os.close(folder)


def _packed_bytes(shown: str, seen: os.stat_result, rest: ArchiveRest) -> int:
    """Return the size of one entry in an archive: its headers, and its content in whole blocks."""
    content = seen.st_size - rest.offset_in(shown, seen.st_size) if stat.S_ISREG(seen.st_mode) else 0
    return tarfile.BLOCKSIZE * ((3 if rest.digests else 1) + -(-content // tarfile.BLOCKSIZE))


def _closed_archive(first: bytes, pieces: Iterator[bytes], rest: ArchiveRest) -> Iterator[bytes]:
    yield first
    yield from pieces
    if rest.digests:
        end = tarfile.TarInfo(".")
        end.type, end.pax_headers = tarfile.DIRTYPE, rest.take_headers()
        yield end.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    yield bytes(2 * tarfile.BLOCKSIZE)


def _pack_folder(folder: int, prefix: str, depth: int, rest: ArchiveRest) -> Iterator[bytes]:
    try:
        for name in sorted(os.listdir(folder)):
            seen = _stat_or_none(folder, name)
            if seen is None:
                continue
            had = rest.has(prefix + name, seen)
            if stat.S_ISDIR(seen.st_mode):
                if not had:
                    yield _header(prefix + name, seen, tarfile.DIRTYPE, 0, rest)
                if depth < DEPTH_MAX:
                    try:
                        below = os.open(name, _FOLDER, dir_fd=folder)
                    except OSError:  # removed, or replaced by a link
                        continue
                    yield from _pack_folder(below, f"{prefix}{name}/", depth + 1, rest)
            elif not had:
                yield from _pack_one(folder, name, prefix + name, seen, rest, close=False)
    finally:
        os.close(folder)


def _pack_one(
    folder: int, name: str, shown: str, seen: os.stat_result, rest: ArchiveRest, *, close: bool
) -> Iterator[bytes]:
    try:
        if stat.S_ISLNK(seen.st_mode):
            target = _relative(shown, os.readlink(name, dir_fd=folder), rest.base)
            if rest.digests or _stays_inside(shown, target):
                yield _header(shown, seen, tarfile.SYMTYPE, 0, rest, target=target)
        elif stat.S_ISREG(seen.st_mode):
            yield from _pack_bytes(folder, name, shown, seen, rest)
        elif rest.digests:
            yield _header(shown, seen, tarfile.FIFOTYPE, 0, rest)
    except OSError:  # removed since it was listed
        return
    finally:
        if close:
            os.close(folder)


def _pack_bytes(folder: int, name: str, shown: str, seen: os.stat_result, rest: ArchiveRest) -> Iterator[bytes]:
    file = os.open(name, _FILE, dir_fd=folder)
    try:
        size = os.fstat(file).st_size
        offset = rest.offset_in(shown, size)
        yield _header(shown, seen, tarfile.REGTYPE, size - offset, rest, offset=offset)
        digest = hashlib.sha256() if rest.digests else None
        at = 0 if digest is not None else offset
        os.lseek(file, at, os.SEEK_SET)
        while at < size:
            end = offset if at < offset else size
            piece = os.read(file, min(_CHUNK_BYTES, end - at)) or bytes(min(_CHUNK_BYTES, end - at))
            if digest is not None:
                digest.update(piece)
            if at >= offset:
                yield piece
            at += len(piece)
        yield bytes((offset - size) % tarfile.BLOCKSIZE)
        if digest is not None:
            rest.set_digest(digest.hexdigest())
    finally:
        os.close(file)


def _header(
    shown: str, seen: os.stat_result, kind: bytes, size: int, rest: ArchiveRest, *, target: str = "", offset: int = 0
) -> bytes:
    entry = tarfile.TarInfo(shown)
    entry.type, entry.size, entry.linkname = kind, size, target
    entry.mode, entry.mtime = stat.S_IMODE(seen.st_mode) & 0o777, int(seen.st_mtime)
    entry.pax_headers = rest.take_headers(offset)
    return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _relative(shown: str, target: str, base: str) -> str:
    """The target of a link at `shown`, relative if it is an absolute path to the folder that is packed, or into it."""
    if not base or not os.path.join(os.path.normpath(target), "").startswith(os.path.join(base, "")):
        return target
    return os.path.relpath(target, os.path.join(base, os.path.dirname(shown)))


def _stays_inside(shown: str, target: str) -> bool:
    """Whether a link at `shown` points to a path under the archive's root."""
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
        raise BadRequest(f"path: {path[:100]!r} leaves the job's output folder", hint="use a path inside that folder")
    return words


def _open(root: str, words: list[str]) -> int:
    """Open the folder `words` under `root`. The path of the root status may contain links, as the head owns it."""
    try:
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise NotFound("the job has no output folder", hint="it is created when the job first starts") from error
    for word in words:
        try:
            below = _open_below(folder, word, "/".join(words))
        finally:
            os.close(folder)
        folder = below
    return folder


def _open_below(folder: int, word: str, path: str) -> int:
    try:
        return os.open(word, _FOLDER, dir_fd=folder)
    except OSError as error:
        raise NotFound(f"{path!r}: no such folder in the job's outputs", hint="links are not followed") from error


def _stat(folder: int, name: str, path: str) -> os.stat_result:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        raise NotFound(f"{path!r}: no such file in the job's outputs") from error


def _stat_or_none(folder: int, name: str) -> os.stat_result | None:
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

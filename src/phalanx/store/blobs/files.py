"""The Blobs port on files: <root>/<first two digits>/<sha256>, written to a temporary file, checked, synced, and then renamed.

The temporary file of an interrupted upload stays for a day, and the next upload of the same blob goes on in it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Final

from phalanx.core.errors import BadRequest, NotFound
from phalanx.durable_files import (
    create_file,
    make_directory,
    remove_file,
    rename_path,
    sync_directory,
    sync_file,
    truncate_file,
    write_at,
)
from phalanx.failpoints import around
from phalanx.ports.store import StoreRefused

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_TEMPORARY: Final = ".coming-"
_PARTIAL: Final = ".partial-"
_PARTIAL_KEPT_S: Final = 86400.0
_READ_BYTES: Final = 1 << 20
_FOLDER_DIGITS: Final = 2  # of the hash, in the name of its folder


class FileBlobs:
    """Archives in files. Thread-safe.

    Args:
        root: the folder, created if missing; incomplete files of a crash are removed.

    Raises:
        StoreRefused: the folder cannot be created.
    """

    def __init__(self, root: str) -> None:
        self._root = os.path.abspath(root)
        self._lock = threading.Lock()  # between the last use of a blob and its removal
        try:
            make_directory("blobs.open", self._root)
            self._sweep()
        except OSError as error:
            raise _refusal(error, self._root) from error

    def received(self, sha256: str) -> int:
        """Bytes of an interrupted upload of the blob, on which `put` can go on; 0 for none, and while another upload is in it."""
        if _SHA256.fullmatch(sha256) is None:
            return 0
        try:
            fd = os.open(self._partial(sha256), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return 0
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return os.fstat(fd).st_size
        except BlockingIOError:
            return 0
        finally:
            os.close(fd)

    def put(self, sha256: str, chunks: Iterator[bytes], offset: int = 0) -> int:
        """Store the bytes and return their count; durable when this returns. If the blob exists, the bytes are only compared.

        Args:
            sha256: of the whole blob.
            chunks: the bytes from `offset` on.
            offset: bytes that an interrupted upload brought, as `received` says.

        Raises:
            BadRequest: the bytes have another hash, or the name is not a hash.
            StoreRefused: the disk is full or failed.
        """
        _check_name(sha256)
        if offset == 0 and self.has(sha256):
            return self._compare(sha256, chunks)
        self._drop_old_partials()
        try:
            fd, temporary = self._open_partial(sha256)
        except OSError as error:
            raise _refusal(error, self._root) from error
        whole = False
        try:
            if os.fstat(fd).st_size < offset:
                raise BadRequest(
                    f"upload {sha256[:12]}: the bytes that were sent before are not here", hint="send it from its start"
                )
            truncate_file("blobs.put", fd, offset)
            digest, size = _hash_start(fd, offset)
            for chunk in chunks:
                write_at("blobs.put", fd, chunk, size)
                digest.update(chunk)
                size += len(chunk)
            whole = True
            _check_hash(sha256, digest.hexdigest())
            sync_file("blobs.put", fd)
            self._publish(temporary, sha256)
        except BaseException as error:
            may_go_on = not whole and temporary == self._partial(sha256)  # interrupted, and not beside another upload
            if not may_go_on or isinstance(error, OSError):
                _discard(temporary)
            if isinstance(error, OSError):
                raise _refusal(error, self._root) from error
            raise
        finally:
            os.close(fd)
        return size

    def has(self, sha256: str) -> bool:
        """Whether the complete blob is stored. If it is, it counts as used now, so that `remove_unused` leaves it to who asked."""
        if _SHA256.fullmatch(sha256) is None:
            return False
        with self._lock:
            try:
                with around("blobs.used.touch"):
                    os.utime(self._file(sha256))
            except OSError:  # it does not exist, or the disk refuses writes, and then nothing is removed either
                return os.path.isfile(self._file(sha256))
        return True

    def unused(self, before_s: float) -> list[tuple[str, int]]:
        """Name and size of each blob that was last used before a Unix time."""
        found = []
        for folder in sorted(os.listdir(self._root)):
            for name in sorted(os.listdir(os.path.join(self._root, folder)) if len(folder) == _FOLDER_DIGITS else ()):
                with contextlib.suppress(FileNotFoundError):
                    seen = os.stat(os.path.join(self._root, folder, name))
                    if seen.st_mtime < before_s and _SHA256.fullmatch(name):
                        found.append((name, seen.st_size))
        return found

    def remove_unused(self, sha256: str, before_s: float) -> bool:
        """Remove a blob unless it was used since `before_s` (Unix seconds). Returns whether it is removed. Idempotent.

        Raises:
            StoreRefused: it could not be removed.
        """
        path = self._file(sha256)
        with self._lock:
            try:
                if os.stat(path).st_mtime >= before_s:
                    return False
                remove_file("blobs.unused", path)
            except FileNotFoundError:
                return False
            except OSError as error:
                raise _refusal(error, path) from error
        return True

    def path(self, sha256: str) -> str:
        """Path of the blob's file.

        Raises:
            NotFound: no such blob.
        """
        if not self.has(sha256):
            raise NotFound(f"no upload {sha256[:64]!r}", hint="upload it again")
        return self._file(sha256)

    def _partial(self, sha256: str) -> str:
        return os.path.join(self._root, _PARTIAL + sha256)

    def _open_partial(self, sha256: str) -> tuple[int, str]:
        """Open and lock the temporary file of an upload: that of the blob, or one of its own while another upload of the blob runs."""
        for path in (self._partial(sha256), os.path.join(self._root, _TEMPORARY + secrets.token_hex(8))):
            fd = create_file("blobs.put", path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # marks the file as in use, also for another process
                if os.path.samestat(os.stat(path), os.fstat(fd)):
                    return fd, path
            except (BlockingIOError, FileNotFoundError):  # in use, or published in this moment
                pass
            os.close(fd)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def _drop_old_partials(self) -> None:
        for name in os.listdir(self._root):
            path = os.path.join(self._root, name)
            with contextlib.suppress(FileNotFoundError):
                if name.startswith(_PARTIAL) and os.stat(path).st_mtime < time.time() - _PARTIAL_KEPT_S:
                    _remove_unless_written(path)

    def _file(self, sha256: str) -> str:
        return os.path.join(self._root, sha256[:2], sha256)

    def _publish(self, temporary: str, sha256: str) -> None:
        path = self._file(sha256)
        make_directory("blobs.put", os.path.dirname(path))
        rename_path("blobs.put", temporary, path)
        self._sync_folders(sha256)

    def _compare(self, sha256: str, chunks: Iterator[bytes]) -> int:
        size, digest = 0, hashlib.sha256()
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
        _check_hash(sha256, digest.hexdigest())
        try:  # a crash may have happened between its rename and the sync of the folder
            self._sync_folders(sha256)
        except OSError as error:
            raise _refusal(error, self._root) from error
        return size

    def _sync_folders(self, sha256: str) -> None:
        for folder in (os.path.dirname(self._file(sha256)), self._root):
            sync_directory("blobs.put", folder)

    def _sweep(self) -> None:
        for name in os.listdir(self._root):
            if name.startswith(_TEMPORARY):
                _remove_unless_written(os.path.join(self._root, name))
        self._drop_old_partials()


def _hash_start(fd: int, offset: int) -> tuple[hashlib._Hash, int]:
    """The hash of the bytes that are here, and their count."""
    digest, at = hashlib.sha256(), 0
    while at < offset:
        piece = os.pread(fd, min(_READ_BYTES, offset - at), at)
        digest.update(piece)
        at += len(piece)
    return digest, at


def _check_name(sha256: str) -> None:
    if not _SHA256.fullmatch(sha256):
        raise BadRequest(f"{sha256[:80]!r} is not a SHA-256 in hex", hint="64 digits, a to f in lower case")


def _check_hash(wanted: str, found: str) -> None:
    if found != wanted:
        raise BadRequest(
            f"upload {wanted[:12]}: the received bytes have the hash {found[:12]}",
            hint="upload it again; it changed in transit",
        )


def _discard(temporary: str) -> None:
    try:
        remove_file("blobs.take_back", temporary)
    except OSError:  # already renamed, or the disk fails: the next start removes it
        pass


def _remove_unless_written(path: str) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_file("blobs.sweep", path)
    except BlockingIOError:
        pass
    finally:
        os.close(fd)


def _refusal(error: OSError, path: str) -> StoreRefused:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return StoreRefused(f"the disk is full: cannot write to {path}", hint="free some space and submit again")
    return StoreRefused(f"{path} cannot be written: {error}", hint="check the disk")

"""The Blobs port on files: <root>/<first two digits>/<sha256>, written beside, checked, synced, and only then named."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from typing import Final

from phalanx.core.errors import BadRequest, NotFound
from phalanx.failpoints import around, sync_directory, write
from phalanx.ports.store import StoreRefused

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_COMING: Final = ".coming-"


class FileBlobs:
    """Archives in files. May be called from any thread.

    Args:
        root: the folder, made when it is not there; what a crash left half-written in it is removed.

    Raises:
        StoreRefused: the folder cannot be made.
    """

    def __init__(self, root: str) -> None:
        self._root = os.path.abspath(root)
        try:
            with around("blobs.open.directory"):
                os.makedirs(self._root, mode=0o700, exist_ok=True)
            self._sweep()
        except OSError as error:
            raise _refusal(error, self._root) from error

    def put(self, sha256: str, chunks: Iterator[bytes]) -> int:
        """Keep the bytes and answer their count; durable when this returns. A blob that is here already is only compared.

        Raises:
            BadRequest: the bytes have another hash, or the name is none.
            StoreRefused: no room.
        """
        _check_name(sha256)
        if self.has(sha256):
            return self._compare(sha256, chunks)
        try:
            with around("blobs.put.create"):
                fd, coming = tempfile.mkstemp(dir=self._root, prefix=_COMING)
        except OSError as error:
            raise _refusal(error, self._root) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # tells a sweep that somebody still writes it
            size = _write(fd, sha256, chunks)
            self._name(coming, sha256)
        except BaseException as error:
            _take_back(coming)
            if isinstance(error, OSError):
                raise _refusal(error, self._root) from error
            raise
        finally:
            os.close(fd)
        return size

    def has(self, sha256: str) -> bool:
        """Whether the blob is here, whole."""
        return _SHA256.fullmatch(sha256) is not None and os.path.isfile(self._place(sha256))

    def path(self, sha256: str) -> str:
        """The file that holds it, for sending.

        Raises:
            NotFound: no such blob.
        """
        if not self.has(sha256):
            raise NotFound(f"there is no upload {sha256[:64]!r}", hint="upload it again")
        return self._place(sha256)

    def _place(self, sha256: str) -> str:
        return os.path.join(self._root, sha256[:2], sha256)

    def _name(self, coming: str, sha256: str) -> None:
        place = self._place(sha256)
        with around("blobs.put.directory"):
            os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
        with around("blobs.put.rename"):
            os.replace(coming, place)
        self._sync_name(sha256)

    def _compare(self, sha256: str, chunks: Iterator[bytes]) -> int:
        size, digest = 0, hashlib.sha256()
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
        _check_hash(sha256, digest.hexdigest())
        try:  # a crash may have come between its naming and the sync of the folder
            self._sync_name(sha256)
        except OSError as error:
            raise _refusal(error, self._root) from error
        return size

    def _sync_name(self, sha256: str) -> None:
        for folder in (os.path.dirname(self._place(sha256)), self._root):
            sync_directory("blobs.put.sync_directory", folder)

    def _sweep(self) -> None:
        for name in os.listdir(self._root):
            if name.startswith(_COMING):
                _remove_unless_written(os.path.join(self._root, name))


def _write(fd: int, sha256: str, chunks: Iterator[bytes]) -> int:
    size, digest = 0, hashlib.sha256()
    for chunk in chunks:
        write("blobs.put.write", fd, chunk, size)
        digest.update(chunk)
        size += len(chunk)
    _check_hash(sha256, digest.hexdigest())
    with around("blobs.put.sync"):
        os.fsync(fd)
    return size


def _check_name(sha256: str) -> None:
    if not _SHA256.fullmatch(sha256):
        raise BadRequest(f"{sha256[:80]!r} is not a SHA-256 in hex", hint="64 digits, a to f in lower case")


def _check_hash(wanted: str, found: str) -> None:
    if found != wanted:
        raise BadRequest(
            f"upload {wanted[:12]}: the bytes that came have the hash {found[:12]}",
            hint="upload it again; it changed on its way",
        )


def _take_back(coming: str) -> None:
    try:
        with around("blobs.take_back.remove"):
            os.unlink(coming)
    except OSError:  # named already, or the disk fails; a starting head sweeps
        pass


def _remove_unless_written(path: str) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with around("blobs.sweep.remove"):
            os.unlink(path)
    except BlockingIOError:
        pass
    finally:
        os.close(fd)


def _refusal(error: OSError, path: str) -> StoreRefused:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return StoreRefused(f"the disk is full: {path} takes no upload", hint="free some space and submit again")
    return StoreRefused(f"{path} cannot be written: {error}", hint="look after the disk")

"""Unpacks an uploaded working directory: a tar archive, extracted into one folder and never outside it."""

from __future__ import annotations

import bz2
import contextlib
import errno
import gzip
import hashlib
import lzma
import os
import tarfile
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Final

from phalanx.node.files.job_accounts import acting_as
from phalanx.node.files.rmtree import remove_tree
from phalanx.node.head_link.head_connection import HeadAccess, HeadConnection
from phalanx.node.logic.accounts import NodeAccount

MEMBERS_MAX: Final = 200_000
UNPACKED_BYTES_MAX: Final = 8 << 30  # an upload has at most 100 MB packed; this is 80:1
_FETCH_S: Final = 300.0
# The longest path has 4 KiB; contents are read in pieces of 1 MiB.
_PIECE_BYTES_MAX: Final = 4 << 20
_COMPRESSED: Final[tuple[tuple[bytes, Callable[[BinaryIO], Any]], ...]] = (
    (b"\x1f\x8b", lambda source: gzip.GzipFile(fileobj=source)),
    (b"BZh", bz2.BZ2File),
    (b"\xfd7zXZ\x00", lzma.LZMAFile),
)
# Errors caused by names in the archive: a file where a folder should be, a duplicate, too long.
_OF_NAMES: Final = frozenset(
    {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EILSEQ}
)


class UploadInvalid(Exception):
    """The archive differs from the uploaded one, or would write outside its folder. A retry does not help."""


def fetch_and_unpack(
    access: HeadAccess,
    sha256: str,
    folder: str,
    cancelled: threading.Event,
    *,
    account: NodeAccount | None = None,
    archive_path: str = "",
) -> None:
    """Download the upload with this hash into `folder`, which appears only when it is complete. Idempotent.

    Args:
        access: to the head.
        sha256: of the archive.
        folder: the folder to create.
        cancelled: aborts it.
        account: owner of the folder; it is unpacked with that account's rights.
        archive_path: temporary path of the archive, out of the account's reach; beside the folder by default.

    Raises:
        UploadInvalid: invalid archive.
        HeadUnavailable, RequestRejected: the head does not send it.
        OSError: the disk failed.
    """
    with acting_as(account):
        if os.path.isdir(folder):
            return
    archive_path, fresh = archive_path or f"{folder}.tar", f"{folder}.new"
    fd = os.open(archive_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        HeadConnection(access).download(f"/v1/node/blobs/{sha256}", fd, timeout_s=_FETCH_S)
        if _digest(archive_path) != sha256:
            raise UploadInvalid(f"upload {sha256[:12]}: the downloaded archive does not match its hash; submit again")
        os.lseek(fd, 0, os.SEEK_SET)
        with os.fdopen(os.dup(fd), "rb") as archive, acting_as(account):
            remove_tree(fresh)  # left by an interrupted try
            unpack(archive, fresh, cancelled)
            os.rename(fresh, folder)
    finally:
        os.close(fd)
        os.unlink(archive_path)


def unpack(packed: str | BinaryIO, folder: str, cancelled: threading.Event) -> None:
    """Extract the archive's folders, files and inner links below `folder`, which must not exist.

    Links are created last, so that nothing is written through one; devices, sockets and hard links are rejected.

    Raises:
        UploadInvalid: an entry leads outside, has another type, or the archive is too large.
    """
    os.mkdir(folder, 0o700)
    try:
        with contextlib.ExitStack() as closing:
            source = packed if not isinstance(packed, str) else closing.enter_context(open(packed, "rb"))
            links = _write_all(_plain(source, closing), folder, cancelled)
        _link_all(links, folder)
    except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError, zlib.error, lzma.LZMAError) as error:
        raise UploadInvalid(f"upload: not a readable tar archive ({_short(error)})") from error
    except OSError as error:
        if error.errno in _OF_NAMES or isinstance(error, gzip.BadGzipFile):
            raise UploadInvalid(f"upload: {_short(error)}") from error
        raise


def _write_all(source: _Bounded, folder: str, cancelled: threading.Event) -> list[tuple[str, str]]:
    """Extract everything except links; returns the links as (target, path)."""
    links: list[tuple[str, str]] = []
    count = size = 0
    with tarfile.open(fileobj=source, mode="r:") as archive:  # type: ignore[call-overload]  # it has what tarfile calls
        for entry in archive:
            count, size = count + 1, size + max(0, entry.size)
            if count > MEMBERS_MAX or size > UNPACKED_BYTES_MAX:
                raise UploadInvalid(
                    f"upload: more than {MEMBERS_MAX} entries or {UNPACKED_BYTES_MAX >> 30} GiB unpacked"
                )
            if cancelled.is_set():
                raise UploadInvalid("upload: the job was stopped during unpacking")
            path = _inside(folder, entry.name)
            if entry.isdir():
                os.makedirs(path, mode=0o700, exist_ok=True)
            elif entry.isreg():
                _write(archive, entry, path)
            elif entry.issym():
                _inside(folder, os.path.join(os.path.dirname(entry.name), entry.linkname))
                links.append((entry.linkname, path))
            else:
                raise UploadInvalid(f"upload: {_shown(entry.name)} is neither file, folder nor symbolic link")
            archive.members = []  # otherwise tarfile keeps all entries in memory
    return links


def _link_all(links: Sequence[tuple[str, str]], folder: str) -> None:
    for target, path in links:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        try:
            os.symlink(target, path)
        except FileExistsError as error:
            raise UploadInvalid(f"upload: {_shown(os.path.basename(path))} exists twice, once as a link") from error
    root = os.path.realpath(folder)
    for target, path in links:  # a link through another link may lead higher than its text shows
        if not (os.path.realpath(path) + os.sep).startswith(root + os.sep):
            os.unlink(path)
            raise UploadInvalid(f"upload: the link to {_shown(target)} leads outside the working directory")


class _Bounded:
    """The reader for tarfile, which reads a header in one piece of the size that the header claims: limits that size."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self.seek, self.tell = source.seek, source.tell

    def read(self, size: int = -1) -> bytes:
        """Read at most `size` bytes.

        Raises:
            UploadInvalid: a header claims an impossible size.
        """
        if not 0 <= size <= _PIECE_BYTES_MAX:
            raise UploadInvalid(f"upload: a header of {size} bytes; at most {_PIECE_BYTES_MAX >> 20} MiB are read")
        return self._source.read(size)


def _plain(source: BinaryIO, closing: contextlib.ExitStack) -> _Bounded:
    """Decompress the archive; its first bytes determine the format."""
    source.seek(0)
    begin = source.read(6)
    source.seek(0)
    for magic, opened in _COMPRESSED:
        if begin.startswith(magic):
            return _Bounded(closing.enter_context(opened(source)))
    return _Bounded(source)


def _short(error: Exception) -> str:
    return _shown(str(error) or type(error).__name__)[1:-1]


def _shown(text: str) -> str:
    """A prefix of untrusted text, without control characters."""
    return ascii(text[:200])


def _inside(folder: str, name: str) -> str:
    """The path of `name` below `folder`.

    Raises:
        UploadInvalid: it is absolute or leads outside.
    """
    relative = os.path.normpath(name)
    if os.path.isabs(name) or relative.split(os.sep, 1)[0] == ".." or "\0" in name:
        raise UploadInvalid(f"upload: {_shown(name)} leads outside the working directory")
    return os.path.join(folder, relative)


def _write(archive: tarfile.TarFile, entry: tarfile.TarInfo, path: str) -> None:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    source = archive.extractfile(entry)
    assert source is not None
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        while piece := source.read(1 << 20):
            file.write(piece)
    os.chmod(path, (entry.mode & 0o755) | 0o600)


def _digest(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()

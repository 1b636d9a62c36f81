"""Unpack an uploaded working directory: a tar archive, written into one folder and never outside it."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import threading
from typing import Final

from phalanx.node.shell.link import Connection, HeadAccess

MEMBERS_MAX: Final = 200_000
UNPACKED_BYTES_MAX: Final = 8 << 30  # an upload is refused over 100 MB packed; this is what 80:1 makes of it
_FETCH_S: Final = 300.0


class UploadInvalid(Exception):
    """The archive is not what was uploaded, or would write outside its folder. Another try does not help."""


def fetch_and_unpack(access: HeadAccess, sha256: str, folder: str, cancelled: threading.Event) -> None:
    """Bring the upload named by its hash to `folder`, which appears only when it is whole. Harmless when it is there.

    Raises:
        UploadInvalid: see there.
        HeadAway, Rejected: the head does not give it.
        OSError: the disk.
    """
    if os.path.isdir(folder):
        return
    packed, fresh = f"{folder}.tar", f"{folder}.new"
    fd = os.open(packed, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        Connection(access).fetch(f"/v1/node/blobs/{sha256}", fd, timeout_s=_FETCH_S)
        if _digest(packed) != sha256:
            raise UploadInvalid(f"upload {sha256[:12]}: other bytes arrived than were uploaded; submit again")
        shutil.rmtree(fresh, ignore_errors=True)  # a try that was broken off
        unpack(packed, fresh, cancelled)
        os.rename(fresh, folder)
    finally:
        os.close(fd)
        os.unlink(packed)


def unpack(packed: str, folder: str, cancelled: threading.Event) -> None:
    """Write the archive's folders, files and inner links below `folder`, which must not exist.

    Links are made last, so that nothing is ever written through one; devices, sockets and hard links are no part of a working directory.

    Raises:
        UploadInvalid: an entry leads outside, is of another kind, or it is all too large.
    """
    os.mkdir(folder, 0o700)
    links: list[tuple[str, str]] = []
    count = size = 0
    try:
        with tarfile.open(packed, mode="r:*") as archive:
            for entry in archive:
                count, size = count + 1, size + entry.size
                if count > MEMBERS_MAX or size > UNPACKED_BYTES_MAX:
                    raise UploadInvalid(
                        f"upload: more than {MEMBERS_MAX} entries or {UNPACKED_BYTES_MAX >> 30} GiB unpacked"
                    )
                if cancelled.is_set():
                    raise UploadInvalid("upload: the job was stopped while it was unpacked")
                path = _inside(folder, entry.name)
                if entry.isdir():
                    os.makedirs(path, mode=0o700, exist_ok=True)
                elif entry.isreg():
                    _write(archive, entry, path)
                elif entry.issym():
                    _inside(folder, os.path.join(os.path.dirname(entry.name), entry.linkname))
                    links.append((entry.linkname, path))
                else:
                    raise UploadInvalid(f"upload: {entry.name!r} is neither file, folder nor symbolic link")
    except (tarfile.TarError, EOFError, UnicodeError) as error:
        raise UploadInvalid(f"upload: no readable tar archive ({error})") from error
    for target, path in links:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        try:
            os.symlink(target, path)
        except FileExistsError as error:
            raise UploadInvalid(f"upload: {os.path.basename(path)!r} is in it twice, once as a link") from error
    root = os.path.realpath(folder)
    for target, path in links:  # a link through another link may climb higher than its words do
        if not (os.path.realpath(path) + os.sep).startswith(root + os.sep):
            os.unlink(path)
            raise UploadInvalid(f"upload: the link to {target!r} leads outside the working directory")


def _inside(folder: str, name: str) -> str:
    """The path of `name` below `folder`.

    Raises:
        UploadInvalid: it is absolute or climbs out.
    """
    relative = os.path.normpath(name)
    if os.path.isabs(name) or relative.split(os.sep, 1)[0] == ".." or "\0" in name:
        raise UploadInvalid(f"upload: {name!r} leads outside the working directory")
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

"""Bring a checkpoint from the head's copy to this node: what lies here already and matches the manifest stays, the rest is fetched.

A file comes under another name and has its own once its bytes match, so that a fetch which broke off goes on where it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from urllib.parse import urlencode

from phalanx.core.state.commands import Prepare
from phalanx.core.work.job import Resume
from phalanx.node.logic.accounts import Account
from phalanx.node.logic.kept import own_copy
from phalanx.node.shell.accounts import acting_as
from phalanx.node.shell.channels import Backoff
from phalanx.node.shell.link import Connection, HeadAccess, HeadAway, Rejected
from phalanx.node.shell.present import Present
from phalanx.wire import manifest as manifests
from phalanx.wire.manifest import MANIFEST_NAME, CheckpointInvalid, ManifestFile

_FILES_AT_ONCE: Final = 3  # one connection with TLS keeps about one core busy
_FETCH_S: Final = 60.0  # a pause in the stream, not the whole of it
_TRIES: Final = 3  # of a file whose bytes do not match: the link has checksums of its own, so it is the head's disk
_COMING: Final = ".coming"


def newest_valid(member: Present, access: HeadAccess, own: str, note: Callable[[str], None]) -> Resume | None:
    """The first of the candidates that is whole here, or can be fetched whole. `note` is told of each that cannot, and why.

    Raises:
        Rejected: the head does not speak with this attempt any more.
        OSError: this node's disk.
    """
    for candidate in member.prepare.candidates:
        if member.cancelled.is_set():
            return None
        try:
            bring(member, candidate, access, own)
        except CheckpointInvalid as error:
            note(f"checkpoint of step {candidate.step} is not used: {error}")
            continue
        return candidate
    return None


def bring(member: Present, resume: Resume, access: HeadAccess, own: str) -> None:
    """Have this checkpoint here whole. Waits for a head that is away, until the member is stopped.

    Raises:
        CheckpointInvalid: it is not whole anywhere, or the member was stopped.
        Rejected, OSError: as above.
    """
    folder = own_copy(member.prepare, resume, own)
    if folder is None:
        with acting_as(member.account):
            manifests.verify(resume.path, expected_digest=resume.digest)
        return
    backoff = Backoff(member.cancelled)
    while not member.cancelled.is_set():
        try:
            _bring(member, resume, access, folder)
        except HeadAway:
            backoff.pause()
        except Rejected as error:
            if error.status == 404:
                raise CheckpointInvalid(f"the head has no whole copy: {error}") from error
            raise
        else:
            return
    raise CheckpointInvalid("the job was stopped while it was fetched")


def _bring(member: Present, resume: Resume, access: HeadAccess, folder: str) -> None:
    with acting_as(member.account):
        os.makedirs(folder, mode=0o700, exist_ok=True)
    source = _Source(member.prepare, resume, access, member.account)
    encoded = source.read(folder, MANIFEST_NAME)
    if manifests.digest(encoded) != resume.digest:
        raise CheckpointInvalid("the head's manifest differs from the published one")
    manifest = manifests.decode(encoded, where=f"checkpoint of step {resume.step}")
    with acting_as(member.account):
        root = os.path.realpath(folder) + os.sep
        for file in manifest.files:
            if not os.path.realpath(os.path.join(folder, file.path)).startswith(root):
                raise CheckpointInvalid(f"its manifest names {file.path!r} outside the folder")
    with ThreadPoolExecutor(max_workers=_FILES_AT_ONCE, thread_name_prefix="fetch") as threads:
        for done in [threads.submit(source.have, folder, file) for file in manifest.files]:
            done.result()


class _Source:
    """The head's copy of one checkpoint. Thread-safe: a connection for each file."""

    def __init__(self, prepare: Prepare, resume: Resume, access: HeadAccess, account: Account | None) -> None:
        self._access = access
        self._account = account
        self._about = {
            "job_id": prepare.job_id,
            "epoch": prepare.epoch,
            "of_epoch": resume.epoch,
            "step": resume.step,
        }

    def have(self, folder: str, file: ManifestFile) -> None:
        """This file here, with the bytes that the manifest says."""
        path, said = os.path.join(folder, file.path), (file.size_bytes, file.crc32)
        with acting_as(self._account):
            if os.path.isfile(path) and manifests.checksum(path) == said:
                return
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        for _ in range(_TRIES):
            self._fetch(file.path, f"{path}{_COMING}", file.size_bytes)
            with acting_as(self._account):
                if manifests.checksum(f"{path}{_COMING}") == said:
                    os.replace(f"{path}{_COMING}", path)
                    return
                os.unlink(f"{path}{_COMING}")
        raise CheckpointInvalid(f"{file.path}: the head's copy is not what its manifest says")

    def read(self, folder: str, name: str) -> bytes:
        """A small file, whole, and kept here."""
        path = os.path.join(folder, name)
        fd = self._open(f"{path}{_COMING}", os.O_TRUNC)
        try:
            Connection(self._access).fetch(self._url(name, 0), fd, timeout_s=_FETCH_S)
            encoded = os.pread(fd, os.fstat(fd).st_size, 0)
        finally:
            os.close(fd)
        with acting_as(self._account):
            os.replace(f"{path}{_COMING}", path)
        return encoded

    def _open(self, path: str, more: int = 0) -> int:
        with acting_as(self._account):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | more, 0o600)
        return manifests.regular(fd, path)

    def _fetch(self, name: str, path: str, size_bytes: int) -> None:
        """Fetch what is not here yet; a longer file is none of ours."""
        fd = self._open(path)
        connection = Connection(self._access)
        try:
            begin = os.lseek(fd, 0, os.SEEK_END)
            if begin > size_bytes:
                os.ftruncate(fd, 0)
                begin = os.lseek(fd, 0, os.SEEK_SET)
            if begin < size_bytes:
                connection.fetch(self._url(name, begin), fd, timeout_s=_FETCH_S)
        finally:
            connection.close()
            os.close(fd)

    def _url(self, name: str, offset: int) -> str:
        return f"/v1/node/checkpoints/file?{urlencode({**self._about, 'path': name, 'offset': offset})}"

"""Downloads a checkpoint from the head's copy to this node: files that already match the manifest stay, the others are downloaded.

A file is written under a temporary name and renamed once its bytes match, so that an interrupted download continues where it stopped.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from urllib.parse import urlencode

from phalanx.core.state.commands import PrepareTasks
from phalanx.core.work.job import PublishedCheckpoint
from phalanx.node.files.job_accounts import acting_as
from phalanx.node.head_link.channels import Backoff
from phalanx.node.head_link.head_connection import (
    HeadAccess,
    HeadConnection,
    HeadUnavailable,
    RequestRejected,
)
from phalanx.node.logic import local_copies
from phalanx.node.logic.accounts import NodeAccount
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.transfer import object_checkpoints
from phalanx.wire import manifest as manifests
from phalanx.wire.manifest import MANIFEST_NAME, CheckpointInvalid, ManifestFile

_FILES_AT_ONCE: Final = 3  # one connection with TLS uses about one core
_FETCH_S: Final = 60.0  # a pause in the stream, not the whole download
# Of a file whose bytes do not match: the connection has checksums of its own, so the head's disk is bad.
_TRIES: Final = 3
_PARTIAL: Final = ".partial"


def newest_complete(
    member: MemberRuntime, access: HeadAccess, own: str, note: Callable[[str], None]
) -> PublishedCheckpoint | None:
    """The first candidate that is complete here or can be downloaded. `note` receives the reason for each that is rejected.

    Raises:
        RequestRejected: the head no longer accepts this attempt.
        OSError: this node's disk.
    """
    for candidate in member.prepare.candidates:
        if member.cancelled.is_set():
            return None
        try:
            download_checkpoint(member, candidate, access, own)
        except CheckpointInvalid as error:
            note(f"checkpoint of step {candidate.step} is rejected: {error}")
            continue
        return candidate
    return None


def download_checkpoint(member: MemberRuntime, resume: PublishedCheckpoint, access: HeadAccess, own: str) -> None:
    """Make this checkpoint complete here. Retries while the head is unreachable, until the member is stopped.

    Raises:
        CheckpointInvalid: no complete copy exists, or the member was stopped.
        RequestRejected, OSError: as above.
    """
    folder = local_copies.local_checkpoint_path(member.prepare, resume, own)
    if folder is None:
        with acting_as(member.account):
            manifests.verify(resume.path, expected_digest=resume.digest)
        return
    if local_copies.in_object_store(member.prepare):
        object_checkpoints.download(member, resume, folder)
        return
    backoff = Backoff(member.cancelled)
    while not member.cancelled.is_set():
        try:
            _download(member, resume, access, folder)
        except HeadUnavailable:
            backoff.pause()
        except RequestRejected as error:
            if error.status == 404:
                raise CheckpointInvalid(f"the head has no complete copy: {error}") from error
            raise
        else:
            return
    raise CheckpointInvalid("the job was stopped during the download")


def _download(member: MemberRuntime, resume: PublishedCheckpoint, access: HeadAccess, folder: str) -> None:
    with acting_as(member.account):
        os.makedirs(folder, mode=0o700, exist_ok=True)
    source = _HeadCopy(member.prepare, resume, access, member.account)
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
        for download in [threads.submit(source.have, folder, file) for file in manifest.files]:
            download.result()


class _HeadCopy:
    """The head's copy of one checkpoint. Thread-safe: one connection per file."""

    def __init__(
        self, prepare: PrepareTasks, resume: PublishedCheckpoint, access: HeadAccess, account: NodeAccount | None
    ) -> None:
        self._access = access
        self._account = account
        self._about = {
            "job_id": prepare.job_id,
            "epoch": prepare.epoch,
            "of_epoch": resume.epoch,
            "step": resume.step,
        }

    def have(self, folder: str, file: ManifestFile) -> None:
        """Make this file complete here, with the size and checksum of the manifest."""
        path, expected = os.path.join(folder, file.path), (file.size_bytes, file.crc32)
        with acting_as(self._account):
            if os.path.isfile(path) and manifests.checksum(path) == expected:
                return
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        for _ in range(_TRIES):
            self._fetch(file.path, f"{path}{_PARTIAL}", file.size_bytes)
            with acting_as(self._account):
                if manifests.checksum(f"{path}{_PARTIAL}") == expected:
                    os.replace(f"{path}{_PARTIAL}", path)
                    return
                os.unlink(f"{path}{_PARTIAL}")
        raise CheckpointInvalid(f"{file.path}: the head's copy does not match its manifest")

    def read(self, folder: str, name: str) -> bytes:
        """Download a small file and return its bytes."""
        path = os.path.join(folder, name)
        fd = self._open(f"{path}{_PARTIAL}", os.O_TRUNC)
        try:
            HeadConnection(self._access).download(self._url(name, 0), fd, timeout_s=_FETCH_S)
            encoded = os.pread(fd, os.fstat(fd).st_size, 0)
        finally:
            os.close(fd)
        with acting_as(self._account):
            os.replace(f"{path}{_PARTIAL}", path)
        return encoded

    def _open(self, path: str, flags: int = 0) -> int:
        with acting_as(self._account):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
        return manifests.require_regular(fd, path)

    def _fetch(self, name: str, path: str, size_bytes: int) -> None:
        """Download the missing bytes; a partial file that is too long starts again."""
        fd = self._open(path)
        connection = HeadConnection(self._access)
        try:
            begin = os.lseek(fd, 0, os.SEEK_END)
            if begin > size_bytes:
                os.ftruncate(fd, 0)
                begin = os.lseek(fd, 0, os.SEEK_SET)
            if begin < size_bytes:
                connection.download(self._url(name, begin), fd, timeout_s=_FETCH_S)
        finally:
            connection.close()
            os.close(fd)

    def _url(self, name: str, offset: int) -> str:
        return f"/v1/node/checkpoints/file?{urlencode({**self._about, 'path': name, 'offset': offset})}"

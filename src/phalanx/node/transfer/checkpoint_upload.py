"""Uploads checkpoints of this node's ranks: to the head, in pieces, if the gang's nodes do not share its folders, or to an object store.

The checkpoints of an attempt go in order, and only the newest may wait: a newer one replaces one whose upload has not started. Uploads
continue after the head or the network was unavailable. `kept` is called once the head holds all of a checkpoint; only then may a job resume from it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import BinaryIO, Final
from urllib.parse import urlencode

import msgspec

from phalanx.core.errors import UploadNotBegun
from phalanx.core.ids import Epoch, JobId
from phalanx.node.files import checkpoint_folders
from phalanx.node.files.job_accounts import acting_as
from phalanx.node.head_link.channels import Backoff, start_thread
from phalanx.node.head_link.head_connection import (
    HeadAccess,
    HeadConnection,
    HeadUnavailable,
    RegistrationRequired,
    RequestRejected,
)
from phalanx.node.logic.accounts import NodeAccount
from phalanx.node.processes.thread_pool import KeyedThreadPool
from phalanx.node.transfer.object_checkpoints import ObjectUpload
from phalanx.node.transfer.object_program import ObjectStoreUnavailable
from phalanx.wire import manifest as manifests
from phalanx.wire.manifest import (
    MANIFEST_BYTES_MAX,
    MANIFEST_NAME,
    CheckpointInvalid,
    CheckpointManifest,
    ManifestFile,
)
from phalanx.wire.stored_files import PIECE_BYTES_MAX, CheckpointUploadReply, FileEndReply

STALL_S: Final = 30.0  # at the end of a member: give up after this time without progress while the head answers
# At the end of a crashed member: it restarts here and uploads the rest then, or a node is gone.
SHORT_WAIT_S: Final = 2.0
_ATTEMPTS_AT_ONCE: Final = 4
_FILES_AT_ONCE: Final = 3  # one connection with TLS uses about one core
_ASK_S: Final = 60.0  # for a piece that is synced on a busy disk
_POLL_S: Final = 5.0  # also how long other nodes may send nothing before a newer checkpoint goes first
_POLL_SLACK_S: Final = 10.0
_NOTE_AFTER_S: Final = 10.0  # of failures, before a line in the job's log
_CHECK_EVERY_S: Final = 0.1
_BEGINS_MAX: Final = 50  # only a restarted head has lost a started upload; that is rare
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class CheckpointUpload:
    """One checkpoint on this node. Times are on a monotonic clock, in seconds.

    Attributes:
        folder: of the checkpoint on this node.
        objects: its transfer to an object store; None if the head stores it.
        on_stored: called once the head or the store holds all of it; None except on node rank 0, which must know.
        note: writes a line to the job's log.
        account: owner of the folder.
        before_upload: runs before the upload: it uploads the outputs written until this save, so that a job that resumes from it has them.
        awaited_by_ranks: the ranks waited for this save, as before a stop; so the end of the member waits for it too.
        superseded: a newer one is queued behind it.
        replaced: number of earlier checkpoints that it replaced and that are not uploaded.
        progress_s: last time that the head accepted data, or was unreachable.
    """

    job_id: JobId
    epoch: Epoch
    step: int
    digest: str
    folder: str
    note: Callable[[str], None]
    before_upload: Callable[[], None] = lambda: None
    objects: ObjectUpload | None = None
    on_stored: Callable[[], None] | None = None
    account: NodeAccount | None = None
    awaited_by_ranks: bool = False
    superseded: bool = False
    replaced: int = 0
    progress_s: float = field(default_factory=time.monotonic)
    started: bool = False
    finished: bool = False
    dropped: bool = False
    trouble_noted: bool = False

    @property
    def target(self) -> str:
        """Where it goes, for messages."""
        return "the head" if self.objects is None else "the object store"

    def note_progress(self) -> None:
        """Some of it has arrived."""
        self.progress_s = time.monotonic()


class CheckpointUploader:
    """All checkpoint uploads of one supervisor. Thread-safe.

    `shutting_down`: true once the supervisor must end, and is killed if it takes long. `resumed`: folders that an attempt resumes from, or may.
    """

    def __init__(
        self,
        access: HeadAccess,
        ended: threading.Event,
        *,
        shutting_down: Callable[[], bool] = lambda: False,
        resume_folders: Callable[[JobId, Epoch], Collection[str]] = lambda _job, _epoch: (),
    ) -> None:
        self._access = access
        self._ended = ended
        self._hurried = shutting_down
        self._resumed = resume_folders
        self._pool = KeyedThreadPool("keep", _ATTEMPTS_AT_ONCE)
        self._changed = threading.Condition()
        self._uploads: list[CheckpointUpload] = []
        self._due: set[tuple[JobId, Epoch]] = set()  # attempts whose lane has work that has not started

    def submit(self, upload: CheckpointUpload) -> None:
        """Upload this checkpoint. Idempotent.

        Per attempt one upload waits beside the current one: the lane's next work takes the newest.

        Raises:
            RuntimeError: no thread can be started; the next put tries again.
        """
        attempt = (upload.job_id, upload.epoch)
        with self._changed:
            for other in self._of(*attempt):
                other.superseded = True
                if not other.started:
                    other.dropped = other.finished = True
                    upload.replaced = other.replaced + 1
            self._uploads = [one for one in self._uploads if not one.finished]
            self._uploads.append(upload)
            if attempt in self._due:
                return
            self._due.add(attempt)
        try:
            self._pool.submit(attempt, lambda: self._upload_newest(*attempt))
        except RuntimeError:
            with self._changed:
                self._due.discard(attempt)
            raise

    def stop_attempt(self, job_id: JobId, epoch: Epoch) -> None:
        """The attempt is over: stop its uploads."""
        with self._changed:
            for upload in self._of(job_id, epoch):
                upload.dropped = True

    def unfinished_folders(self) -> frozenset[str]:
        """Folders of unfinished uploads."""
        with self._changed:
            return frozenset(upload.folder for upload in self._uploads if not upload.finished)

    def notify_when_uploaded(self, job_id: JobId, epoch: Epoch, done: Callable[[], None], *, patient: bool) -> None:
        """Call `done` once no upload of the attempt is left, or waiting is hopeless (`STALL_S`, `SHORT_WAIT_S`).

        `patient`: the member ended in order; otherwise only saves that the ranks waited for are waited for.
        """
        with self._changed:
            if not self._of(job_id, epoch):
                done()
                return

        def wait() -> None:
            self._wait(job_id, epoch, patient=patient)
            done()

        start_thread("checkpoint-upload", wait)

    def _wait(self, job_id: JobId, epoch: Epoch, *, patient: bool) -> None:
        since_s = time.monotonic()
        with self._changed:
            while uploads := self._of(job_id, epoch):
                now_s = time.monotonic()
                urgent = self._hurried() or (not patient and not any(upload.awaited_by_ranks for upload in uploads))
                moved_s = max(since_s, *(upload.progress_s for upload in uploads))
                if (urgent and now_s - since_s > SHORT_WAIT_S) or now_s - moved_s > STALL_S or self._ended.is_set():
                    for upload in uploads:
                        upload.note(
                            f"checkpoint of step {upload.step} has not reached {upload.target}; the job no longer waits for it"
                        )
                    return
                self._changed.wait(_CHECK_EVERY_S)

    def _of(self, job_id: JobId, epoch: Epoch) -> list[CheckpointUpload]:
        return [one for one in self._uploads if (one.job_id, one.epoch) == (job_id, epoch) and not one.finished]

    # ----------------------------------------------------------------------------------------------- on a worker thread

    def _upload_newest(self, job_id: JobId, epoch: Epoch) -> None:
        with self._changed:
            self._due.discard((job_id, epoch))
            upload = next(one for one in self._of(job_id, epoch) if not one.started)
            upload.started = True
        self._upload_one(upload)

    def _upload_one(self, upload: CheckpointUpload) -> None:
        try:
            if upload.replaced:
                skipped = "1 earlier was" if upload.replaced == 1 else f"{upload.replaced} earlier were"
                upload.note(
                    f"checkpoint of step {upload.step} replaced older ones: {skipped} not uploaded to {upload.target}"
                )
            if not upload.dropped:
                upload.before_upload()
            if not upload.dropped and self._try(upload) and upload.on_stored is not None:
                upload.on_stored()
        finally:
            with self._changed:
                upload.finished = True
                self._changed.notify_all()
            with acting_as(upload.account):
                keep = self.unfinished_folders() | set(self._resumed(upload.job_id, upload.epoch))
                checkpoint_folders.remove_old_copies(os.path.dirname(upload.folder), keep)

    def _try(self, upload: CheckpointUpload) -> bool:
        """Retry until the head or the store holds it all, or rejects it."""
        backoff, begins = Backoff(self._ended), 0
        while not (self._ended.is_set() or upload.dropped):
            try:
                if upload.objects is not None:
                    return upload.objects.run(upload.note_progress, lambda: self._ended.is_set() or upload.dropped)
                return _CheckpointTransfer(upload, self._access).run()
            except (HeadUnavailable, RegistrationRequired, ObjectStoreUnavailable) as error:
                self._note_trouble(upload, error)
                backoff.pause()
            except RequestRejected as error:
                begins += 1
                if error.code != UploadNotBegun.code or begins > _BEGINS_MAX:
                    upload.note(f"checkpoint of step {upload.step} is not stored: {error}")
                    return False
            except (OSError, CheckpointInvalid, msgspec.MsgspecError) as error:
                upload.note(f"checkpoint of step {upload.step} is not stored: {error}")
                return False
        return False

    def _note_trouble(
        self, upload: CheckpointUpload, error: HeadUnavailable | RegistrationRequired | ObjectStoreUnavailable
    ) -> None:
        _log.debug("checkpoint of step %d of job %s: %s", upload.step, upload.job_id, error)
        now_s = time.monotonic()
        if now_s - upload.progress_s > _NOTE_AFTER_S and not upload.trouble_noted:
            upload.trouble_noted = True
            upload.note(f"checkpoint of step {upload.step} has not reached {upload.target} yet; retrying: {error}")
        if not getattr(error, "answered", False):
            upload.progress_s = max(upload.progress_s, now_s - _NOTE_AFTER_S)  # wait for a head that is unreachable


class _CheckpointTransfer:
    """One attempt to upload a checkpoint."""

    def __init__(self, upload: CheckpointUpload, access: HeadAccess) -> None:
        self._upload = upload
        self._access = access
        self._about = {
            "job_id": upload.job_id,
            "epoch": upload.epoch,
            "step": upload.step,
            "digest": upload.digest,
        }

    def run(self) -> bool:
        """Whether the head holds all of it; False as soon as it reports that it never will."""
        connection = HeadConnection(self._access)
        try:
            with self._open(os.path.join(self._upload.folder, MANIFEST_NAME)) as file:
                encoded = file.read(MANIFEST_BYTES_MAX)
            manifest = manifests.decode(encoded, where=self._upload.folder)
            body = connection.call("PUT", self._url("manifest"), encoded, timeout_s=_ASK_S)
            reply = msgspec.json.decode(body, type=CheckpointUploadReply)
            if not reply.complete:
                self._send_all(manifest, reply)
                return self._await(connection)
            return True
        finally:
            connection.close()

    def _send_all(self, manifest: CheckpointManifest, reply: CheckpointUploadReply) -> None:
        mine = [
            file for file in manifest.files if reply.sizes.get(file.path, 0) < file.size_bytes and self._is_here(file)
        ]
        with ThreadPoolExecutor(max_workers=_FILES_AT_ONCE, thread_name_prefix="keep-file") as threads:
            for sent in [threads.submit(self._send, file, reply.sizes.get(file.path, 0)) for file in mine]:
                sent.result()

    def _send(self, file: ManifestFile, offset: int) -> None:
        connection = HeadConnection(self._access)
        try:
            with self._open(self._path(file)) as source:
                while offset < file.size_bytes and not self._upload.dropped:
                    source.seek(offset)
                    piece = source.read(min(PIECE_BYTES_MAX, file.size_bytes - offset))
                    if not piece:
                        raise CheckpointInvalid(f"{file.path} is shorter here than in its manifest")
                    path = self._url("file", path=file.path, offset=offset)
                    body = connection.call("PUT", path, piece, timeout_s=_ASK_S)
                    offset = msgspec.json.decode(body, type=FileEndReply).end
                    self._upload.progress_s = time.monotonic()
        finally:
            connection.close()

    def _await(self, connection: HeadConnection) -> bool:
        """Wait, after sending all local files; node rank 0 waits until the head holds the files of other nodes."""
        upload = self._upload
        missing: int | None = None
        while not upload.dropped:
            wait_s = 0.0 if upload.on_stored is None or missing is None else _POLL_S
            body = connection.call("GET", self._url("", wait_s=wait_s), timeout_s=_POLL_S + _POLL_SLACK_S)
            reply = msgspec.json.decode(body, type=CheckpointUploadReply)
            if reply.complete or upload.on_stored is None:
                return reply.complete
            if reply.lost_node:
                upload.note(
                    f"checkpoint of step {upload.step} is incomplete: {reply.lost_node} was lost before it had uploaded its part"
                )
                return False
            if missing is None or reply.missing_bytes < missing:
                missing, upload.progress_s = reply.missing_bytes, time.monotonic()
            elif upload.superseded or time.monotonic() - upload.progress_s > STALL_S:
                upload.note(f"checkpoint of step {upload.step} is incomplete: another node has not uploaded its part")
                return False
        return False

    def _open(self, path: str) -> BinaryIO:
        with acting_as(self._upload.account):
            return manifests.open_regular(path)

    def _is_here(self, file: ManifestFile) -> bool:
        path = self._path(file)
        with acting_as(self._upload.account):
            return os.path.exists(path)

    def _path(self, file: ManifestFile) -> str:
        path = os.path.join(self._upload.folder, file.path)
        with acting_as(self._upload.account):
            inside = os.path.realpath(path).startswith(os.path.realpath(self._upload.folder) + os.sep)
        if not inside:
            raise CheckpointInvalid(f"its manifest names {file.path!r} outside the folder")
        return path

    def _url(self, part: str, **extra: object) -> str:
        words = urlencode({**self._about, **extra})
        return f"/v1/node/checkpoints{f'/{part}' if part else ''}?{words}"

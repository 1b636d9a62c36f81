"""The head's copies of checkpoints on disk. Nodes upload pieces; a checkpoint gets its final name only once it is complete.

    <checkpoint root>/<folder of the attempt>/.kept                          the head stores copies of this attempt
                                             /step-<8 digits>.tmp-kept-<d>/  an upload; <d> is the start of the manifest's digest
                                             /step-<8 digits>/               complete: every file was verified and synced

Thread-safe; blocks on the disk. The caller (`kept`) authorizes writes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.errors import BadRequest, Conflict, NotFound, TryLater, UploadNotBegun
from phalanx.core.ids import Epoch, JobId
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.durable_files import (
    create_file,
    make_directory,
    remove_file,
    remove_folder,
    remove_tree,
    rename_path,
    replace_file,
    sync_directory,
    sync_file,
    truncate_file,
    write_at,
)
from phalanx.failpoints import around
from phalanx.wire import manifest as manifests
from phalanx.wire.manifest import (
    MANIFEST_NAME,
    CheckpointInvalid,
    CheckpointManifest,
    ManifestFile,
)
from phalanx.wire.stored_files import NONCE_FILE

_MARK: Final = ".kept"
_UPLOAD_SUFFIX: Final = ".tmp-kept-"
_RETIRED: Final = ".tmp-retired"
_STEP: Final = re.compile(r"step-(\d{8,})(\.tmp-kept-[0-9a-f]+)?")  # the second group marks an upload
_DIGEST_SHOWN: Final = 16  # hexadecimal digits in a folder's name
_OPENING_MAX: Final = 12  # checkpoints opened at once: half of the API's threads (api.runtime)
_OPEN_WAIT_S: Final = 0.5  # for another node that opens the same checkpoint, as all nodes of a gang do: a few syncs


class DiskFull(TryLater):
    """The head's disk is full. Once space was freed, the same request succeeds."""

    code = "disk_full"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointKey:
    """Identifies one checkpoint: its attempt and the attempt's folder, its step, and the SHA-256 of its manifest."""

    job_id: JobId
    epoch: Epoch
    folder: str
    step: int
    digest: str


@dataclass(slots=True, kw_only=True)
class _Upload:
    """The upload of one checkpoint. `lock` guards the tables, the count and the completion; each file's own lock guards its bytes."""

    folder: str
    final: str
    files: dict[str, ManifestFile]
    missing_bytes: int
    ends: dict[str, int] = field(default_factory=dict)
    crcs: dict[str, int] = field(default_factory=dict)
    locks: dict[str, threading.Lock] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    whole: bool = False


class CheckpointCopies:
    """All copies under one root. Creates both roots, and writes a nonce into each by which nodes recognize them."""

    def __init__(self, checkpoint_root: str, output_root: str) -> None:
        self.root = checkpoint_root
        self.nonce = secrets.token_hex(16)
        # Guards only the three tables, and is never held during disk access: reading a folder of 200 GB takes minutes.
        self._lock = threading.Condition()
        self._uploads: dict[CheckpointKey, _Upload] = {}  # removed once complete
        # By folder and step, regardless of the digest, as they share one final name.
        self._opening: set[tuple[str, int]] = set()
        # Complete checkpoints whose names were synced by this process; reset at each `settle` of the job, which costs at most three syncs.
        self._named: dict[JobId, set[CheckpointKey]] = {}
        for folder in (checkpoint_root, output_root):
            with contextlib.suppress(
                OSError
            ):  # then no node can prove that it shares the folder, and the head stores copies
                make_directory("kept.open", folder)
                replace_file("kept.open.nonce", os.path.join(folder, NONCE_FILE), self.nonce.encode())
        self._jobs = _marked_jobs(checkpoint_root)

    @property
    def jobs(self) -> frozenset[JobId]:
        """Jobs that may have copies."""
        return frozenset(self._jobs)

    def begin_upload(
        self, place: CheckpointKey, encoded: bytes, *, published: Iterable[str]
    ) -> tuple[bool, int, dict[str, int]]:
        """Begin or resume the upload of a checkpoint. Idempotent.

        `published`: digests that the job may resume from. An unpublished copy is replaced by a new one of the same step.

        Returns:
            Whether the checkpoint is complete, the number of missing bytes, and the received size of each file.

        Raises:
            BadRequest: the manifest does not match its digest, or names files outside its folder.
            Conflict: another checkpoint of this step is published.
            DiskFull: the disk is full.
            TryLater: the files received before are being read for another node.
        """
        manifest = _checked(place, encoded)
        with self._opened_alone(place) as begun, disk_errors(self.root):
            final = self._folder(place.folder, place.step)
            if os.path.isdir(final) and not self._replaces(place, final, set(published)):
                self._sync_name(place)
                with self._lock:
                    self._uploads.pop(place, None)
                return True, 0, {}
            upload = begun
            if upload is None:
                upload = self._open(place, manifest, encoded, final)
                with self._lock:
                    self._uploads[place] = upload
        with disk_errors(self.root):
            self._finish_if_whole(place, upload)
        return upload.whole, upload.missing_bytes, dict(upload.ends)

    def append(self, place: CheckpointKey, path: str, offset: int, data: bytes) -> int:
        """Append a piece to a file, and return the file's new size. A piece at any other offset changes nothing.

        Raises:
            UploadNotBegun: this process of the head has not begun the checkpoint.
            BadRequest: the manifest has no such file, or the file's bytes differ from it.
            DiskFull: the disk is full; the piece was not stored.
            TryLater: writing failed; if the sync failed, the whole file has to be sent again.
        """
        upload = self._uploads.get(place)
        if upload is None:
            raise UploadNotBegun(
                f"checkpoint of step {place.step}: no upload has begun here", hint="send its manifest first"
            )
        file = upload.files.get(path)
        if file is None:
            raise BadRequest(f"{path[:100]!r} is not a file of the checkpoint of step {place.step}")
        with upload.locks[path]:
            end = upload.ends.get(path, 0)
            if offset != end or not data:
                return end
            if end + len(data) > file.size_bytes:
                raise BadRequest(f"{path}: more than the {file.size_bytes} bytes of its manifest")
            with disk_errors(self.root):
                end = self._append(upload, file, end, data)
        if end == file.size_bytes:
            with disk_errors(self.root):
                self._finish_if_whole(place, upload)
        return end

    def upload_state(self, place: CheckpointKey) -> tuple[bool, int]:
        """Return whether the checkpoint is complete, and the number of missing bytes.

        Raises:
            UploadNotBegun: this process of the head has not begun the checkpoint.
            TryLater: its name could not be synced.
        """
        upload = self._uploads.get(place)
        if upload is not None:
            return upload.whole, upload.missing_bytes
        if _digest_of(self._folder(place.folder, place.step)) == place.digest:
            with disk_errors(self.root):
                self._sync_name(place)
            return True, 0
        raise UploadNotBegun(
            f"checkpoint of step {place.step}: no upload has begun here", hint="send its manifest first"
        )

    def path(self, attempt_folder: str, step: int, name: str) -> str:
        """Return the path of a file of a complete copy.

        Raises:
            NotFound: the copy does not exist, or has no such file.
        """
        folder = self._folder(attempt_folder, step)
        try:
            manifest, _ = manifests.read(folder)
        except CheckpointInvalid as error:
            raise NotFound(f"the head has no checkpoint of step {step} in {attempt_folder}") from error
        if name != MANIFEST_NAME and (not _inside(name) or all(file.path != name for file in manifest.files)):
            raise NotFound(f"{name[:100]!r} is not a file of the checkpoint of step {step}")
        stored_path = os.path.join(folder, name)
        if not os.path.isfile(stored_path):  # not retryable: the node falls back to an earlier checkpoint
            raise NotFound(f"the head's copy of the checkpoint of step {step} lacks {name[:100]!r}")
        return stored_path

    def remove_unneeded(self, job: Job, attempts: Sequence[Attempt]) -> None:
        """Remove the copies of a job that are no longer needed: expired copies, and unpublished or incomplete ones of ended attempts.

        `attempts`: read before `job`. Folders of other attempts stay: they may have begun since, or a restored database has lost them.
        """
        with self._lock:
            self._named.pop(job.id, None)
        published = frozenset((one.epoch, one.step) for one in job.checkpoints)
        oldest = min(published, default=(Epoch(0), 0))
        for attempt in attempts:
            epoch, epoch_folder = attempt.epoch, os.path.join(self.root, attempt.folder)
            over = not attempt.holds_allocation and os.path.exists(os.path.join(epoch_folder, _MARK))
            with self._lock:
                while any(
                    folder == attempt.folder and (over or (epoch, step) < oldest) for folder, step in self._opening
                ):
                    self._lock.wait()  # otherwise an upload being opened would recreate what is removed here
                for place in [p for p in self._uploads if p.folder == attempt.folder]:
                    if over or (epoch, place.step) < oldest:
                        del self._uploads[place]
            for entry in _names(epoch_folder):
                found = _STEP.fullmatch(entry)
                if found is None:
                    useless = entry.endswith(_RETIRED)
                else:
                    key = (epoch, int(found[1]))
                    useless = (over or key < oldest) and (found[2] is not None or key not in published)
                if useless:
                    _retire(os.path.join(epoch_folder, entry))
            if over and _names(epoch_folder) == [_MARK]:
                with contextlib.suppress(OSError):
                    remove_file("kept.settled_mark", os.path.join(epoch_folder, _MARK))
                    remove_folder("kept.settled_epoch", epoch_folder)
        folder = os.path.join(self.root, job.folder)
        if not any(attempt.holds_allocation for attempt in attempts) and not _has_marks(folder):
            self._jobs.discard(job.id)
            with contextlib.suppress(OSError):
                remove_folder("kept.settled_job", folder)

    def stale_folders(self, job: Job, attempts: Sequence[Attempt]) -> list[str]:
        """The stored checkpoints of an ended job but its newest valid one, which is verified if there are others: one pass over its bytes.

        Empty if none of those that the job published is valid: then each may be worth something to someone.
        """
        found = {
            os.path.join(self.root, attempt.folder, entry)
            for attempt in attempts
            for entry in _names(os.path.join(self.root, attempt.folder))
            if _STEP.fullmatch(entry)
        }
        if len(found) < 2:  # nothing could go; most jobs are such after the first removal
            return []
        folders = {attempt.epoch: attempt.folder for attempt in attempts}
        for one in reversed(job.checkpoints):
            newest = self._folder(folders[one.epoch], one.step) if one.epoch in folders else one.path
            if newest in found:
                with contextlib.suppress(CheckpointInvalid, OSError):
                    manifests.verify(newest, expected_digest=one.digest)
                    return sorted(found - {newest})
        return []

    def remove_stale(self, folders: Iterable[str]) -> None:
        """Remove what `stale_folders` returned. Idempotent."""
        for folder in folders:
            _retire(folder)

    @contextlib.contextmanager
    def _opened_alone(self, place: CheckpointKey) -> Iterator[_Upload | None]:
        """Yield the upload at a place, and exclude other callers from that step meanwhile.

        Raises:
            TryLater: another caller has that step open, or too many checkpoints are being opened.
        """
        step = (place.folder, place.step)
        with self._lock:
            if not self._lock.wait_for(
                lambda: step not in self._opening and len(self._opening) < _OPENING_MAX, timeout=_OPEN_WAIT_S
            ):
                raise TryLater(
                    f"checkpoint of step {place.step}: the head is reading the files that it received before",
                    hint="send it again in a moment",
                )
            self._opening.add(step)
            # Read before the caller looks for the final name: an upload that completes in between has that name.
            upload = self._uploads.get(place)
        try:
            yield upload
        finally:
            with self._lock:
                self._opening.discard(step)
                self._lock.notify_all()

    def _folder(self, attempt_folder: str, step: int) -> str:
        return os.path.join(self.root, attempt_folder, f"step-{step:08d}")

    def _replaces(self, place: CheckpointKey, final: str, published: set[str]) -> bool:
        """Whether the checkpoint replaces the stored one of its step, which is then removed; False if they are the same."""
        stored = _digest_of(final)
        if stored == place.digest:
            return False
        if stored is not None and stored in published:
            raise Conflict(f"another checkpoint of step {place.step} of this epoch is already published")
        _retire(final)
        return True

    def _open(self, place: CheckpointKey, manifest: CheckpointManifest, encoded: bytes, final: str) -> _Upload:
        """Open the folder of an upload, including files that an earlier process of the head received."""
        folder = f"{final}{_UPLOAD_SUFFIX}{place.digest[:_DIGEST_SHOWN]}"
        make_directory("kept.begin", folder)
        with around("kept.begin.mark"), open(os.path.join(os.path.dirname(final), _MARK), "ab"):
            self._jobs.add(place.job_id)
        replace_file("kept.manifest", os.path.join(folder, MANIFEST_NAME), encoded)
        files = {file.path: file for file in manifest.files}
        missing_bytes = sum(file.size_bytes for file in files.values())
        upload = _Upload(folder=folder, final=final, files=files, missing_bytes=missing_bytes)
        for path, file in upload.files.items():
            upload.locks[path] = threading.Lock()
            stored_path = os.path.join(folder, path)
            make_directory("kept.parents", os.path.dirname(stored_path))
            if not file.size_bytes:
                replace_file("kept.empty", stored_path, b"")
            elif os.path.exists(stored_path):
                size, crc = manifests.checksum(stored_path)
                if size < file.size_bytes or (size, crc) == (file.size_bytes, file.crc32):
                    upload.ends[path], upload.crcs[path] = size, crc
                    upload.missing_bytes -= size
                    _sync_file(stored_path)  # it may be complete without ever having been synced
        return upload

    def _append(self, upload: _Upload, file: ManifestFile, end: int, data: bytes) -> int:
        stored_path = os.path.join(upload.folder, file.path)
        fd = create_file("kept.piece", stored_path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            write_at("kept.piece", fd, data, end)
            crc = zlib.crc32(data, upload.crcs.get(file.path, 0))
            end += len(data)
            if end == file.size_bytes:
                truncate_file("kept.piece", fd, end)
                try:
                    sync_file("kept.piece", fd)
                except OSError:
                    # After a failed sync, the kernel may mark unwritten pages of any piece as clean: receive the whole file again.
                    _discard(stored_path)
                    with upload.lock:
                        upload.missing_bytes += upload.ends.pop(file.path, 0)
                        upload.crcs.pop(file.path, None)
                    raise
                if crc != file.crc32:
                    end, crc = 0, 0
        finally:
            os.close(fd)
        with upload.lock:
            upload.missing_bytes -= end - upload.ends.get(file.path, 0)
            upload.ends[file.path], upload.crcs[file.path] = end, crc
        if not end:
            raise BadRequest(
                f"{file.path}: the received bytes do not match the manifest", hint="check the disk of the sending node"
            )
        return end

    def _finish_if_whole(self, place: CheckpointKey, upload: _Upload) -> None:
        """Rename a complete upload to its final name, once."""
        with upload.lock:
            if upload.whole or upload.missing_bytes:
                return
            for folder, _, _ in os.walk(upload.folder):
                sync_directory("kept.inside", folder)
            with self._lock:
                self._named.get(place.job_id, set()).discard(place)  # left from an earlier copy, which was replaced
            rename_path("kept.finish", upload.folder, upload.final)
            self._sync_name(place)
            upload.whole = True
        with self._lock:  # after the rename, so that `begin` finds it under its name or here
            self._uploads.pop(place, None)

    def _sync_name(self, place: CheckpointKey) -> None:
        """Sync the folders above a complete checkpoint, once per process: after the rename, the head may have crashed or a sync failed."""
        with self._lock:
            if place in self._named.get(place.job_id, ()):
                return
        attempt_folder = os.path.join(self.root, place.folder)
        for folder in (attempt_folder, os.path.dirname(attempt_folder), self.root):
            sync_directory("kept.finish", folder)
        with self._lock:
            self._named.setdefault(place.job_id, set()).add(place)


def _checked(place: CheckpointKey, encoded: bytes) -> CheckpointManifest:
    if manifests.digest(encoded) != place.digest:
        raise BadRequest(f"checkpoint of step {place.step}: the manifest does not match its digest")
    try:
        manifest = manifests.decode(encoded, where=f"checkpoint of step {place.step}")
    except CheckpointInvalid as error:
        raise BadRequest(str(error)) from error
    if (manifest.step, manifest.epoch) != (place.step, place.epoch):
        raise BadRequest(
            f"the manifest is of epoch {manifest.epoch}, step {manifest.step}; expected epoch {place.epoch}, step {place.step}"
        )
    for file in manifest.files:
        if not _inside(file.path) or file.path == MANIFEST_NAME or file.size_bytes < 0:
            raise BadRequest(f"the manifest names {file.path[:100]!r}, which is not a valid file of a checkpoint")
    return manifest


def _inside(path: str) -> bool:
    """Whether a relative path is normalized and stays inside its folder."""
    words = path.split("/")
    return bool(path) and "\0" not in path and not any(word in ("", ".", "..") for word in words)


@contextlib.contextmanager
def disk_errors(root: str) -> Iterator[None]:
    """Turn disk errors into errors of the API.

    Raises:
        DiskFull: the disk or a quota is full.
        TryLater: any other error of the disk.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"the head's disk is full: {root}", hint="free space stored_path; the request is repeated automatically"
            ) from error
        raise TryLater(
            f"the head cannot write {error.filename or root}: {error.strerror}", hint="check the head's disk"
        ) from error


def _sync_file(path: str) -> None:
    """Sync a file that an earlier process of the head wrote; remove it if that fails."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync_file("kept.begin", fd)
    except OSError:
        _discard(path)
        raise
    finally:
        os.close(fd)


def _discard(path: str) -> None:
    """Remove a file whose sync failed, best effort: a second sync would not report the pages that the first one lost."""
    with contextlib.suppress(OSError):
        remove_file("kept.take_back", path)


def _digest_of(folder: str) -> str | None:
    """Return the digest of the manifest in a folder; None without one."""
    try:
        return manifests.read(folder)[1]
    except CheckpointInvalid:
        return None


def _retire(path: str) -> None:
    """Remove a folder; it is renamed first, so that no partly removed folder ever has the name of a checkpoint."""
    doomed = path if path.endswith(_RETIRED) else f"{path}{_RETIRED}"
    if doomed != path:
        with contextlib.suppress(OSError):
            rename_path("kept.retire", path, doomed)
    remove_tree("kept.retire", doomed)


def _marked_jobs(root: str) -> set[JobId]:
    return {JobId(name.partition("-")[0]) for name in _names(root) if _has_marks(os.path.join(root, name))}


def _has_marks(job_folder: str) -> bool:
    return any(_MARK in _names(os.path.join(job_folder, name)) for name in _names(job_folder))


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []

"""The head's copies of checkpoints, on disk: pieces come from the nodes of a gang, and a checkpoint has its name only when all of it is here.

    <checkpoint root>/<job>/epoch-<e>/.kept                          the head keeps copies of this epoch
                                     /step-<8 digits>.tmp-kept-<d>/  on its way; <d> begins the manifest's digest
                                     /step-<8 digits>/               whole: every file compared with the manifest and synced

Thread-safe, blocks on the disk. Who may write what is judged by whoever calls (`kept`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import threading
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.errors import BadRequest, Conflict, NotFound, TryLater
from phalanx.core.ids import Epoch, JobId
from phalanx.failpoints import around, sync_directory, write
from phalanx.wire import manifest as manifests
from phalanx.wire.kept import NONCE_FILE
from phalanx.wire.manifest import MANIFEST_NAME, CheckpointInvalid, Manifest, ManifestFile

_MARK: Final = ".kept"
_ON_ITS_WAY: Final = ".tmp-kept-"
_RETIRED: Final = ".tmp-retired"
_EPOCH: Final = re.compile(r"epoch-(\d+)")
_STEP: Final = re.compile(r"step-(\d{8,})(\.tmp-kept-[0-9a-f]+)?")  # the second group: on its way
_DIGEST_SHOWN: Final = 16  # hexadecimal digits in a folder's name
_OPENING_MAX: Final = 12  # checkpoints opened at once: half of the threads that serve the API (api.runtime)
_OPEN_WAIT_S: Final = 0.5  # for another that opens the same checkpoint, as all nodes of a gang do: some syncs


class DiskFull(TryLater):
    """The head's disk took nothing: room must be made, then the same request goes through."""

    code = "disk_full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One checkpoint: of which attempt, after which step, and the SHA-256 of its manifest."""

    job_id: JobId
    epoch: Epoch
    step: int
    digest: str


@dataclass(slots=True, kw_only=True)
class _Coming:
    """One checkpoint on its way. `lock` guards the tables, the count and the end; each file's own lock its bytes."""

    folder: str
    final: str
    files: dict[str, ManifestFile]
    missing_bytes: int
    ends: dict[str, int] = field(default_factory=dict)
    crcs: dict[str, int] = field(default_factory=dict)
    locks: dict[str, threading.Lock] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    whole: bool = False


class KeptFiles:
    """All copies under one root. Makes both roots, and says in each whose they are."""

    def __init__(self, checkpoint_root: str, output_root: str) -> None:
        self.root = checkpoint_root
        self.nonce = secrets.token_hex(16)
        # Guards the three tables alone, and is never held while the disk works: a folder of 200 GB is read for minutes.
        self._lock = threading.Condition()
        self._coming: dict[Place, _Coming] = {}  # no longer than they are on their way
        self._opening: set[tuple[JobId, Epoch, int]] = set()  # by step, whatever the digest: they have one name to take
        # Whole, and their names synced in this life; forgotten at each look at the job, which costs three syncs at most.
        self._named: dict[JobId, set[Place]] = {}
        for folder in (checkpoint_root, output_root):
            with contextlib.suppress(OSError):  # then no node proves that it sees it, and the head keeps copies
                with around("kept.open.directory"):
                    os.makedirs(folder, mode=0o700, exist_ok=True)
                write_durably(os.path.join(folder, NONCE_FILE), self.nonce.encode())
        self._jobs = _marked_jobs(checkpoint_root)

    @property
    def jobs(self) -> frozenset[JobId]:
        """Jobs of which there may be copies."""
        return frozenset(self._jobs)

    def begin(self, place: Place, encoded: bytes, *, published: Iterable[str]) -> tuple[bool, int, dict[str, int]]:
        """Be ready for the files of a manifest; again is harmless. Returns whether all are here, bytes missing, and the files' ends.

        `published`: digests that the job may be resumed from; a copy that is none of them makes room for a new one of its step.

        Raises:
            BadRequest: the manifest is another than its digest says, or names files outside its folder.
            Conflict: another checkpoint of this step is published.
            DiskFull: no room.
            TryLater: what came of it before is being read for another node.
        """
        manifest = _checked(place, encoded)
        with self._opened_alone(place) as begun, disk(self.root):
            final = self._folder(place.job_id, place.epoch, place.step)
            if os.path.isdir(final) and not self._replaces(place, final, set(published)):
                self._sync_name(place)
                with self._lock:
                    self._coming.pop(place, None)
                return True, 0, {}
            coming = begun
            if coming is None:
                coming = self._open(place, manifest, encoded, final)
                with self._lock:
                    self._coming[place] = coming
        with disk(self.root):
            self._finish_if_whole(place, coming)
        return coming.whole, coming.missing_bytes, dict(coming.ends)

    def take(self, place: Place, path: str, offset: int, data: bytes) -> int:
        """Add a piece to a file; one that does not begin where the file ends changes nothing. Returns where the file ends then.

        Raises:
            Conflict: the checkpoint was not begun in this life of the head.
            BadRequest: it is no file of the manifest, or has other bytes.
            DiskFull: no room; nothing of the piece counts.
            TryLater: the disk refused it; where it refused the sync, nothing of the file counts.
        """
        coming = self._coming.get(place)
        if coming is None:
            raise Conflict(f"checkpoint of step {place.step}: not begun here", hint="send its manifest first")
        file = coming.files.get(path)
        if file is None:
            raise BadRequest(f"{path[:100]!r} is no file of the checkpoint of step {place.step}")
        with coming.locks[path]:
            end = coming.ends.get(path, 0)
            if offset != end or not data:
                return end
            if end + len(data) > file.size_bytes:
                raise BadRequest(f"{path}: more than the {file.size_bytes} bytes of its manifest")
            with disk(self.root):
                end = self._append(coming, file, end, data)
        if end == file.size_bytes:
            with disk(self.root):
                self._finish_if_whole(place, coming)
        return end

    def state(self, place: Place) -> tuple[bool, int]:
        """Whether the checkpoint is here whole, and the bytes that are missing.

        Raises:
            Conflict: it was not begun in this life of the head.
            TryLater: the disk refused to sync its name.
        """
        coming = self._coming.get(place)
        if coming is not None:
            return coming.whole, coming.missing_bytes
        if _digest_of(self._folder(place.job_id, place.epoch, place.step)) == place.digest:
            with disk(self.root):
                self._sync_name(place)
            return True, 0
        raise Conflict(f"checkpoint of step {place.step}: not begun here", hint="send its manifest first")

    def path(self, job_id: JobId, epoch: Epoch, step: int, name: str) -> str:
        """A file of a whole copy, for sending.

        Raises:
            NotFound: there is no such copy, or no such file in it.
        """
        folder = self._folder(job_id, epoch, step)
        try:
            manifest, _ = manifests.read(folder)
        except CheckpointInvalid as error:
            raise NotFound(f"job {job_id} has no checkpoint of step {step} in epoch {epoch} here") from error
        if name != MANIFEST_NAME and (not _inside(name) or all(file.path != name for file in manifest.files)):
            raise NotFound(f"{name[:100]!r} is no file of the checkpoint of step {step}")
        there = os.path.join(folder, name)
        if not os.path.isfile(there):  # not to be asked for again: the node takes the checkpoint before
            raise NotFound(f"the copy of the checkpoint of step {step} has lost its {name[:100]!r}")
        return there

    def settle(
        self, job_id: JobId, live: Epoch | None, published: frozenset[tuple[Epoch, int]], *, newest: Epoch
    ) -> None:
        """Remove what is no use any more of a job: copies that retention gave up, what came for an attempt that is over, and what never became whole.

        `newest`: the newest attempt that was known when `live` was read. One that came since is not over.
        """
        with self._lock:
            self._named.pop(job_id, None)
        folder = os.path.join(self.root, job_id)
        oldest = min(published, default=(Epoch(0), 0))
        for epoch_folder, number in _numbered(folder, _EPOCH):
            epoch = Epoch(number)
            over = epoch != live and epoch <= newest and os.path.exists(os.path.join(epoch_folder, _MARK))
            with self._lock:
                while any(
                    (job, at) == (job_id, epoch) and (over or (at, step) < oldest) for job, at, step in self._opening
                ):
                    self._lock.wait()  # what is opened now would come back behind us
                for place in [p for p in self._coming if (p.job_id, p.epoch) == (job_id, epoch)]:
                    if over or (epoch, place.step) < oldest:
                        del self._coming[place]
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
                    with around("kept.settle.mark"):
                        os.unlink(os.path.join(epoch_folder, _MARK))
                    with around("kept.settle.epoch"):
                        os.rmdir(epoch_folder)
        if live is None and not any(_MARK in _names(path) for path, _ in _numbered(folder, _EPOCH)):
            self._jobs.discard(job_id)
            with contextlib.suppress(OSError), around("kept.settle.job"):
                os.rmdir(folder)

    @contextlib.contextmanager
    def _opened_alone(self, place: Place) -> Iterator[_Coming | None]:
        """What is on its way at a place, with nobody else at that step until the end.

        Raises:
            TryLater: somebody is, or too many other checkpoints are being opened.
        """
        step = (place.job_id, place.epoch, place.step)
        with self._lock:
            if not self._lock.wait_for(
                lambda: step not in self._opening and len(self._opening) < _OPENING_MAX, timeout=_OPEN_WAIT_S
            ):
                raise TryLater(
                    f"checkpoint of step {place.step}: what came of it before is being read",
                    hint="send it again in a moment",
                )
            self._opening.add(step)
            # Before its name is looked for: what has become whole since then has that.
            coming = self._coming.get(place)
        try:
            yield coming
        finally:
            with self._lock:
                self._opening.discard(step)
                self._lock.notify_all()

    def _folder(self, job_id: JobId, epoch: Epoch, step: int) -> str:
        return os.path.join(self.root, job_id, f"epoch-{epoch}", f"step-{step:08d}")

    def _replaces(self, place: Place, final: str, published: set[str]) -> bool:
        """Whether a new checkpoint takes the place of what lies at its name; false where it lies there itself."""
        held = _digest_of(final)
        if held == place.digest:
            return False
        if held is not None and held in published:
            raise Conflict(f"another checkpoint of step {place.step} of this epoch is published already")
        _retire(final)
        return True

    def _open(self, place: Place, manifest: Manifest, encoded: bytes, final: str) -> _Coming:
        """The folder of a checkpoint on its way, with what an earlier life of the head has of it."""
        folder = f"{final}{_ON_ITS_WAY}{place.digest[:_DIGEST_SHOWN]}"
        with around("kept.begin.directory"):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        with around("kept.begin.mark"), open(os.path.join(os.path.dirname(final), _MARK), "ab"):
            self._jobs.add(place.job_id)
        write_durably(os.path.join(folder, MANIFEST_NAME), encoded)
        files = {file.path: file for file in manifest.files}
        missing_bytes = sum(file.size_bytes for file in files.values())
        coming = _Coming(folder=folder, final=final, files=files, missing_bytes=missing_bytes)
        for path, file in coming.files.items():
            coming.locks[path] = threading.Lock()
            there = os.path.join(folder, path)
            with around("kept.begin.parents"):
                os.makedirs(os.path.dirname(there), mode=0o700, exist_ok=True)
            if not file.size_bytes:
                write_durably(there, b"")
            elif os.path.exists(there):
                size, crc = manifests.checksum(there)
                if size < file.size_bytes or (size, crc) == (file.size_bytes, file.crc32):
                    coming.ends[path], coming.crcs[path] = size, crc
                    coming.missing_bytes -= size
                    _sync_file(there)  # it may be whole, and nobody have synced it
        return coming

    def _append(self, coming: _Coming, file: ManifestFile, end: int, data: bytes) -> int:
        there = os.path.join(coming.folder, file.path)
        with around("kept.piece.create"):
            fd = os.open(there, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            write("kept.piece.write", fd, data, end)
            crc = zlib.crc32(data, coming.crcs.get(file.path, 0))
            end += len(data)
            if end == file.size_bytes:
                with around("kept.piece.cut"):
                    os.ftruncate(fd, end)
                try:
                    with around("kept.piece.sync"):
                        os.fsync(fd)
                except OSError:
                    # The kernel may take pages of any piece for written now that are not: all of the file comes again.
                    _take_back(there)
                    with coming.lock:
                        coming.missing_bytes += coming.ends.pop(file.path, 0)
                        coming.crcs.pop(file.path, None)
                    raise
                if crc != file.crc32:
                    end, crc = 0, 0
        finally:
            os.close(fd)
        with coming.lock:
            coming.missing_bytes -= end - coming.ends.get(file.path, 0)
            coming.ends[file.path], coming.crcs[file.path] = end, crc
        if not end:
            raise BadRequest(
                f"{file.path}: other bytes came than its manifest says", hint="look after that node's disk"
            )
        return end

    def _finish_if_whole(self, place: Place, coming: _Coming) -> None:
        """Give it its name, once, when nothing is missing."""
        with coming.lock:
            if coming.whole or coming.missing_bytes:
                return
            for folder, _, _ in os.walk(coming.folder):
                sync_directory("kept.finish.sync_inside", folder)
            with self._lock:
                self._named.get(place.job_id, set()).discard(place)  # of the same one before, which has made room since
            with around("kept.finish.rename"):
                os.rename(coming.folder, coming.final)
            self._sync_name(place)
            coming.whole = True
        with self._lock:  # behind the rename: `begin` finds it at its name or here
            self._coming.pop(place, None)

    def _sync_name(self, place: Place) -> None:
        """Sync the folders above a whole checkpoint, once in this life: whoever gave it its name may have died before that, or been refused."""
        with self._lock:
            if place in self._named.get(place.job_id, ()):
                return
        job_folder = os.path.join(self.root, place.job_id)
        for folder in (os.path.join(job_folder, f"epoch-{place.epoch}"), job_folder, self.root):
            sync_directory("kept.finish.sync_directory", folder)
        with self._lock:
            self._named.setdefault(place.job_id, set()).add(place)


def _checked(place: Place, encoded: bytes) -> Manifest:
    if manifests.digest(encoded) != place.digest:
        raise BadRequest(f"checkpoint of step {place.step}: the manifest is another than its digest says")
    try:
        manifest = manifests.decode(encoded, where=f"checkpoint of step {place.step}")
    except CheckpointInvalid as error:
        raise BadRequest(str(error)) from error
    if (manifest.step, manifest.epoch) != (place.step, place.epoch):
        raise BadRequest(f"the manifest is of step {manifest.step} of epoch {manifest.epoch}")
    for file in manifest.files:
        if not _inside(file.path) or file.path == MANIFEST_NAME or file.size_bytes < 0:
            raise BadRequest(f"the manifest names {file.path[:100]!r}, which is no file of a checkpoint")
    return manifest


def _inside(path: str) -> bool:
    """Whether a relative path stays below its folder, in the one way to write it."""
    words = path.split("/")
    return bool(path) and "\0" not in path and not any(word in ("", ".", "..") for word in words)


@contextlib.contextmanager
def disk(root: str) -> Iterator[None]:
    """What the disk refuses, as an answer to whoever asked."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"the head's disk is full: {root} takes no more", hint="make room there; it is tried again"
            ) from error
        raise TryLater(
            f"the head cannot write {error.filename or root}: {error.strerror}", hint="look after its disk"
        ) from error


def write_durably(path: str, data: bytes) -> None:
    """A whole file or none, synced; its folder is the caller's to sync."""
    fresh = f"{path}.new"
    with around("kept.whole.create"):
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        write("kept.whole.write", fd, data, 0)
        with around("kept.whole.sync"):
            os.fsync(fd)
    finally:
        os.close(fd)
    with around("kept.whole.rename"):
        os.replace(fresh, path)


def _sync_file(path: str) -> None:
    """Sync what an earlier life of the head has written, or remove it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with around("kept.begin.sync"):
            os.fsync(fd)
    except OSError:
        _take_back(path)
        raise
    finally:
        os.close(fd)


def _take_back(path: str) -> None:
    """Remove a file whose sync failed: a second sync would say nothing of pages that the first gave up. Best effort."""
    with contextlib.suppress(OSError), around("kept.piece.take_back"):
        os.unlink(path)


def _digest_of(folder: str) -> str | None:
    """Of the manifest that lies in a folder; None without one."""
    try:
        return manifests.read(folder)[1]
    except CheckpointInvalid:
        return None


def _retire(path: str) -> None:
    """Remove a folder; renamed first, so that nothing torn is ever left under a name that could be resumed from."""
    doomed = path if path.endswith(_RETIRED) else f"{path}{_RETIRED}"
    if doomed != path:
        with contextlib.suppress(OSError), around("kept.retire.rename"):
            os.rename(path, doomed)
    with around("kept.retire.remove"):
        shutil.rmtree(doomed, ignore_errors=True)


def _marked_jobs(root: str) -> set[JobId]:
    return {
        JobId(job)
        for job in _names(root)
        for path, _ in _numbered(os.path.join(root, job), _EPOCH)
        if _MARK in _names(path)
    }


def _numbered(folder: str, pattern: re.Pattern[str]) -> list[tuple[str, int]]:
    return [
        (os.path.join(folder, name), int(found[1])) for name in _names(folder) if (found := pattern.fullmatch(name))
    ]


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []

"""The head's copies of outputs on disk: the files of all nodes of a job in one folder. A file is replaced whole, or appended to.

    <output root>/<folder of the job>/...           the files that `phalanx get` downloads
                 /.from/<folder of the job>.json    the node rank of each file that is not of the first node, to resolve equal names
                 /.coming/<job>.<epoch>.<k>/<hash>  an upload, of the k-th node of the gang

If two nodes use the same name, the lower node rank gets it; the other file's name ends in `.node-<k>`. Links are never followed or
made: each folder is opened by descriptor. Thread-safe; blocks on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest, NotFound
from phalanx.core.ids import Epoch, JobId
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
from phalanx.store.checkpoints.copies import disk_errors
from phalanx.wire import manifest as manifests
from phalanx.wire.stored_files import OUTPUT_FILES_MAX, OutputFile

_NOTES: Final = ".from"
_UPLOADS: Final = ".coming"
_FIRST: Final = 0  # the node rank whose names never change, also in later attempts
_NODE: Final = re.compile(r"\.node-(\d+)$")
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE_KEPT: Final = 0o755


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOrigin:
    """The attempt and the node of the gang that a file belongs to. `folder`: of the job."""

    job_id: JobId
    epoch: Epoch
    folder: str
    node_rank: int


class OutputCopies:
    """All outputs under one root."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._lock = threading.Lock()
        self.jobs: set[JobId] = set()  # with uploads to this process of the head
        remove_tree("outputs.sweep", os.path.join(root, _UPLOADS))  # nodes send those files again

    def list_files(self, origin: OutputOrigin) -> list[OutputFile]:
        """List the files that a node of a new attempt starts with: all files for the first node, for others those of their node rank."""
        owners = self._owners(origin.folder)
        found = []
        for path, size_bytes in self._walk(origin.folder):
            owner = owners.get(path, _FIRST)
            own = _NODE.search(path)
            if origin.node_rank == _FIRST:
                found.append(OutputFile(path=path, name=path, size_bytes=size_bytes))
            elif owner == origin.node_rank:
                name = path[: own.start()] if own and int(own[1]) == owner else path
                found.append(OutputFile(path=path, name=name, size_bytes=size_bytes))
        return found

    def append_stored(self, origin: OutputOrigin, path: str, offset: int, data: bytes) -> int:
        """Append a piece to a file that this node uploaded before. If the file does not end at `offset`, nothing changes.

        Returns:
            The file's size afterwards; -1 if the file is not this node's, is not a regular file, or already ends in other bytes.
        """
        words = _words(path)
        name = self._name_for(origin, words)
        if name is None:
            return -1
        with disk_errors(self._root), self._within(origin.folder, name[:-1], make=False) as folder:
            try:
                fd = os.open(name[-1], os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ELOOP, errno.EISDIR):
                    return -1
                raise
            try:
                seen = os.fstat(fd)
                if not stat.S_ISREG(seen.st_mode):
                    return -1
                if seen.st_size == offset + len(data):
                    # A repeated piece: the head died or failed before the sync, or the answer was lost. Returning this end confirms durability.
                    if os.pread(fd, len(data), offset) != data:
                        return -1
                elif seen.st_size != offset:
                    return seen.st_size
                # Write it also when repeated: after a failed sync, the kernel may mark unwritten pages as clean.
                write_at("outputs.extend", fd, data, offset)
                sync_file("outputs.extend", fd)
                # The head may have died between the rename and this sync. It costs almost nothing if there is nothing to write.
                sync_directory("outputs.extend", folder)
            finally:
                os.close(fd)
        return offset + len(data)

    def append_upload(self, origin: OutputOrigin, path: str, offset: int, data: bytes) -> int:
        """Append a piece to an upload, and return its size. A piece at another offset changes nothing, except that offset 0 restarts it."""
        _words(path)
        upload = self._upload_path(origin, path)
        self.jobs.add(origin.job_id)
        with disk_errors(self._root):
            make_directory("outputs.take", os.path.dirname(upload))
            fd = create_file("outputs.take", upload, os.O_WRONLY | os.O_NOFOLLOW)
            try:
                if offset == 0:
                    truncate_file("outputs.take", fd, 0)
                end = os.fstat(fd).st_size
                if offset == end:
                    write_at("outputs.take", fd, data, end)
                    end += len(data)
            finally:
                os.close(fd)
        return end

    def finish_upload(self, origin: OutputOrigin, path: str, *, size_bytes: int, crc32: int, mode: int) -> None:
        """Rename a complete upload to its final name; it replaces the same node's earlier file of that name.

        Raises:
            BadRequest: the bytes do not match, or a folder has that name.
        """
        words, upload = _words(path), self._upload_path(origin, path)
        with disk_errors(self._root):
            if not os.path.exists(upload) or manifests.checksum(upload) != (size_bytes, crc32):
                with contextlib.suppress(OSError):
                    remove_file("outputs.refuse", upload)
                raise BadRequest(f"{path[:100]}: the received bytes do not match the checksum", hint="send it again")
            fd = os.open(upload, os.O_RDONLY | os.O_CLOEXEC)
            try:
                with around("outputs.name.mode"):
                    os.fchmod(fd, (mode & _MODE_KEPT) | 0o600)
                sync_file("outputs.name", fd)
            finally:
                os.close(fd)
            with self._lock:
                own = self._name_for(origin, words)
                name = words if own is None else own
                with self._within(origin.folder, name[:-1], make=True) as folder:
                    if own is None:
                        self._rename_aside(origin, words, folder)
                    try:
                        rename_path("outputs.name", upload, name[-1], target_folder=folder)
                    except (IsADirectoryError, NotADirectoryError) as error:
                        raise BadRequest(f"{path[:100]}: the head has a folder of that name") from error
                    sync_directory("outputs.name", folder)
                self._record_owner(origin.folder, "/".join(name), origin.node_rank)

    def remove(self, origin: OutputOrigin, path: str) -> None:
        """Remove a file that this node uploaded, and folders that become empty. Idempotent."""
        words = _words(path)
        with self._lock, disk_errors(self._root):
            name = self._name_for(origin, words) or []
            for depth in range(len(name) - 1, -1, -1):
                try:
                    with self._within(origin.folder, name[:depth], make=False) as folder:
                        if depth == len(name) - 1:
                            remove_file("outputs.file", name[depth], folder=folder)
                        else:
                            remove_folder("outputs.folder", name[depth], folder=folder)
                except OSError:  # already removed, now a folder, or not empty
                    return

    def delete(self, folder: str) -> None:
        """Remove all files of a job. Idempotent; the job has ended, so no node uploads to it.

        Raises:
            TryLater: a file could not be removed.
        """
        with disk_errors(self._root):
            with self._lock, contextlib.suppress(FileNotFoundError):
                remove_file("outputs.delete_owners", os.path.join(self._root, _NOTES, f"{folder}.json"))
            # Without the lock, which all uploads need: a large folder takes minutes.
            with contextlib.suppress(FileNotFoundError):  # last: while it exists, the job is found again after a crash
                remove_tree("outputs.delete", os.path.join(self._root, folder), ignore_errors=False)

    def open_file(self, folder: str, path: str) -> int:
        """Open a file for sending, and return its descriptor; the caller closes it.

        Raises:
            NotFound: the file does not exist.
        """
        words = _words(path)
        try:
            with self._within(folder, words[:-1], make=False) as parent:
                return os.open(words[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
        except OSError as error:
            raise NotFound(f"{path[:100]!r}: no such file in the job's outputs") from error

    def remove_stale_uploads(self, job_id: JobId, live: Epoch | None, *, newest: Epoch) -> None:
        """Remove the uploads of ended attempts: all but `live`, up to the `newest` attempt that existed when `live` was read."""
        root = os.path.join(self._root, _UPLOADS)
        if live is None:
            self.jobs.discard(job_id)
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(root):
                job, epoch, _ = name.rsplit(".", 2)
                if job == job_id and int(epoch) != live and int(epoch) <= newest:
                    remove_tree("outputs.settle", os.path.join(root, name))

    def upload_folders(self) -> list[tuple[str, JobId]]:
        """List the folders of unfinished uploads, with the id of the job."""
        root = os.path.join(self._root, _UPLOADS)
        with contextlib.suppress(FileNotFoundError):
            return [(os.path.join(root, name), JobId(name.rsplit(".", 2)[0])) for name in os.listdir(root)]
        return []

    def _name_for(self, origin: OutputOrigin, words: list[str]) -> list[str] | None:
        """Return the path of this node's file of that name; None if a node of a higher rank has the name and must give it up."""
        owner = self._owner(origin, words)
        if owner > origin.node_rank:
            return None
        return words if owner == origin.node_rank else _beside(words, origin.node_rank)

    def _owner(self, origin: OutputOrigin, words: list[str]) -> int:
        """Return the rank of the node whose file has that name; the asking node's own if no file has it."""
        owner = self._owners(origin.folder).get("/".join(words))
        if owner is not None:
            return owner
        return _FIRST if self._exists(origin.folder, words) else origin.node_rank

    def _rename_aside(self, origin: OutputOrigin, words: list[str], folder: int) -> None:
        """Rename another node's file of this name to its node-specific name."""
        owner = self._owner(origin, words)
        beside = _beside(words, owner)
        with contextlib.suppress(FileNotFoundError):
            rename_path("outputs.beside", words[-1], beside[-1], source_folder=folder, target_folder=folder)
            self._record_owner(origin.folder, "/".join(beside), owner)

    def _exists(self, folder: str, words: list[str]) -> bool:
        try:
            with self._within(folder, words[:-1], make=False) as parent:
                os.stat(words[-1], dir_fd=parent, follow_symlinks=False)
        except OSError:
            return False
        return True

    def _owners(self, folder: str) -> dict[str, int]:
        try:
            with open(os.path.join(self._root, _NOTES, f"{folder}.json"), encoding="utf-8") as file:
                record = json.load(file)
        except (OSError, ValueError):
            return {}
        return {str(path): int(rank) for path, rank in record.items()}

    def _record_owner(self, folder: str, path: str, node_rank: int) -> None:
        """Record which node a file belongs to; files of the first node need no record."""
        owners = self._owners(folder)
        if owners.get(path, _FIRST) == node_rank:
            return
        make_directory("outputs.own", os.path.join(self._root, _NOTES))
        text = json.dumps({**owners, path: node_rank})
        replace_file("outputs.own", os.path.join(self._root, _NOTES, f"{folder}.json"), text.encode())
        sync_directory("outputs.own_root", self._root)

    def _upload_path(self, origin: OutputOrigin, path: str) -> str:
        hashed = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()
        return os.path.join(self._root, _UPLOADS, f"{origin.job_id}.{origin.epoch}.{origin.node_rank}", hashed)

    @contextlib.contextmanager
    def _within(self, job_folder: str, words: list[str], *, make: bool) -> Iterator[int]:
        """Yield a descriptor of a folder inside the job's folder."""
        root = os.path.join(self._root, job_folder)
        if make:
            make_directory("outputs.root", root)
            sync_directory("outputs.root", self._root)
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for word in words:
                if make:
                    with contextlib.suppress(FileExistsError), around("outputs.within.directory"):
                        os.mkdir(word, 0o700, dir_fd=folder)
                    # Also if it existed: the head may have died before this sync. It costs almost nothing if there is nothing to write.
                    sync_directory("outputs.within", f"/proc/self/fd/{folder}")
                try:
                    below = os.open(word, _FOLDER, dir_fd=folder)
                except (NotADirectoryError, OSError) as error:
                    if make and error.errno in (errno.ENOTDIR, errno.ELOOP):
                        raise BadRequest(f"{word[:100]!r} is not a folder in the job's outputs") from error
                    raise
                os.close(folder)
                folder = below
            yield folder
        finally:
            os.close(folder)

    def _walk(self, job_folder: str) -> Iterator[tuple[str, int]]:
        """Yield the regular files in the job's folder with their sizes, by path; at most OUTPUT_FILES_MAX, as many as a node uploads."""
        root = os.path.join(self._root, job_folder)
        count = 0
        for folder, folders, names in os.walk(root):
            folders.sort()
            for name in sorted(names):
                with contextlib.suppress(OSError):
                    seen = os.lstat(os.path.join(folder, name))
                    if stat.S_ISREG(seen.st_mode) and count < OUTPUT_FILES_MAX:
                        count += 1
                        yield os.path.relpath(os.path.join(folder, name), root), seen.st_size


def _beside(words: list[str], node_rank: int) -> list[str]:
    return [*words[:-1], f"{words[-1]}.node-{node_rank}"]


def _words(path: str) -> list[str]:
    """Split a normalized relative path.

    Raises:
        BadRequest: the path is not normalized, or leaves the folder.
    """
    words = path.split("/")
    if "\0" in path or len(words) > manifests.DEPTH_MAX or any(word in ("", ".", "..") for word in words):
        raise BadRequest(f"{path[:100]!r} is not a path inside a job's outputs")
    return words

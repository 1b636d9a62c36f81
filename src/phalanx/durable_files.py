"""Changes files so that they survive a crash of the process or of the machine. Each change of the head's files passes a failpoint.

`point` names the caller's part of the failpoint; the function adds its own: `sync_file("blobs.put", fd)` passes `blobs.put.sync`. Files
that are not the head's (of supervisors, ranks and clients) have the empty point, which never fails.

The order of a new file is: write, sync the file, rename it to its name, sync its folder. Before the last step, a power cut may lose it.
"""

from __future__ import annotations

import os
import shutil
import time
from functools import partial
from typing import Final

from phalanx.failpoints import around

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def make_directory(point: str, path: str) -> None:
    """Create a folder that only its owner can enter, with its parents. Idempotent. Passes `.directory`."""
    with around(f"{point}.directory"):
        os.makedirs(path, mode=0o700, exist_ok=True)


def create_file(point: str, path: str, flags: int, mode: int = 0o600) -> int:
    """Open a file, created if missing, and return its descriptor. `flags`: of `os.open`. Passes `.create`."""
    with around(f"{point}.create"):
        return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, mode)


def write_at(point: str, fd: int, content: bytes | memoryview, offset: int) -> None:
    """Write all of `content` at `offset`. The head writes bytes to its files only through this function. Passes `.write`.

    Raises:
        OSError: the write failed; a part of it may be on disk.
    """
    view = memoryview(content)
    with around(f"{point}.write", torn=partial(os.pwrite, fd, view[: len(view) // 2], offset)):
        written = 0
        while written < len(view):
            written += os.pwrite(fd, view[written:], offset + written)


def truncate_file(point: str, fd: int, size_bytes: int) -> None:
    """Cut a file to a size. Passes `.cut`."""
    with around(f"{point}.cut"):
        os.ftruncate(fd, size_bytes)


def sync_file(point: str, fd: int) -> None:
    """Sync a file. After an error, its unsynced bytes are lost even if a second sync succeeds. Passes `.sync`."""
    with around(f"{point}.sync"):
        os.fsync(fd)


def sync_content(point: str, fd: int) -> None:
    """Sync the bytes and the size of a file, but not its times. Passes `.sync`."""
    with around(f"{point}.sync"):
        os.fdatasync(fd)


def rename_path(
    point: str, source: str, target: str, *, source_folder: int | None = None, target_folder: int | None = None
) -> None:
    """Rename a file or folder; replaces a file. The caller syncs the folder. Passes `.rename`."""
    with around(f"{point}.rename"):
        os.rename(source, target, src_dir_fd=source_folder, dst_dir_fd=target_folder)


def remove_file(point: str, path: str, *, folder: int | None = None) -> None:
    """Remove a file. Passes `.remove`."""
    with around(f"{point}.remove"):
        os.unlink(path, dir_fd=folder)


def remove_folder(point: str, path: str, *, folder: int | None = None) -> None:
    """Remove an empty folder. Passes `.remove`."""
    with around(f"{point}.remove"):
        os.rmdir(path, dir_fd=folder)


def remove_tree(point: str, path: str, *, ignore_errors: bool = True) -> None:
    """Remove a folder with everything in it. Passes `.remove`."""
    with around(f"{point}.remove"):
        shutil.rmtree(path, ignore_errors=ignore_errors)


def sync_directory(point: str, folder: str | int) -> None:
    """Sync a folder (path or descriptor), so that its entries survive a power cut. Passes `.sync_directory`."""
    with around(f"{point}.sync_directory"):
        fd = os.open(folder, _FOLDER) if isinstance(folder, str) else folder
        try:
            os.fsync(fd)
        finally:
            if isinstance(folder, str):
                os.close(fd)


def sync_path(path: str) -> None:
    """Sync a closed file or folder that is not the head's."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(point: str, path: str, content: bytes, *, mode: int = 0o600) -> None:
    """Write a whole file atomically; it is durable on return. Passes `.create`, `.write`, `.sync`, `.rename`, `.sync_directory`."""
    fresh = f"{path}.new"
    fd = create_file(point, fresh, os.O_WRONLY | os.O_TRUNC, mode)
    try:
        write_at(point, fd, content, 0)
        sync_file(point, fd)
    finally:
        os.close(fd)
    rename_path(point, fresh, path)
    sync_directory(point, os.path.dirname(path) or ".")


def time_durable_write(path: str, chunk: bytes, count: int = 1) -> float:
    """Return the seconds in which `count` chunks are written and synced to a new file at `path`, which is then removed."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        began_s = time.perf_counter()
        for number in range(count):
            write_at("", fd, chunk, number * len(chunk))
        os.fsync(fd)
        return time.perf_counter() - began_s
    finally:
        os.close(fd)
        os.unlink(path)

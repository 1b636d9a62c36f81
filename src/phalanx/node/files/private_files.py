"""Small files that only their owner can read: tokens, keys, records."""

from __future__ import annotations

import os

from phalanx.failpoints import around, sync_directory, write


def write_private(folder: str, name: str, text: str) -> str:
    """Atomically write a file that only its owner can read, and return its path. Durable on return: a revoked join token stays revoked."""
    path = os.path.join(folder, name)
    fresh = f"{path}.new"
    with around("private.write.directory"):
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    with around("private.write.create"):
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        write("private.write.bytes", fd, text.encode(), 0)
        with around("private.write.sync"):
            os.fsync(fd)
    finally:
        os.close(fd)
    with around("private.write.rename"):
        os.replace(fresh, path)
    sync_directory("private.write.sync_directory", os.path.dirname(path))
    return path

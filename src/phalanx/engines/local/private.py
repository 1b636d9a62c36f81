"""Small files for their owner alone: tokens, keys, records. Written by the head into its state folder, and by what it keeps elsewhere."""

from __future__ import annotations

import os


def write_private(folder: str, name: str, text: str) -> str:
    """A file for its owner alone, whole or not at all; its path."""
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)
    return path

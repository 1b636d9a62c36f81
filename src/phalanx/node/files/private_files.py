"""Small files that only their owner can read: tokens, keys, records."""

from __future__ import annotations

import os

from phalanx.durable_files import make_directory, replace_file


def write_private(folder: str, name: str, text: str) -> str:
    """Atomically write a file that only its owner can read, and return its path. Durable on return: a revoked join token stays revoked.

    `text` may have bytes that are no UTF-8, as surrogates (PEP 383).
    """
    path = os.path.join(folder, name)
    make_directory("private.file", os.path.dirname(path))
    replace_file("private.file", path, text.encode(errors="surrogateescape"))
    return path

"""The manifest of a complete checkpoint folder, and its verification.

`phalanx.torch` writes it after every shard is durable; supervisors read it before a resume. A folder without a manifest, or with files that
differ from it, is never resumed from. Standard library only.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import zlib
from dataclasses import dataclass
from typing import BinaryIO, Final

MANIFEST_NAME: Final = "manifest.json"
MANIFEST_FORMAT: Final = 1
MANIFEST_BYTES_MAX: Final = 64 << 20  # some 100 bytes a file, two files a rank: 300,000 ranks
DEPTH_MAX: Final = 64  # names in a path: code that handles such folders recurses, and Python stops at depth 1000
_CHUNK_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile:
    """One file of the checkpoint: path relative to its folder, size and CRC-32 of its bytes."""

    path: str
    size_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """The content of a complete checkpoint. `world_size` is the number of ranks that wrote it; loading does not depend on it."""

    format: int
    step: int
    epoch: int
    world_size: int
    files: tuple[ManifestFile, ...]


class CheckpointInvalid(Exception):
    """The folder is not a complete checkpoint and must not be resumed from. A retry does not help."""


def checksum(path: str) -> tuple[int, int]:
    """Return size in bytes and CRC-32 of a regular file, read in chunks. Cost: one pass over the file.

    Raises:
        OSError: it cannot be read, or is a pipe, a device or a folder, which could block the reader.
    """
    crc, size = 0, 0
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return size, crc


def open_regular(path: str) -> BinaryIO:
    """Open a regular file for reading. A job controls its checkpoint folder, and a pipe there would block the reader forever.

    Raises:
        OSError: it is missing, or not a regular file.
    """
    return open(require_regular(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), path), "rb")


def require_regular(descriptor: int, path: str) -> int:
    """Return the descriptor of a regular file; close any other, because writing to a pipe without a reader blocks once it is full.

    Raises:
        OSError: it is not a regular file.
    """
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", path)


def encode(manifest: CheckpointManifest) -> bytes:
    """Encode the manifest as JSON, with files sorted by path so that equal checkpoints give equal bytes."""
    record = {
        "format": manifest.format,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "world_size": manifest.world_size,
        "files": [
            {"path": f.path, "size_bytes": f.size_bytes, "crc32": f.crc32}
            for f in sorted(manifest.files, key=lambda f: f.path)
        ],
    }
    return json.dumps(record, indent=1).encode()


def digest(encoded: bytes) -> str:
    """Return the SHA-256 of the manifest's bytes, by which the head identifies the checkpoint."""
    return hashlib.sha256(encoded).hexdigest()


def read(folder: str) -> tuple[CheckpointManifest, str]:
    """Return the manifest of a checkpoint folder, and its digest.

    Raises:
        CheckpointInvalid: it is missing, truncated, or of another format.
    """
    try:
        with open_regular(os.path.join(folder, MANIFEST_NAME)) as file:
            encoded = file.read(MANIFEST_BYTES_MAX + 1)
    except OSError as error:
        raise CheckpointInvalid(f"{folder}: no readable manifest ({error})") from error
    if len(encoded) > MANIFEST_BYTES_MAX:
        raise CheckpointInvalid(f"{folder}: manifest is larger than {MANIFEST_BYTES_MAX} bytes")
    return decode(encoded, where=folder), digest(encoded)


def decode(encoded: bytes, *, where: str) -> CheckpointManifest:
    """Decode a manifest; `where` names its source in errors.

    Raises:
        CheckpointInvalid: it is truncated, or of another format.
    """
    try:
        record = json.loads(encoded)
        if record["format"] != MANIFEST_FORMAT:
            raise CheckpointInvalid(
                f"{where}: manifest format {record['format']}, this release reads {MANIFEST_FORMAT}"
            )
        files = tuple(
            ManifestFile(path=str(f["path"]), size_bytes=int(f["size_bytes"]), crc32=int(f["crc32"]))
            for f in record["files"]
        )
        for file in files:
            _refuse_path(file.path, where)
        return CheckpointManifest(
            format=MANIFEST_FORMAT,
            step=int(record["step"]),
            epoch=int(record["epoch"]),
            world_size=int(record["world_size"]),
            files=files,
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointInvalid(f"{where}: no readable manifest ({error})") from error


def _refuse_path(path: str, where: str) -> None:
    """Check that a path names a file below the folder.

    Raises:
        CheckpointInvalid: it is empty, absolute, too deep, has `..`, or is not a valid name.
    """
    parts = path.split("/")
    if not path or len(parts) > DEPTH_MAX or "\0" in path or any(part in {"", ".", ".."} for part in parts):
        raise CheckpointInvalid(f"{where}: manifest names {path[:200]!r}, which is not a file below the folder")


def verify(folder: str, *, expected_digest: str | None = None) -> CheckpointManifest:
    """Return the manifest of `folder` after checking every file against it. Cost: one pass over all bytes.

    Raises:
        CheckpointInvalid: the manifest is missing or not the expected one, or a file is missing, short or changed.
    """
    manifest, found_digest = read(folder)
    if expected_digest is not None and found_digest != expected_digest:
        raise CheckpointInvalid(f"{folder}: manifest differs from the published one")
    for file in manifest.files:
        path = os.path.join(folder, file.path)
        if "\0" in file.path or not os.path.realpath(path).startswith(os.path.realpath(folder) + os.sep):
            raise CheckpointInvalid(f"{folder}: manifest names {file.path!r} outside the folder")
        try:
            found = checksum(path)
        except OSError as error:
            raise CheckpointInvalid(f"{folder}: {file.path}: {error.strerror or error}") from error
        if found != (file.size_bytes, file.crc32):
            raise CheckpointInvalid(
                f"{folder}: {file.path} has {found[0]} bytes, CRC {found[1]:08x}; expected {file.size_bytes}, {file.crc32:08x}"
            )
    return manifest

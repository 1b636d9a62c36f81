"""Checkpoint folders: names, durability, the atomic commit, removal of leftovers, and retention. Does not use torch.

A checkpoint is written to `step-<8 digits>.tmp-<epoch>-<generation>` and becomes `step-<8 digits>` by one rename, after each file, the
manifest with size and CRC-32 of each file, and the folder were fsynced. So a crash at any time leaves a complete checkpoint or a temporary
folder, which the next start removes; never an incomplete one under the final name.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from typing import Final

from phalanx.durable_files import replace_file, sync_path
from phalanx.wire import manifest as manifests
from phalanx.wire.manifest import (
    MANIFEST_FORMAT,
    MANIFEST_NAME,
    CheckpointInvalid,
    CheckpointManifest,
    ManifestFile,
)

_STEP: Final = re.compile(r"step-(\d{8,})")
_TEMPORARY: Final = re.compile(r"step-\d{8,}\.tmp-.+")
_KEPT_BY_HAND: Final = 2
"""Checkpoints to keep without a head: the newest, and one more in case the newest is unreadable."""


def step_folder(directory: str, step: int) -> str:
    """Return the final path of the checkpoint after `step` steps."""
    return os.path.join(directory, f"step-{step:08d}")


def temporary_folder(directory: str, step: int, *, epoch: int, generation: int) -> str:
    """Return the temporary path of a checkpoint. Equal on all ranks without communication.

    No other epoch or generation uses it, even in a shared `directory`: a rank of an older one may wake between two fence checks.
    """
    return f"{step_folder(directory, step)}.tmp-{epoch}-{generation}"


def create_temporary(temporary: str) -> None:
    """Create an empty temporary folder. Replaces one from a failed save of this process."""
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)


def seal_file(folder: str, name: str) -> ManifestFile:
    """Fsync one file of `folder` and return its manifest entry. Cost: one pass over the file."""
    path = os.path.join(folder, name)
    sync_path(path)
    size_bytes, crc32 = manifests.checksum(path)
    return ManifestFile(path=name, size_bytes=size_bytes, crc32=crc32)


def encode_manifest(*, step: int, epoch: int, world_size: int, files: Iterable[ManifestFile]) -> bytes:
    """Return the encoded manifest of sealed files."""
    return manifests.encode(
        CheckpointManifest(format=MANIFEST_FORMAT, step=step, epoch=epoch, world_size=world_size, files=tuple(files))
    )


def write_manifest(temporary: str, encoded: bytes) -> str:
    """Write the manifest durably and return its digest. Seal all files before."""
    replace_file("", os.path.join(temporary, MANIFEST_NAME), encoded, mode=0o666)
    return manifests.digest(encoded)


def commit(temporary: str, final: str) -> str | None:
    """Rename the complete, durable folder `temporary` to `final`.

    Returns:
        None, or the digest of the valid checkpoint that already exists at `final`. A gang that restarts in place repeats steps of the
        same epoch. The first checkpoint may be published already, so it is kept and the new one deleted.
    """
    if os.path.lexists(final):
        try:
            manifests.verify(final)
            _, digest = manifests.read(final)
        except CheckpointInvalid:
            shutil.rmtree(final)
        else:
            shutil.rmtree(temporary)
            return digest
    os.rename(temporary, final)
    sync_path(os.path.dirname(final))
    return None


def existing_digest(final: str, own: Iterable[ManifestFile]) -> str | None:
    """Return the digest of the checkpoint at `final` if this node has all its files there, named as in `own`; else None."""
    try:
        manifest, digest = manifests.read(final)
        listed = {file.path: file for file in manifest.files}
        for file in own:
            known = listed[file.path]
            if manifests.checksum(os.path.join(final, file.path)) != (known.size_bytes, known.crc32):
                return None
    except (CheckpointInvalid, KeyError, OSError):
        return None
    return digest


def commit_part(temporary: str, final: str, encoded: bytes) -> None:
    """Commit the part of one node, with the manifest of the whole checkpoint. Replaces an existing part."""
    write_manifest(temporary, encoded)
    if os.path.lexists(final):
        shutil.rmtree(final)
    os.rename(temporary, final)
    sync_path(os.path.dirname(final))


def remove_leftovers(directory: str) -> None:
    """Remove temporary folders of killed processes from `directory`. Call it before the first save, without other writers."""
    for entry in _entries(directory):
        if _TEMPORARY.fullmatch(entry.name):
            shutil.rmtree(entry.path, ignore_errors=True)


def delete_old_checkpoints(directory: str) -> None:
    """Delete all but the newest complete checkpoints of `directory`. For use without a head only."""
    complete = [path for _, path in _newest_first(directory) if _has_manifest(path)]
    for path in complete[_KEPT_BY_HAND:]:
        retired = f"{path}.tmp-retired"  # renamed first: a crash while deleting leaves no incomplete checkpoint under a final name
        os.rename(path, retired)
        shutil.rmtree(retired, ignore_errors=True)


def newest_valid(directory: str) -> str | None:
    """Return the newest checkpoint of `directory` that matches its manifest. Cost: one pass over each checkpoint it reads."""
    for _, path in _newest_first(directory):
        try:
            manifests.verify(path)
        except CheckpointInvalid:
            continue
        return path
    return None


def check_sizes(folder: str) -> CheckpointManifest:
    """Return the manifest of `folder` if every file exists with its full size. Cheap; the supervisor has verified the bytes before.

    Raises:
        CheckpointInvalid: a file is missing or has the wrong size.
    """
    manifest, _ = manifests.read(folder)
    for file in manifest.files:
        try:
            size_bytes = os.path.getsize(os.path.join(folder, file.path))
        except OSError as error:
            raise CheckpointInvalid(f"{folder}: {file.path}: {error.strerror}") from error
        if size_bytes != file.size_bytes:
            raise CheckpointInvalid(
                f"{folder}: {file.path} has {size_bytes} bytes, but the manifest has {file.size_bytes}"
            )
    return manifest


def _newest_first(directory: str) -> list[tuple[int, str]]:
    found = [(int(match[1]), entry.path) for entry in _entries(directory) if (match := _STEP.fullmatch(entry.name))]
    return sorted(found, reverse=True)


def _has_manifest(folder: str) -> bool:
    try:
        manifests.read(folder)
    except CheckpointInvalid:
        return False
    return True


def _entries(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:  # the folder does not exist yet, or the path is not a folder; then each save reports it
        return []

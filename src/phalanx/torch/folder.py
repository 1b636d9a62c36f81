"""Checkpoints as folders on disk: names, durability, the atomic commit, sweeping and retention. No torch in here.

A checkpoint is written to `step-<8 digits>.tmp-<generation>` (`.tmp-<epoch>-<generation>` in a folder of several epochs) and becomes
`step-<8 digits>` by one rename, after every file in it and the folder itself were fsynced and the manifest with size and CRC-32 of each
file lies beside them. So a crash at any instant leaves a complete checkpoint or a temporary folder, which the next start sweeps; never
something in between under the final name.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from typing import Final

from phalanx.wire import manifest as manifests
from phalanx.wire.manifest import MANIFEST_FORMAT, MANIFEST_NAME, CheckpointInvalid, Manifest, ManifestFile

_STEP: Final = re.compile(r"step-(\d{8,})")
_TEMPORARY: Final = re.compile(r"step-\d{8,}\.tmp-.+")
_KEPT_BY_HAND: Final = 2
"""Checkpoints kept where no head keeps them: the newest, and one more in case the newest turns out unreadable."""


def step_folder(directory: str, step: int) -> str:
    """The final name of the checkpoint made after `step` steps."""
    return os.path.join(directory, f"step-{step:08d}")


def temporary_folder(directory: str, step: int, *, epoch: int, generation: int) -> str:
    """Where it is written first. Equal on all ranks without a word between them.

    No other epoch or generation writes there, also where all share `directory`: a rank of an older one may wake between two fences.
    In a folder of one epoch the name is that of older releases, of which some ranks of a gang may be.
    """
    alone = os.path.basename(os.path.normpath(directory)) == f"epoch-{epoch}"
    life = f"{generation}" if alone else f"{epoch}-{generation}"
    return f"{step_folder(directory, step)}.tmp-{life}"


def begin(temporary: str) -> None:
    """Make the temporary folder, empty. An older one of that name is a failed try of this process."""
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)


def seal(folder: str, name: str) -> ManifestFile:
    """Fsync one file of `folder` and return its manifest entry. Cost: one pass over the file."""
    path = os.path.join(folder, name)
    _fsync(path)
    size_bytes, crc32 = manifests.checksum(path)
    return ManifestFile(path=name, size_bytes=size_bytes, crc32=crc32)


def manifest_of(*, step: int, epoch: int, world_size: int, files: Iterable[ManifestFile]) -> bytes:
    """The manifest of sealed files, encoded."""
    return manifests.encode(
        Manifest(format=MANIFEST_FORMAT, step=step, epoch=epoch, world_size=world_size, files=tuple(files))
    )


def write_manifest(temporary: str, encoded: bytes) -> str:
    """Write the manifest durably and return its digest. All files must have been sealed."""
    path = os.path.join(temporary, MANIFEST_NAME)
    with open(path, "wb") as file:
        file.write(encoded)
        file.flush()
        os.fsync(file.fileno())
    _fsync(temporary)
    return manifests.digest(encoded)


def commit(temporary: str, final: str) -> str | None:
    """Rename the whole, durable `temporary` to `final`.

    Returns:
        None, or the digest of the valid checkpoint that already lay at `final`. A gang restarted in place makes the same steps of
        the same epoch again; the first one may be published already, so it stays and the newcomer is dropped.
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
    _fsync(os.path.dirname(final))
    return None


def held(final: str, own: Iterable[ManifestFile]) -> str | None:
    """The digest of what lies at `final`, if this node's part of it is whole: the files of the same names as `own`. Else None."""
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
    """As `commit`, for a node's part of a checkpoint: with the manifest of all of it, in place of what may lie there."""
    write_manifest(temporary, encoded)
    if os.path.lexists(final):
        shutil.rmtree(final)
    os.rename(temporary, final)
    _fsync(os.path.dirname(final))


def sweep(directory: str) -> None:
    """Remove temporary folders that a killed process left in `directory`. Call it before the first save, with no other writer."""
    for entry in _entries(directory):
        if _TEMPORARY.fullmatch(entry.name):
            shutil.rmtree(entry.path, ignore_errors=True)


def retain(directory: str) -> None:
    """Keep the newest complete checkpoints of `directory` and delete older ones. Only where no head does."""
    complete = [path for _, path in _newest_first(directory) if _has_manifest(path)]
    for path in complete[_KEPT_BY_HAND:]:
        doomed = f"{path}.tmp-retired"  # renamed first, so that a crash in mid-deletion leaves nothing torn under a final name
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def newest_valid(directory: str) -> str | None:
    """The newest checkpoint of `directory` whose every byte matches its manifest. Cost: one pass over the ones tried."""
    for _, path in _newest_first(directory):
        try:
            manifests.verify(path)
        except CheckpointInvalid:
            continue
        return path
    return None


def check_sizes(folder: str) -> Manifest:
    """The manifest of `folder` if every file is there in full length. Cheap; the supervisor has compared the bytes before.

    Raises:
        CheckpointInvalid: something is missing or short.
    """
    manifest, _ = manifests.read(folder)
    for file in manifest.files:
        try:
            size_bytes = os.path.getsize(os.path.join(folder, file.path))
        except OSError as error:
            raise CheckpointInvalid(f"{folder}: {file.path}: {error.strerror}") from error
        if size_bytes != file.size_bytes:
            raise CheckpointInvalid(
                f"{folder}: {file.path} has {size_bytes} bytes, the manifest says {file.size_bytes}"
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
    except OSError:  # not there yet, or no folder at all: then each save says so, and training goes on
        return []


def _fsync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""Files of records, backups and archives of jobs: gzip, a manifest, one record per line, and a checksum of everything before it.

The format is the same for every database, so a backup of one can be restored into another. The file is renamed once complete and synced.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from phalanx.core.errors import BadFile, Conflict
from phalanx.core.hints import Hint, HintCode
from phalanx.durable_files import (
    create_file,
    remove_file,
    rename_path,
    sync_directory,
    sync_file,
    truncate_file,
    write_at,
)
from phalanx.ports.store import StoreRefused
from phalanx.store.sql.documents import decoder
from phalanx.store.sql.kinds import KIND_BY_NAME

BACKUP: Final = "phalanx-backup"
ARCHIVE: Final = "phalanx-archive"
_NAMES: Final = {BACKUP: "backup", ARCHIVE: "archive of jobs"}
VERSION: Final = 1
_CHUNK: Final = 1 << 20  # compressed bytes per write
_EVERY: Final = 2000  # records between two progress reports
_GZIP: Final = 31  # zlib's window bits for a gzip frame
ProgressCallback = Callable[[int, int], None]  # records done, of how many


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupManifest:
    """The first line.

    Attributes:
        database: "sqlite" or "postgres"; `migration`: version of its schema.
        counts: records of each kind; of an archive, its jobs only.
        last_job_seq: jobs with greater numbers are not in the backup.
        stored_jobs: of an archive, how many of its jobs have files in object stores; None if an earlier version wrote it.
    """

    format: str
    version: int
    phalanx: str
    made_s: float
    database: str
    migration: int
    counts: dict[str, int]
    last_job_seq: int
    stored_jobs: int | None = None

    @property
    def records(self) -> int:
        """Number of all records."""
        return sum(self.counts.values())


class _End(msgspec.Struct):
    sha256: str


def write_backup(
    path: str,
    manifest: BackupManifest,
    records: Iterable[tuple[str, str]],
    progress: ProgressCallback = lambda *_: None,
) -> None:
    """Write a file, readable only by its owner. The file appears under its name only when complete.

    Raises:
        Conflict: the file exists, or another backup is writing it.
        StoreRefused: the disk failed or is full.
    """
    if os.path.exists(path):
        raise Conflict(f"{path} already exists", hint="a backup never replaces another: choose another name")
    part = path + ".part"
    try:
        fd = create_file("backup", part, os.O_WRONLY)
    except OSError as error:
        raise StoreRefused(
            f"{part}: {error.strerror}", hint="name a file in a folder that this user can write to"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.exists(part) or not os.path.samestat(os.fstat(fd), os.stat(part)):
            raise BlockingIOError  # the opened file has become a complete backup meanwhile: do not truncate it
        truncate_file("backup", fd, 0)
        offset = 0
        for chunk in _compressed(_lines(manifest, records, progress)):
            write_at("backup", fd, chunk, offset)
            offset += len(chunk)
        sync_file("backup", fd)
        rename_path("backup", part, path)
        sync_directory("backup", os.path.dirname(os.path.abspath(path)))
    except BlockingIOError:
        raise Conflict(f"another backup is writing {path}", hint="wait for it, or choose another name") from None
    except BaseException as error:
        if os.path.exists(part):
            remove_file("backup.take_back", part)
        if isinstance(error, OSError):
            raise StoreRefused(
                f"{path}: {error.strerror}: the file was not written", hint="is the disk full?"
            ) from error
        raise
    finally:
        os.close(fd)


def read_manifest(path: str, format_: str = BACKUP) -> BackupManifest:
    """Read the first line of a file.

    Raises:
        BadFile: the file cannot be read, or is not of this format.
    """
    for line in _read(path):
        try:
            manifest = msgspec.json.decode(line, type=BackupManifest)
        except (msgspec.MsgspecError, ValueError):
            break
        if manifest.format == format_ and manifest.version > VERSION:
            raise BadFile(
                f"{path} was written by a newer Phalanx ({manifest.phalanx})", hint="restore it with that release"
            )
        if manifest.format == format_:
            return manifest
        break
    raise BadFile(f"{path} is not a Phalanx {_NAMES[format_]}", hint=Hint(HintCode.CREATE_BACKUP))


def read_records(path: str, format_: str = BACKUP) -> Iterator[tuple[str, Any]]:
    """(word, record) for every record of a file. Reading to the end verifies that it is complete and unchanged.

    Raises:
        BadFile: the backup is damaged or truncated, or a record cannot be decoded.
    """
    manifest = read_manifest(path, format_)
    sha256, found = hashlib.sha256(), dict.fromkeys(manifest.counts, 0)
    lines = _read(path)
    sha256.update(next(lines))
    for line in lines:
        if line.startswith(b"{"):
            counted = {kind: found[kind] for kind in manifest.counts}
            if _checksum(line) != sha256.hexdigest() or counted != manifest.counts:
                raise _damaged(path, "its checksum or its counts are wrong")
            if next(lines, None) is not None:  # this also reads gzip's own checksum
                raise _damaged(path, "something follows its end")
            return
        sha256.update(line)
        try:
            word, doc = msgspec.json.decode(line, type=tuple[str, msgspec.Raw])
            record = decoder(KIND_BY_NAME[word]).decode(doc)
        except (msgspec.MsgspecError, ValueError, KeyError) as error:  # ValueError: text that is not UTF-8
            raise _damaged(path, str(error)) from error
        found[word] = found.get(word, 0) + 1
        yield word, record
    raise _damaged(path, "its end is missing")


def _checksum(line: bytes) -> str:
    """The checksum in the last line; empty if the line has none."""
    try:
        return msgspec.json.decode(line, type=_End).sha256
    except (msgspec.MsgspecError, ValueError):
        return ""


def check(path: str, progress: ProgressCallback) -> BackupManifest:
    """Verify a backup by reading it to its end.

    Raises:
        BadFile: it is damaged.
    """
    manifest = read_manifest(path)
    for number, _ in enumerate(read_records(path)):
        if number % _EVERY == 0:
            progress(number, manifest.records)
    return manifest


def _lines(manifest: BackupManifest, records: Iterable[tuple[str, str]], say: ProgressCallback) -> Iterator[bytes]:
    sha256 = hashlib.sha256()
    line = msgspec.json.encode(manifest) + b"\n"
    sha256.update(line)
    yield line
    for number, (word, doc) in enumerate(records):
        line = b'["' + word.encode() + b'",' + doc.encode() + b"]\n"
        sha256.update(line)
        yield line
        if number % _EVERY == 0:
            say(number, manifest.records)
    yield msgspec.json.encode(_End(sha256=sha256.hexdigest())) + b"\n"


def _compressed(lines: Iterable[bytes]) -> Iterator[bytes]:
    packer = zlib.compressobj(6, zlib.DEFLATED, _GZIP)
    held = bytearray()
    for line in lines:
        held += packer.compress(line)
        if len(held) >= _CHUNK:
            yield bytes(held)
            held.clear()
    yield bytes(held) + packer.flush()


def _read(path: str) -> Iterator[bytes]:
    """The lines of a backup."""
    begun = False
    try:
        with gzip.GzipFile(path, "rb") as file:
            for line in file:
                begun = True
                yield line
    except gzip.BadGzipFile as error:
        if begun:
            raise _damaged(path, str(error)) from error
        raise BadFile(
            f"{path} is not a Phalanx backup, or its beginning is damaged", hint=Hint(HintCode.CREATE_BACKUP)
        ) from error
    except (EOFError, zlib.error) as error:
        raise _damaged(path, str(error)) from error
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror}", hint=Hint(HintCode.CREATE_BACKUP)) from error


def _damaged(path: str, why: str) -> BadFile:
    return BadFile(f"{path} is damaged: {why}", hint="use another backup; nothing was restored")

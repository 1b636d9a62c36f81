"""The file of a backup: gzip, one record a line, between a manifest and a checksum of all before it.

It is the same for every database, so a backup of one restores into another. The file gets its name when it is whole and synced.
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
from phalanx.failpoints import around, sync_directory, write
from phalanx.ports.store import StoreRefused
from phalanx.store.sql.kinds import BY_WORD

FORMAT: Final = "phalanx-backup"
VERSION: Final = 1
_CHUNK: Final = 1 << 20  # bytes compressed before they go to the disk
_EVERY: Final = 2000  # records between two words of progress
_GZIP: Final = 31  # zlib's window bits for a gzip frame
Say = Callable[[int, int], None]  # records done, of how many


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The first line.

    Attributes:
        database: of which kind it was; `migration`: of its schema.
        counts: records of each kind.
        last_job_seq: jobs with greater numbers are not in it.
    """

    format: str
    version: int
    phalanx: str
    made_s: float
    database: str
    migration: int
    counts: dict[str, int]
    last_job_seq: int

    @property
    def records(self) -> int:
        """All of them."""
        return sum(self.counts.values())


class _End(msgspec.Struct):
    sha256: str


def save(path: str, manifest: Manifest, records: Iterable[tuple[str, str]], say: Say) -> None:
    """Write a backup, for its owner alone; under its name it is whole or not there.

    Raises:
        Conflict: there is such a file already, or another backup writes it.
        StoreRefused: the disk.
    """
    if os.path.exists(path):
        raise Conflict(f"{path} is there already", hint="a backup never replaces another: take a new name")
    part = path + ".part"
    try:
        with around("backup.create"):
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreRefused(
            f"{part}: {error.strerror}", hint="name a file in a folder that this user can write"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.exists(part) or not os.path.samestat(os.fstat(fd), os.stat(part)):
            raise BlockingIOError  # what was opened has become a whole backup meanwhile: it is not ours to cut
        with around("backup.cut"):
            os.ftruncate(fd, 0)
        offset = 0
        for chunk in _compressed(_lines(manifest, records, say)):
            write("backup.write", fd, chunk, offset)
            offset += len(chunk)
        with around("backup.sync"):
            os.fsync(fd)
        with around("backup.rename"):
            os.rename(part, path)
        sync_directory("backup.directory", os.path.dirname(os.path.abspath(path)))
    except BlockingIOError:
        raise Conflict(f"another backup writes {path}", hint="wait for it, or take another name") from None
    except BaseException as error:
        if os.path.exists(part):
            with around("backup.take_back"):
                os.unlink(part)
        if isinstance(error, OSError):
            raise StoreRefused(f"{path}: {error.strerror}: there is no backup", hint="is the disk full?") from error
        raise
    finally:
        os.close(fd)


def manifest_of(path: str) -> Manifest:
    """The first line of a backup.

    Raises:
        BadFile: it cannot be read, or is no backup.
    """
    for line in _read(path):
        try:
            manifest = msgspec.json.decode(line, type=Manifest)
        except (msgspec.MsgspecError, ValueError):
            break
        if manifest.format == FORMAT and manifest.version > VERSION:
            raise BadFile(
                f"{path} was written by a newer Phalanx ({manifest.phalanx})", hint="restore it with that release"
            )
        if manifest.format == FORMAT:
            return manifest
        break
    raise BadFile(f"{path} is no backup of Phalanx", hint="phalanx backup FILE makes one")


def records_of(path: str) -> Iterator[tuple[str, Any]]:
    """(word, record) for every record of a backup; whoever reads to the end has had all of them, as they were written.

    Raises:
        BadFile: it is damaged, cut short, or holds a record that cannot be read.
    """
    manifest = manifest_of(path)
    sha256, found = hashlib.sha256(), dict.fromkeys(manifest.counts, 0)
    lines = _read(path)
    sha256.update(next(lines))
    for line in lines:
        if line.startswith(b"{"):
            if _promised(line) != sha256.hexdigest() or found != manifest.counts:
                raise _damaged(path, "its checksum or its counts are wrong")
            return
        sha256.update(line)
        try:
            word, doc = msgspec.json.decode(line, type=tuple[str, msgspec.Raw])
            record = BY_WORD[word].kind.decoder.decode(doc)
        except (msgspec.MsgspecError, ValueError, KeyError) as error:  # ValueError: text that is not UTF-8
            raise _damaged(path, str(error)) from error
        found[word] = found.get(word, 0) + 1
        yield word, record
    raise _damaged(path, "its end is missing")


def _promised(line: bytes) -> str:
    """The checksum in the last line; empty where it is none."""
    try:
        return msgspec.json.decode(line, type=_End).sha256
    except (msgspec.MsgspecError, ValueError):
        return ""


def check(path: str, say: Say) -> Manifest:
    """Read a backup to its end.

    Raises:
        BadFile: it is damaged.
    """
    manifest = manifest_of(path)
    for number, _ in enumerate(records_of(path)):
        if number % _EVERY == 0:
            say(number, manifest.records)
    return manifest


def _lines(manifest: Manifest, records: Iterable[tuple[str, str]], say: Say) -> Iterator[bytes]:
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
    """Lines of a backup, one after another."""
    try:
        with gzip.GzipFile(path, "rb") as file:
            yield from file
    except gzip.BadGzipFile as error:
        raise BadFile(
            f"{path} is no backup of Phalanx, or its beginning is damaged", hint="phalanx backup FILE makes one"
        ) from error
    except (EOFError, zlib.error) as error:
        raise _damaged(path, str(error)) from error
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror}", hint="name a file that phalanx backup wrote") from error


def _damaged(path: str, why: str) -> BadFile:
    return BadFile(f"{path} is damaged: {why}", hint="take another backup; nothing was restored")

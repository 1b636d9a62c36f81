"""Uploaded files of requests, in a folder of the gateway that all gateways of one machine share.

A file is durable once its record is: `NAME.jsonl` comes first, `NAME.json` last. Files of a crash have no record, and are removed after a day.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from typing import IO, Any, Final, TypeVar

import msgspec

from phalanx.batches.input_check import FILE_BYTES_MAX
from phalanx.core.ids import UserId
from phalanx.durable_files import replace_file, sync_path
from phalanx.gateway.refusals import Refused

T = TypeVar("T", "StoredFile", "RefusedBatch")

KEPT_S: Final = 30 * 86_400.0
USER_BYTES_MAX: Final = 10_000_000_000
USER_FILES_MAX: Final = 1000
NAME_MAX: Final = 255
_FREE_SHARE: Final = 0.05  # of the disk, that stays free
_CRASH_S: Final = 86_400.0
_FILE_ID: Final = re.compile(r"file-[0-9a-f]{24}")
_BATCH_ID: Final = re.compile(r"batch_r[0-9a-f]{24}")


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a file. `created_s`: Unix time."""

    id: str
    user: UserId
    filename: str
    purpose: str
    bytes: int
    created_s: float

    def view(self) -> dict[str, Any]:
        """The file as OpenAI's API shows it."""
        return file_view(self.id, self.filename, self.purpose, self.bytes, self.created_s) | {
            "expires_at": int(self.created_s + KEPT_S)
        }


class RefusedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that failed its check. `view`: as it is shown."""

    id: str
    user: UserId
    created_s: float
    view: dict[str, Any]


def file_view(file_id: str, name: str, purpose: str, size: int, created_s: float) -> dict[str, Any]:
    """A file as OpenAI's API shows it."""
    return {
        "id": file_id,
        "object": "file",
        "bytes": size,
        "created_at": int(created_s),
        "filename": name,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }


class FileStore:
    """The files of one folder. Its calls block.

    Args:
        folder: created at the first use.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def begin(self, user: UserId) -> FileUpload:
        """Begin an upload.

        Raises:
            Refused: the user has too many files, or the disk is full.
        """
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        self.sweep(time.time())
        own = self.files(user)
        if len(own) >= USER_FILES_MAX:
            raise Refused(429, f"{user} has {len(own)} files, which is the most; delete some", "too_many_files")
        left = USER_BYTES_MAX - sum(one.bytes for one in own)
        disk = shutil.disk_usage(self._folder)
        left = min(left, int(disk.free - disk.total * _FREE_SHARE))
        if left <= 0:
            raise Refused(
                507 if disk.free <= disk.total * _FREE_SHARE else 429, "there is no room for more files", "no_room"
            )
        return FileUpload(self._folder, user, min(left, FILE_BYTES_MAX))

    def files(self, user: UserId) -> list[StoredFile]:
        """The files of a user, newest first."""
        found = [one for one in self._records("file-", StoredFile) if one.user == user]
        return sorted(found, key=lambda one: (-one.created_s, one.id))

    def file(self, file_id: str, user: UserId) -> StoredFile | None:
        """A user's file; None if it does not exist."""
        found = self._record(file_id, StoredFile) if _FILE_ID.fullmatch(file_id) else None
        return found if found is not None and found.user == user else None

    def open(self, file: StoredFile) -> IO[bytes]:
        """Open a file.

        Raises:
            FileNotFoundError: it was deleted.
        """
        return open(os.path.join(self._folder, f"{file.id}.jsonl"), "rb")

    def delete(self, file: StoredFile) -> None:
        """Delete a file. Idempotent."""
        for ending in (".json", ".jsonl"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._folder, file.id + ending))

    def add_refused(self, batch: RefusedBatch) -> None:
        """Keep a batch that failed its check."""
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        replace_file("", os.path.join(self._folder, f"{batch.id}.json"), msgspec.json.encode(batch))

    def refused(self, user: UserId) -> list[RefusedBatch]:
        """The batches of a user that failed their check, newest first."""
        found = [one for one in self._records("batch_r", RefusedBatch) if one.user == user]
        return sorted(found, key=lambda one: (-one.created_s, one.id))

    def refused_batch(self, batch_id: str, user: UserId) -> RefusedBatch | None:
        """Such a batch of a user."""
        found = self._record(batch_id, RefusedBatch) if _BATCH_ID.fullmatch(batch_id) else None
        return found if found is not None and found.user == user else None

    def sweep(self, now_s: float) -> None:
        """Remove what is too old."""
        old = [one.id for one in self._records("file-", StoredFile) if one.created_s + KEPT_S < now_s]
        old += [one.id for one in self._records("batch_r", RefusedBatch) if one.created_s + KEPT_S < now_s]
        for name in old:
            for ending in (".json", ".jsonl"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self._folder, name + ending))
        for name in os.listdir(self._folder):
            path = os.path.join(self._folder, name)
            if name.endswith(".jsonl") and not os.path.exists(path.removesuffix("l")):
                with contextlib.suppress(FileNotFoundError):
                    if os.stat(path).st_mtime + _CRASH_S < now_s:
                        os.unlink(path)

    def _records(self, prefix: str, kind: type[T]) -> Iterator[T]:
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return
        for name in names:
            if name.startswith(prefix) and name.endswith(".json"):
                found = self._record(name.removesuffix(".json"), kind)
                if found is not None:
                    yield found

    def _record(self, name: str, kind: type[T]) -> T | None:
        try:
            with open(os.path.join(self._folder, f"{name}.json"), "rb") as file:
                return msgspec.json.decode(file.read(), type=kind)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None


class FileUpload:
    """One upload under way; `finish` makes it a file, `abort` removes it."""

    def __init__(self, folder: str, user: UserId, limit: int) -> None:
        self._folder, self._user, self._limit = folder, user, limit
        self.id = f"file-{secrets.token_hex(12)}"
        self.bytes = 0
        self._path = os.path.join(folder, f"{self.id}.jsonl")
        self._file: IO[bytes] = open(self._path, "xb")  # noqa: SIM115  # `finish` or `abort` closes it

    def write(self, piece: bytes) -> None:
        """Take the next bytes.

        Raises:
            Refused: the file is too large.
        """
        self.bytes += len(piece)
        if self.bytes > self._limit:
            raise Refused(413, f"the file is larger than {self._limit:,} bytes, which is the most now", "too_large")
        self._file.write(piece)

    def finish(self, filename: str, purpose: str) -> StoredFile:
        """Make it durable."""
        self._file.close()
        sync_path(self._path)
        found = StoredFile(
            id=self.id,
            user=self._user,
            filename=filename,
            purpose=purpose,
            bytes=self.bytes,
            created_s=time.time(),
        )
        replace_file("", self._path.removesuffix("l"), msgspec.json.encode(found))
        return found

    def abort(self) -> None:
        """Remove it."""
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


def new_refused_id() -> str:
    """An id for a batch without a job."""
    return f"batch_r{secrets.token_hex(12)}"

"""Where a download into a folder is, in a file of that folder: so that the same command goes on after an interruption."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from typing import Final

from phalanx.client.output import ArchivePosition
from phalanx.core.errors import BadFile
from phalanx.core.jsonline import parse_object

JOURNAL: Final = ".phalanx-get.json"
_EVERY_S: Final = 0.2  # between two notes, unless a large file begins
_LARGE_BYTES: Final = 1 << 20
_JOURNAL_MAX: Final = 1 << 16


class DownloadJournal:
    """Notes which file is being received, and how much came before it. Held by one command at a time.

    The note of an earlier run counts if it is of the same download and of this start of the machine: after a power cut, files may lack bytes
    that were written before it.

    Args:
        folder: of the download; made if missing.
        download: what is downloaded, in words: the job, the time of its submit, and the path in its outputs.

    Raises:
        BadFile: another command downloads into the folder now, or the folder cannot be written.
    """

    def __init__(self, folder: str, download: str) -> None:
        self._path = os.path.join(folder, JOURNAL)
        self._download = download
        self._noted_s = -_EVERY_S
        self.after = ""
        self.since_s = 0.0
        self.files = self.bytes = 0
        self._made = "" if os.path.exists(folder) else folder
        try:
            os.makedirs(folder, exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BadFile(f"{folder}: {os.strerror(error.errno or 0)}", hint="give another folder") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise BadFile(
                f"another command downloads into {folder} now", hint="wait for it, or give another folder"
            ) from None
        except OSError:  # a file system without locks
            pass
        self._read()

    def position(self, offset: int) -> ArchivePosition:
        """The position to go on from. `offset`: bytes of the noted file that are here."""
        return ArchivePosition(after=self.after, offset=offset if self.after else 0, since_s=self.since_s)

    def set_time(self, begun_s: float) -> None:
        """The head began the archive at this time of its clock; the first one counts, less what clocks of file systems lag behind."""
        self.since_s = self.since_s or begun_s - 1.0

    def is_past(self, name: str) -> bool:
        """Whether the file comes before the noted one in the order of an archive."""
        return bool(self.after) and name.split("/") < self.after.split("/")

    def note(self, name: str, size_bytes: int, files: int, received_bytes: int) -> None:
        """The file `name` begins; `files` with `received_bytes` are complete."""
        now_s = time.monotonic()
        if not self.since_s or (size_bytes < _LARGE_BYTES and now_s - self._noted_s < _EVERY_S) or not _is_text(name):
            return
        self._noted_s = now_s
        self.after, self.files, self.bytes = name, files, received_bytes
        found = {
            "download": self._download,
            "boot": _boot_id(),
            "after": name,
            "since_s": self.since_s,
            "files": files,
            "bytes": received_bytes,
        }
        line = json.dumps(found).encode()
        os.pwrite(self._fd, line.ljust(os.fstat(self._fd).st_size), 0)  # in one write, and never shorter than before

    def finish(self) -> None:
        """The download is complete."""
        os.unlink(self._path)

    def discard(self) -> None:
        """Nothing is to be downloaded: remove the note, and the folder if it was made for it."""
        self.finish()
        with contextlib.suppress(OSError):  # something else is in it by now
            if self._made:
                os.rmdir(self._made)

    def close(self) -> None:
        """Let another command go on. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> None:
        found = parse_object(os.pread(self._fd, _JOURNAL_MAX, 0).strip()) or {}
        after, since_s, files, size = (found.get(key) for key in ("after", "since_s", "files", "bytes"))
        known = found.get("download") == self._download and found.get("boot") == _boot_id()
        if (
            known
            and isinstance(after, str)
            and isinstance(since_s, float)
            and isinstance(files, int)
            and isinstance(size, int)
        ):
            self.after, self.since_s, self.files, self.bytes = after, since_s, files, size


def _is_text(name: str) -> bool:
    try:
        return bool(name.encode())
    except UnicodeEncodeError:  # a name of other bytes; an earlier file is noted instead
        return False


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""

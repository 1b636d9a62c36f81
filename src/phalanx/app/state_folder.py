"""The head's state folder: its paths, and the small files that survive restarts."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from dataclasses import dataclass
from typing import Any, Final

from phalanx.core.errors import Conflict
from phalanx.durable_files import create_file, make_directory, remove_file, truncate_file, write_at
from phalanx.node.files.private_files import write_private

_LONG_LEASES: Final = "planned_stop.json"
_SMALL_CHARS_MAX: Final = 1 << 22  # size of a small file; the largest, cluster.json, lists every node


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFolder:
    """Paths under PHALANX_HOME (default ~/.phalanx). Only their owner can read them."""

    path: str

    @classmethod
    def open(cls, path: str | None = None) -> StateFolder:
        """Open the folder; it is created if missing."""
        chosen = path or os.environ.get("PHALANX_HOME") or os.path.join(os.path.expanduser("~"), ".phalanx")
        home = cls(path=os.path.abspath(chosen))
        make_directory("home.open", home.path)
        return home

    def path_of(self, *parts: str) -> str:
        """Return a path inside the folder."""
        return os.path.join(self.path, *parts)

    def lock(self) -> int:
        """Lock the folder for one head, until the returned descriptor is closed or the process ends.

        Raises:
            Conflict: another head runs with this folder.
        """
        fd = create_file("home.lock", self.path_of("head.lock"), os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise Conflict(f"a head already runs in {self.path}", hint="phalanx down stops it") from error
        return fd

    def write_lock_holder(self, lock: int, record: dict[str, Any]) -> None:
        """Write the holder of the lock into the lock file, so that a running head is found even without head.json."""
        truncate_file("home.holder", lock, 0)
        write_at("home.holder", lock, json.dumps(record).encode(), 0)

    def secret(self) -> bytes:
        """Return the head's 256-bit secret, created once."""
        path = self.path_of("node_secret")
        try:
            with open(path, "rb") as file:
                return bytes.fromhex(file.read().decode())
        except FileNotFoundError:
            fresh = secrets.token_bytes(32)
            self.write_private("node_secret", fresh.hex())
            return fresh

    def write_private(self, name: str, text: str) -> None:
        """Write a file atomically, readable only by its owner."""
        write_private(self.path, name, text)

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a small JSON file; empty if it is missing or invalid."""
        try:
            # O_NONBLOCK: if the file is a pipe, do not wait for a writer. The read is limited.
            with open(
                os.open(self.path_of(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), encoding="utf-8"
            ) as file:
                record = json.loads(file.read(_SMALL_CHARS_MAX))
        except (OSError, ValueError, RecursionError):
            return {}
        return record if isinstance(record, dict) else {}

    def long_leases_until_s(self) -> float:
        """Return until when leases granted by earlier heads may last, in CLOCK_BOOTTIME of this boot; 0 if they are not longer than normal."""
        record = self.read_json(_LONG_LEASES)
        return float(record["until_s"]) if record.get("boot_id") == boot_id() else 0.0

    def record_long_leases(self, until_s: float) -> None:
        """Record the end of long leases before the first is granted. A later end that is already recorded stays."""
        until_s = max(until_s, self.long_leases_until_s())
        self.write_private(_LONG_LEASES, json.dumps({"until_s": until_s, "boot_id": boot_id()}))

    def remove(self, name: str) -> None:
        """Remove a file. Idempotent."""
        with contextlib.suppress(FileNotFoundError):
            remove_file("home.file", self.path_of(name))


def boot_id() -> str:
    """Return the id of this boot of the kernel: CLOCK_BOOTTIME values of other boots are not comparable."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()

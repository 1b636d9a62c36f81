"""The head's state folder: what lies where, and the small files that outlive a head."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from dataclasses import dataclass
from typing import Any, Final

from phalanx.core.errors import Conflict
from phalanx.engines.local.private import write_private
from phalanx.failpoints import around, write

_LONG_LEASES: Final = "planned_stop.json"
_SMALL_CHARS_MAX: Final = 1 << 22  # of a small file; the longest, cluster.json, names every node


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Paths under PHALANX_HOME (default ~/.phalanx). All of it is for its owner alone."""

    path: str

    @classmethod
    def open(cls, path: str | None = None) -> Home:
        """The folder, made if need be."""
        chosen = path or os.environ.get("PHALANX_HOME") or os.path.join(os.path.expanduser("~"), ".phalanx")
        home = cls(path=os.path.abspath(chosen))
        with around("home.open.directory"):
            os.makedirs(home.path, mode=0o700, exist_ok=True)
        return home

    def at(self, *parts: str) -> str:
        """A path inside."""
        return os.path.join(self.path, *parts)

    def lock(self) -> int:
        """Hold the folder for one head; the descriptor keeps it until it is closed or the process ends.

        Raises:
            Conflict: another head runs here.
        """
        with around("home.lock.create"):
            fd = os.open(self.at("head.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise Conflict(f"a head already runs in {self.path}", hint="phalanx down stops it") from error
        return fd

    def say_who_holds(self, lock: int, record: dict[str, Any]) -> None:
        """Write who holds the lock into it: a lost head.json must not hide a living head."""
        with around("home.holder.cut"):
            os.ftruncate(lock, 0)
        write("home.holder.write", lock, json.dumps(record).encode(), 0)

    def secret(self) -> bytes:
        """The head's own 256 bits, made once."""
        path = self.at("node_secret")
        try:
            with open(path, "rb") as file:
                return bytes.fromhex(file.read().decode())
        except FileNotFoundError:
            fresh = secrets.token_bytes(32)
            self.write_private("node_secret", fresh.hex())
            return fresh

    def write_private(self, name: str, text: str) -> None:
        """A file for its owner alone, whole or not at all."""
        write_private(self.path, name, text)

    def read_json(self, name: str) -> dict[str, Any]:
        """A small JSON file; empty where there is none."""
        try:
            # Neither waits for a pipe in its place nor reads on for ever.
            with open(os.open(self.at(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), encoding="utf-8") as file:
                record = json.loads(file.read(_SMALL_CHARS_MAX))
        except (OSError, ValueError, RecursionError):
            return {}
        return record if isinstance(record, dict) else {}

    def leases_until_s(self) -> float:
        """Up to when heads before have granted longer leases than today's, on CLOCK_BOOTTIME of this boot; else 0."""
        record = self.read_json(_LONG_LEASES)
        return float(record["until_s"]) if record.get("boot_id") == boot_id() else 0.0

    def remember_leases(self, until_s: float) -> None:
        """Before the first is granted. What was granted longer still stands."""
        until_s = max(until_s, self.leases_until_s())
        self.write_private(_LONG_LEASES, json.dumps({"until_s": until_s, "boot_id": boot_id()}))

    def remove(self, name: str) -> None:
        """Remove a file. Harmless twice."""
        with contextlib.suppress(FileNotFoundError), around("home.remove.name"):
            os.unlink(self.at(name))


def boot_id() -> str:
    """This boot of the kernel: CLOCK_BOOTTIME readings of another one mean nothing."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()

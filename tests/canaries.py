"""Secrets through the whole suite: every home that a head of any test leaves is searched for them before it is removed.

Fifty variables of everybody's environment, and of each home the token of its admin, the secret that tokens of nodes are made of, and every
private key. Heads, keepers and supervisors log at debug level. What a program printed is its own affair, and is not looked at.
"""

import base64
import contextlib
import functools
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

COUNT = 50
OURS = secrets.token_hex(16)  # how each of ours begins
VARIABLES = {f"CANARY_SECRET_{number:02}": f"{OURS}{secrets.token_hex(8)}" for number in range(COUNT)}
LEVEL = "PHALANX_LOG"
HOME = "node_secret"  # a folder with such a file is a head's home
SECRETS = ("token", "node_secret", "join_salt.json")  # by the name of the file that holds it, and the keys
# A job's variables are kept there, so that it can be started again; sbatch gives it everybody's environment.
DATABASE = ("phalanx.db", "phalanx.db-wal", "phalanx.db-shm")
PRINTED = {"logs", "outputs", "checkpoints", "blobs"}  # folders of a home with what programs said and left
PIECE_BYTES = 1 << 22
OVERLAP_BYTES = 256  # of two pieces, for what stands across them
SECRET_MIN = 16  # characters; an empty file would be found everywhere
BASE64_CHARS = 40  # of a secret in base64; its last ones depend on what follows it


@dataclass
class SecretLeakScanner:
    """What was searched, and what was found."""

    homes: int = 0
    files: int = 0
    known: int = COUNT
    size_bytes: int = 0
    found: list[str] = field(default_factory=list)

    def look(self, root: str) -> None:
        """Search all that lies below a folder, if a head had its home there."""
        files = list(below(root))
        homes = {path.parent for path in files if path.name == HOME}
        if not homes:
            return
        held = {path for path in files if path.name in SECRETS or path.suffix == ".key"}
        wanted = {secret for path in held for secret in secrets_in(path)}
        self.homes += len(homes)
        self.known += len(wanted)
        for path in files:
            if path not in held:
                self._search(path, wanted if path.name in DATABASE else {OURS.encode(), *wanted})

    def _search(self, path: Path, wanted: set[bytes]) -> None:
        before = b""
        try:
            with open(path, "rb") as file:
                while piece := file.read(PIECE_BYTES):
                    self.size_bytes += len(piece)
                    self.found += [
                        f"{path}: {secret[:6]!r}..." for secret in wanted if stands_in(secret, before + piece)
                    ]
                    before = piece[-OVERLAP_BYTES:]
        except OSError:  # it was removed, or is nobody's to read
            return
        self.files += 1

    def __str__(self) -> str:
        """What was searched."""
        return (
            f"{self.known} secrets in {self.homes} homes of heads, {self.files:,} files of {self.size_bytes >> 20} MiB: "
            f"{len(self.found)} found"
        )


def below(root: str) -> Iterator[Path]:
    """Every file, no link followed, but what programs printed into a home."""
    for folder, folders, names in os.walk(root):
        if HOME in names:
            folders[:] = [name for name in folders if name not in PRINTED]
        for name in names:
            path = Path(folder, name)
            with contextlib.suppress(OSError):  # it was removed
                if stat.S_ISREG(path.lstat().st_mode):
                    yield path


def secrets_in(path: Path) -> list[bytes]:
    """Of a certificate's key the first line of its code, of other keys every line, of JSON every text, of anything else all of it."""
    try:
        content = path.read_bytes().strip()
    except OSError:  # it was removed
        return []
    if path.suffix == ".key":
        lines = content.splitlines()
        found = lines[1:2] if content.startswith(b"-----BEGIN") else lines
    elif path.suffix == ".json":
        found = [text.encode() for text in json.loads(content).values()]
    else:
        found = [content]
    return [secret for secret in found if len(secret) >= SECRET_MIN]


def stands_in(secret: bytes, content: bytes) -> bool:
    """Whether it is there as it is, or in base64."""
    return secret in content or base64.b64encode(secret)[:BASE64_CHARS] in content


def environment() -> dict[str, str]:
    """The variables of this process without those of Phalanx (but for the log level) and without a terminal's size."""
    sized = ("COLUMNS", "LINES")
    return {
        name: value for name, value in os.environ.items() if name == LEVEL or not name.startswith(("PHALANX_", *sized))
    }


@contextlib.contextmanager
def leak_scanner(kept: Path) -> Iterator[SecretLeakScanner]:
    """Search whatever a test removes, and at the end each folder in `kept`, which nobody removes."""
    scanner, rmtree = SecretLeakScanner(), shutil.rmtree

    @functools.wraps(rmtree)
    def look_and_remove(path: Any, *args: Any, **more: Any) -> None:
        if isinstance(path, str | os.PathLike):
            scanner.look(os.fsdecode(path))
        rmtree(path, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", look_and_remove)
        yield scanner
    for folder in sorted(kept.iterdir()):
        if not folder.is_symlink():
            scanner.look(str(folder))

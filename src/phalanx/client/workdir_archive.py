"""Reproducible tar archive of the working directory that is uploaded with a job. Honours .gitignore.

Used if the nodes do not share the submitter's file system, or with `--copy`. Reads the folder and writes one temporary file; sends nothing.
Owners, times and permission bits other than x are left out, so that equal folders have equal SHA-256 and are uploaded once.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Final, cast

from phalanx.client.connection.clusters import config_folder
from phalanx.client.connection.discovery import state_folder
from phalanx.core.errors import BadFile, TooLarge
from phalanx.core.hints import Hint, HintCode
from phalanx.core.units import format_bytes

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

COPY_BYTES_MAX: Final = 100_000_000  # DESIGN 2: code is uploaded, data is not
_FILES_MAX: Final = 100_000  # more files than this are an environment or a data set, not code
_NAMED: Final = 5  # largest files named in an error
_PARENTS_MAX: Final = 64  # levels searched for the root of the repository


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkdirArchive:
    """An archive on disk, open at its start. `skipped`: entries that are not ignored but cannot be archived, with reasons."""

    file: IO[bytes]
    sha256: str
    bytes: int
    files: int
    skipped: tuple[str, ...] = ()

    def close(self) -> None:
        """Close and remove the archive; it is an unnamed temporary file."""
        self.file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    name: str  # relative to the folder, "/" between parts
    path: str
    found: os.stat_result


def archive_workdir(folder: str, *, limit_bytes: int = COPY_BYTES_MAX) -> WorkdirArchive:
    """Archive `folder`. The caller closes the archive.

    Raises:
        BadFile: the folder is missing, or a file in it cannot be read.
        TooLarge: the files together exceed `limit_bytes`; the message names the largest.
    """
    root = os.path.abspath(folder)
    if not os.path.isdir(root):
        raise BadFile(f"{folder}: no such folder", hint=Hint(HintCode.SET_WORKDIR))
    left_out: list[str] = []
    entries = sorted(_walk(root, left_out), key=lambda entry: os.fsencode(entry.name))
    _check_size(entries, folder, limit_bytes)
    file = tempfile.TemporaryFile(prefix="phalanx-copy-")  # noqa: SIM115  # the caller closes it
    try:
        digest = _write(entries, file)
    except BaseException:
        file.close()
        raise
    size = file.tell()
    file.seek(0)
    regular = sum(stat.S_ISREG(entry.found.st_mode) for entry in entries)
    return WorkdirArchive(file=file, sha256=digest, bytes=size, files=regular, skipped=tuple(left_out))


def read_archive_member(packed: WorkdirArchive, name: str) -> bytes | None:
    """Return the contents of a file in the archive, or None if no file has that name. Rewinds the archive."""
    packed.file.seek(0)
    try:
        with tarfile.open(fileobj=packed.file, mode="r:") as archive:
            found = next((member for member in archive if member.name == name and member.isreg()), None)
            content = None if found is None else archive.extractfile(found)
            return None if content is None else content.read()
    finally:
        packed.file.seek(0)


# ---- files to archive -----------------------------------------------------------------------------------------------


def _walk(root: str, left_out: list[str]) -> Iterator[_Entry]:
    """Yield every folder, file and safe link that is not ignored, parents first. Iterative, so that depth is not limited by recursion."""
    pending, own_folders = [("", _rules_above(root))], _own_folders()
    while pending:
        base, rules = pending.pop()
        own = _rules_in(os.path.join(root, base), "")
        here = [*rules, *([(base, own)] if own is not None else [])]
        for item in _entries_of(os.path.join(root, base)):
            name = f"{base}/{item.name}" if base else item.name
            found = item.stat(follow_symlinks=False)
            folder = stat.S_ISDIR(found.st_mode)
            if item.name == ".git" or _ignored(name, here, folder=folder):
                continue
            if folder and os.path.realpath(item.path) in own_folders:
                left_out.append(f"{name} (Phalanx's own folder, with tokens)")
                continue
            if why := _reason_to_skip(root, name, found):
                left_out.append(f"{name} ({why})")
                continue
            yield _Entry(name=name, path=item.path, found=found)
            if folder:
                pending.append((name, here))


def _own_folders() -> set[str]:
    """The folders with this user's tokens and the head's secrets, which no node may get: a home directory contains them."""
    own = (state_folder(), os.path.expanduser("~/.phalanx"), config_folder())
    return {os.path.realpath(folder) for folder in own}


def _entries_of(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            return list(found)
    except OSError as error:
        raise BadFile(
            f"{path}: cannot be read: {os.strerror(error.errno or 0)}",
            hint="fix its permissions, or add it to .gitignore",
        ) from None


def _reason_to_skip(root: str, name: str, found: os.stat_result) -> str:
    """Return why an entry cannot be archived, or an empty text."""
    if stat.S_ISLNK(found.st_mode):
        target = os.readlink(os.path.join(root, name))
        # Only the text of the link is checked: the node has other files.
        inside = os.path.normpath(os.path.join(os.path.dirname(name), target))
        if os.path.isabs(target) or inside == ".." or inside.startswith("../"):
            return f"a link to {target}, outside the folder"
        return ""
    return "" if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode) else "neither file, folder nor link"


# ---- .gitignore -----------------------------------------------------------------------------------------------------

# (base, its rules), outermost first. A base is a folder relative to the root; for a folder above the root, "^" and the path from it to the root.
_Rules = list[tuple[str, "GitIgnoreSpec"]]


def _ignored(name: str, rules: _Rules, *, folder: bool) -> bool:
    """Decide as git does: the innermost .gitignore that matches a path wins; in it the last matching line."""
    for base, spec in reversed(rules):
        relative = base[1:] + name if base.startswith("^") else name[len(base) :].lstrip("/") if base else name
        ignored = spec.check_file(relative + "/" if folder else relative).include
        if ignored is not None:
            return ignored
    return False


def _rules_above(root: str) -> _Rules:
    """Return the rules of the repository around `root`, from its top down to the parent of `root`; none outside a repository."""
    above: list[str] = []
    path = root
    for _ in range(_PARENTS_MAX):
        if os.path.exists(os.path.join(path, ".git")):
            break
        path, last = os.path.dirname(path), path
        if path == last:
            return []
        above.append(path)
    else:
        return []
    rules: _Rules = []
    exclude = _rules_in(path, ".git/info/exclude")
    if exclude is not None:
        rules.append(("^" + _below(path, root), exclude))
    for folder in reversed(above):
        spec = _rules_in(folder, "")
        if spec is not None:
            rules.append(("^" + _below(folder, root), spec))
    return rules


def _below(folder: str, root: str) -> str:
    relative = os.path.relpath(root, folder)
    return "" if relative == "." else relative + "/"


def _rules_in(folder: str, name: str) -> GitIgnoreSpec | None:
    from pathspec import GitIgnoreSpec

    path = os.path.join(folder, name or ".gitignore")
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return GitIgnoreSpec.from_lines(file.read(1 << 20).splitlines())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise BadFile(f"{path}: not a valid .gitignore: {error}") from None


# ---- the archive ----------------------------------------------------------------------------------------------------


def _check_size(entries: list[_Entry], folder: str, limit_bytes: int) -> None:
    files = [entry for entry in entries if stat.S_ISREG(entry.found.st_mode)]
    total = sum(entry.found.st_size for entry in files)
    hint = "add files that the job does not need to .gitignore, or submit from a folder that the nodes share"
    if total > limit_bytes:
        largest = sorted(files, key=lambda entry: (-entry.found.st_size, entry.name))[:_NAMED]
        named = ", ".join(f"{entry.name} ({format_bytes(entry.found.st_size)})" for entry in largest)
        raise TooLarge(
            f"{folder}: the copy has {format_bytes(total)}, more than {format_bytes(limit_bytes)}; the largest files: {named}",
            hint=hint,
        )
    if len(entries) > _FILES_MAX:
        raise TooLarge(f"{folder}: the copy has {len(entries)} files, more than {_FILES_MAX}", hint=hint)


def _write(entries: list[_Entry], file: IO[bytes]) -> str:
    hashing = _Hashing(file)
    # PAX: the only format with long names, any encoding and a stable form.
    with tarfile.open(fileobj=cast("IO[bytes]", hashing), mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            _add(archive, entry)
    return hashing.hexdigest()


def _add(archive: tarfile.TarFile, entry: _Entry) -> None:
    member = tarfile.TarInfo(entry.name)
    mode = entry.found.st_mode
    member.mode = 0o755 if stat.S_ISDIR(mode) or mode & stat.S_IXUSR else 0o644
    if stat.S_ISLNK(mode):
        member.type, member.linkname, member.mode = tarfile.SYMTYPE, os.readlink(entry.path), 0o777
        archive.addfile(member)
    elif stat.S_ISDIR(mode):
        member.type = tarfile.DIRTYPE
        archive.addfile(member)
    else:
        member.size = entry.found.st_size
        try:
            # O_NOFOLLOW: the file may have become a link since it was listed.
            with open(os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as source:
                archive.addfile(member, source)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else "it shrank while it was copied"
            raise BadFile(f"{entry.path}: cannot be copied: {why}", hint="fix it, or add it to .gitignore") from None


class _Hashing:
    """A file to write to that computes the SHA-256 of its content."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._sha256.update(data)
        return self._file.write(data)

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()

"""Reads files that a user names and small files of the state folder, up to a size limit. Pipes and devices are rejected unless a function says otherwise."""

from __future__ import annotations

import json
import os
import stat
import sys
from typing import Any

from phalanx.core.errors import BadFile, TooLarge

MIB = 1 << 20
ADDRESS_CHARS_MAX = 1 << 12  # of a database URL with options
SMALL_CHARS_MAX = 1 << 22  # of a file of the state folder; the longest, cluster.json, lists every node


def read_file_bytes(path: str, limit: int, kind: str, *, missing_hint: str = "") -> bytes:
    """Return the bytes of a regular file, or of standard input for `-`; at most `limit`.

    Args:
        path: of the file, or `-`.
        limit: bytes.
        kind: kind of file, for messages.
        missing_hint: hint for a missing file.

    Raises:
        BadFile: the file is missing, not a regular file, or cannot be read.
        TooLarge: the file is larger than `limit`.
    """
    if path == "-":
        return _within(sys.stdin.buffer.read(limit + 1), limit, "standard input", kind)
    try:
        # Without O_NONBLOCK, opening a named pipe blocks until it has a writer.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if stat.S_ISDIR(found.st_mode):
                raise _folder(path, kind)
            if not stat.S_ISREG(found.st_mode):
                raise BadFile(f"{path}: not a regular file", hint="use - to read standard input")
            if found.st_size > limit:
                raise _too_large(path, limit, kind, f"{found.st_size / MIB:.1f} MiB")
            return _within(file.read(limit + 1), limit, path, kind)
    except FileNotFoundError:
        raise BadFile(f"{path}: no such file", hint=missing_hint) from None
    except IsADirectoryError:
        raise _folder(path, kind) from None
    except OSError as error:
        raise BadFile(f"{path}: cannot be read: {os.strerror(error.errno or 0)}") from None
    except ValueError as error:  # the path contains a NUL byte
        raise BadFile(f"{path}: not a valid path: {error}") from None


def read_database_url(path: str) -> str:
    """Return the database URL, password included, from a file of one line. Blocks on a pipe, so that `<(command)` works.

    Raises:
        BadFile: the file cannot be read, or is not one line of text.
    """
    hint = "a file with one line: postgresql://USER:PASSWORD@HOST/DATABASE"
    try:
        with open(path, encoding="utf-8") as file:
            address = file.read(ADDRESS_CHARS_MAX + 1).strip()
    except OSError as error:
        raise BadFile(f"{path}: cannot be read: {os.strerror(error.errno or 0)}", hint=hint) from None
    except UnicodeDecodeError:
        raise BadFile(f"{path}: not UTF-8 text", hint=hint) from None
    if len(address) > ADDRESS_CHARS_MAX or not address.isprintable():
        raise BadFile(f"{path}: not one line of text", hint=hint)
    return address


def read_small_text(path: str) -> str:
    """Return the text of a small file of the state folder. Never blocks, even if the path is a pipe.

    Raises:
        OSError, ValueError: the file cannot be read, or is not text.
    """
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), encoding="utf-8") as file:
        return file.read(SMALL_CHARS_MAX)


def read_small_json(path: str) -> Any:
    """Return the JSON value of a small file of the state folder, of any type.

    Raises:
        OSError, ValueError: the file cannot be read, or is not JSON.
    """
    try:
        return json.loads(read_small_text(path))
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _folder(path: str, what: str) -> BadFile:
    return BadFile(f"{path}: is a folder, not a {what}", hint="give the path of the file in it")


def _within(raw: bytes, limit: int, path: str, what: str) -> bytes:
    if len(raw) > limit:
        raise _too_large(path, limit, what, "more")
    return raw


def _too_large(path: str, limit: int, what: str, size: str) -> TooLarge:
    most = f"{limit // MIB} MiB" if limit >= MIB else f"{limit >> 10} KiB"
    return TooLarge(f"{path}: a {what} may have at most {most}; this one has {size}", hint="is it the right file?")

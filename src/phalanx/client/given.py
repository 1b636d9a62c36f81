"""A file that a person named, or one of the state folder: never read past its limit. A pipe or a device is none, but where it is waited for."""

from __future__ import annotations

import json
import os
import stat
import sys
from typing import Any

from phalanx.core.errors import BadFile, TooLarge

MIB = 1 << 20
ADDRESS_CHARS_MAX = 1 << 12  # of a database, with options; what is no address is not shown either
SMALL_CHARS_MAX = 1 << 22  # of a file of the state folder; the longest, cluster.json, names every node


def bytes_of(path: str, limit: int, what: str, *, missing: str = "") -> bytes:
    """The bytes of a regular file, or of standard input for `-`; at most `limit`. `what` is its kind, for messages; `missing` a hint.

    Raises:
        BadFile: there is none, or it is no regular file, or it cannot be read.
        TooLarge: it is longer.
    """
    if path == "-":
        return _within(sys.stdin.buffer.read(limit + 1), limit, "standard input", what)
    try:
        # Without O_NONBLOCK a named pipe would hold us until somebody writes.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if stat.S_ISDIR(found.st_mode):
                raise _folder(path, what)
            if not stat.S_ISREG(found.st_mode):
                raise BadFile(f"{path}: is no regular file", hint="use - to read standard input")
            if found.st_size > limit:
                raise _too_large(path, limit, what, f"{found.st_size / MIB:.1f} MiB")
            return _within(file.read(limit + 1), limit, path, what)
    except FileNotFoundError:
        raise BadFile(f"{path}: no such file", hint=missing) from None
    except IsADirectoryError:
        raise _folder(path, what) from None
    except OSError as error:
        raise BadFile(f"{path}: cannot be read: {os.strerror(error.errno or 0)}") from None
    except ValueError as error:  # a NUL in it, or what no file system takes
        raise BadFile(f"{path}: is no path: {error}") from None


def address_in(path: str) -> str:
    """The address of a database, with its password, that a file holds in one line. A pipe is waited for: `<(command)` is one.

    Raises:
        BadFile: it cannot be read, or is not one line of text.
    """
    hint = "a file with one line: postgresql://USER:PASSWORD@HOST/DATABASE"
    try:
        with open(path, encoding="utf-8") as file:
            said = file.read(ADDRESS_CHARS_MAX + 1).strip()
    except OSError as error:
        raise BadFile(f"{path}: cannot be read: {os.strerror(error.errno or 0)}", hint=hint) from None
    except UnicodeDecodeError:
        raise BadFile(f"{path}: not UTF-8 text", hint=hint) from None
    if len(said) > ADDRESS_CHARS_MAX or not said.isprintable():
        raise BadFile(f"{path}: is not one line of text", hint=hint)
    return said


def small_text(path: str) -> str:
    """The text of a small file of the state folder; of a pipe in its place what is in it now.

    Raises:
        OSError, ValueError: it cannot be read, or is no text.
    """
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), encoding="utf-8") as file:
        return file.read(SMALL_CHARS_MAX)


def small_json(path: str) -> Any:
    """The value in one, of whatever type.

    Raises:
        OSError, ValueError: it cannot be read, or is no JSON.
    """
    try:
        return json.loads(small_text(path))
    except RecursionError as error:
        raise ValueError("brackets within brackets") from error


def _folder(path: str, what: str) -> BadFile:
    return BadFile(f"{path}: is a folder, not a {what}", hint="name the file in it")


def _within(raw: bytes, limit: int, path: str, what: str) -> bytes:
    if len(raw) > limit:
        raise _too_large(path, limit, what, "more")
    return raw


def _too_large(path: str, limit: int, what: str, size: str) -> TooLarge:
    most = f"{limit // MIB} MiB" if limit >= MIB else f"{limit >> 10} KiB"
    return TooLarge(f"{path}: a {what} has at most {most}, and this has {size}", hint="is it the right file?")

"""Read the shipped fact files and the tables of a user. Nothing is fetched or written."""

from __future__ import annotations

import json
import os
import stat
from functools import cache
from importlib import resources
from typing import Any, Final

from phalanx.core.errors import BadFile

FILE_BYTES_MAX: Final = 4 << 20  # the longest table has 20 kB; rejects a wrong file early


@cache
def shipped_text(name: str) -> str:
    """Return the text of a shipped file, by its name in `tables/` ("gpus.csv").

    Raises:
        BadFile: the file is missing from this installation.
    """
    try:
        return resources.files("phalanx.planner.facts").joinpath("tables", name).read_text(encoding="utf-8")
    except OSError:
        raise BadFile(f"the facts file {name} is missing from this installation", hint="reinstall Phalanx") from None


def shipped_json(name: str) -> Any:
    """Return the value of a shipped JSON file ("stacks.json").

    Raises:
        BadFile: the file is missing or is not valid JSON.
    """
    return _parsed(shipped_text(name), name)


def read_text(path: str) -> str:
    """Return the text of a user's file.

    Raises:
        BadFile: the file cannot be read, is not UTF-8 text, or is too long.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe blocks until another process writes.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BadFile(f"{path}: not a regular file", hint="give the path of a regular file")
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in the path
        raise BadFile(f"{path}: not a valid path: {error}") from None
    if len(content) > FILE_BYTES_MAX:
        raise BadFile(f"{path}: larger than {FILE_BYTES_MAX >> 20} MiB, the limit for a fact table")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadFile(f"{path}: not UTF-8 text") from None


def read_json(path: str) -> Any:
    """Return the value of a user's JSON file.

    Raises:
        BadFile: the file cannot be read or is not valid JSON; the line is named.
    """
    return _parsed(read_text(path), path)


def user_tables(home: str, name: str) -> tuple[str, ...]:
    """Return the path of the user's table with this name (`HOME/facts/gpus.csv`), to read after the shipped one; empty without such a file."""
    path = os.path.join(home, "facts", name)
    return (path,) if os.path.isfile(path) else ()


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadFile(f"{where} line {error.lineno}: not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError):  # a number with thousands of digits, deeply nested brackets
        raise BadFile(f"{where}: not valid JSON: too deeply nested, or a number with too many digits") from None

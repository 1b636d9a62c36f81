"""The files that ship with the facts, and a user's own tables beside them. Reading alone: nothing is fetched, nothing is written."""

from __future__ import annotations

import json
import os
import stat
from functools import cache
from importlib import resources
from typing import Any, Final

from phalanx.core.errors import BadFile

FILE_BYTES_MAX: Final = 4 << 20  # the longest table has 20 kB; bounds a file given by mistake


@cache
def shipped_text(name: str) -> str:
    """The text of a shipped file, by its name in `tables/` ("gpus.csv").

    Raises:
        BadFile: this installation does not have it.
    """
    try:
        return resources.files("phalanx.facts").joinpath("tables", name).read_text(encoding="utf-8")
    except OSError:
        raise BadFile(
            f"the facts file {name} is missing from this installation", hint="install Phalanx again"
        ) from None


def shipped_json(name: str) -> Any:
    """The value of a shipped JSON file ("stacks.json").

    Raises:
        BadFile: it is missing or is no JSON.
    """
    return _parsed(shipped_text(name), name)


def text_at(path: str) -> str:
    """The text of a user's file.

    Raises:
        BadFile: it cannot be read, is no text, or is far longer than any table.
    """
    try:
        # Without O_NONBLOCK a named pipe would hold us until somebody writes.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BadFile(f"{path}: is no regular file", hint="name the file itself")
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in it
        raise BadFile(f"{path}: is no path: {error}") from None
    if len(content) > FILE_BYTES_MAX:
        raise BadFile(f"{path}: more than {FILE_BYTES_MAX >> 20} MiB, which no table of facts is")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadFile(f"{path}: not UTF-8 text") from None


def json_at(path: str) -> Any:
    """The value of a user's JSON file.

    Raises:
        BadFile: it cannot be read or is no JSON; the line is named.
    """
    return _parsed(text_at(path), path)


def own_tables(home: str, name: str) -> tuple[str, ...]:
    """The user's own table of that name (`HOME/facts/gpus.csv`) as a path to read after the shipped one; empty where there is none."""
    path = os.path.join(home, "facts", name)
    return (path,) if os.path.isfile(path) else ()


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadFile(f"{where} line {error.lineno}: no JSON: {error.msg}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, brackets within brackets
        raise BadFile(f"{where}: no JSON that a table could be") from None

"""Parses job files (YAML 1.2) into the mapping of `core.work.job_file.request`, with the line of every key."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import Final

from phalanx.cli.yaml_file import read_yaml_file
from phalanx.core.work.job_file.keys import KEY_KINDS, KEY_OF_SYNONYM, ValueKind
from phalanx.user_files.yaml_document import FLAG_WORDS, FileKind, YamlValue, parse_yaml

_MISSING: Final = "for a command, write -- before it: phalanx run -- python train.py"
FILE_BYTES_MAX: Final = 256 << 10  # a script of 5,000 lines; the worst case takes the scanner half a second
JOB_FILE: Final = FileKind(
    name="job file",
    example="write at least run: and the command",
    bytes_max=FILE_BYTES_MAX,
    depth_max=6,  # a job file is two deep
    events_max=10_000,
    aliases=True,
)
ROLES: Final = "roles"  # of a service: each becomes a service
_INT: Final = re.compile(r"[-+]?\d{1,18}")
_YES_NO: Final = frozenset({"yes", "no", "on", "off", "y", "n"})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """Content of a job file. `lines` has the line of each key, from 1."""

    path: str
    mapping: dict[str, object]
    lines: dict[str, int] = field(default_factory=dict)

    def location(self, key: str) -> str:
        """Return `job.yaml:3` for a key in the file, else the path."""
        return f"{self.path}:{self.lines[key]}" if key in self.lines else self.path


def read_job_file(path: str, *, beside: str = "") -> JobFile:
    """Return the job file at `path`; `-` reads standard input. The key `beside` is left to the caller.

    Raises:
        BadFile: the file is missing, a folder, not UTF-8 or not YAML, or has an unknown or duplicate key.
        TooLarge: the file is larger than 256 KiB; checked before parsing.
    """
    root = read_yaml_file(path, JOB_FILE, missing_hint=_MISSING)
    if beside and isinstance(root.content, dict):
        root.content.pop(beside, None)
    if isinstance(root.content, dict) and ROLES in root.content:
        raise root.content[ROLES].error(
            f"{ROLES}: this file is of two services", f"phalanx serve up {shlex.quote(path)} starts both"
        )
    return job_file_of(root)


def parse_job_file(text: str, *, path: str) -> JobFile:
    """Return the job file of a text. `path` is for messages.

    Raises:
        BadFile: as for `read_job_file`.
    """
    return job_file_of(parse_yaml(text, JOB_FILE, path=path))


def job_file_of(root: YamlValue) -> JobFile:
    """Return the job file of a parsed mapping.

    Raises:
        BadFile: it has an unknown key, or a value of another kind.
    """
    keys = root.mapping("job file", KEY_KINDS, KEY_OF_SYNONYM)
    return JobFile(
        path=root.path,
        mapping={key: _value(key, value) for key, value in keys.items()},
        lines={key: value.line for key, value in keys.items()},
    )


def _value(key: str, value: YamlValue) -> object:
    kind = KEY_KINDS[key]
    match kind, value.content:
        case _, str() if value.is_null:
            return None
        case (
            (ValueKind.TEXT_OR_WORDS | ValueKind.LIST | ValueKind.LIST_OR_MAPPING | ValueKind.TABLE),
            list() as listed,
        ):
            return [one.text(key) for one in listed]
        case ((ValueKind.TABLE_OF_LISTS | ValueKind.LIST_OR_MAPPING), dict() as table):
            return {name: _text_or_list(f"{key}: {name}", inner) for name, inner in table.items()}
        case ((ValueKind.TABLE | ValueKind.TEXT_OR_MAPPING), dict() as table):
            return {name: None if inner.is_null else inner.text(f"{key}: {name}") for name, inner in table.items()}
        case _, str() as text if kind not in {ValueKind.TABLE, ValueKind.TABLE_OF_LISTS}:
            return _scalar(kind, value, text)
        case _:
            raise value.error(f"{key}: {_WANTED[kind]}")


def _text_or_list(key: str, value: YamlValue) -> object:
    if value.is_null:
        return None
    return [one.text(key) for one in value.content] if isinstance(value.content, list) else value.text(key)


def _scalar(kind: ValueKind, value: YamlValue, text: str) -> object:
    if kind is ValueKind.NUMBER and not value.quoted and _INT.fullmatch(text):
        return int(text)
    if kind is ValueKind.FLAG and not value.quoted:
        if text in FLAG_WORDS:
            return FLAG_WORDS[text]
        if text.lower() in _YES_NO:
            raise value.error(f"{text} is a text in YAML 1.2; write true or false")
    return text


_WANTED: Final = {
    ValueKind.TEXT: "expected one value, not a list or mapping",
    ValueKind.TEXT_OR_WORDS: "expected a command, or a list of its words",
    ValueKind.LIST: "expected one value, or a list",
    ValueKind.NUMBER: "expected a whole number",
    ValueKind.FLAG: "expected true or false",
    ValueKind.TABLE: "expected keys and values",
    ValueKind.LIST_OR_MAPPING: "expected one value, a list, or names and values",
    ValueKind.TABLE_OF_LISTS: "expected keys and values",
    ValueKind.TEXT_OR_MAPPING: "expected one value, or keys and values",
}

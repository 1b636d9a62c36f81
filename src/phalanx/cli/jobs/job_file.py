"""Parses job files (YAML 1.2) into the mapping of `core.work.request`, with the line of every key.

Uses ruamel's event stream instead of its constructors: scalars keep the text that the user typed (`time: 2:00:00`, `A: 1.10`,
`name: 007`), keys are checked in order, and depth, count and aliases are limited before anything is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NoReturn

from phalanx.client.input_files import read_file_bytes
from phalanx.core.errors import BadFile
from phalanx.core.work.keys import (
    KEY_KINDS,
    InvalidKey,
    ValueKind,
    check_key,
)

if TYPE_CHECKING:
    from ruamel.yaml.events import Event, ScalarEvent

_MISSING: Final = "for a command, write -- before it: phalanx run -- python train.py"
FILE_BYTES_MAX: Final = 256 << 10  # a script of 5,000 lines; the worst case takes the scanner half a second
_NODES_MAX: Final = 10_000  # scalars and collections; each use of an alias counts
_DEPTH_MAX: Final = 8  # a job file is two deep; ruamel's scanner is quadratic in depth

# YAML 1.2 core schema, for the few keys that hold numbers and flags.
_NULL: Final = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL: Final = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
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


def read_job_file(path: str) -> JobFile:
    """Return the job file at `path`; `-` reads standard input.

    Raises:
        BadFile: the file is missing, a folder, not UTF-8 or not YAML, or has an unknown or duplicate key; the message names the line.
        TooLarge: the file is larger than 256 KiB; checked before parsing.
    """
    return parse_job_file(
        _text_of(read_file_bytes(path, FILE_BYTES_MAX, "job file", missing_hint=_MISSING), path), path=path
    )


def parse_job_file(text: str, *, path: str) -> JobFile:
    """Return the job file of a text. `path` is for messages.

    Raises:
        BadFile: as for `read_job_file`.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        return _Reader(YAML(typ="safe", pure=True).parse(text), path).job_file()
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = path if mark is None else f"{path}:{mark.line + 1}"
        raise BadFile(f"{where}: not YAML: {error.problem or error.context}") from None
    except YAMLError as error:
        raise BadFile(f"{path}: not YAML: {' '.join(str(error).split())[:200]}") from None


# ---- bytes ----------------------------------------------------------------------------------------------------------


def _text_of(raw: bytes, path: str) -> str:
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise BadFile(f"{path}: is UTF-16; a job file must be UTF-8", hint=f"iconv -f UTF-16 -t UTF-8 {path}")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadFile(
            f"{path}:{line}: not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}",
            hint="save it as UTF-8, for example with iconv -f LATIN1 -t UTF-8",
        ) from None


# ---- events ---------------------------------------------------------------------------------------------------------


class _Reader:
    """Builds the mapping from the events of one document."""

    def __init__(self, events: Iterator[Event], path: str) -> None:
        self._events = self._counted(events)
        self._path = path
        self._anchors: dict[str, object] = {}

    def job_file(self) -> JobFile:
        self._skip_to_document()
        root = next(self._events)
        if _kind(root) == "DocumentEnd" or (_kind(root) == "Scalar" and _scalar(root).value in _NULL):
            raise BadFile(f"{self._path}: empty file", hint="write at least run: and the command")
        if _kind(root) != "MappingStart":
            self._fail(root, "a job file has keys and values, for example run: python train.py")
        mapping: dict[str, object] = {}
        lines: dict[str, int] = {}
        while _kind(event := next(self._events)) != "MappingEnd":
            key = self._key(event)
            if key in lines:
                self._fail(event, f"{key} is defined twice, here and on line {lines[key]}")
            lines[key] = _line(event)
            self._check_key(event, key)
            mapping[key] = self._value(key)
        for event in self._events:
            if _kind(event) == "DocumentStart":
                self._fail(event, "a job file has one job, and here a second document begins")
        return JobFile(path=self._path, mapping=mapping, lines=lines)

    def _counted(self, events: Iterator[Event]) -> Iterator[Event]:
        depth = 0
        for count, event in enumerate(events):
            depth += _kind(event).endswith("Start") - _kind(event).endswith("End")
            if depth > _DEPTH_MAX or count > _NODES_MAX:
                self._fail(
                    event,
                    f"nested more than {_DEPTH_MAX} deep" if depth > _DEPTH_MAX else f"more than {_NODES_MAX} values",
                )
            if getattr(event, "tag", None) is not None:
                self._fail(event, f"the tag {event.tag} is not allowed in a job file")  # type: ignore[attr-defined]
            yield event

    def _skip_to_document(self) -> None:
        while _kind(event := next(self._events)) != "DocumentStart":
            if _kind(event) == "StreamEnd":
                raise BadFile(f"{self._path}: empty file", hint="write at least run: and the command")

    def _check_key(self, event: Event, key: str) -> None:
        try:
            if key == "<<":
                raise InvalidKey("merge keys (<<) are not YAML 1.2", key=key, hint="write the values out")
            check_key(key)
        except InvalidKey as error:
            raise BadFile(f"{self._path}:{_line(event)}: {error.message}", hint=error.hint) from None

    def _key(self, event: Event) -> str:
        if _kind(event) != "Scalar":
            self._fail(event, "a key must be a word")
        return str(_scalar(event).value)

    def _value(self, key: str) -> object:  # noqa: RET503  # _fail never returns
        event = next(self._events)
        match KEY_KINDS[key], _kind(event):
            case _, "Alias":
                return self._alias(event)
            case (
                (
                    ValueKind.NUMBER
                    | ValueKind.FLAG
                    | ValueKind.TEXT
                    | ValueKind.TEXT_OR_WORDS
                    | ValueKind.LIST
                    | ValueKind.TEXT_OR_MAPPING
                ),
                "Scalar",
            ):
                return self._remember(event, self._resolved(event, KEY_KINDS[key]))
            case ((ValueKind.TEXT_OR_WORDS | ValueKind.LIST | ValueKind.TABLE), "SequenceStart"):
                return self._remember(event, self._words(key))
            case ((ValueKind.TABLE | ValueKind.TEXT_OR_MAPPING), "MappingStart"):
                return self._remember(event, self._table(key))
            case ValueKind.TABLE, "Scalar" if _is_null(event):
                return None
            case _:
                self._fail(event, f"{key}: {_WANTED[KEY_KINDS[key]]}")

    def _words(self, key: str) -> list[str]:
        words: list[str] = []
        while _kind(event := next(self._events)) != "SequenceEnd":
            words.append(self._text(event, f"{key}: expected a list of words"))
        return words

    def _table(self, key: str) -> dict[str, object]:
        table: dict[str, object] = {}
        while _kind(event := next(self._events)) != "MappingEnd":
            name = self._key(event)
            if name in table:
                self._fail(event, f"{key}: {name} is defined twice")
            if name == "<<":
                self._fail(event, "merge keys (<<) are not YAML 1.2; write the values out")
            value = next(self._events)
            table[name] = None if _is_null(value) else self._text(value, f"{key}: {name} must be text")
        return table

    def _text(self, event: Event, otherwise: str) -> str:  # noqa: RET503  # as above
        if _kind(event) == "Alias":
            value = self._alias(event)
            if isinstance(value, str):
                return value
        elif _kind(event) == "Scalar":
            return str(self._remember(event, _scalar(event).value))
        self._fail(event, otherwise)

    def _remember(self, event: Any, value: object) -> object:
        if event.anchor is not None:
            self._anchors[event.anchor] = value
        return value

    def _alias(self, event: Any) -> object:
        """Return the value of an earlier anchor.

        An anchor is stored only when its value is complete, so that no value can contain itself. Lists cannot be nested, so aliases
        multiply the size at most once.
        """
        if event.anchor not in self._anchors:
            self._fail(event, f"*{event.anchor} is not defined above")
        return self._anchors[event.anchor]

    def _resolved(self, event: Event, kind: ValueKind) -> object:
        scalar = _scalar(event)
        text = scalar.value
        if _is_null(event):
            return None
        if kind is ValueKind.NUMBER and scalar.style is None and _INT.fullmatch(text):
            return int(text)
        if kind is ValueKind.FLAG and scalar.style is None:
            if text in _BOOL:
                return _BOOL[text]
            if text.lower() in _YES_NO:
                self._fail(event, f"{text} is a text in YAML 1.2; write true or false")
        return text

    def _fail(self, event: Event, why: str) -> NoReturn:
        raise BadFile(f"{self._path}:{_line(event)}: {why}")


_WANTED: Final = {
    ValueKind.TEXT: "expected one value, not a list or mapping",
    ValueKind.TEXT_OR_WORDS: "expected a command, or a list of its words",
    ValueKind.LIST: "expected one value, or a list",
    ValueKind.NUMBER: "expected a whole number",
    ValueKind.FLAG: "expected true or false",
    ValueKind.TABLE: "expected keys and values",
    ValueKind.TEXT_OR_MAPPING: "expected one value, or keys and values",
}


def _kind(event: Event) -> str:
    return type(event).__name__.removesuffix("Event")


def _scalar(event: Event) -> ScalarEvent:
    return event  # type: ignore[return-value]  # called only if _kind is Scalar


def _is_null(event: Event) -> bool:
    return _kind(event) == "Scalar" and _scalar(event).style is None and _scalar(event).value in _NULL


def _line(event: Event) -> int:
    return int(event.start_mark.line) + 1

"""Job files: YAML 1.2 to the mapping of `core.work.request`, with the line of every key.

Built on ruamel's event stream rather than its constructors: a scalar keeps the words the user typed (`time: 2:00:00`, `A: 1.10`,
`name: 007`), keys are judged as they come, and depth, count and aliases are bounded before anything is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NoReturn

from phalanx.client.given import bytes_of
from phalanx.core.errors import BadFile
from phalanx.core.work.keys import KEYS, BadKey, Kind, refuse_key

if TYPE_CHECKING:
    from ruamel.yaml.events import Event, ScalarEvent

_MISSING: Final = "a command goes after --: phalanx run -- python train.py"
FILE_BYTES_MAX: Final = 256 << 10  # a script of 5,000 lines; the scanner needs half a second for this much of the worst
_NODES_MAX: Final = 10_000  # scalars and collections, aliases counted as often as they are used
_DEPTH_MAX: Final = 8  # a job file is two deep; ruamel's scanner is quadratic in depth

# YAML 1.2 core schema, for the few keys that hold numbers and flags.
_NULL: Final = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL: Final = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT: Final = re.compile(r"[-+]?\d{1,18}")
_YES_NO: Final = frozenset({"yes", "no", "on", "off", "y", "n"})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """What a file says. `lines` holds the line, from 1, of each key."""

    path: str
    mapping: dict[str, object]
    lines: dict[str, int] = field(default_factory=dict)

    def at(self, key: str) -> str:
        """`job.yaml:3` for a key that stands in the file, else the path."""
        return f"{self.path}:{self.lines[key]}" if key in self.lines else self.path


def read_job_file(path: str) -> JobFile:
    """The job file at `path`; `-` reads standard input.

    Raises:
        BadFile: missing, a folder, not UTF-8, not YAML, an unknown or doubled key; says the line.
        TooLarge: over 256 KiB, told before a byte is parsed.
    """
    return parse_job_file(_text_of(bytes_of(path, FILE_BYTES_MAX, "job file", missing=_MISSING), path), path=path)


def parse_job_file(text: str, *, path: str) -> JobFile:
    """The job in a text. `path` is for messages.

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
        raise BadFile(f"{path}: is UTF-16, a job file is UTF-8", hint=f"iconv -f UTF-16 -t UTF-8 {path}")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadFile(
            f"{path}:{line}: not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}",
            hint="save it as UTF-8; iconv -f LATIN1 -t UTF-8 converts most",
        ) from None


# ---- events ---------------------------------------------------------------------------------------------------------


class _Reader:
    """Walks the events of one document and builds the mapping."""

    def __init__(self, events: Iterator[Event], path: str) -> None:
        self._events = self._counted(events)
        self._path = path
        self._anchors: dict[str, object] = {}

    def job_file(self) -> JobFile:
        self._skip_to_document()
        root = next(self._events)
        if _kind(root) == "DocumentEnd" or (_kind(root) == "Scalar" and _scalar(root).value in _NULL):
            raise BadFile(f"{self._path}: holds nothing", hint="write at least run: and the command")
        if _kind(root) != "MappingStart":
            self._refuse(root, "a job file holds keys and values, as in run: python train.py")
        mapping: dict[str, object] = {}
        lines: dict[str, int] = {}
        while _kind(event := next(self._events)) != "MappingEnd":
            key = self._key(event)
            if key in lines:
                self._refuse(event, f"{key} stands here and on line {lines[key]}")
            lines[key] = _line(event)
            self._known(event, key)
            mapping[key] = self._value(key)
        for event in self._events:
            if _kind(event) == "DocumentStart":
                self._refuse(event, "a job file holds one job, and here a second document begins")
        return JobFile(path=self._path, mapping=mapping, lines=lines)

    def _counted(self, events: Iterator[Event]) -> Iterator[Event]:
        depth = 0
        for count, event in enumerate(events):
            depth += _kind(event).endswith("Start") - _kind(event).endswith("End")
            if depth > _DEPTH_MAX or count > _NODES_MAX:
                self._refuse(
                    event,
                    f"nested more than {_DEPTH_MAX} deep" if depth > _DEPTH_MAX else f"more than {_NODES_MAX} values",
                )
            if getattr(event, "tag", None) is not None:
                self._refuse(event, f"the tag {event.tag} has no meaning in a job file")  # type: ignore[attr-defined]
            yield event

    def _skip_to_document(self) -> None:
        while _kind(event := next(self._events)) != "DocumentStart":
            if _kind(event) == "StreamEnd":
                raise BadFile(f"{self._path}: holds nothing", hint="write at least run: and the command")

    def _known(self, event: Event, key: str) -> None:
        try:
            if key == "<<":
                raise BadKey("merge keys (<<) are not YAML 1.2", key=key, hint="write the values out")
            refuse_key(key)
        except BadKey as error:
            raise BadFile(f"{self._path}:{_line(event)}: {error.message}", hint=error.hint) from None

    def _key(self, event: Event) -> str:
        if _kind(event) != "Scalar":
            self._refuse(event, "a key must be a word")
        return str(_scalar(event).value)

    def _value(self, key: str) -> object:  # noqa: RET503  # _refuse never returns
        event = next(self._events)
        match KEYS[key], _kind(event):
            case _, "Alias":
                return self._alias(event)
            case ((Kind.NUMBER | Kind.FLAG | Kind.TEXT | Kind.WORDS | Kind.LIST | Kind.MAYBE_TABLE), "Scalar"):
                return self._keep(event, self._resolved(event, KEYS[key]))
            case ((Kind.WORDS | Kind.LIST | Kind.TABLE), "SequenceStart"):
                return self._keep(event, self._words(key))
            case ((Kind.TABLE | Kind.MAYBE_TABLE), "MappingStart"):
                return self._keep(event, self._table(key))
            case Kind.TABLE, "Scalar" if _is_null(event):
                return None
            case _:
                self._refuse(event, f"{key}: {_WANTED[KEYS[key]]}")

    def _words(self, key: str) -> list[str]:
        words: list[str] = []
        while _kind(event := next(self._events)) != "SequenceEnd":
            words.append(self._text(event, f"{key}: a list of words, and this is none"))
        return words

    def _table(self, key: str) -> dict[str, object]:
        table: dict[str, object] = {}
        while _kind(event := next(self._events)) != "MappingEnd":
            name = self._key(event)
            if name in table:
                self._refuse(event, f"{key}: {name} stands here twice")
            if name == "<<":
                self._refuse(event, "merge keys (<<) are not YAML 1.2; write the values out")
            value = next(self._events)
            table[name] = None if _is_null(value) else self._text(value, f"{key}: {name} must be text")
        return table

    def _text(self, event: Event, otherwise: str) -> str:  # noqa: RET503  # as above
        if _kind(event) == "Alias":
            value = self._alias(event)
            if isinstance(value, str):
                return value
        elif _kind(event) == "Scalar":
            return str(self._keep(event, _scalar(event).value))
        self._refuse(event, otherwise)

    def _keep(self, event: Any, value: object) -> object:
        if event.anchor is not None:
            self._anchors[event.anchor] = value
        return value

    def _alias(self, event: Any) -> object:
        """What an anchor before holds. An anchor counts only when whole, so that nothing can hold itself, and since no list holds a
        list, aliases multiply at most once.
        """
        if event.anchor not in self._anchors:
            self._refuse(event, f"*{event.anchor} names nothing above it")
        return self._anchors[event.anchor]

    def _resolved(self, event: Event, kind: Kind) -> object:
        scalar = _scalar(event)
        text = scalar.value
        if _is_null(event):
            return None
        if kind is Kind.NUMBER and scalar.style is None and _INT.fullmatch(text):
            return int(text)
        if kind is Kind.FLAG and scalar.style is None:
            if text in _BOOL:
                return _BOOL[text]
            if text.lower() in _YES_NO:
                self._refuse(event, f"{text} is text in YAML 1.2; write true or false")
        return text

    def _refuse(self, event: Event, why: str) -> NoReturn:
        raise BadFile(f"{self._path}:{_line(event)}: {why}")


_WANTED: Final = {
    Kind.TEXT: "one value, not a list or table",
    Kind.WORDS: "a command, or a list of its words",
    Kind.LIST: "one of them, or a list",
    Kind.NUMBER: "a whole number",
    Kind.FLAG: "true or false",
    Kind.TABLE: "names and values",
    Kind.MAYBE_TABLE: "one value, or names and values",
}


def _kind(event: Event) -> str:
    return type(event).__name__.removesuffix("Event")


def _scalar(event: Event) -> ScalarEvent:
    return event  # type: ignore[return-value]  # asked only where _kind said so


def _is_null(event: Event) -> bool:
    return _kind(event) == "Scalar" and _scalar(event).style is None and _scalar(event).value in _NULL


def _line(event: Event) -> int:
    return int(event.start_mark.line) + 1

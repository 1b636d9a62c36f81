"""Reads the YAML that users write (jobs, queues, rules, topology) into values with their lines. Each error is `FILE:LINE: message`.

Uses ruamel's event stream instead of its constructors: scalars keep the text that the user typed (`time: 2:00:00`, `A: 1.10`,
`name: 007`), and depth, count, tags and aliases are limited before anything is built.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from phalanx.core.errors import BadFile
from phalanx.core.work.nearest_match import unknown_key_hint

if TYPE_CHECKING:
    from ruamel.yaml.events import Event

# YAML 1.2 core schema.
NULL_WORDS: Final = frozenset({"", "~", "null", "Null", "NULL"})
FLAG_WORDS: Final = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_WHOLE: Final = re.compile(r"[-+]?\d{1,18}|0x[0-9a-fA-F]{1,15}|0o[0-7]{1,20}")
_DECIMAL: Final = re.compile(r"[-+]?(?:\.\d{1,18}|\d{1,18}(?:\.\d{0,18})?)(?:[eE][-+]?\d{1,3})?")
_BASES: Final = {"0x": 16, "0o": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileKind:
    """Name and limits of one kind of file.

    Attributes:
        example: hint for a file that is empty or not a mapping.
        depth_max: of nested mappings and lists. ruamel's scanner is quadratic in depth.
        events_max: scalars, collections and their ends; each use of an alias counts.
        aliases: whether anchors and aliases are allowed.
    """

    name: str
    example: str
    bytes_max: int
    depth_max: int
    events_max: int
    aliases: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlValue:
    """A scalar as typed, a list or a mapping. The value of a key has the line of its key."""

    content: str | list[YamlValue] | dict[str, YamlValue]
    path: str
    line: int
    quoted: bool = False

    def error(self, why: str, hint: str = "") -> BadFile:
        """Return the error `FILE:LINE: why`."""
        return BadFile(f"{self.path}:{self.line}: {why}", hint=hint)

    @property
    def is_null(self) -> bool:
        """Whether this is an unquoted null or a key without a value."""
        return not self.quoted and isinstance(self.content, str) and self.content in NULL_WORDS

    def text(self, key: str) -> str:
        """Return the text of a scalar.

        Raises:
            BadFile: it is a list or mapping.
        """
        if not isinstance(self.content, str):
            raise self.error(f"{key}: expected one value, not a list or mapping")
        return self.content

    def mapping(
        self, key: str, known: Collection[str] = (), synonyms: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, YamlValue]:
        """Return the keys and values; none for null.

        Args:
            key: of this value, for messages.
            known: the allowed keys; empty allows any.
            synonyms: as for `unknown_key_hint`.

        Raises:
            BadFile: it is a list or another scalar, or has an unknown key.
        """
        if self.is_null:
            return {}
        if not isinstance(self.content, dict):
            shown = f"{self.content[:40]!r}" if isinstance(self.content, str) else "a list"
            raise self.error(f"{key}: expected keys and values, not {shown}")
        for name, value in self.content.items():
            if known and name not in known:
                raise value.error(f"unknown key {name[:60]!r}", unknown_key_hint(name, known, synonyms))
        return self.content

    def plain(self) -> Any:
        """Return plain Python values: texts, and null, flags and numbers of YAML 1.2."""
        match self.content:
            case dict():
                return {key: value.plain() for key, value in self.content.items()}
            case list():
                return [value.plain() for value in self.content]
            case text if self.quoted:
                return text
            case text if text in NULL_WORDS:
                return None
            case text if text in FLAG_WORDS:
                return FLAG_WORDS[text]
            case text if _WHOLE.fullmatch(text):
                return int(text, _BASES.get(text[:2], 10))
            case text:
                return float(text) if _DECIMAL.fullmatch(text) else text


def parse_yaml(text: str, kind: FileKind, *, path: str) -> YamlValue:
    """Return the mapping of a text with one YAML document. `path` is for messages.

    Raises:
        BadFile: the text is empty, not YAML, not a mapping, too deep or too long, or has a duplicate key, a tag, a second document or a
            forbidden alias.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.reader import ReaderError

    try:
        return _DocumentReader(YAML(typ="safe", pure=True).parse(text), kind, path).document()
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, why = 1 if mark is None else mark.line + 1, error.problem or error.context
    except ReaderError as error:
        line, why = text.count("\n", 0, error.position) + 1, error.reason
    except YAMLError as error:
        line, why = 1, " ".join(str(error).split())[:200]
    raise BadFile(f"{path}:{line}: not YAML: {why}")


class _DocumentReader:
    """Builds the values of one document from its events."""

    def __init__(self, events: Iterator[Event], kind: FileKind, path: str) -> None:
        self._kind = kind
        self._path = path
        self._events = self._checked(events)
        self._anchors: dict[str, YamlValue] = {}

    def document(self) -> YamlValue:
        found: YamlValue | None = None
        for event, name in self._events:
            if name == "DocumentStart" and found is not None:
                raise self._error(event, f"a {self._kind.name} has one document, and here a second one begins")
            if name in ("Scalar", "MappingStart", "SequenceStart"):
                found = self._value(event, name, _line(event))
        if found is None or found.is_null or found.content == {}:
            raise BadFile(f"{self._path}:1: empty file", hint=self._kind.example)
        if not isinstance(found.content, dict):
            raise found.error(f"a {self._kind.name} has keys and values", self._kind.example)
        return found

    def _checked(self, events: Iterator[Any]) -> Iterator[tuple[Any, str]]:
        depth, kind = 0, self._kind
        for count, event in enumerate(events):
            name = type(event).__name__.removesuffix("Event")
            depth += (name in ("MappingStart", "SequenceStart")) - (name in ("MappingEnd", "SequenceEnd"))
            if depth > kind.depth_max:
                raise self._error(event, f"nested more than {kind.depth_max} deep")
            if count > kind.events_max:
                raise self._error(event, f"more than {kind.events_max} values")
            if getattr(event, "tag", None) is not None:
                raise self._error(event, f"the tag {str(event.tag)[:60]} is not allowed in a {kind.name}")
            if getattr(event, "anchor", None) is not None and not kind.aliases:
                raise self._error(event, f"anchors and aliases are not allowed in a {kind.name}")
            yield event, name

    def _value(self, event: Any, name: str, line: int) -> YamlValue:
        content: str | list[YamlValue] | dict[str, YamlValue]
        match name:
            case "Alias":
                if event.anchor not in self._anchors:
                    raise self._error(event, f"*{event.anchor[:60]} is not defined above")
                return replace(self._anchors[event.anchor], line=line)
            case "MappingStart":
                content = self._mapping()
            case "SequenceStart":
                content = self._list()
            case _:
                content = event.value
        quoted = name == "Scalar" and event.style is not None
        value = YamlValue(content=content, path=self._path, line=line, quoted=quoted)
        if event.anchor is not None:
            self._anchors[event.anchor] = value  # complete, so that no value can contain itself
        return value

    def _list(self) -> list[YamlValue]:
        values = []
        while (following := next(self._events))[1] != "SequenceEnd":
            values.append(self._value(*following, _line(following[0])))
        return values

    def _mapping(self) -> dict[str, YamlValue]:
        table: dict[str, YamlValue] = {}
        while (following := next(self._events))[1] != "MappingEnd":
            event, name = following
            if name != "Scalar":
                raise self._error(event, "a key must be a word")
            key = event.value
            if key in table:
                raise self._error(event, f"{key[:60]} is defined twice, here and on line {table[key].line}")
            if key == "<<":
                raise self._error(event, "merge keys (<<) are not YAML 1.2", "write the values out")
            table[key] = self._value(*next(self._events), _line(event))
        return table

    def _error(self, event: Event, why: str, hint: str = "") -> BadFile:
        return BadFile(f"{self._path}:{_line(event)}: {why}", hint=hint)


def _line(event: Event) -> int:
    return int(event.start_mark.line) + 1

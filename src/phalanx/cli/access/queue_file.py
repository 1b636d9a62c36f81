"""Parses queue files (YAML 1.2, a tree of queues by name) into the records sent to the head. Errors name the line.

queues:
  research:
    quota: 32                     # GPUs; none: no quota of its own
    borrow: 16                    # GPUs beyond its quota; all (default) or none
    lend: all                     # idle GPUs of its quota that others may use; all (default) or none
    weight: 2                     # share relative to its siblings; default 1
    priority: 0                   # added to the priority of its jobs; default 0
    users: {gpus: 8, jobs: 4}     # limits of each user: GPUs in use, running jobs
    budget: 1000 GPU-h per 30d
    open: true                    # unchanged if the key is missing
    queues:
      nlp: {quota: 16}
      vision: {quota: 8, weight: 3}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from phalanx.client.input_files import read_file_bytes
from phalanx.core.errors import BadFile, BadRequest
from phalanx.core.units import format_duration, parse_duration_s
from phalanx.core.work.nearest_match import nearest_match

if TYPE_CHECKING:
    from phalanx.wire.api.queues import QueueSettings

FILE_BYTES_MAX: Final = 256 << 10  # the same as for a job file
_VALUES_MAX: Final = 20_000  # more than a thousand queues with all their keys; takes the scanner a second
_DEPTH_MAX: Final = 24  # two for each level of queues; the head allows eight levels
_KEYS: Final = ("quota", "borrow", "lend", "weight", "priority", "users", "budget", "open", "queues")
_USER_KEYS: Final = ("gpus", "jobs")
# Names of the same keys in Kueue, Slurm and YARN, to suggest the right key.
_SYNONYMS: Final = {
    **dict.fromkeys(("nominalquota", "capacity", "gpus"), "quota"),
    **dict.fromkeys(("fairshare", "shares"), "weight"),
    **dict.fromkeys(("children", "parent"), "queues"),
    "borrowinglimit": "borrow",
    "lendinglimit": "lend",
    "user": "users",
}
_WHOLE: Final = re.compile(r"[-+]?[0-9]{1,12}")
_NUMBER: Final = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,9})?")
_BUDGET: Final = re.compile(
    r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*gpu-?h(?:ours?)?(?:\s+(?:per|/)\s*(\S+))?", re.IGNORECASE
)
_FLAGS: Final = {"true": True, "false": False}
_NONE: Final = frozenset({"", "~", "null", "Null", "NULL"})


class _Value(NamedTuple):
    """A scalar or mapping of the file, with its line."""

    value: str | dict[str, _Value]
    line: int


def read_queue_file(path: str) -> list[QueueSettings]:
    """Return the queues of the file at `path`, each after its parent; `-` reads standard input.

    Raises:
        BadFile: the file cannot be read, is not YAML, or has a wrong key or value; the message names the line.
        TooLarge: the file is larger than 256 KiB.
    """
    return parse_queue_file(_text_of(path), path=path)


def parse_queue_file(text: str, *, path: str) -> list[QueueSettings]:
    """Return the queues of a text; `path` is for messages.

    Raises:
        BadFile: as for `read_queue_file`.
    """
    return _Reader(path).queues(text)


def _text_of(path: str) -> str:
    raw = read_file_bytes(path, FILE_BYTES_MAX, "queue file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadFile(f"{path}:{line}: not UTF-8") from None


class _Reader:
    def __init__(self, path: str) -> None:
        self._path = path
        self._lines: dict[str, int] = {}  # of each queue read so far

    def queues(self, text: str) -> list[QueueSettings]:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError, YAMLError

        try:
            top = self._document(self._counted(YAML(typ="safe", pure=True).parse(text)))
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            self._fail(1 if mark is None else mark.line + 1, f"not YAML: {error.problem or error.context}")
        except YAMLError as error:
            raise BadFile(f"{self._path}: not YAML: {' '.join(str(error).split())[:200]}") from None
        for key, value in top.items():
            self._check_key(key, ("queues",), value.line)
        return list(self._level(top["queues"], None)) if "queues" in top else []

    # ---- YAML events to values with lines -------------------------------------------------------------------------

    def _counted(self, events: Iterator[Any]) -> Iterator[tuple[str, Any, int]]:
        depth = 0
        for count, event in enumerate(events):
            kind = type(event).__name__.removesuffix("Event")
            line = int(event.start_mark.line) + 1
            depth += kind.endswith("Start") - kind.endswith("End")
            if depth > _DEPTH_MAX or count > _VALUES_MAX:
                self._fail(line, "nested too deep" if depth > _DEPTH_MAX else f"more than {_VALUES_MAX} values")
            if kind in ("Alias", "SequenceStart") or getattr(event, "anchor", None) or getattr(event, "tag", None):
                self._fail(line, "a queue file has only keys and values: no lists, anchors, aliases or tags")
            yield kind, event, line

    def _document(self, events: Iterator[tuple[str, Any, int]]) -> dict[str, _Value]:
        found: dict[str, _Value] | None = None
        for kind, event, line in events:
            if kind == "MappingStart" and found is None:
                found = self._table(events)
            elif kind in ("MappingStart", "Scalar") and not (kind == "Scalar" and event.value in _NONE):
                self._fail(line, "a queue file begins with queues: and the tree below it")
        if not found:
            raise BadFile(f"{self._path}: empty file", hint="write queues: and the tree below it")
        return found

    def _table(self, events: Iterator[tuple[str, Any, int]]) -> dict[str, _Value]:
        table: dict[str, _Value] = {}
        for kind, event, line in events:
            if kind == "MappingEnd":
                return table
            if kind != "Scalar":
                self._fail(line, "a key must be a word")
            if event.value in table:
                self._fail(line, f"{event.value} is defined twice, here and on line {table[event.value].line}")
            inner, value, _ = next(events)
            table[event.value] = _Value(self._table(events) if inner == "MappingStart" else value.value, line)
        raise AssertionError("the parser ends every mapping that it begins")

    # ---- values to queues -----------------------------------------------------------------------------------------

    def _level(self, level: _Value, parent: str | None) -> Iterator[QueueSettings]:
        for name, queue in self._mapping(level, "queues").items():
            if name in self._lines:
                self._fail(
                    queue.line,
                    f"queue {name} is defined twice, here and on line {self._lines[name]}",
                    "names must be unique in the whole tree",
                )
            self._lines[name] = queue.line
            inside = self._mapping(queue, name)
            for key, value in inside.items():
                self._check_key(key, _KEYS, value.line)
            yield self._queue(name, parent, inside)
            if "queues" in inside:
                yield from self._level(inside["queues"], name)

    def _queue(self, name: str, parent: str | None, inside: Mapping[str, _Value]) -> QueueSettings:
        from phalanx.wire.api.queues import QueueSettings

        found: dict[str, Any] = {"id": name, "parent": parent}
        for key, value in inside.items():
            match key:
                case "quota":
                    found["quota_gpus"] = self._gpus(key, value, words={"none": None})
                case "borrow" | "lend":
                    found[f"{key}_gpus"] = self._gpus(key, value, words={"all": None, "none": 0})
                case "weight":
                    found["weight"] = self._number(key, value)
                case "priority":
                    found["priority"] = self._gpus(key, value, words={}, what="a whole number")
                case "users":
                    found |= self._users(value)
                case "budget":
                    found |= self._budget(value)
                case "open":
                    found["open"] = self._flag(value)
                case _:  # `queues`: handled by _level
                    pass
        return QueueSettings(**found)

    def _users(self, users: _Value) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        for key, value in self._mapping(users, "users").items():
            self._check_key(key, _USER_KEYS, value.line)
            found[f"{key}_per_user"] = self._gpus(
                f"users: {key}", value, words={"all": None}, what=f"a number of {key}"
            )
        return found

    def _budget(self, value: _Value) -> dict[str, float]:
        text = self._scalar("budget", value)
        match = _BUDGET.fullmatch(text)
        if match is None:
            self._fail(value.line, f"budget: {text!r} is not a budget", "write 1000 GPU-h per 30d")
        found = {"budget_gpu_h": float(match[1])}
        if match[2]:
            try:
                found["budget_period_s"] = parse_duration_s(match[2], what="budget")
            except BadRequest as error:
                self._fail(value.line, error.message, error.hint)
        return found

    def _gpus(
        self, key: str, value: _Value, *, words: Mapping[str, int | None], what: str = "a number of GPUs"
    ) -> int | None:
        text = self._scalar(key, value)
        if text in words:
            return words[text]
        if not _WHOLE.fullmatch(text):
            others = "".join(f" or {word}" for word in words)
            self._fail(value.line, f"{key}: {text!r} is not {what}", f"a whole number{others}")
        return int(text)

    def _number(self, key: str, value: _Value) -> float:
        text = self._scalar(key, value)
        if not _NUMBER.fullmatch(text):
            self._fail(value.line, f"{key}: {text!r} is not a number", "write a number above 0; the default is 1")
        return float(text)

    def _flag(self, value: _Value) -> bool:
        text = self._scalar("open", value)
        if text.lower() not in _FLAGS:
            self._fail(value.line, f"open: {text!r} is neither true nor false")
        return _FLAGS[text.lower()]

    def _scalar(self, key: str, value: _Value) -> str:
        if isinstance(value.value, dict):
            self._fail(value.line, f"{key}: expected one value, not a mapping")
        return value.value.strip()

    def _mapping(self, value: _Value, key: str) -> dict[str, _Value]:
        if isinstance(value.value, dict):
            return value.value
        if value.value not in _NONE:
            self._fail(value.line, f"{key}: expected keys and values, not {value.value[:40]!r}")
        return {}

    def _check_key(self, key: str, keys: tuple[str, ...], line: int) -> None:
        if key not in keys:
            synonym = _SYNONYMS.get(key.lower().replace("_", "").replace("-", ""))
            near = synonym if synonym in keys else nearest_match(key, keys)
            self._fail(
                line, f"unknown key {key!r}", f"did you mean {near!r}?" if near else f"known keys: {' '.join(keys)}"
            )

    def _fail(self, line: int, why: str, hint: str = "") -> NoReturn:
        raise BadFile(f"{self._path}:{line}: {why}", hint=hint)


def format_budget(gpu_h: float, period_s: float) -> str:
    """Format a budget as it is written in the file."""
    return f"{gpu_h:g} GPU-h per {_format_period(period_s)}"


def _format_period(period_s: float) -> str:
    for unit_s, unit in ((86400.0, "d"), (3600.0, "h")):
        if period_s % unit_s == 0.0:
            return f"{period_s / unit_s:g}{unit}"
    return format_duration(period_s)

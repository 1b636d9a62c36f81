"""A job file in the making: the keys that a file of another tool gives, and one note for each of its keys that has no place here.

No key gets lost: `finish` notes each key that a converter neither takes nor notes, and leaves out and notes each value that our own parser refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from phalanx.core.errors import BadFile, PhalanxError
from phalanx.core.work.job_file.keys import KEY_KINDS
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.user_files.yaml_document import YamlValue

SourcePath = tuple[str | int, ...]
_COMMAND: Final = ("type", "run", "tasks_per_node")
_FOLDER: Final = "/"  # any; the parser completes relative paths by it


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedJob:
    """Keys of a job file, in order, and the notes about what is missing or different."""

    mapping: dict[str, object]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """A value of a key, or an item of it, with where it is from; `also`: further keys of the source that it holds."""

    key: str
    item: str | None
    value: object
    source: SourcePath
    also: tuple[SourcePath, ...]


class JobDraft:
    """See the module. `reasons`: why keys of the source have no place, by their path as `a.b`; those below count too."""

    def __init__(self, source: YamlValue, reasons: Mapping[str, str]) -> None:
        self._source, self._reasons = source, reasons
        self._handled: set[SourcePath] = set()
        self._notes: dict[SourcePath, list[str]] = {}
        self._parts: list[_Part] = []
        self._above: set[SourcePath] = set()  # paths with a handled one below

    def get(self, *path: str | int) -> YamlValue | None:
        """The value at a path, which stays to be handled; None for none and null."""
        found: YamlValue | None = self._source
        for step in path:
            content = None if found is None else found.content
            if isinstance(content, dict) and isinstance(step, str):
                found = content.get(step)
            elif isinstance(content, list) and isinstance(step, int) and step < len(content):
                found = content[step]
            else:
                return None
        return None if found is None or found.is_null else found

    def items(self, *path: str | int) -> list[tuple[SourcePath, YamlValue]]:
        """The items of a list or mapping, or the one value, each with its path; empty for none."""
        found = self.get(*path)
        match None if found is None else found.content:
            case None:
                return []
            case list() as listed:
                return [((*path, index), one) for index, one in enumerate(listed)]
            case dict() as table:
                return [((*path, name), one) for name, one in table.items()]
            case _:
                assert found is not None
                return [(path, found)]

    def named_items(self, *path: str | int) -> list[tuple[SourcePath, YamlValue]]:
        """The items of a list or mapping; none of a scalar, which stays to be handled."""
        return [(where, one) for where, one in self.items(*path) if where != path]

    def text(self, *path: str | int) -> str:
        """The text of a scalar, which counts as handled; empty for none, for null, and for what is no scalar, which stays."""
        found = self.get(*path)
        if found is None or not isinstance(found.content, str):
            return ""
        self._handled.add(path)
        return found.content.strip()

    def error(self, why: str, hint: str) -> BadFile:
        """The error for a file from which no job can be made."""
        return self._source.error(why, hint)

    def put(
        self, key: str, value: object, source: SourcePath, *, item: str | None = None, also: Sequence[SourcePath] = ()
    ) -> None:
        """Set a key of the job file, or an item of it (of a list if it is ""), from the scalar at `source`, and from `also`."""
        if not isinstance(getattr(self.get(*source), "content", ""), dict | list):
            self._handled.add(source)
        self._parts.append(_Part(key, item, value, source, tuple(also)))

    def take(self, source: SourcePath) -> None:
        """Count a key as handled, whose value is part of another."""
        self._handled.add(source)

    def leave(self, source: SourcePath, why: str) -> None:
        """Note that a key of the source has no place, in place of any earlier note on it."""
        self._handled.add(source)
        self._notes[source] = [f"{_dotted(source)} is not taken over: {why}"]

    def note(self, source: SourcePath, text: str) -> None:
        """Note what is different about a key of the source that has its place."""
        self._handled.add(source)
        self._notes.setdefault(source, []).append(f"{_dotted(source)}: {text}")

    def finish(self, notes: Sequence[str] = ()) -> ImportedJob:
        """The job file. Names all that was not handled. `notes`: put before the others.

        Raises:
            PhalanxError: the command itself is refused.
        """
        self._above = {one[:length] for one in self._handled for length in range(len(one))} | {()}
        self._name_rest((), self._source)
        mapping = self._accepted()
        found = sorted((self._line(source), text) for source, texts in self._notes.items() for text in texts)
        return ImportedJob(
            mapping=mapping, notes=(*notes, *(f"{self._source.path}:{line}: {text}" for line, text in found))
        )

    def _line(self, source: SourcePath) -> int:
        line, found = self._source.line, self._source
        for step in source:
            content = found.content
            if isinstance(content, dict) and step in content:
                found = content[str(step)]
            elif isinstance(content, list) and isinstance(step, int) and step < len(content):
                found = content[step]
            else:
                break
            line = found.line
        return line

    def _name_rest(self, path: SourcePath, value: YamlValue) -> None:
        """Name what is below a path and was not handled: a whole branch in one line, if nothing of it was and it has one reason."""
        if path in self._handled:
            return
        below = f"{_dotted(path)}."
        touched = path in self._above or any(one.startswith(below) for one in self._reasons)
        match value.content:
            case dict() as table if touched and table:
                for name, one in table.items():
                    self._name_rest((*path, name), one)
            case list() as listed if touched and listed:
                for index, one in enumerate(listed):
                    self._name_rest((*path, index), one)
            case _:
                self.leave(path, self._reason(path))

    def _reason(self, path: SourcePath) -> str:
        words = ".".join(str(step) for step in path if isinstance(step, str))
        while words:
            if words in self._reasons:
                return self._reasons[words]
            words = words.rpartition(".")[0]
        return "Phalanx has nothing like it"

    def _accepted(self) -> dict[str, object]:
        """The parts that the parser of job files takes, together. Those of the command are tried alone first: without it there is no job."""
        first = [part for part in self._parts if part.key in _COMMAND]
        rest = [part for part in self._parts if part.key not in _COMMAND]
        mapping = _checked({}, first)
        mapping = self._with_those_accepted(mapping, rest)
        return {key: mapping[key] for key in KEY_KINDS if key in mapping}

    def _with_those_accepted(self, mapping: dict[str, object], parts: Sequence[_Part]) -> dict[str, object]:
        """Add all parts at once, or each half by itself where one is refused: a file of thousands of variables is checked a few times."""
        if not parts:
            return mapping
        try:
            return _checked(mapping, parts)
        except PhalanxError as error:
            if len(parts) > 1:
                half = len(parts) // 2
                return self._with_those_accepted(self._with_those_accepted(mapping, parts[:half]), parts[half:])
            for source in (parts[0].source, *parts[0].also):
                self.leave(source, f"a job file refuses it: {error.message}")
            return mapping


def _checked(mapping: Mapping[str, object], parts: Sequence[_Part]) -> dict[str, object]:
    """The mapping with these parts.

    Raises:
        PhalanxError: the parser of job files refuses it.
    """
    found: dict[str, Any] = dict(mapping)
    tables: dict[str, dict[str, object]] = {}
    lists: dict[str, list[object]] = {}
    for part in parts:
        if part.item is None:
            found[part.key] = part.value
        elif part.item:
            tables.setdefault(part.key, dict(found.get(part.key, {})))[part.item] = part.value
        else:
            lists.setdefault(part.key, list(found.get(part.key, []))).append(part.value)
    found |= tables | lists
    spec_from_mapping({"name": "imported", **found}, workdir=_FOLDER, now_s=0.0)
    return found


def _dotted(path: SourcePath) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")[:200]

"""What a revision of a service changed against an earlier one: by the keys of a job file. Pure; the head shows it beside each revision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.work.job_file.job_keys import job_keys
from phalanx.core.work.spec import JobSpec

_VALUE_MAX: Final = 200  # characters of a value
_WITHOUT_VALUES: Final = ("env",)  # only the owner of a service sees its variables


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChange:
    """A key of the job file with its value before and after, "" if it was not given. Variables have names ("env MODEL") and no values."""

    key: str
    before: str = ""
    after: str = ""


def revision_changes(before: JobSpec, after: JobSpec) -> list[KeyChange]:
    """The keys that differ, in the order of a job file."""
    old, new = job_keys(before, now_s=0.0), job_keys(after, now_s=0.0)
    return [one for key in {**old, **new} if old.get(key) != new.get(key) for one in _changes(key, old, new)]


def _changes(key: str, old: Mapping[str, object], new: Mapping[str, object]) -> Iterator[KeyChange]:
    before, after = old.get(key), new.get(key)
    if isinstance(before or after, Mapping):
        first, second = _table(before), _table(after)
        for name in sorted({*first, *second}):
            if first.get(name) != second.get(name):
                hidden = key in _WITHOUT_VALUES
                texts = {} if hidden else {"before": _text(first.get(name)), "after": _text(second.get(name))}
                yield KeyChange(key=f"{key} {name}", **texts)
    else:
        yield KeyChange(key=key, before=_text(before), after=_text(after))


def _table(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {"": value} if value is not None else {}


def _text(value: object) -> str:
    if value is None:
        return ""
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= _VALUE_MAX else text[: _VALUE_MAX - 3] + "..."

"""Slurm's format strings: `%.18i %j` of squeue and sinfo, `JobID,State%20` of sacct. Pure."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest

_LETTER: Final = re.compile(r"%(\.)?([0-9]{1,4})?([A-Za-z])")
_WIDTHS_MAX: Final = 4096
_AGO: Final = re.compile(r"now(?:-([0-9]{1,9})(second|minute|hour|day|week)?s?)?")
_UNITS_S: Final = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}
_TIME_FORMATS: Final = ("%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S")


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatField:
    """One field. `width` 0: as wide as its value; `right`: filled on the left; `before`: the text that precedes it."""

    name: str
    width: int = 0
    right: bool = False
    before: str = ""


def parse_letters(text: str, known: Mapping[str, str]) -> tuple[tuple[FormatField, ...], str]:
    """Return the fields of a `%` format, and the text behind the last.

    Raises:
        BadRequest: a letter that the view does not know.
    """
    fields: list[FormatField] = []
    end = 0
    for match in _LETTER.finditer(text):
        if match[3] not in known:
            raise BadRequest(
                f"format {text!r}: %{match[3]} is not known to this view", hint=f"known: {' '.join(known)}"
            )
        width = min(int(match[2] or 0), _WIDTHS_MAX)
        fields.append(FormatField(name=match[3], width=width, right=bool(match[1]), before=text[end : match.start()]))
        end = match.end()
    return tuple(fields), text[end:]


def render_letters(
    fields: Sequence[FormatField], rest: str, rows: Sequence[Mapping[str, str]], titles: Mapping[str, str] | None
) -> list[str]:
    """Return one line for each row, cut and filled to the widths as Slurm does, after a line of titles if they are given."""
    lines = []
    for row in [*([titles] if titles is not None else []), *rows]:
        line = "".join(field.before + _fitted(row.get(field.name, ""), field) for field in fields)
        lines.append(line + rest)
    return lines


def _fitted(value: str, field: FormatField) -> str:
    if not field.width:
        return value
    cut = value[: field.width]
    return cut.rjust(field.width) if field.right else cut.ljust(field.width)


def parse_columns(text: str, known: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Return names and widths of sacct's `--format`, a negative width for a column that begins on the left; `known` has the widths without a `%`.

    Raises:
        BadRequest: a name that the view does not know.
    """
    found = []
    by_lower = {name.lower(): name for name in known}
    for word in text.split(","):
        name, _, width = word.strip().partition("%")
        if not name:
            continue
        if name.lower() not in by_lower:
            raise BadRequest(f"--format: {name} is not known to this view", hint=f"known: {','.join(known)}")
        own = by_lower[name.lower()]
        found.append((own, int(width) if re.fullmatch("-?[0-9]{1,4}", width) else known[own]))
    return tuple(found)


def render_columns(
    columns: Sequence[tuple[str, int]], rows: Sequence[Mapping[str, str]], *, titles: bool, separator: str = ""
) -> list[str]:
    """Return sacct's lines: columns of fixed width, or separated if `separator` is given."""
    if separator:
        head = [separator.join(name for name, _ in columns)] if titles else []
        return head + [separator.join(row.get(name, "") for name, _ in columns) for row in rows]
    lines = []
    if titles:
        lines = [
            " ".join(_cell(name[: abs(width)], width) for name, width in columns) + " ",
            " ".join("-" * abs(width) for _, width in columns) + " ",
        ]
    for row in rows:
        lines.append(" ".join(_cell(row.get(name, ""), width) for name, width in columns) + " ")
    return lines


def _cell(value: str, width: int) -> str:
    most = abs(width)
    value = value if len(value) <= most else value[: most - 1] + "+"
    return value.rjust(most) if width >= 0 else value.ljust(most)


def parse_past_s(text: str, now_s: float) -> float:
    """Return the Unix seconds of sacct's `--starttime` or `--endtime`: `2026-12-01[T08:00[:00]]` in local time, `now-2hours`, `today`.

    Raises:
        BadRequest: another text.
    """
    if (match := _AGO.fullmatch(text)) is not None:
        return now_s - int(match[1] or 0) * _UNITS_S[match[2] or "second"]
    if text in {"today", "midnight"}:
        text = time.strftime(_TIME_FORMATS[0], time.localtime(now_s))
    for one in _TIME_FORMATS:
        try:
            return time.mktime(time.strptime(text, one))
        except (ValueError, OverflowError):
            continue
    raise BadRequest(
        f"{text[:40]!r} is not a time that this view knows", hint="2026-12-01, 2026-12-01T08:00, now-2hours, today"
    )

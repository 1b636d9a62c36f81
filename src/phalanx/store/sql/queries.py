"""Named SQL statements in the dialect of each database.

The basic statements of each kind of record follow from its declaration: "all", "one", "page", "put" and "delete", each with the name of the
table. Each database's folder has all others: `reads.sql` and `writes.sql`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

from phalanx.core.state.records import JOBS, RecordKind
from phalanx.store.sql.kinds import KINDS, KINDS_OF_JOBS

_NAME: Final = re.compile(r"^-- name: ([a-z_]+)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True, eq=False)
class Dialect:
    """The SQL dialect of a database.

    Attributes:
        name: of its folder.
        placeholder: placeholder for a bound value.
        types: types of columns.
        table_options: end of CREATE TABLE.
    """

    name: str
    placeholder: str
    types: Mapping[type, str]
    table_options: str = ""

    @property
    def reads(self) -> dict[str, str]:
        """Queries by name."""
        return _reads(self)

    @property
    def writes(self) -> dict[str, str]:
        """Statements of `commit`, by name. All are idempotent except for kinds that are only appended to, which refuse an existing record."""
        return _writes(self)

    def has_label(self, wanted: tuple[str, str | None]) -> tuple[str, list[str]]:
        """The condition that a job has a label, for `WHERE`, and its values."""
        name, text = wanted
        same = "" if text is None else f" AND text = {self.placeholder}"
        condition = f"EXISTS (SELECT 1 FROM job_labels WHERE job_seq = jobs.seq AND label = {self.placeholder}{same})"  # noqa: S608  # our own SQL
        return condition, [name] if text is None else [name, text]

    def create_table(self, kind: RecordKind[Any, Any]) -> str:
        """The statement that creates the table of a kind."""
        text, whole = self.types[str], self.types[int]
        columns = [f'"{column.name}" {self.types[column.type]} NOT NULL' for column in kind.columns]
        parts = ", ".join(
            (*columns, f"doc {text} NOT NULL", f"crc {whole} NOT NULL", f"PRIMARY KEY ({_names(kind.key)})")
        )
        return f"CREATE TABLE {kind.table} ({parts}){self.table_options};\n"


SQLITE: Final = Dialect("sqlite", "?", {str: "TEXT", int: "INTEGER", float: "REAL"}, " STRICT")
# Texts sort by bytes, as in SQLite and Python, whatever the locale of the database.
POSTGRES: Final = Dialect("postgres", "%s", {str: 'text COLLATE "C"', int: "bigint", float: "double precision"})
DIALECTS: Final = {dialect.name: dialect for dialect in (SQLITE, POSTGRES)}


@cache
def _reads(dialect: Dialect) -> dict[str, str]:
    found = queries(dialect.name, "reads.sql")
    for kind in KINDS:
        select = f"SELECT doc, crc FROM {kind.table}"  # noqa: S608  # names of our own, as below
        found[f"all {kind.table}"] = f"{select} ORDER BY {_names(kind.order or kind.key)}"
        found[f"one {kind.table}"] = f"{select} WHERE ({_names(kind.key)}) = ({_places(dialect, kind.key)})"
        if kind.pages:
            names = _names(name for name, _ in kind.pages)
            found[f"page {kind.table}"] = (
                f"SELECT doc, crc, {names} FROM {kind.table} WHERE ({names}) > ({_places(dialect, kind.pages)})"  # noqa: S608
                f" ORDER BY {names} LIMIT {dialect.placeholder}"
            )
    found["counts"] = " UNION ALL ".join(f"SELECT '{kind.name}', (SELECT count(*) FROM {kind.table})" for kind in KINDS)  # noqa: S608
    return found


@cache
def _writes(dialect: Dialect) -> dict[str, str]:
    found = queries(dialect.name, "writes.sql")
    for kind in KINDS:
        columns = [*(column.name for column in kind.columns), "doc", "crc"]
        insert = f"INSERT INTO {kind.table} ({_names(columns)}) VALUES ({_places(dialect, columns)})"  # noqa: S608
        changed = ", ".join(f'"{name}" = excluded."{name}"' for name in columns if name not in kind.key)
        update = "" if kind.append_only else f" ON CONFLICT ({_names(kind.key)}) DO UPDATE SET {changed}"
        found[f"put {kind.table}"] = insert + update
        found[f"delete {kind.table}"] = (
            f"DELETE FROM {kind.table} WHERE ({_names(kind.key)}) = ({_places(dialect, kind.key)})"  # noqa: S608
        )
    for kind in KINDS_OF_JOBS:
        column = "id" if kind is JOBS else "job_id"
        found[f"archive {kind.table}"] = f"DELETE FROM {kind.table} WHERE {column} = {dialect.placeholder}"  # noqa: S608
    return found


def _names(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _places(dialect: Dialect, values: Iterable[object]) -> str:
    return ", ".join(dialect.placeholder for _ in values)


def queries(dialect: str, file: str) -> dict[str, str]:
    """The statements of one file by name, without their comments; none if the dialect has no such file."""
    path = files("phalanx.store.sql").joinpath(dialect, file)
    if not path.is_file():
        return {}
    _, *parts = _NAME.split(path.read_text(encoding="utf-8"))
    found = {name: _bare(statement) for name, statement in zip(parts[::2], parts[1::2], strict=True)}
    if len(found) * 2 != len(parts):
        raise ValueError(f"{dialect}/{file}: a name is used twice")
    return found


def _bare(statement: str) -> str:
    lines = [line for line in statement.splitlines() if line.strip() and not line.startswith("--")]
    return " ".join(line.strip() for line in lines).rstrip(";")

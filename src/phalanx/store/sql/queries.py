"""Named SQL statements: each database's folder has a `reads.sql` and a `writes.sql` with the same names, in its own dialect."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

_NAME: Final = re.compile(r"^-- name: ([a-z_]+)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Dialect:
    """The SQL dialect of a database.

    Attributes:
        name: of its folder.
        placeholder: placeholder for a bound value.
    """

    name: str
    placeholder: str

    @property
    def reads(self) -> dict[str, str]:
        """Queries by name."""
        return queries(self.name, "reads.sql")

    @property
    def writes(self) -> dict[str, str]:
        """Statements of `commit`, by name."""
        return queries(self.name, "writes.sql")


SQLITE: Final = Dialect("sqlite", "?")
POSTGRES: Final = Dialect("postgres", "%s")


@cache
def queries(dialect: str, file: str) -> dict[str, str]:
    """The statements of one file by name, without their comments."""
    text = files("phalanx.store.sql").joinpath(dialect, file).read_text(encoding="utf-8")
    _, *parts = _NAME.split(text)
    found = {name: _bare(statement) for name, statement in zip(parts[::2], parts[1::2], strict=True)}
    if len(found) * 2 != len(parts):
        raise ValueError(f"{dialect}/{file}: a name is used twice")
    return found


def _bare(statement: str) -> str:
    lines = [line for line in statement.splitlines() if line.strip() and not line.startswith("--")]
    return " ".join(line.strip() for line in lines).rstrip(";")

"""Numbered migrations: each is applied once, in its own transaction, and recorded with its checksum.

A database of an older release is upgraded; one of a newer release is refused.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from phalanx.store.errors import StoreUnusable
from phalanx.store.sql.kinds import KINDS
from phalanx.store.sql.queries import DIALECTS


@dataclass(frozen=True, slots=True)
class Migration:
    """One migration: `0001_initial.sql` is number 1."""

    number: int
    name: str
    sql: str

    @property
    def sha256(self) -> str:
        """Hash of its text; a released migration is never edited."""
        return hashlib.sha256(self.sql.encode()).hexdigest()


@cache
def migrations(dialect: str) -> tuple[Migration, ...]:
    """All migrations of a dialect, numbered 1, 2, 3 ... without gaps: tables of declared kinds, then the file of that number, if any.

    Raises:
        ValueError: a number is missing or used twice.
    """
    texts: dict[int, str] = {}
    names: dict[int, str] = {}
    for kind in KINDS:
        if kind.migration:
            texts[kind.migration] = texts.get(kind.migration, "") + DIALECTS[dialect].create_table(kind)
            names[kind.migration] = f"{kind.migration:04}_{kind.table}"
    folder = files("phalanx.store.sql").joinpath(dialect, "migrations")
    found = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    for name in found:
        texts[int(name[:4])] = texts.get(int(name[:4]), "") + folder.joinpath(name).read_text(encoding="utf-8")
        names[int(name[:4])] = name.removesuffix(".sql")
    if sorted(texts) != list(range(1, len(texts) + 1)) or len({name[:4] for name in found}) < len(found):
        raise ValueError(f"{dialect}: migrations are not numbered 1 to {len(texts)}: {', '.join(found)}")
    return tuple(Migration(number, names[number], texts[number]) for number in sorted(texts))


def check_applied(applied: list[tuple[int, str, str]], known: tuple[Migration, ...]) -> None:
    """Check that the applied migrations, as (number, name, sha256), are a prefix of those of this release.

    Raises:
        StoreUnusable: the database is of a newer release, or has other migrations.
    """
    if len(applied) > len(known):
        number, name, _ = applied[-1]
        raise StoreUnusable(
            f"the database was written by a newer Phalanx: it has migration {number} ({name}), this release has {len(known)}",
            hint="install that release again, or restore the copy made before the upgrade",
        )
    for (number, name, sha256), migration in zip(applied, known, strict=False):
        if number != migration.number or sha256 != migration.sha256:
            raise StoreUnusable(
                f"migration {number} ({name}) of the database differs from this release's {migration.name}",
                hint="the database was created by a development build; restore a copy that a release has written",
            )

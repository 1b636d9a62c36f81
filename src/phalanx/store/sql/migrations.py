"""Numbered migrations: each file is applied once, in a transaction of its own, and remembered with its checksum.

A database of an older release is brought up to date; one of a newer release is left alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from phalanx.store.errors import StoreUnusable


@dataclass(frozen=True, slots=True)
class Migration:
    """One file: `0001_initial.sql` is number 1."""

    number: int
    name: str
    sql: str

    @property
    def sha256(self) -> str:
        """Of its text; a migration that was released is never edited."""
        return hashlib.sha256(self.sql.encode()).hexdigest()


@cache
def migrations(dialect: str) -> tuple[Migration, ...]:
    """All migrations of a dialect, numbered 1, 2, 3 ... without holes.

    Raises:
        ValueError: a number is missing or stands twice.
    """
    folder = files("phalanx.store.sql").joinpath(dialect, "migrations")
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    found = tuple(
        Migration(int(name[:4]), name.removesuffix(".sql"), folder.joinpath(name).read_text(encoding="utf-8"))
        for name in names
    )
    if [migration.number for migration in found] != list(range(1, len(found) + 1)):
        raise ValueError(f"{dialect}: migrations are not numbered 1 to {len(found)}: {', '.join(names)}")
    return found


def compare(applied: list[tuple[int, str, str]], known: tuple[Migration, ...]) -> None:
    """What a database remembers, as (number, name, sha256), must be the beginning of what this release knows.

    Raises:
        StoreUnusable: the database is of a newer release, or was made by migrations other than ours.
    """
    if len(applied) > len(known):
        number, name, _ = applied[-1]
        raise StoreUnusable(
            f"the database was written by a newer Phalanx: it has migration {number} ({name}), this release knows {len(known)}",
            hint="install that release again, or restore the copy made before the upgrade",
        )
    for (number, name, sha256), migration in zip(applied, known, strict=False):
        if number != migration.number or sha256 != migration.sha256:
            raise StoreUnusable(
                f"migration {number} ({name}) of the database is not this release's {migration.name}",
                hint="the database was made by a development build; restore a copy made by a release",
            )

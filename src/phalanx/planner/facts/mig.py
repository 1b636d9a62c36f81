"""Read the tables of MIG: the GPU models that can be divided, and the profiles of each with the places where their instances can lie.

The driver of a real GPU reports both; the tables stand in where it does not, as for virtual devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.mig import MEMORY_SLICES_MAX, MigProfile
from phalanx.core.units import MIB
from phalanx.planner.cost.machine import FactSource
from phalanx.planner.facts.gpus import find_gpu, normalize_gpu_name
from phalanx.planner.facts.table import TableColumns, TableRow, read_named_records, read_rows
from phalanx.planner.facts.table_files import shipped_text

GPU_COLUMNS: Final = TableColumns(required=("name", "aliases", "memory_slices", "compute_slices"))
PROFILE_COLUMNS: Final = TableColumns(
    required=(
        "gpu",
        "profile",
        "id",
        "compute_slices",
        "memory_slices",
        "starts",
        "max_instances",
        "memory_mib",
        "starts_source",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigProfileEntry:
    """One profile of a model. `fact`: source of everything but the starts; `starts_fact`: of these."""

    profile: MigProfile
    fact: FactSource
    starts_fact: FactSource


@dataclass(frozen=True, slots=True, kw_only=True)
class MigGpuEntry:
    """One GPU model that can be divided, with its profiles in the order of the table."""

    name: str
    aliases: tuple[str, ...]
    memory_slices: int
    compute_slices: int
    entries: tuple[MigProfileEntry, ...]
    fact: FactSource

    @property
    def profiles(self) -> tuple[MigProfile, ...]:
        """The profiles without their sources."""
        return tuple(entry.profile for entry in self.entries)

    @property
    def memory_bytes(self) -> int:
        """Memory of an instance over the whole GPU: what the GPU has in MIG mode."""
        return max(profile.memory_bytes for profile in self.profiles)


@cache
def read_mig_gpus() -> tuple[MigGpuEntry, ...]:
    """Return the shipped tables.

    Raises:
        BadFile: a table is invalid; file, line and column are named.
    """
    return parse_mig_tables(shipped_text("mig_gpus.csv"), shipped_text("mig_profiles.csv"))


def parse_mig_tables(gpus: str, profiles: str) -> tuple[MigGpuEntry, ...]:
    """Return the GPU models in the texts of the two tables.

    Raises:
        BadFile: as for `read_mig_gpus`.
    """
    rows = read_rows(profiles, "mig_profiles.csv", PROFILE_COLUMNS)

    def entry(row: TableRow) -> MigGpuEntry:
        own = [one for one in rows if one.text("gpu") == row.text("name")]
        memory_slices = row.integer("memory_slices", least=1)
        compute_slices = row.integer("compute_slices", least=1)
        if not own:
            raise row.error("name", f"{row.text('name')} has no row in mig_profiles.csv")
        if memory_slices > MEMORY_SLICES_MAX:
            raise row.error("memory_slices", f"is above {MEMORY_SLICES_MAX}")
        return MigGpuEntry(
            name=row.text("name"),
            aliases=row.words("aliases"),
            memory_slices=memory_slices,
            compute_slices=compute_slices,
            entries=tuple(_entry(one, memory_slices, compute_slices) for one in own),
            fact=row.fact(),
        )

    found = read_named_records(gpus, "mig_gpus.csv", GPU_COLUMNS, entry, lambda one: one.name)
    seen: set[tuple[str, str]] = set()
    for row in rows:
        key = (row.text("gpu"), row.text("profile"))
        if key in seen:
            raise row.error("profile", f"{key[1]} of {key[0]} is listed twice")
        if all(one.name != key[0] for one in found):
            raise row.error("gpu", f"{key[0]} has no row in mig_gpus.csv")
        seen.add(key)
    return found


def _entry(row: TableRow, memory_slices: int, compute_slices: int) -> MigProfileEntry:
    starts = row.integers("starts")
    size = row.integer("memory_slices", least=1)
    if not starts or starts != tuple(sorted(set(starts))) or starts[-1] + size > memory_slices:
        raise row.error("starts", f"are not ascending starts of {size} of {memory_slices} memory slices")
    if row.integer("compute_slices", least=1) > compute_slices:
        raise row.error("compute_slices", f"is above {compute_slices}, which the GPU has")
    return MigProfileEntry(
        profile=MigProfile(
            name=row.text("profile"),
            id=row.integer("id"),
            compute_slices=row.integer("compute_slices", least=1),
            memory_slices=size,
            memory_bytes=row.integer("memory_mib", least=1) * MIB,
            starts=starts,
            max_instances=row.integer("max_instances", least=1),
        ),
        fact=row.fact(),
        starts_fact=row.fact("starts_source"),
    )


def find_mig_gpu(name: str, gpus: Sequence[MigGpuEntry] | None = None) -> MigGpuEntry | None:
    """Return the model with this name: its own, an alias, a name that `find_gpu` knows, or the driver's. Case is ignored.

    None if the tables do not have it: it cannot be divided, or its figures are not verified.
    """
    table = read_mig_gpus() if gpus is None else gpus
    wanted = normalize_gpu_name(name)
    found = _named(wanted, table)
    if found is None:
        try:
            found = _named(normalize_gpu_name(find_gpu(name).gpu.name), table)
        except BadRequest:
            return None
    return found


def _named(name: str, table: Sequence[MigGpuEntry]) -> MigGpuEntry | None:
    return next(
        (one for one in table if name in {normalize_gpu_name(word) for word in (one.name, *one.aliases)}),
        None,
    )

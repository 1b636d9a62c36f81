"""Read the tables of cloud instances (AWS, Google, Azure) and of networks between servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.nearest_match import suggestion
from phalanx.planner.cost.machine import FactSource
from phalanx.planner.facts.gpus import (
    GB,
    GBIT,
    NETWORK_KINDS,
    GpuEntry,
    read_gpus,
    resolve_gpu_column,
)
from phalanx.planner.facts.table import (
    TableColumns,
    TableRow,
    merge_tables,
    read_rows,
)
from phalanx.planner.facts.table_files import read_text, shipped_text

COLUMNS: Final = TableColumns(
    required=("name", "cloud", "gpu", "gpus", "network_gbit_per_gpu", "network_kind"),
    optional=("storage_gb_per_s", "memory_gib", "note"),
)
NETWORK_COLUMNS: Final = TableColumns(required=("name", "kind", "gbit_per_gpu"))


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkEntry:
    """A network between nodes. Bytes per second are per GPU and direction."""

    name: str
    kind: str
    bytes_per_s: float
    fact: FactSource


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceEntry:
    """One instance type of a cloud.

    Attributes:
        gpu: a name in the table of GPUs.
        storage_bytes_per_s: durable writes, per node; None if unknown.
        memory_bytes: of the host; None if unknown.
    """

    name: str
    cloud: str
    gpu: str
    gpus: int
    network: NetworkEntry
    storage_bytes_per_s: float | None
    fact: FactSource
    memory_bytes: float | None = None
    note: str = ""

    @property
    def offer(self) -> str:
        """The name in the table of prices."""
        return f"{self.cloud} {self.name}"


def read_instances(*paths: str, gpus: Sequence[GpuEntry] | None = None) -> tuple[InstanceEntry, ...]:
    """Return the shipped table merged with the tables at `paths`, whose rows replace rows of the same name.

    `gpus` is the table for the column `gpu`, by default the shipped one.

    Raises:
        BadFile: a table is invalid; file, line and column are named.
    """
    own = (parse_instance_table(read_text(path), path, gpus) for path in paths)
    return merge_tables(_shipped(), own, lambda entry: entry.name.lower())


@cache
def _shipped() -> tuple[InstanceEntry, ...]:
    return parse_instance_table(shipped_text("instances.csv"), "instances.csv")


def parse_instance_table(text: str, where: str, gpus: Sequence[GpuEntry] | None = None) -> tuple[InstanceEntry, ...]:
    """Return the instances in the text of a table.

    Raises:
        BadFile: as for `read_instances`.
    """
    known = read_gpus() if gpus is None else gpus
    return tuple(_instance(row, known) for row in read_rows(text, where, COLUMNS))


def _instance(row: TableRow, gpus: Sequence[GpuEntry]) -> InstanceEntry:
    storage = row.number("storage_gb_per_s", least=0.001) * GB if row.text("storage_gb_per_s") else None
    return InstanceEntry(
        name=row.text("name"),
        cloud=row.text("cloud"),
        gpu=resolve_gpu_column(row, gpus),
        gpus=row.integer("gpus", least=1),
        network=NetworkEntry(
            name=row.text("name"),
            kind=row.choice("network_kind", NETWORK_KINDS),
            bytes_per_s=row.number("network_gbit_per_gpu") * GBIT,
            fact=row.fact(),
        ),
        storage_bytes_per_s=storage,
        memory_bytes=row.number("memory_gib", least=1.0) * 2**30 if row.text("memory_gib") else None,
        fact=row.fact(),
        note=row.text("note"),
    )


@cache
def read_networks() -> tuple[NetworkEntry, ...]:
    """Return the shipped table of networks.

    Raises:
        BadFile: the table is invalid.
    """
    return tuple(
        NetworkEntry(
            name=row.text("name").lower(),
            kind=row.choice("kind", NETWORK_KINDS),
            bytes_per_s=row.number("gbit_per_gpu") * GBIT,
            fact=row.fact(),
        )
        for row in read_rows(shipped_text("networks.csv"), "networks.csv", NETWORK_COLUMNS)
    )


def find_instance(text: str, instances: Sequence[InstanceEntry]) -> InstanceEntry:
    """Return the instance with this name, with or without its cloud as a prefix. Case is ignored.

    Raises:
        BadRequest: unknown instance.
    """
    word = text.strip().lower()
    for instance in instances:
        if word in (instance.name.lower(), instance.offer.lower()):
            return instance
    names = [instance.name for instance in instances]
    hint = suggestion(word, names, f"known: {', '.join(names)}", form="{!r}")
    raise BadRequest(f"instance: unknown instance {text!r}", hint=hint)


def find_network(text: str) -> NetworkEntry:
    """Return the network with this name ("ib-ndr", "25gbe"). Case is ignored.

    Raises:
        BadRequest: unknown network.
    """
    word = text.strip().lower()
    for network in read_networks():
        if word == network.name:
            return network
    names = [network.name for network in read_networks()]
    hint = suggestion(word, names, f"known: {', '.join(names)}", form="{!r}")
    raise BadRequest(f"network: unknown network {text!r}", hint=hint)

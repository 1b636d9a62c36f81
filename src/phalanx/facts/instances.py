"""Read the tables of cloud instances (AWS, Google, Azure) and of networks between servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.performance.machine import Fact
from phalanx.core.work.nearest import nearest
from phalanx.facts.files import shipped_text, text_at
from phalanx.facts.gpus import GB, GBIT, NETWORK_KINDS, GpuEntry, gpu_in, read_gpus
from phalanx.facts.table import Columns, Row, laid_over, rows_of

COLUMNS: Final = Columns(
    needed=("name", "cloud", "gpu", "gpus", "network_gbit_per_gpu", "network_kind"), free=("storage_gb_per_s", "note")
)
NETWORK_COLUMNS: Final = Columns(needed=("name", "kind", "gbit_per_gpu"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network between nodes. Bytes per second are per GPU and direction."""

    name: str
    kind: str
    bytes_per_s: float
    fact: Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One instance type of a cloud.

    Attributes:
        gpu: a name in the table of GPUs.
        storage_bytes_per_s: durable writes, per node; None if unknown.
    """

    name: str
    cloud: str
    gpu: str
    gpus: int
    network: Network
    storage_bytes_per_s: float | None
    fact: Fact
    note: str = ""

    @property
    def offer(self) -> str:
        """The name in the table of prices."""
        return f"{self.cloud} {self.name}"


def read_instances(*paths: str, gpus: Sequence[GpuEntry] | None = None) -> tuple[Instance, ...]:
    """Return the shipped table merged with the tables at `paths`, whose rows replace rows of the same name.

    `gpus` is the table for the column `gpu`, by default the shipped one.

    Raises:
        BadFile: a table is invalid; file, line and column are named.
    """
    own = (instances_in(text_at(path), path, gpus) for path in paths)
    return laid_over(_shipped(), own, lambda entry: entry.name.lower())


@cache
def _shipped() -> tuple[Instance, ...]:
    return instances_in(shipped_text("instances.csv"), "instances.csv")


def instances_in(text: str, where: str, gpus: Sequence[GpuEntry] | None = None) -> tuple[Instance, ...]:
    """Return the instances in the text of a table.

    Raises:
        BadFile: as for `read_instances`.
    """
    known = read_gpus() if gpus is None else gpus
    return tuple(_instance(row, known) for row in rows_of(text, where, COLUMNS))


def _instance(row: Row, gpus: Sequence[GpuEntry]) -> Instance:
    storage = row.number("storage_gb_per_s", least=0.001) * GB if row.text("storage_gb_per_s") else None
    return Instance(
        name=row.text("name"),
        cloud=row.text("cloud"),
        gpu=gpu_in(row, gpus),
        gpus=row.whole("gpus", least=1),
        network=Network(
            name=row.text("name"),
            kind=row.one_of("network_kind", NETWORK_KINDS),
            bytes_per_s=row.number("network_gbit_per_gpu") * GBIT,
            fact=row.fact(),
        ),
        storage_bytes_per_s=storage,
        fact=row.fact(),
        note=row.text("note"),
    )


@cache
def read_networks() -> tuple[Network, ...]:
    """Return the shipped table of networks.

    Raises:
        BadFile: the table is invalid.
    """
    return tuple(
        Network(
            name=row.text("name").lower(),
            kind=row.one_of("kind", NETWORK_KINDS),
            bytes_per_s=row.number("gbit_per_gpu") * GBIT,
            fact=row.fact(),
        )
        for row in rows_of(shipped_text("networks.csv"), "networks.csv", NETWORK_COLUMNS)
    )


def instance_named(text: str, instances: Sequence[Instance]) -> Instance:
    """Return the instance with this name, with or without its cloud as a prefix. Case is ignored.

    Raises:
        BadRequest: unknown instance.
    """
    word = text.strip().lower()
    for instance in instances:
        if word in (instance.name.lower(), instance.offer.lower()):
            return instance
    names = [instance.name for instance in instances]
    close = nearest(word, names)
    raise BadRequest(
        f"instance: unknown instance {text!r}",
        hint=f"did you mean {close!r}?" if close else f"known: {', '.join(names)}",
    )


def network_named(text: str) -> Network:
    """Return the network with this name ("ib-ndr", "25gbe"). Case is ignored.

    Raises:
        BadRequest: unknown network.
    """
    word = text.strip().lower()
    for network in read_networks():
        if word == network.name:
            return network
    names = [network.name for network in read_networks()]
    close = nearest(word, names)
    raise BadRequest(
        f"network: unknown network {text!r}",
        hint=f"did you mean {close!r}?" if close else f"known: {', '.join(names)}",
    )

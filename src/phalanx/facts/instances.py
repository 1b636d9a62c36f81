"""The tables of rented servers (AWS, Google, Azure) and of networks between servers, by name."""

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
    """What joins nodes. Bytes per second are per GPU and direction."""

    name: str
    kind: str
    bytes_per_s: float
    fact: Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One kind of rented server.

    Attributes:
        gpu: a name of the table of GPUs.
        storage_bytes_per_s: durable, per node; None where nobody says.
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
        """As the table of prices has it."""
        return f"{self.cloud} {self.name}"


def read_instances(*paths: str, gpus: Sequence[GpuEntry] | None = None) -> tuple[Instance, ...]:
    """The shipped table, then the tables at `paths`: a row there replaces the one of its name. `gpus` is the table in which the column
    `gpu` is looked up, the shipped one by default.

    Raises:
        BadFile: a table is not what it should be; file, line and column are named.
    """
    own = (instances_in(text_at(path), path, gpus) for path in paths)
    return laid_over(_shipped(), own, lambda entry: entry.name.lower())


@cache
def _shipped() -> tuple[Instance, ...]:
    return instances_in(shipped_text("instances.csv"), "instances.csv")


def instances_in(text: str, where: str, gpus: Sequence[GpuEntry] | None = None) -> tuple[Instance, ...]:
    """The instances of one table's text.

    Raises:
        BadFile: as `read_instances`.
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
    """The shipped table of networks.

    Raises:
        BadFile: it is not what it should be.
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
    """The instance of that name, with or without its cloud before it; case does not count.

    Raises:
        BadRequest: there is none.
    """
    word = text.strip().lower()
    for instance in instances:
        if word in (instance.name.lower(), instance.offer.lower()):
            return instance
    names = [instance.name for instance in instances]
    close = nearest(word, names)
    raise BadRequest(f"instance: unknown instance {text!r}",
                     hint=f"did you mean {close!r}?" if close else f"known: {', '.join(names)}")  # fmt: skip


def network_named(text: str) -> Network:
    """The network of that name ("ib-ndr", "25gbe"); case does not count.

    Raises:
        BadRequest: there is none.
    """
    word = text.strip().lower()
    for network in read_networks():
        if word == network.name:
            return network
    names = [network.name for network in read_networks()]
    close = nearest(word, names)
    raise BadRequest(f"network: unknown network {text!r}",
                     hint=f"did you mean {close!r}?" if close else f"known: {', '.join(names)}")  # fmt: skip

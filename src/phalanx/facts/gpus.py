"""The table of GPUs, and what a user or a driver means by a GPU's name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.performance.machine import Fact, Gpu
from phalanx.core.units import MIB
from phalanx.core.work.layout import PRECISIONS
from phalanx.core.work.nearest import nearest
from phalanx.facts.files import shipped_text, text_at
from phalanx.facts.table import Columns, Row, laid_over, named_of

COLUMNS: Final = Columns(
    needed=("name", "memory_gb", "memory_mib", "memory_gb_per_s", "link_kind", "link_gb_per_s", "link_domain",
            "pcie_gb_per_s", "watts", "gpus_per_node", "network_gbit_per_gpu", "network_kind", "network_source"),
    free=("aliases", "bf16_tflops", "fp16_tflops", "fp8_tflops", "fp32_tflops", "best_bf16_tflops", "best_fp8_tflops",
          "best_source", "virtual", "note"),
)  # fmt: skip
LINK_KINDS: Final = ("nvlink", "xgmi", "pcie")
NETWORK_KINDS: Final = ("infiniband", "roce", "efa", "tcp", "ethernet", "none")
TERA: Final = 1e12
GB: Final = 1e9
GBIT: Final = 1e9 / 8  # bytes per second
_MAKERS: Final = re.compile(r"^(?:(?:nvidia|amd|geforce|tesla|instinct)[- ]+)+")
_MEMORY: Final = re.compile(r"(.*?[a-z0-9)])[-:]([0-9]{1,4})(?:g(?:i?b)?)(?:-hbm[0-9]e?)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEntry:
    """One row: the GPU, and how such GPUs usually stand in servers.

    Attributes:
        memory_gb: as the name has it (80 for "80 GB"); `gpu.memory_bytes` is what the driver reports.
        gpus_per_node: of the usual server.
        network_bytes_per_s: per GPU and direction between nodes in the usual server; `network_fact` says which server that is.
        note: what to know of the figures; empty for nothing.
    """

    gpu: Gpu
    memory_gb: int
    gpus_per_node: int
    network_bytes_per_s: float
    network_kind: str
    network_fact: Fact
    note: str = ""


def read_gpus(*paths: str) -> tuple[GpuEntry, ...]:
    """The shipped table, then the tables at `paths`: a row there replaces the one of its name, a new name is added.

    Raises:
        BadFile: a table is not what it should be; file, line and column are named.
    """
    return laid_over(_shipped(), (gpus_in(text_at(path), path) for path in paths), _name)


@cache
def _shipped() -> tuple[GpuEntry, ...]:
    return gpus_in(shipped_text("gpus.csv"), "gpus.csv")


def gpus_in(text: str, where: str) -> tuple[GpuEntry, ...]:
    """The GPUs of one table's text.

    Raises:
        BadFile: as `read_gpus`.
    """
    return named_of(text, where, COLUMNS, _entry, _name)


def _name(entry: GpuEntry) -> str:
    return entry.gpu.name


def _entry(row: Row) -> GpuEntry:
    peak = {name: row.number(f"{name}_tflops") * TERA for name in PRECISIONS if row.text(f"{name}_tflops")}
    best = {
        name: row.number(f"best_{name}_tflops") * TERA for name in ("bf16", "fp8") if row.text(f"best_{name}_tflops")
    }
    if not peak or min(peak.values()) <= 0:
        raise row.wrong("bf16_tflops", "no rate above 0 is given for any precision")
    for name, rate in best.items():
        if not row.text("best_source"):
            raise row.wrong("best_source", "is empty; a measured rate says who measured it")
        if rate > peak.get(name, 0.0):
            raise row.wrong(f"best_{name}_tflops", "is above the peak")
    gpu = Gpu(
        name=row.text("name").lower(),
        aliases=row.words("aliases"),
        memory_bytes=row.whole("memory_mib", least=1) * MIB,
        memory_bytes_per_s=row.number("memory_gb_per_s", least=1.0) * GB,
        flops=peak,
        best_flops=best,
        link_bytes_per_s=row.number("link_gb_per_s") * GB,
        link_domain=row.whole("link_domain", least=1),
        link_kind=row.one_of("link_kind", LINK_KINDS),
        pcie_bytes_per_s=row.number("pcie_gb_per_s", least=0.1) * GB,
        watts=row.number("watts"),
        virtual=row.truth("virtual"),
        fact=row.fact(),
    )
    return GpuEntry(
        gpu=gpu,
        memory_gb=row.whole("memory_gb", least=1),
        gpus_per_node=row.whole("gpus_per_node", least=1),
        network_bytes_per_s=row.number("network_gbit_per_gpu") * GBIT,
        network_kind=row.one_of("network_kind", NETWORK_KINDS),
        network_fact=row.fact("network_source"),
        note=row.text("note"),
    )


def gpu_named(
    text: str, *, memory_gib: int | None = None, gpus: Sequence[GpuEntry] | None = None, notes: list[str] | None = None
) -> GpuEntry:
    """The GPU that is meant: a name of the table, an alias ("h100"), either with memory ("a100-40gb", "H100:80GB"), or what the driver
    calls it ("NVIDIA H100 80GB HBM3"). Case does not count.

    A name that several rows bear means the first of them in the table; `notes` is then told so, and which others there are.

    With `memory_gib`, as `GpuRequest` has it, the row of that memory is meant, or else of the least above it. `gpus` is the table, the
    shipped one by default.

    Raises:
        BadRequest: no such GPU, or none of it with that memory.
    """
    table = read_gpus() if gpus is None else gpus
    asked = text if memory_gib is None else f"{text}-{memory_gib}gb"
    name = _plain(text)
    if memory_gib is None and not _bearing(name, table) and (split := _MEMORY.fullmatch(name)):
        name, memory_gib = split[1], int(split[2])
    bearing = (_bearing(f"{name}-{memory_gib}gb", table) if memory_gib else []) or _bearing(name, table)
    if not bearing:
        raise _unknown(asked, name, table)
    found = [entry for entry in bearing if memory_gib is None or entry.memory_gb >= memory_gib]
    if not found:
        have = ", ".join(f"{entry.gpu.name} ({entry.memory_gb} GB)" for entry in bearing)
        raise BadRequest(f"gpus: no {name} has {memory_gib} GB", hint=f"known: {have}")
    chosen = found[0] if memory_gib is None else min(found, key=lambda entry: entry.memory_gb)
    if chosen.gpu.name != name and len(found) > 1 and notes is not None and memory_gib is None:
        others = ", ".join(entry.gpu.name for entry in found if entry is not chosen)
        notes.append(f"{text} is taken as {chosen.gpu.name}; there is also {others}")
    return chosen


def gpu_on(entry: GpuEntry, per_node: int) -> Gpu:
    """The GPU as a node with `per_node` of them has it: links inside a server join no more than are there; those of a rack join as ever."""
    if entry.gpu.link_domain > entry.gpus_per_node or entry.gpu.link_domain <= per_node:
        return entry.gpu
    return replace(entry.gpu, link_domain=per_node)


def gpu_in(row: Row, gpus: Sequence[GpuEntry]) -> str:
    """The table's name of the GPU that a row's column `gpu` names.

    Raises:
        BadFile: there is no such GPU; line and nearest match are named.
    """
    try:
        return gpu_named(row.text("gpu"), gpus=gpus).gpu.name
    except BadRequest as unknown:
        raise row.wrong("gpu", unknown.message.removeprefix("gpus: "), hint=unknown.hint) from None


def _bearing(name: str, table: Sequence[GpuEntry]) -> list[GpuEntry]:
    """Rows of that name: the one it is the name of, or else all that have it among their aliases."""
    exact = [entry for entry in table if _plain(entry.gpu.name) == name]
    return exact or [entry for entry in table if any(_plain(alias) == name for alias in entry.gpu.aliases)]


def _plain(text: str) -> str:
    return _MAKERS.sub("", re.sub(r"[\s_:/-]+", "-", text.strip().lower()))


def _unknown(asked: str, name: str, table: Sequence[GpuEntry]) -> BadRequest:
    words = sorted({word for entry in table for word in (entry.gpu.name, *entry.gpu.aliases)})
    close = nearest(asked, words) or nearest(name, words)
    known = f"known: {', '.join(sorted(entry.gpu.name for entry in table))}"
    return BadRequest(f"gpus: unknown GPU {asked!r}", hint=f"did you mean {close!r}?" if close else known)

"""Read the table of GPUs, and resolve the GPU names of users and drivers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.units import MIB
from phalanx.core.work.layouts.layout import PRECISIONS
from phalanx.core.work.nearest_match import suggestion
from phalanx.planner.cost.machine import FactSource, Gpu
from phalanx.planner.facts.table import (
    TableColumns,
    TableRow,
    merge_tables,
    read_named_records,
)
from phalanx.planner.facts.table_files import read_text, shipped_text

_MEMORY_COLUMNS: Final = ("memory_gb", "memory_mib", "memory_gb_per_s")
_LINK_COLUMNS: Final = ("link_kind", "link_gb_per_s", "link_domain", "pcie_gb_per_s")
_SERVER_COLUMNS: Final = ("gpus_per_node", "network_gbit_per_gpu", "network_kind", "network_source")
_RATE_COLUMNS: Final = (
    "bf16_tflops",
    "fp16_tflops",
    "fp8_tflops",
    "nvfp4_tflops",
    "fp32_tflops",
    "best_bf16_tflops",
    "best_fp8_tflops",
)
COLUMNS: Final = TableColumns(
    required=("name", *_MEMORY_COLUMNS, *_LINK_COLUMNS, "watts", *_SERVER_COLUMNS),
    optional=("aliases", *_RATE_COLUMNS, "best_source", "virtual", "note"),
)
LINK_KINDS: Final = ("nvlink", "xgmi", "pcie")
NETWORK_KINDS: Final = ("infiniband", "roce", "efa", "tcp", "ethernet", "none")
TERA: Final = 1e12
GB: Final = 1e9
GBIT: Final = 1e9 / 8  # bytes per second
_MAKERS: Final = re.compile(r"^(?:(?:nvidia|amd|geforce|tesla|instinct)[- ]+)+")
_STAND_IN: Final = "virtual-"  # of the model of a virtual device that stands in for a GPU
_MEMORY: Final = re.compile(r"(.*?[a-z0-9)])[-:]([0-9]{1,4})(?:g(?:i?b)?)(?:-hbm[0-9]e?)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEntry:
    """One row: the GPU, and the usual server for it.

    Attributes:
        memory_gb: nominal size (80 for "80 GB"); `gpu.memory_bytes` is the size that the driver reports.
        gpus_per_node: of the usual server.
        network_bytes_per_s: per GPU and direction between nodes of the usual server; `network_fact` names the server.
        note: remark on the figures, or empty.
    """

    gpu: Gpu
    memory_gb: int
    gpus_per_node: int
    network_bytes_per_s: float
    network_kind: str
    network_fact: FactSource
    note: str = ""


def read_gpus(*paths: str) -> tuple[GpuEntry, ...]:
    """Return the shipped table merged with the tables at `paths`, whose rows replace rows of the same name.

    Raises:
        BadFile: a table is invalid; file, line and column are named.
    """
    return merge_tables(_shipped(), (parse_gpu_table(read_text(path), path) for path in paths), _name)


@cache
def _shipped() -> tuple[GpuEntry, ...]:
    return parse_gpu_table(shipped_text("gpus.csv"), "gpus.csv")


def parse_gpu_table(text: str, where: str) -> tuple[GpuEntry, ...]:
    """Return the GPUs in the text of a table.

    Raises:
        BadFile: as for `read_gpus`.
    """
    return read_named_records(text, where, COLUMNS, _entry, _name)


def _name(entry: GpuEntry) -> str:
    return entry.gpu.name


def _entry(row: TableRow) -> GpuEntry:
    peak = {name: row.number(f"{name}_tflops") * TERA for name in PRECISIONS if row.text(f"{name}_tflops")}
    best = {
        name: row.number(f"best_{name}_tflops") * TERA for name in ("bf16", "fp8") if row.text(f"best_{name}_tflops")
    }
    if not peak or min(peak.values()) <= 0:
        raise row.error("bf16_tflops", "no precision has a rate above 0")
    for name, rate in best.items():
        if not row.text("best_source"):
            raise row.error("best_source", "is empty; a measured rate needs a source")
        if rate > peak.get(name, 0.0):
            raise row.error(f"best_{name}_tflops", "is above the peak")
    gpu = Gpu(
        name=row.text("name").lower(),
        aliases=row.words("aliases"),
        memory_bytes=row.integer("memory_mib", least=1) * MIB,
        memory_bytes_per_s=row.number("memory_gb_per_s", least=1.0) * GB,
        flops=peak,
        best_flops=best,
        link_bytes_per_s=row.number("link_gb_per_s") * GB,
        link_domain=row.integer("link_domain", least=1),
        link_kind=row.choice("link_kind", LINK_KINDS),
        pcie_bytes_per_s=row.number("pcie_gb_per_s", least=0.1) * GB,
        watts=row.number("watts"),
        virtual=row.boolean("virtual"),
        fact=row.fact(),
    )
    return GpuEntry(
        gpu=gpu,
        memory_gb=row.integer("memory_gb", least=1),
        gpus_per_node=row.integer("gpus_per_node", least=1),
        network_bytes_per_s=row.number("network_gbit_per_gpu") * GBIT,
        network_kind=row.choice("network_kind", NETWORK_KINDS),
        network_fact=row.fact("network_source"),
        note=row.text("note"),
    )


def find_gpu(
    text: str, *, memory_gib: int | None = None, gpus: Sequence[GpuEntry] | None = None, notes: list[str] | None = None
) -> GpuEntry:
    """Return the GPU with this name: a name in the table, an alias ("h100"), either with memory ("a100-40gb", "H100:80GB"), or the name
    from the driver ("NVIDIA H100 80GB HBM3"). Case is ignored.

    If several rows match, return the first; `notes` then receives the choice and the other rows.

    With `memory_gib`, as in `GpuRequest`, return the row with that memory, or with the next larger one. `gpus` is the table, by default
    the shipped one.

    Raises:
        BadRequest: unknown GPU, or no variant has enough memory.
    """
    table = read_gpus() if gpus is None else gpus
    asked = text if memory_gib is None else f"{text}-{memory_gib}gb"
    name = normalize_gpu_name(text)
    if name.startswith(_STAND_IN):  # it computes on the CPU, whatever it stands in for
        name, memory_gib = "virtual", None
    if memory_gib is None and not _matching(name, table) and (split := _MEMORY.fullmatch(name)):
        name, memory_gib = split[1], int(split[2])
    variants = (_matching(f"{name}-{memory_gib}gb", table) if memory_gib else []) or _matching(name, table)
    if not variants:
        raise _unknown(asked, name, table)
    found = [entry for entry in variants if memory_gib is None or entry.memory_gb >= memory_gib]
    if not found:
        have = ", ".join(f"{entry.gpu.name} ({entry.memory_gb} GB)" for entry in variants)
        raise BadRequest(f"gpus: no {name} has {memory_gib} GB", hint=f"known: {have}")
    chosen = found[0] if memory_gib is None else min(found, key=lambda entry: entry.memory_gb)
    if chosen.gpu.name != name and len(found) > 1 and notes is not None and memory_gib is None:
        others = ", ".join(entry.gpu.name for entry in found if entry is not chosen)
        notes.append(f"took {text} as {chosen.gpu.name}; other variants: {others}")
    return chosen


def gpu_in_node(entry: GpuEntry, per_node: int) -> Gpu:
    """Return the GPU for a node with `per_node` of them. A link domain inside a server is at most the node; one of a rack is unchanged."""
    if entry.gpu.link_domain > entry.gpus_per_node or entry.gpu.link_domain <= per_node:
        return entry.gpu
    return replace(entry.gpu, link_domain=per_node)


def resolve_gpu_column(row: TableRow, gpus: Sequence[GpuEntry]) -> str:
    """Resolve the column `gpu` of a row to a name in the table of GPUs.

    Raises:
        BadFile: unknown GPU; the line and the nearest match are named.
    """
    try:
        return find_gpu(row.text("gpu"), gpus=gpus).gpu.name
    except BadRequest as unknown:
        raise row.error("gpu", unknown.message.removeprefix("gpus: "), hint=unknown.hint) from None


def _matching(name: str, table: Sequence[GpuEntry]) -> list[GpuEntry]:
    """Return the row with this name, or else all rows with this alias."""
    exact = [entry for entry in table if normalize_gpu_name(entry.gpu.name) == name]
    return exact or [entry for entry in table if any(normalize_gpu_name(alias) == name for alias in entry.gpu.aliases)]


def normalize_gpu_name(text: str) -> str:
    """Return a name as names are compared: lower case, without the maker, words joined by hyphens."""
    return _MAKERS.sub("", re.sub(r"[\s_:/-]+", "-", text.strip().lower()))


def _unknown(asked: str, name: str, table: Sequence[GpuEntry]) -> BadRequest:
    words = sorted({word for entry in table for word in (entry.gpu.name, *entry.gpu.aliases)})
    known = f"known: {', '.join(sorted(entry.gpu.name for entry in table))}"
    hint = suggestion(asked, words, suggestion(name, words, known, form="{!r}"), form="{!r}")
    return BadRequest(f"gpus: unknown GPU {asked!r}", hint=hint)

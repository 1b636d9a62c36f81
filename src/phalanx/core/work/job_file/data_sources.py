"""The key `data` of a job: the datasets that it reads, by name, and how they reach its nodes. Nodes look at the sources themselves."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.hostlist import fold_hostlist
from phalanx.core.fleet.node import HeldDataset
from phalanx.core.ids import NodeId
from phalanx.core.units import format_bytes, format_duration
from phalanx.core.work.job_file.data_mode import DataMode

DATA_VARIABLE: Final = "PHALANX_DATA_"  # and the dataset's name in capitals
SOURCES_MAX: Final = 32
_SOURCE_MAX: Final = 2048  # characters
_MODE: Final = "mode"
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")
_PRINTABLE: Final = re.compile(r"[^\x00-\x20\x7f-\x9f\u2028\u2029]+")
OBJECT_STORES: Final = ("s3", "gs", "az")
_SCHEMES: Final = (*OBJECT_STORES, "http", "https", "hf")
_MOUNTED: Final = (*OBJECT_STORES, "http", "https")
_KNOWN: Final = "a folder such as /nfs/train, or s3:// gs:// az:// https:// hf://"


def parse_data(value: object) -> tuple[tuple[tuple[str, str], ...], DataMode]:
    """The datasets as (name, source) in the order written, and their mode.

    Raises:
        BadRequest: a name, a source or the mode is not valid, or two names give one variable.
    """
    if not isinstance(value, Mapping):
        raise BadRequest("data: must contain names and sources", hint="write data: {train: s3://bucket/folder}")
    mode = _mode(value.get(_MODE, DataMode.STAGE.value))
    sources = tuple((str(name), _source(name, text, mode)) for name, text in value.items() if name != _MODE)
    if len(sources) > SOURCES_MAX:
        raise BadRequest(f"data: {len(sources)} datasets; at most {SOURCES_MAX} are allowed")
    variables = {data_variable(name) for name, _ in sources}
    if len(variables) < len(sources):
        raise BadRequest("data: two names differ only in capitals, and would be one variable")
    return sources, mode


def data_variable(name: str) -> str:
    """The variable by which ranks find the dataset."""
    return DATA_VARIABLE + name.upper()


def local_path(source: str) -> str | None:
    """The path of a source that the node sees as a file or folder; None for another source."""
    if source.startswith("file://"):
        return source.removeprefix("file://")
    return source if source.startswith("/") else None


def dataset_key(source: str) -> str:
    """The key by which a node says that it has a copy of a source. A hash: addresses are the business of their users."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def staged_keys(sources: tuple[tuple[str, str], ...], mode: DataMode) -> tuple[str, ...]:
    """The keys of the datasets that a job's nodes copy."""
    return tuple(dataset_key(source) for _, source in sources) if mode is DataMode.STAGE else ()


def data_note(
    sources: tuple[tuple[str, str], ...], mode: DataMode, held: Mapping[NodeId, Sequence[HeldDataset]]
) -> list[str]:
    """The note about them that is shown before the start. `held`: the datasets of which each node has a copy."""
    if not sources or mode is not DataMode.STAGE:
        return mount_notes(sources, mode)
    notes = [f"data {', '.join(name for name, _ in sources)}: copied to each node before the ranks start"]
    for name, source in sources:
        key = dataset_key(source)
        copies = {node: one for node, found in held.items() for one in found if one.key == key}
        if not copies:
            continue
        size = max(one.size_bytes for one in copies.values())
        rates = [one.bytes_per_s for one in copies.values() if one.bytes_per_s > 0]
        takes = f", about {format_duration(size / median(rates))} to copy to another node" if rates else ""
        nodes: list[str] = sorted(copies)
        notes.append(f"{name}: {format_bytes(size)}, on {fold_hostlist(nodes)} already{takes}")
    return notes


def mount_notes(sources: tuple[tuple[str, str], ...], mode: DataMode) -> list[str]:
    """The note about datasets that nodes mount: one or none. A path is there already."""
    names = [name for name, source in sources if local_path(source) is None]
    if mode is not DataMode.MOUNT or not names:
        return []
    return [f"data {', '.join(names)}: mounted on each node, 0 bytes to copy"]


def _mode(value: object) -> DataMode:
    try:
        return DataMode(str(value).lower())
    except ValueError:
        raise BadRequest(f"data: mode {str(value)[:40]!r} is not known", hint="stage, stream or mount") from None


def _source(name: object, text: object, mode: DataMode) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadRequest(
            f"data: {str(name)[:40]!r} is not a name", hint="a letter, then letters, digits and _, up to 32 characters"
        )
    source = text.strip() if isinstance(text, str) else ""
    if not source or len(source) > _SOURCE_MAX or not _PRINTABLE.fullmatch(source):
        raise BadRequest(f"data: {name} has no valid source", hint=_KNOWN)
    path = local_path(source)
    if path is not None and (not path.startswith("/") or ".." in path.split("/")):
        raise BadRequest(f"data: {name}: {source[:80]} is not an absolute path", hint=_KNOWN)
    scheme, separator, rest = source.partition("://")
    if path is None and (not separator or scheme not in _SCHEMES or not rest.strip("/")):
        raise BadRequest(f"data: {name}: {source[:80]} is not a source", hint=_KNOWN)
    if path is None and "@" in rest.partition("/")[0] and scheme in {"http", "https"}:
        raise BadRequest(f"data: {name}: the address contains a password", hint="give credentials by env")
    if path is None and mode is DataMode.MOUNT and scheme not in _MOUNTED:
        raise BadRequest(
            f"data: {name}: {scheme}:// cannot be mounted", hint="mode: stage copies it, mode: stream gives its address"
        )
    return source

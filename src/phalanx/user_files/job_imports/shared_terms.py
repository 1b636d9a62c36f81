"""What the files of several tools have in common: GPUs of each node, sizes, durations, datasets, and variables of the tool in a script."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from phalanx.core.work.job_file.data_sources import local_path
from phalanx.user_files.job_imports.job_draft import JobDraft, SourcePath

_MEMORY_ONLY: Final = re.compile(r"([0-9]{1,6})\s*gb?\+?", re.IGNORECASE)
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)i?b?\+?", re.IGNORECASE)
_REMOTE: Final = re.compile(r"(?:s3|gs|az|https?|hf)://")
_WHOLE: Final = re.compile(r"[0-9]{1,9}")
_NOT_IN_NAMES: Final = re.compile(r"[^a-z0-9-]+")
_NAME_MAX: Final = 63
_DATA_NAME_MAX: Final = 32


def whole_number(text: str) -> int | None:
    """The number that a text of at most nine digits is; None for any other text."""
    return int(text) if _WHOLE.fullmatch(text) else None


def node_count(draft: JobDraft, key: str) -> int:
    """The number of nodes under a key; 1 without it, and for what is no such number, which is noted."""
    text = draft.text(key)
    number = whole_number(text)
    if text and not number:
        draft.leave((key,), "it is not a number of nodes")
    return number or 1


def put_name(draft: JobDraft, *, service_key: str = "") -> None:
    """Take over the name. `service_key`: the key that makes it a service; empty for a job."""
    name = draft.text("name")
    if service_key:
        draft.put("type", "service", (service_key,))
        draft.put("name", _service_name(draft, name or "service"), ("name",))
    elif name:
        draft.put("name", name, ("name",))


def gpus_of_nodes(nodes: int, choices: Sequence[tuple[str, str]]) -> str:
    """The value of `gpus` for this many nodes and, on each, one of (model or "", number), the first that fits."""
    counts = list(dict.fromkeys(count for _, count in choices))
    if len(counts) == 1:
        kinds = ",".join(dict.fromkeys(kind for kind, _ in choices if kind))
        return _one_request(nodes, kinds, counts[0])
    return "|".join(dict.fromkeys(_one_request(nodes, kind, count) for kind, count in choices))


def gpu_kind(name: str) -> str:
    """The name of a GPU model as we write it: `A100-80GB` is a100-80gb, `24GB+` is any model with so much memory."""
    if found := _MEMORY_ONLY.fullmatch(name.strip()):
        return f"any-{int(found[1])}gb"
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def size_text(text: str) -> str | None:
    """A size such as `32`, `32GB`, `32+` as we write it; None for anything else. A number alone is GiB."""
    found = _SIZE.fullmatch(text.strip())
    return None if found is None else f"{found[1]}{(found[2] or 'g').upper()}"


def put_dataset(draft: JobDraft, target: str, address: str, source: SourcePath) -> None:
    """Take over a bucket or folder that the tool puts at a path of the node, as a dataset."""
    if not _REMOTE.match(address) and local_path(address) is None:
        draft.leave(source, "it is a file of this machine: put it into the working directory, and submit with --copy")
        return
    name = re.sub(r"[^A-Za-z0-9]+", "_", target).strip("_")[-_DATA_NAME_MAX:].strip("_")
    name = (name if name[:1].isalpha() else f"data_{name}")[:_DATA_NAME_MAX] or "data"
    draft.put("data", address, source, item=name)
    draft.note(
        source, f"each node copies it, read-only; its folder is $PHALANX_DATA_{name.upper()}, not {target[:100]}"
    )


def without_value(name: str) -> str:
    """Why a variable without a value is left out."""
    return f"it has no value: give it at submit (-e {name}), or as a secret (phalanx secrets set {name}, and secrets: [{name}])"


def with_variables(draft: JobDraft, script: str, source: SourcePath, prefix: str, known: Mapping[str, str]) -> str:
    """The script, with variables of the tool that it names set from ours before it. Notes those that have no counterpart."""
    named = sorted(set(re.findall(rf"\b{prefix}[A-Z0-9_]+", script)))
    for name in named:
        if name not in known:
            draft.note(source, f"nothing sets {name} here")
    lines = [f'export {name}="{known[name]}"' for name in named if name in known]
    if lines:
        draft.note(source, f"first sets {', '.join(name for name in named if name in known)} from variables of Phalanx")
    return "\n".join([*lines, script])


def _service_name(draft: JobDraft, name: str) -> str:
    """The name of a service: lower-case letters, digits and -. Notes a change."""
    found = _NOT_IN_NAMES.sub("-", name.lower()).strip("-")[:_NAME_MAX].strip("-")
    found = found if found[:1].isalpha() else f"s-{found}".rstrip("-")
    if found != name:
        draft.note(("name",), f"the service is called {found}: names have lower-case letters, digits and -")
    return found


def _one_request(nodes: int, kinds: str, count: str) -> str:
    request = f"{kinds}:{count}" if kinds else count
    return request if nodes == 1 and count == "1" else f"{nodes}x{request}"

"""Provides the datasets that a job names: a copy in the node's cache, the folder itself, a mount, or the address. `node.data` has the program that copies."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from phalanx.core.units import parse_memory_bytes
from phalanx.core.work.job_file.data_mode import DataMode
from phalanx.core.work.job_file.data_sources import local_path
from phalanx.node.data.dataset_cache import DatasetCache
from phalanx.node.data.held_datasets import HeldDatasets, read_about
from phalanx.node.files.cache_folder import make_cache
from phalanx.node.files.job_accounts import acting_as, open_for_writing
from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.prepare.cached_folders import hold_folder, read_answer
from phalanx.node.prepare.data_mounts import DataMounts
from phalanx.node.prepare.data_server import DataServers
from phalanx.node.prepare.setup_runner import DATA_TASK, run_setup_command
from phalanx.wire.supervisor import StagingSample

LIMIT_VARIABLE: Final = "PHALANX_DATA_LIMIT"  # of the supervisor: the most that the datasets of one account take
_PROGRAM: Final = (sys.executable, "-I", "-m", "phalanx.node.data.staging_main")
_ID: Final = re.compile(r"[0-9a-f]{32}")
_PROGRESS_BYTES_MAX: Final = 4096


def provide(
    member: MemberRuntime,
    *,
    cache: str,
    limit: str,
    servers: DataServers,
    held: HeldDatasets,
    mounts: DataMounts,
    variables: Mapping[str, str],
    open_output: Callable[[], int],
) -> None:
    """Set `member.data` to what the ranks get for each dataset.

    Args:
        member: its processes must be open, if datasets are copied.
        cache: the node's cache folder.
        limit: of the datasets' bytes as the operator wrote it; "" for the default.
        servers: of chunks, for other nodes.
        held: receives the datasets that are here now.
        mounts: of object stores.
        variables: the environment of the program, with the job's credentials.
        open_output: as in `run_setup_command`.

    Raises:
        PreparationFailed: a dataset cannot be had here.
        OSError: the disk failed.
    """
    spec = member.prepare.spec
    match spec.data_mode:
        case DataMode.STREAM:
            member.data = spec.data
        case DataMode.MOUNT:
            member.data = _mounted(member, mounts, variables, open_output)
        case DataMode.STAGE:
            member.data = _staged(member, cache, limit, servers, held, variables, open_output)


def progress_of(member: MemberRuntime) -> StagingSample | None:
    """How far the staging of a member is; None if it stages nothing now."""
    if not member.staging:
        return None
    try:
        descriptor = os.open(member.staging, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            found = json.loads(file.read(_PROGRESS_BYTES_MAX))
        return msgspec.convert({**found, "job_id": member.key.job_id, "epoch": member.key.epoch}, StagingSample)
    except (OSError, ValueError, TypeError, msgspec.MsgspecError):
        return None


def _mounted(
    member: MemberRuntime, mounts: DataMounts, variables: Mapping[str, str], open_output: Callable[[], int]
) -> tuple[tuple[str, str], ...]:
    """Paths as they are, and all others as mounts that last until the member is wound up."""
    data = member.prepare.spec.data
    there = {name: _visible(member, name, source) for name, source in data if local_path(source) is not None}
    remote = tuple(one for one in data if one[0] not in there)
    if remote:
        there |= member.cleanup.enter_context(mounts.hold(member, remote, variables, open_output))
    return tuple((name, there[name]) for name, _ in data)


def _visible(member: MemberRuntime, name: str, source: str) -> str:
    path = local_path(source) or source
    with acting_as(member.account):
        if not os.path.exists(path):
            raise PreparationFailed(f"data {name}: {path} does not exist on this node", charge=True)
    return path


def _staged(
    member: MemberRuntime,
    cache: str,
    limit: str,
    servers: DataServers,
    held: HeldDatasets,
    variables: Mapping[str, str],
    open_output: Callable[[], int],
) -> tuple[tuple[str, str], ...]:
    spec = member.prepare.spec
    answer, order, progress, peers = (
        os.path.join(member.scratch.path, f"data.{end}") for end in ("json", "order", "progress", "peers")
    )
    datasets = DatasetCache(cache)
    with acting_as(member.account):
        make_cache(cache, member.account)
        with open(open_for_writing(order), "w", encoding="utf-8") as out:
            request = {
                "sources": spec.data,
                "cache": cache,
                "bytes_max": parse_memory_bytes(limit) if limit else 0,
                "rank": member.grant.node_rank,
                "nodes": len(member.prepare.allocation.grants),
                "peers": peers,
            }
            json.dump({**request, "answer": answer, "progress": progress}, out)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(answer)  # of a failed try
    member.staging = progress
    try:
        with servers.share(member, cache, peers):
            run_setup_command(member, DATA_TASK, (*_PROGRAM, order), variables, open_output, cwd="/")
    finally:
        member.staging = ""
    with acting_as(member.account):
        found = read_answer(answer)
        paths = found.get("paths")
        if not isinstance(paths, dict):
            why = str(found.get("why") or "staging the job's data was interrupted on this node")
            raise PreparationFailed(why, charge=found.get("charge") is True)
        return tuple((name, _path(member, datasets, paths.get(name), held)) for name, _ in spec.data)


def _path(member: MemberRuntime, datasets: DatasetCache, answer: object, held: HeldDatasets) -> str:
    """The path of a dataset, held until the member is wound up. The job's account wrote the answer, so it is checked."""
    name, inner = answer if isinstance(answer, list) and len(answer) == 2 else ("", "")
    if (
        not isinstance(name, str)
        or not _ID.fullmatch(name)
        or not isinstance(inner, str)
        or "/" in inner
        or inner in {".", ".."}
    ):
        raise PreparationFailed("staging the job's data gave no valid answer", charge=False)
    if not hold_folder(member, datasets, name):
        raise PreparationFailed("the job's data was removed right after it was staged", charge=False)
    about = read_about(datasets.path(name))
    if about is not None:
        held.add(about, datasets, name)
    return os.path.join(datasets.path(name), "files", inner).rstrip("/")

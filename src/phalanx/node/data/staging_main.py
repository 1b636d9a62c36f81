"""Stages a job's datasets on this node: `python -I -m phalanx.node.data.staging_main ORDER`.

Started by `prepare.data_staging` inside the member's containment and under its account, so that it reads what the job may read. Its output goes
to the job's log, its result into the answer file: {"paths": {name: [dataset, path below its files]}} or {"why": text, "charge": bool}.
ORDER is JSON: sources, cache, bytes_max, rank, nodes, answer, progress, peers (a file that the supervisor writes).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from phalanx.core.units import format_bytes, format_duration
from phalanx.durable_files import replace_file
from phalanx.node.data.dataset_cache import DatasetCache, NoRoom
from phalanx.node.data.peer_link import PeerFile
from phalanx.node.data.source_opener import open_source
from phalanx.node.data.sources import DataSource, SourceUnavailable
from phalanx.node.data.staging import Staging, StagingProgress
from phalanx.node.data.stored_dataset import StoredDataset, is_unchanged
from phalanx.node.logic.dataset import Dataset, DatasetInvalid
from phalanx.node.logic.output_mask import OutputMasker
from phalanx.node.logic.variables.secret_variables import only_secrets

_SAY_EVERY_S: Final = 10.0  # lines in the job's log; `show` has newer numbers
_LIST_TRIES: Final = 5


def main(arguments: Sequence[str]) -> int:
    """Write the answer; returns 0 if all datasets are here."""
    with open(arguments[0], encoding="utf-8") as file:
        order: dict[str, Any] = json.load(file)
    answer: dict[str, object]
    try:
        answer = {"paths": {name: _stage(order, name, source) for name, source in order["sources"]}}
    except DatasetInvalid as error:
        answer = {"why": f"data: {error}", "charge": True}
    except (SourceUnavailable, NoRoom, OSError) as error:
        answer = {"why": f"data could not be staged on this node: {error}", "charge": False}
    if "why" in answer:  # an error of a store may repeat a part of its request
        answer["why"] = OutputMasker(only_secrets(os.environ).values()).mask(str(answer["why"]).encode()).decode()
    replace_file("", order["answer"], json.dumps(answer).encode())
    if "why" in answer:
        _print(str(answer["why"]))
    return 1 if "why" in answer else 0


def _stage(order: dict[str, Any], name: str, url: str) -> list[str]:
    source = open_source(url, os.environ)
    dataset = _listed(source)
    cache = DatasetCache(order["cache"], order["bytes_max"])
    in_use = cache.acquire(dataset.id)  # from here on no other job evicts it
    try:
        with cache.creation_lock(dataset.id, wait=False) as mine:
            if mine:
                _bring(order, name, source, dataset, cache)
        if not mine:
            _print(f"data {name}: another job is staging it; waiting for it")
            with cache.creation_lock(dataset.id, wait=True):
                _bring(order, name, source, dataset, cache)
    finally:
        os.close(in_use)
    return [dataset.id, dataset.files[0].path if dataset.single else ""]


def _listed(source: DataSource) -> Dataset:
    for number in range(_LIST_TRIES):
        try:
            return source.list()
        except SourceUnavailable as error:
            if number == _LIST_TRIES - 1:
                raise
            _print(f"{error}; trying again")
            time.sleep(2.0**number)
    raise AssertionError


def _bring(order: dict[str, Any], name: str, source: DataSource, dataset: Dataset, cache: DatasetCache) -> None:
    about = (
        f"data {name}: {format_bytes(dataset.size_bytes)} in {len(dataset.files)} file{'s' * (len(dataset.files) > 1)}"
    )
    was_complete = cache.complete(dataset.id)
    if not was_complete:
        for gone in cache.make_room(dataset.id, dataset.size_bytes):
            _print(f"data {name}: removed the dataset {gone[:12]}, least recently used, to make room")
    elif is_unchanged(cache.path(dataset.id), dataset):
        _print(f"{about}: already on this node, 0 bytes moved")
        _Reporter(order, name)(
            StagingProgress(
                done_bytes=dataset.size_bytes,
                total_bytes=dataset.size_bytes,
                rate_bytes_per_s=0,
                from_source=0,
                from_peers=0,
            )
        )
        return
    began_s, cpu_s = time.monotonic(), time.process_time()
    stored = StoredDataset(cache.path(dataset.id), dataset)
    try:
        if was_complete:
            cache.mark_incomplete(dataset.id)
            bad = len(stored.verify())
            differ = "1 chunk does" if bad == 1 else f"{bad} chunks do"
            _print(f"data {name}: its files on this node were changed; {differ} not match")
        elif stored.digests:
            _print(f"data {name}: goes on at {format_bytes(stored.stored_bytes)}, which are here from before")
        staging = Staging(
            stored=stored,
            source=source,
            rank=order["rank"],
            nodes=order["nodes"],
            peers=PeerFile(order["peers"], dataset.id),
            on_progress=_Reporter(order, name),
            log=_print,
        )
        last = staging.run()
        moved = last.from_source + last.from_peers
        stored.finish(moved / max(time.monotonic() - began_s, 1e-3))
        cache.mark_complete(dataset.id)
    finally:
        stored.close()
    took_s = max(time.monotonic() - began_s, 1e-3)
    _print(
        f"{about}: staged in {format_duration(took_s)}, {format_bytes(last.from_source)} from the source and {format_bytes(last.from_peers)} from other nodes, {time.process_time() - cpu_s:.1f}s of CPU"
    )


class _Reporter:
    """Writes the progress to a file that the supervisor reads, and from time to time to the log."""

    def __init__(self, order: dict[str, Any], name: str) -> None:
        self._path, self._name = order["progress"], name
        self._logged_s = time.monotonic()

    def __call__(self, progress: StagingProgress) -> None:
        left = progress.total_bytes - progress.done_bytes
        eta_s = left / progress.rate_bytes_per_s if progress.rate_bytes_per_s > 0 else None
        fresh = f"{self._path}.new"
        with open(fresh, "w", encoding="ascii") as file:  # not synced: it is worth nothing after a power cut
            json.dump(
                {
                    "name": self._name,
                    "done_bytes": progress.done_bytes,
                    "total_bytes": progress.total_bytes,
                    "rate_bytes_per_s": progress.rate_bytes_per_s,
                    "from_source_bytes": progress.from_source,
                    "from_peers_bytes": progress.from_peers,
                },
                file,
            )
        os.replace(fresh, self._path)
        if time.monotonic() - self._logged_s >= _SAY_EVERY_S:
            self._logged_s = time.monotonic()
            ends = "" if eta_s is None else f", {format_duration(eta_s)} left"
            _print(
                f"data {self._name}: {format_bytes(progress.done_bytes)} of {format_bytes(progress.total_bytes)}, {format_bytes(int(progress.rate_bytes_per_s))}/s{ends}"
            )


def _print(text: str) -> None:
    sys.stdout.write(f"phalanx: {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

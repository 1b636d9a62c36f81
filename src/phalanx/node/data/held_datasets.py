"""Which datasets this node has a copy of, as its supervisor knows: those that it has staged, and under one account also those found at its start."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import msgspec

from phalanx.core.fleet.node import DATASETS_MAX, HeldDataset
from phalanx.core.work.job_file.data_sources import dataset_key
from phalanx.node.data.dataset_cache import DatasetCache
from phalanx.node.data.stored_dataset import ABOUT_FILE, StagedCopy, read_text


class HeldDatasets:
    """See the module. Called by many threads. `on_change` receives them when they have changed."""

    def __init__(self, cache: str, on_change: Callable[[tuple[HeldDataset, ...]], None]) -> None:
        """Look what is in the cache; "" if other accounts own their caches, whose links the supervisor must not follow."""
        self._on_change = on_change
        self._lock = threading.Lock()
        self._found: dict[str, tuple[str, HeldDataset]] = {}  # with the file that exists while it is complete
        self._reported: tuple[HeldDataset, ...] = ()
        datasets = DatasetCache(cache)
        for name in datasets.names() if cache else ():
            about = read_about(datasets.path(name))
            if about is not None:
                self._put(about, datasets.marker(name))

    def add(self, about: StagedCopy, datasets: DatasetCache, name: str) -> None:
        """A dataset was staged, or found."""
        with self._lock:
            self._put(about, datasets.marker(name))
        now = self.current()
        if now != self._reported:
            self._reported = now
            self._on_change(now)

    def current(self) -> tuple[HeldDataset, ...]:
        """The datasets that are complete now, by key; of too many the latest."""
        with self._lock:
            self._found = {key: one for key, one in self._found.items() if os.path.lexists(one[0])}
            return tuple(one for _, (_, one) in sorted(list(self._found.items())[-DATASETS_MAX:]))

    def _put(self, about: StagedCopy, marker: str) -> None:
        key = dataset_key(about.source)
        self._found.pop(key, None)
        one = HeldDataset(key=key, size_bytes=about.size_bytes, bytes_per_s=about.bytes_per_s)
        self._found[key] = (marker, one)


def read_about(folder: str) -> StagedCopy | None:
    """What a dataset's folder says about its copy; None if it says nothing valid."""
    try:
        return msgspec.json.decode(read_text(os.path.join(folder, ABOUT_FILE)).encode(), type=StagedCopy)
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return None

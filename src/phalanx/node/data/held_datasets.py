"""Which datasets this node has a copy of, as its supervisor knows: those that it has staged, and under one account also those found at its start."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from phalanx.core.fleet.node import DATASETS_MAX
from phalanx.core.work.data_sources import dataset_key
from phalanx.node.data.dataset_cache import DatasetCache
from phalanx.node.data.stored_dataset import SOURCE_FILE, read_text


class HeldDatasets:
    """See the module. Called by many threads. `on_change` receives the keys when they have changed."""

    def __init__(self, cache: str, on_change: Callable[[tuple[str, ...]], None]) -> None:
        """Look what is in the cache; "" if other accounts own their caches, whose links the supervisor must not follow."""
        self._on_change = on_change
        self._lock = threading.Lock()
        self._markers: dict[str, str] = {}
        self._reported: tuple[str, ...] = ()
        datasets = DatasetCache(cache)
        for name in datasets.names() if cache else ():
            source = read_text(os.path.join(datasets.path(name), SOURCE_FILE))
            if source:
                self._markers[dataset_key(source)] = datasets.marker(name)

    def add(self, source: str, datasets: DatasetCache, name: str) -> None:
        """A dataset was staged, or found."""
        with self._lock:
            self._markers.pop(dataset_key(source), None)
            self._markers[dataset_key(source)] = datasets.marker(name)
        found = self.keys()
        if found != self._reported:
            self._reported = found
            self._on_change(found)

    def keys(self) -> tuple[str, ...]:
        """The keys of the datasets that are complete now, sorted; of too many the latest."""
        with self._lock:
            self._markers = {key: marker for key, marker in self._markers.items() if os.path.lexists(marker)}
            return tuple(sorted(list(self._markers)[-DATASETS_MAX:]))

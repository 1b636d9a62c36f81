"""Why jobs wait, for readers on other threads than the controller's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

from phalanx.core.ids import JobId
from phalanx.core.state.plan import Waiting


class GuardedWaits(Mapping[JobId, Waiting]):
    """The scheduler's waits, each worked out when asked and while the scheduler stands still."""

    def __init__(self, waits: Mapping[JobId, Waiting], guard: AbstractContextManager[object]) -> None:
        self._waits, self._guard = waits, guard

    def __getitem__(self, job_id: JobId) -> Waiting:
        with self._guard:
            return self._waits[job_id]

    def __iter__(self) -> Iterator[JobId]:
        with self._guard:
            return iter(list(self._waits))

    def __len__(self) -> int:
        with self._guard:
            return len(self._waits)

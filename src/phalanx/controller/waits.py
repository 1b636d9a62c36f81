"""Why jobs wait, for readers on other threads than the controller's."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from contextlib import AbstractContextManager

from phalanx.core.ids import JobId
from phalanx.core.state.plan import WaitReason


class GuardedWaits(Mapping[JobId, WaitReason]):
    """The scheduler's waits, each computed on access under the scheduler's guard.

    Jobs may start between two accesses: `items` and `values` leave out those that no longer wait.
    """

    def __init__(self, waits: Mapping[JobId, WaitReason], guard: AbstractContextManager[object]) -> None:
        self._waits, self._guard = waits, guard

    def __getitem__(self, job_id: JobId) -> WaitReason:
        with self._guard:
            return self._waits[job_id]

    def __iter__(self) -> Iterator[JobId]:
        with self._guard:
            return iter(list(self._waits))

    def __len__(self) -> int:
        with self._guard:
            return len(self._waits)

    def items(self) -> ItemsView[JobId, WaitReason]:
        """The jobs that still wait, with their reasons."""
        return self._current().items()

    def values(self) -> ValuesView[WaitReason]:
        """The reasons of `items`."""
        return self._current().values()

    def _current(self) -> dict[JobId, WaitReason]:
        return {job_id: wait for job_id in self if (wait := self.get(job_id)) is not None}

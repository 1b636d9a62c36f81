"""The activity of each device, from the samples that supervisors send: one window of samples for each generation of a job on a device."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.core.accounting.activity import Activity, ActivityWindow
from phalanx.core.ids import Epoch, Generation, JobId, NodeId
from phalanx.core.work.attempt import Attempt
from phalanx.wire.supervisor import DeviceSample


@dataclass(slots=True)
class _Window:
    """`silent_at_ms`: when the samples are too old to say anything."""

    of: tuple[JobId, Epoch, Generation] | None
    window: ActivityWindow = field(default_factory=ActivityWindow)
    activity: Activity | None = None
    silent_at_ms: int = 0


class DeviceActivities:
    """See the module."""

    def __init__(self) -> None:
        self._windows: dict[NodeId, dict[int, _Window]] = {}

    def add(
        self, node_id: NodeId, sample: DeviceSample, attempt: Attempt | None, now_ms: int, silent_at_ms: int
    ) -> None:
        """Take a sample that has just arrived. `attempt`: of the job that it names; None if that holds nothing any more."""
        of = None if attempt is None else (attempt.job_id, attempt.epoch, attempt.generation)
        windows = self._windows.setdefault(node_id, {})
        known = windows.get(sample.index)
        if known is None or known.of != of:
            known = windows[sample.index] = _Window(of)
        known.silent_at_ms = silent_at_ms
        if sample.utilization is not None:
            known.activity = known.window.add(now_ms, sample.utilization, empty=sample.processes == 0)

    def find(self, node_id: NodeId, index: int, attempt: Attempt, now_ms: int, *, shared: bool) -> Activity | None:
        """The activity of a device; of a shared one, that of all its jobs together. None without recent samples."""
        window = self._windows.get(node_id, {}).get(index)
        if window is None or window.of is None or now_ms >= window.silent_at_ms:
            return None
        of_attempt = window.of == (attempt.job_id, attempt.epoch, attempt.generation)
        return window.activity if of_attempt or shared else None

    def restart(self, attempt: Attempt) -> None:
        """Judge the attempt by samples from now on: before, it stood still for a save."""
        for grant in attempt.allocation.grants:
            windows = self._windows.get(grant.node_id, {})
            for index in grant.devices:
                if index in windows:
                    windows[index].window.restart()

    def drop_node(self, node_id: NodeId) -> None:
        """Drop what is known of a node's devices."""
        self._windows.pop(node_id, None)

"""The disk space that the outputs of each project take at the head, and the limit on it. Only what nodes upload can be refused.

All folders are measured in one pass, which is repeated when it is old; what arrives in between is added. A piece that would be refused causes a
new pass, since outputs may have been removed or replaced meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from typing import Final

from phalanx.api.services import HeadServices
from phalanx.core.errors import OutputsFull
from phalanx.core.ids import JobId, ProjectId
from phalanx.core.state.records import PROJECTS
from phalanx.core.units import format_bytes
from phalanx.store.disk_usage import job_folders, tree_bytes
from phalanx.store.outputs.copies import OutputCopies

_MEASURE_EVERY_S: Final = 600.0
_AGAIN_S: Final = 5.0  # between passes for pieces that would be refused,
_AGAIN_FACTOR: Final = 20.0  # and at most this part of the time


class OutputUsage:
    """See the module. Thread-safe; blocks while it measures."""

    def __init__(self, services: HeadServices, copies: OutputCopies) -> None:
        self._services, self._copies = services, copies
        self._lock = threading.Lock()  # of the numbers
        self._measuring = threading.Lock()
        self._used: Counter[ProjectId] = Counter()
        self._arrived: Counter[ProjectId] = Counter()  # since the pass under way, or the last one, began
        self._measured_s: float | None = None
        self._took_s = 0.0

    def used_bytes(self, project_id: ProjectId) -> int:
        """Return what the outputs of a project's jobs occupy, at most 10 minutes old."""
        self._measure(_MEASURE_EVERY_S)
        with self._lock:
            return self._used[project_id] + self._arrived[project_id]

    def add(self, job_id: JobId, size_bytes: int) -> None:
        """Count a piece that a node sends.

        Raises:
            OutputsFull: the project's limit would be exceeded; it is not counted.
        """
        job = self._services.store.job(job_id)
        project = None if job is None else self._services.store.record(PROJECTS, job.project)
        if project is None or not project.outputs_bytes:
            return
        used = self.used_bytes(project.id)
        if used + size_bytes > project.outputs_bytes:
            self._measure(max(_AGAIN_S, _AGAIN_FACTOR * self._took_s))
            used = self.used_bytes(project.id)
        if used + size_bytes > project.outputs_bytes:
            raise OutputsFull(
                f"project {project.id} has {format_bytes(used)} of outputs at the head, and may have"
                f" {format_bytes(project.outputs_bytes)}",
                hint="remove outputs, or ask an admin for more space",
            )
        with self._lock:
            self._arrived[project.id] += size_bytes

    def _measure(self, older_s: float) -> None:
        """Measure all folders, if the last pass is older than that."""
        with self._measuring:
            began_s = self._services.clock.boottime_s()
            if self._measured_s is not None and began_s - self._measured_s < older_s:
                return
            with self._lock:
                before, self._arrived = self._arrived, Counter()
                self._used.update(before)  # until the new sums are there
            used: Counter[ProjectId] = Counter()
            root = self._services.output_root
            folders = [(os.path.join(root, name), job_id) for name, job_id in job_folders(root)]
            for folder, job_id in folders + self._copies.upload_folders():
                job = self._services.store.job(job_id)
                if job is not None:
                    used[job.project] += tree_bytes(folder)
            self._measured_s = self._services.clock.boottime_s()
            self._took_s = self._measured_s - began_s
            with self._lock:
                self._used = used

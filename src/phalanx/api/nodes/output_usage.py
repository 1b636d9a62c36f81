"""The disk space that the outputs of each project take at the head, and the limit on it. Only what nodes upload can be refused.

What a project takes of its limit is reported once a minute. All folders are measured in one pass, which is repeated when it is old; what arrives in between is added. A piece that would be refused causes a
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
from phalanx.core.state.reports import OutputsReached
from phalanx.core.units import format_bytes
from phalanx.core.work.queue import Project
from phalanx.store.disk_usage import job_folders, tree_bytes
from phalanx.store.outputs.copies import OutputCopies

WARN_PERCENT: Final = 80
_REFUSED_S: Final = 3600.0  # after a refused piece the space counts as full: nodes try again all the time
_LARGEST: Final = 3  # jobs that a warning names
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
        self._refused_s: dict[tuple[ProjectId, int], float] = {}  # when the last piece was, under this limit
        self._largest: dict[ProjectId, tuple[tuple[JobId, int], ...]] = {}

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
            with self._lock:
                self._refused_s[project.id, project.outputs_bytes] = self._services.clock.boottime_s()
            raise OutputsFull(
                f"project {project.id} has {format_bytes(used)} of outputs at the head, and may have"
                f" {format_bytes(project.outputs_bytes)}",
                hint="remove outputs, or ask an admin for more space",
            )
        with self._lock:
            self._arrived[project.id] += size_bytes

    def check(self) -> None:
        """Report projects whose outputs have reached, or no longer reach, a part of their limit."""
        limited = [project for project in self._services.store.projects() if project.outputs_bytes]
        if any(self._report(project) is not None for project in limited):
            self._measure(max(_AGAIN_S, _AGAIN_FACTOR * self._took_s))
        reports = [one for one in map(self._report, limited) if one is not None]
        if reports:
            self._services.controller.report(reports).result()

    def _report(self, project: Project) -> OutputsReached | None:
        used = self.used_bytes(project.id)
        with self._lock:
            since_s = self._services.clock.boottime_s() - self._refused_s.get(
                (project.id, project.outputs_bytes), -_REFUSED_S
            )
            most = self._largest.get(project.id, ())
        share = used * 100 // project.outputs_bytes
        percent = 100 if since_s < _REFUSED_S or share >= 100 else WARN_PERCENT if share >= WARN_PERCENT else 0
        if project.outputs_warned == 100 and share >= WARN_PERCENT:
            percent = 100  # a file that did not fit is as good as none: there is no news before there is room
        if percent == project.outputs_warned:
            return None
        return OutputsReached(
            project_id=project.id, limit_bytes=project.outputs_bytes, used_bytes=used, percent=percent, most=most
        )

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
            jobs: dict[ProjectId, Counter[JobId]] = {}
            root = self._services.output_root
            folders = [(os.path.join(root, name), job_id) for name, job_id in job_folders(root)]
            for folder, job_id in folders + self._copies.upload_folders():
                job = self._services.store.job(job_id)
                if job is not None:
                    size = tree_bytes(folder)
                    used[job.project] += size
                    jobs.setdefault(job.project, Counter())[job_id] += size
            self._measured_s = self._services.clock.boottime_s()
            self._took_s = self._measured_s - began_s
            with self._lock:
                self._largest = {project: tuple(sizes.most_common(_LARGEST)) for project, sizes in jobs.items()}
                self._used = used

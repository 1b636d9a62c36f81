"""The address of a web program: /j/JOB/PORT/..., or /j/JOB.N/PORT/... on node N of the job. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import JobId
from phalanx.core.work.job_file.web_ports import PORT_MAX, web_path

OPEN_PATH: Final = ".phalanx/open"  # below a program's path: where a browser begins
_PATH: Final = re.compile(r"/j/([0-9]{1,18}(?:_[0-9]{1,9})?)(?:\.([0-9]{1,6}))?/([0-9]{1,5})(/.*)?", re.DOTALL)
_LABEL: Final = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,9}))?(?:-n([0-9]{1,6}))?-p([0-9]{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTarget:
    """A port beside the ranks of one node of a job."""

    job_id: JobId
    port: int
    node_rank: int = 0

    @property
    def prefix(self) -> str:
        """The path of its pages at the head; it ends with a slash."""
        return web_path(self.job_id, self.port, self.node_rank)

    @property
    def label(self) -> str:
        """The first part of its own host name: 17-p8888, or 17-3-n1-p8888 for node 1 of element 17_3."""
        node = f"-n{self.node_rank}" if self.node_rank else ""
        return f"{self.job_id.replace('_', '-')}{node}-p{self.port}"


def parse_program_path(path: str) -> tuple[ProgramTarget, str] | None:
    """Return the program of a path and the rest, which begins with a slash or is empty; None for any other path."""
    found = _PATH.fullmatch(path)
    if found is None or not 1 <= int(found[3]) <= PORT_MAX:
        return None
    target = ProgramTarget(job_id=JobId(found[1]), port=int(found[3]), node_rank=int(found[2] or 0))
    return target, found[4] or ""


def parse_label(label: str) -> ProgramTarget | None:
    """Return the program of the first part of a host name; None for any other one."""
    found = _LABEL.fullmatch(label)
    if found is None or not 1 <= int(found[4]) <= PORT_MAX:
        return None
    job_id = JobId(f"{found[1]}_{found[2]}" if found[2] else found[1])
    return ProgramTarget(job_id=job_id, port=int(found[4]), node_rank=int(found[3] or 0))

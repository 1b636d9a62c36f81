"""Prints the waiting jobs that a change of the queues or nodes makes impossible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phalanx.cli.cells import count
from phalanx.wire.api.jobs import ImpossibleJobView


def impossible_lines(jobs: Sequence[ImpossibleJobView], more: int, *, dry_run: bool) -> Iterator[str]:
    """Yield a title and a line for each job; nothing without a job."""
    if not jobs:
        return
    yield f"{count(len(jobs) + more, 'waiting job')} {'could' if dry_run else 'can'} never start any more:"
    for job in jobs:
        yield f"  job {job.id}: {job.why}"
    if more:
        yield f"  and {more} more"

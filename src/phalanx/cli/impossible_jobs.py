"""Prints a change of the fleet, and the waiting jobs that it makes impossible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phalanx.cli.cells import count
from phalanx.cli.list_output import to_json
from phalanx.cli.terminal import strip_control
from phalanx.wire.api.jobs import ImpossibleJobView
from phalanx.wire.api.licences import LicenceChanged
from phalanx.wire.api.pools import PoolRemoved


def print_change(changed: LicenceChanged | PoolRemoved, text: str, *, as_json: bool) -> None:
    """Print the text and these jobs; as JSON what the head replied."""
    if as_json:
        print(to_json(changed, indent=2))
        return
    for line in (text, *impossible_lines(changed.impossible, changed.impossible_more, dry_run=False)):
        print(strip_control(line))


def impossible_lines(jobs: Sequence[ImpossibleJobView], more: int, *, dry_run: bool) -> Iterator[str]:
    """Yield a title and a line for each job; nothing without a job."""
    if not jobs:
        return
    yield f"{count(len(jobs) + more, 'waiting job')} {'could' if dry_run else 'can'} never start any more:"
    for job in jobs:
        yield f"  job {job.id}: {job.why}"
    if more:
        yield f"  and {more} more"

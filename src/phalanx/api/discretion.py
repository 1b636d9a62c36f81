"""What others see of a job: that it is there, whose it is, how it stands and what became of it in our words; never what its owner's
words, paths or programs say.

Whoever may see jobs sees all of them, since everybody waits in the same queues. Command, folders, labels and environment are for those
who `sees_all_of` names; so is every sentence into which a path, a command, or a program's own words may have come.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from phalanx.api.gate import sees_all_of
from phalanx.core.access.roles import Caller
from phalanx.core.ids import JobId
from phalanx.core.state.story import StoryLine
from phalanx.ports.store import Store

# Lines whose sentence is made of numbers, names of nodes and users, and our own words. Any other kind is told without its sentence.
PLAIN_KINDS: Final = frozenset(
    {"submitted", "placed", "running", "held", "released", "dependencies_met", "port_in_use"}
)
HIDDEN: Final = "(for its owner and project)"


class Discretion:
    """One caller's view of many lines. What was looked up of a job is kept: ask for one request, not for longer."""

    def __init__(self, store: Store, caller: Caller) -> None:
        self._store = store
        self._caller = caller
        self._whole: dict[JobId, bool] = {}

    def sees(self, job_id: JobId) -> bool:
        """Whether the caller sees all of a job."""
        known = self._whole.get(job_id)
        if known is None:
            job = self._store.job(job_id)
            known = self._whole[job_id] = job is None or sees_all_of(self._caller, job)
        return known

    def lines(self, lines: Iterable[StoryLine]) -> list[StoryLine]:
        """The lines as the caller may read them."""
        return [self.line(line) for line in lines]

    def line(self, line: StoryLine) -> StoryLine:
        """One of them."""
        if line.job_id is None or line.kind in PLAIN_KINDS or self.sees(line.job_id):
            return line
        return replace(line, text=f"{line.kind.replace('_', ' ')} {HIDDEN}", facts={})

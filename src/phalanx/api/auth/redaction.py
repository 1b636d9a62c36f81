"""Hides what other users may not see of a job.

A caller who may see jobs sees that every job exists, its owner, its state and its outcome, since all users wait in the same queues.
Command, folders, labels and environment are only for the callers that `may_see_all_of` accepts. So is every sentence that may quote a
path, a command or the output of a program.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from phalanx.api.auth.authenticator import may_see_all_of
from phalanx.core.access.caller import Caller
from phalanx.core.ids import JobId
from phalanx.core.state.history import HistoryLine
from phalanx.ports.store import Store

# Kinds of lines whose text the head alone writes, from numbers and the names of nodes and users. Other kinds are shown without text.
PUBLIC_KINDS: Final = frozenset(
    {
        "submitted",
        "placed",
        "running",
        "held",
        "released",
        "dependencies_met",
        "port_in_use",
        "idle_warning",
        "idle_notice",
        "idle_ended",
    }
)
REDACTED: Final = "(for its owner and project)"


class JobRedactor:
    """Redacts lines for one caller. Caches what it looked up per job, so use one instance per request only."""

    def __init__(self, store: Store, caller: Caller) -> None:
        self._store = store
        self._caller = caller
        self._visible: dict[JobId, bool] = {}

    def may_see_all(self, job_id: JobId) -> bool:
        """Whether the caller may see all of a job."""
        known = self._visible.get(job_id)
        if known is None:
            job = self._store.job(job_id)
            known = self._visible[job_id] = job is None or may_see_all_of(self._caller, job)
        return known

    def redact_all(self, lines: Iterable[HistoryLine]) -> list[HistoryLine]:
        """Return the lines as the caller may read them."""
        return [self.redact(line) for line in lines]

    def redact(self, line: HistoryLine) -> HistoryLine:
        """Return one line as the caller may read it."""
        if line.job_id is None or self.may_see_all(line.job_id):
            return line
        return redact_line(line)


def redact_line(line: HistoryLine) -> HistoryLine:
    """Return a line of a job as a caller may read it who may not see all of that job."""
    if line.kind in PUBLIC_KINDS:
        return line
    return replace(line, text=f"{line.kind.replace('_', ' ')} {REDACTED}", facts={})

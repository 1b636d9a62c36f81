"""All kinds of records in a database, sorted so that each comes after the kinds that it refers to."""

from __future__ import annotations

from typing import Any, Final

from phalanx.core.access.audit import AuditLine
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.records import ATTEMPT_USES, ATTEMPTS, IDEMPOTENCY, JOBS, RECORDS, RecordColumn, RecordKind

HISTORY: Final = RecordKind[int, HistoryLine](
    "history line",
    HistoryLine,
    "history",
    key=("seq",),
    columns=(RecordColumn("seq", int), RecordColumn("job_id"), RecordColumn("node_id")),
    pages=(("seq", -1),),
    append_only=True,
)
AUDIT: Final = RecordKind[int, AuditLine](
    "audit line",
    AuditLine,
    "audit",
    key=("seq",),
    columns=(RecordColumn("seq", int), RecordColumn("at_s", float), RecordColumn("user")),
    pages=(("seq", -1),),
    append_only=True,
)
KINDS: Final[tuple[RecordKind[Any, Any], ...]] = (*RECORDS, HISTORY, AUDIT)
KINDS_OF_JOBS: Final[tuple[RecordKind[Any, Any], ...]] = (HISTORY, IDEMPOTENCY, ATTEMPT_USES, ATTEMPTS, JOBS)
"""The kinds whose records leave with an archived job: those that refer to it, then the job itself."""
KIND_BY_NAME: Final = {kind.name: kind for kind in KINDS}

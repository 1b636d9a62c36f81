"""All kinds of records in a database, sorted so that each comes after the kinds that it refers to. Used by backup and restore."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from phalanx.store.sql import documents
from phalanx.store.sql.documents import Column, RecordCodec, Row


@dataclass(frozen=True, slots=True)
class StoredKind:
    """One kind.

    Attributes:
        name: name of the kind in a backup.
        query: the named query for all of them, or for a page of them.
        first: for a paged query: the key before the first. In its rows, the key follows document and checksum.
        statement: the named statement that writes one; `row` creates its parameters.
    """

    name: str
    kind: RecordCodec[Any]
    query: str
    statement: str
    row: Callable[[Any], Row]
    first: tuple[Column, ...] = ()


KINDS: Final = (
    StoredKind("user", documents.USER, "users", "put_user", documents.user_row),
    StoredKind("project", documents.PROJECT, "projects", "put_project", documents.project_row),
    StoredKind("token", documents.TOKEN, "tokens", "put_token", documents.token_row),
    StoredKind("queue", documents.QUEUE, "queues", "put_queue", documents.queue_row),
    StoredKind("spent", documents.SPENT, "spent", "put_spent", documents.spent_row),
    StoredKind("reservation", documents.RESERVATION, "all_reservations", "put_reservation", documents.reservation_row),
    StoredKind("calibration", documents.CALIBRATION, "calibrations", "put_calibration", documents.calibration_row),
    StoredKind("rules", documents.FAILURE_RULES, "all_failure_rules", "put_failure_rules", documents.failure_rules_row),
    StoredKind("node", documents.NODE, "nodes", "put_node", documents.node_row),
    StoredKind("job", documents.JOB, "page_of_jobs", "put_job", documents.job_row, (-1,)),
    StoredKind("attempt", documents.ATTEMPT, "page_of_attempts", "put_attempt", documents.attempt_row, ("", -1)),
    StoredKind("key", documents.IDEMPOTENCY, "page_of_keys", "put_idempotency", documents.idempotency_row, (-1,)),
    StoredKind("story", documents.STORY, "page_of_story", "add_story", documents.story_row, (-1,)),
    StoredKind("audit", documents.AUDIT, "page_of_audit", "add_audit", documents.audit_row, (-1,)),
)
KIND_BY_NAME: Final = {stored.name: stored for stored in KINDS}

"""All kinds of records in a database, sorted so that each comes after the kinds that it refers to. Used by backup and restore."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from phalanx.store.sql import documents
from phalanx.store.sql.documents import Column, Kind, Row


@dataclass(frozen=True, slots=True)
class Stored:
    """One kind.

    Attributes:
        word: name of the kind in a backup.
        read: the named query for all of them, or for a page of them.
        first: for a paged query: the key before the first. In its rows, the key follows document and checksum.
        put: the named statement that writes one; `row` creates its parameters.
    """

    word: str
    kind: Kind[Any]
    read: str
    put: str
    row: Callable[[Any], Row]
    first: tuple[Column, ...] = ()


KINDS: Final = (
    Stored("user", documents.USER, "users", "put_user", documents.user_row),
    Stored("project", documents.PROJECT, "projects", "put_project", documents.project_row),
    Stored("token", documents.TOKEN, "tokens", "put_token", documents.token_row),
    Stored("queue", documents.QUEUE, "queues", "put_queue", documents.queue_row),
    Stored("spent", documents.SPENT, "spent", "put_spent", documents.spent_row),
    Stored("reservation", documents.RESERVATION, "all_reservations", "put_reservation", documents.reservation_row),
    Stored("calibration", documents.CALIBRATION, "calibrations", "put_calibration", documents.calibration_row),
    Stored("rules", documents.FAILURE_RULES, "all_failure_rules", "put_failure_rules", documents.failure_rules_row),
    Stored("node", documents.NODE, "nodes", "put_node", documents.node_row),
    Stored("job", documents.JOB, "page_of_jobs", "put_job", documents.job_row, (-1,)),
    Stored("attempt", documents.ATTEMPT, "page_of_attempts", "put_attempt", documents.attempt_row, ("", -1)),
    Stored("key", documents.IDEMPOTENCY, "page_of_keys", "put_idempotency", documents.idempotency_row, (-1,)),
    Stored("story", documents.STORY, "page_of_story", "add_story", documents.story_row, (-1,)),
    Stored("audit", documents.AUDIT, "page_of_audit", "add_audit", documents.audit_row, (-1,)),
)
BY_WORD: Final = {stored.word: stored for stored in KINDS}

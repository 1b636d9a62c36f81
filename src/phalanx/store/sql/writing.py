"""Converts a batch, or the records of a backup, to rows of named statements. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

from phalanx.core.work.attempt import Attempt
from phalanx.ports.store import Batch
from phalanx.store.commit_checks import BatchRows
from phalanx.store.sql import documents
from phalanx.store.sql.documents import Row

_LOT: Final = 1000  # records of a backup written at once


def statements(batch: Batch, rows: BatchRows) -> list[tuple[str, list[Row]]]:
    """Named statements and their rows, sorted so that each row comes after those that it refers to. Removals come after records: a node
    that is put and removed is gone.
    """
    plan: list[tuple[str, list[Row]]] = [
        ("put_user", [documents.user_row(user) for user in rows.users.values()]),
        ("put_project", [documents.project_row(project) for project in rows.projects.values()]),
        ("put_token", [documents.token_row(token) for token in rows.tokens.values()]),
        ("put_queue", [documents.queue_row(queue) for queue in rows.queues.values()]),
        ("put_spent", [documents.spent_row(spent) for spent in rows.queue_usage.values()]),
        ("remove_queue", [(queue_id,) for queue_id in batch.removed_queues]),
        ("remove_spent", [(queue_id,) for queue_id in batch.removed_queues]),
        ("put_reservation", [documents.reservation_row(one) for one in rows.reservations.values()]),
        ("put_calibration", [documents.calibration_row(one) for one in rows.calibrations.values()]),
        ("put_failure_rules", [documents.failure_rules_row(one) for one in rows.failure_rules.values()]),
        ("put_node", [documents.node_row(node) for node in rows.nodes.values()]),
        ("remove_node", [(node_id,) for node_id in batch.removed_nodes]),
        ("put_job", [documents.job_row(job) for job in rows.jobs.values()]),
        ("put_attempt", [documents.attempt_row(attempt) for attempt in _ended_first(rows.attempts.values())]),
        ("put_idempotency", [documents.idempotency_row(key) for key in rows.idempotency.values()]),
        ("add_story", [documents.story_row(line) for line in batch.story]),
        ("add_audit", [documents.audit_row(line) for line in batch.audit]),
    ]
    return [(name, values) for name, values in plan if values]


def _ended_first(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Ended attempts first, so that no job has two live attempts in between."""
    return sorted(attempts, key=lambda attempt: attempt.holds_allocation)


def grouped(records: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Group consecutive records of one kind, at most _LOT in a group."""
    rest = iter(records)
    word, lot = "", list[Any]()
    while chunk := list(islice(rest, _LOT)):
        for kind, record in chunk:
            if kind != word or len(lot) >= _LOT:
                if lot:
                    yield word, lot
                word, lot = kind, []
            lot.append(record)
    if lot:
        yield word, lot

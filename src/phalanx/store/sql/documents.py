"""Encodes records as rows and decodes them: a JSON document, its checksum, and the columns that are searched. Pure."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import msgspec

from phalanx.core.access.audit import AuditLine
from phalanx.core.fleet.documents import FleetDocument
from phalanx.core.fleet.failure_rules import FailureRules
from phalanx.core.fleet.node import Node
from phalanx.core.state.story import StoryLine
from phalanx.core.state.world import Idempotency, Record
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Project, Queue, QueueUsage
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.users import Token, User
from phalanx.ports.store import StoreRefused
from phalanx.store.errors import StoreUnusable

T = TypeVar("T")
Column = str | int | float | None
Row = tuple[Column, ...]

_encoder: Final = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class RecordCodec(Generic[T]):
    """Decoder for documents of one kind. Built once, since building a decoder costs a thousand uses."""

    name: str
    decoder: msgspec.json.Decoder[T]

    def decode(self, doc: object, crc: object) -> T:
        """Decode a document.

        Raises:
            StoreUnusable: the document was changed, or is not of this kind.
        """
        content = doc.encode() if isinstance(doc, str) else b""  # a damaged row may contain anything
        if not content or zlib.crc32(content) != crc:
            raise StoreUnusable(
                f"a record of kind {self.name} is damaged in the database (checksum): {str(doc)[:80]!r}",
                hint="restore the database from a backup; the disk may be failing",
            )
        try:
            return self.decoder.decode(content)
        except msgspec.DecodeError as error:
            raise StoreUnusable(
                f"a record of kind {self.name} cannot be read ({error}): {str(doc)[:80]}",
                hint="was the database written by another release?",
            ) from error


JOB: Final = RecordCodec("job", msgspec.json.Decoder(Job))
ATTEMPT: Final = RecordCodec("attempt", msgspec.json.Decoder(Attempt))
NODE: Final = RecordCodec("node", msgspec.json.Decoder(Node))
QUEUE: Final = RecordCodec("queue", msgspec.json.Decoder(Queue))
SPENT: Final = RecordCodec("use of a queue", msgspec.json.Decoder(QueueUsage))
PROJECT: Final = RecordCodec("project", msgspec.json.Decoder(Project))
USER: Final = RecordCodec("user", msgspec.json.Decoder(User))
TOKEN: Final = RecordCodec("token", msgspec.json.Decoder(Token))
RESERVATION: Final = RecordCodec("reservation", msgspec.json.Decoder(Reservation))
CALIBRATION: Final = RecordCodec("calibration", msgspec.json.Decoder(FleetDocument))
FAILURE_RULES: Final = RecordCodec("failure rules", msgspec.json.Decoder(FailureRules))
IDEMPOTENCY: Final = RecordCodec("idempotency key", msgspec.json.Decoder(Idempotency))
STORY: Final = RecordCodec("story line", msgspec.json.Decoder(StoryLine))
AUDIT: Final = RecordCodec("audit line", msgspec.json.Decoder(AuditLine))


def user_row(user: User) -> Row:
    """Row of `put_user`."""
    return (user.id, user.role.value, int(user.disabled), *_document(user))


def project_row(project: Project) -> Row:
    """Row of `put_project`."""
    return (project.id, *_document(project))


def queue_row(queue: Queue) -> Row:
    """Row of `put_queue`."""
    return (queue.id, *_document(queue))


def spent_row(spent: QueueUsage) -> Row:
    """Row of `put_spent`."""
    return (spent.queue, *_document(spent))


def reservation_row(reservation: Reservation) -> Row:
    """Row of `put_reservation`."""
    return (reservation.id, int(reservation.ended), *_document(reservation))


def calibration_row(calibration: FleetDocument) -> Row:
    """Row of `put_calibration`."""
    return (calibration.id, *_document(calibration))


def failure_rules_row(rules: FailureRules) -> Row:
    """Row of `put_failure_rules`."""
    return (rules.id, *_document(rules))


def token_row(token: Token) -> Row:
    """Row of `put_token`."""
    return (token.id, token.user, token.sha256, float(token.created_s), *_document(token))


def node_row(node: Node) -> Row:
    """Row of `put_node`."""
    return (node.id, node.state.value, *_document(node))


def job_row(job: Job) -> Row:
    """Row of `put_job`."""
    return (
        job.seq,
        job.id,
        job.state.value,
        job.user,
        job.project,
        job.queue,
        job.name,
        float(job.submit_s),
        None if job.ended_s is None else float(job.ended_s),
        job.epoch,
        *_document(job),
    )


def attempt_row(attempt: Attempt) -> Row:
    """Row of `put_attempt`."""
    return (attempt.job_id, attempt.epoch, attempt.state.value, *_document(attempt))


def idempotency_row(key: Idempotency) -> Row:
    """Row of `put_idempotency`."""
    return (key.user, key.key, key.job_id, *_document(key))


def story_row(line: StoryLine) -> Row:
    """Row of `add_story`."""
    return (line.seq, line.job_id, line.node_id, *_document(line))


def audit_row(line: AuditLine) -> Row:
    """Row of `add_audit`."""
    return (line.seq, float(line.at_s), line.user, *_document(line))


def _document(record: Record | StoryLine | AuditLine) -> tuple[str, int]:
    """The JSON of a record and its CRC-32.

    Raises:
        StoreRefused: the record cannot be encoded: an unpaired surrogate, or a number of more than 64 bits.
    """
    try:
        content = _encoder.encode(record)
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError) as error:
        raise StoreRefused(
            f"a record of kind {type(record).__name__} cannot be written ({error}): {str(record)[:80]!r}"
        ) from error
    return content.decode(), zlib.crc32(content)

"""What is asked of the database. Each function takes a connection and leaves it as it was; nothing here writes."""

from __future__ import annotations

from typing import Final, TypeVar

import apsw

from phalanx.core.ids import JobId, NodeId
from phalanx.core.state.story import StoryLine
from phalanx.core.state.world import World
from phalanx.core.work.job import Job, JobState
from phalanx.ports.store import JobFilter
from phalanx.store.errors import StoreUnusable
from phalanx.store.loading import ENDED_JOBS_LOADED, KEYS_LOADED, build_world
from phalanx.store.sql import documents
from phalanx.store.sql.documents import Column, Kind
from phalanx.store.sql.queries import queries

T = TypeVar("T")
_READS: Final = queries("sqlite", "reads.sql")
_INTEGER_MAX: Final = 2**63 - 1  # SQLite's


def records(connection: apsw.Connection, kind: Kind[T], name: str, values: tuple[Column, ...] = ()) -> list[T]:
    """All records that a named query finds."""
    return [
        kind.read(doc, crc) for doc, crc in list(connection.execute(_READS[name], values))
    ]  # read to the end before one may fail


def record(connection: apsw.Connection, kind: Kind[T], name: str, value: Column) -> T | None:
    """The one record that a named query finds, or None."""
    found = records(connection, kind, name, (value,))
    return found[0] if found else None


def number(connection: apsw.Connection, name: str) -> int:
    """The one number of a named query; 0 for none."""
    row = connection.execute(_READS[name]).fetchone()
    return int(row[0] or 0) if row is not None else 0


def load_world(connection: apsw.Connection) -> World:
    """Everything alive, as of one moment."""
    connection.execute("BEGIN")
    try:
        return build_world(
            nodes=records(connection, documents.NODE, "nodes"),
            queues=records(connection, documents.QUEUE, "queues"),
            spent=records(connection, documents.SPENT, "spent"),
            projects=records(connection, documents.PROJECT, "projects"),
            users=records(connection, documents.USER, "users"),
            tokens=records(connection, documents.TOKEN, "tokens"),
            reservations=records(connection, documents.RESERVATION, "reservations"),
            calibrations=records(connection, documents.CALIBRATION, "calibrations"),
            jobs=_jobs_to_load(connection),
            attempts=records(connection, documents.ATTEMPT, "live_attempts"),
            idempotency=reversed(records(connection, documents.IDEMPOTENCY, "newest_idempotency", (KEYS_LOADED,))),
            last_job_seq=number(connection, "last_job_seq"),
            last_story_seq=number(connection, "last_story_seq"),
        )
    finally:
        connection.execute("COMMIT")


def list_jobs(connection: apsw.Connection, wanted: JobFilter) -> list[Job]:
    """Jobs by filter, newest first. Cost grows with `limit`, not with the jobs there are (for one condition beside the states)."""
    where, values = "", []
    conditions: tuple[tuple[str, Column], ...] = (
        (" AND user = ?", wanted.user), (" AND project = ?", wanted.project), (" AND queue = ?", wanted.queue),
        (" AND name = ?", wanted.name), (" AND seq < ?", wanted.before_seq),
    )  # fmt: skip
    for condition, value in conditions:
        if value is not None:
            where += condition
            values.append(value)
    states = sorted(wanted.states or set(JobState))
    limit = max(0, min(wanted.limit, _INTEGER_MAX))
    part = f"SELECT * FROM ({_READS['newest_seqs_in_state'].format(where=where)})"  # noqa: S608  # ours; values are bound
    seqs = " UNION ALL ".join([part] * len(states))
    bound = [column for state in states for column in (state.value, *values, limit)]
    found = list(connection.execute(_READS["jobs_of_seqs"].format(seqs=seqs), (*bound, limit)))
    return [documents.JOB.read(doc, crc) for doc, crc in found]


def list_states(connection: apsw.Connection, first_seq: int, count: int) -> list[tuple[JobId, JobState]]:
    """Ids and states of jobs, in submit order: columns alone, so that ten thousand cost some milliseconds."""
    end = min(first_seq + max(0, count), _INTEGER_MAX)
    return [
        (JobId(id_), JobState(state)) for id_, state in list(connection.execute(_READS["states"], (first_seq, end)))
    ]


def count_jobs(connection: apsw.Connection) -> dict[JobState, int]:
    """How many jobs are in each state; every state is named."""
    counts = dict.fromkeys(JobState, 0)
    counts.update((JobState(state), count) for state, count in connection.execute(_READS["job_counts"]))
    return counts


def list_story(
    connection: apsw.Connection, job_id: JobId | None, node_id: NodeId | None, after: int, limit: int
) -> list[StoryLine]:
    """Story lines with seq > after, oldest first."""
    named = {(False, False): "story", (True, False): "story_of_job", (False, True): "story_of_node"}
    name = named.get((job_id is not None, node_id is not None), "story_of_job_and_node")
    about = tuple(about for about in (job_id, node_id) if about is not None)
    return records(connection, documents.STORY, name, (*about, after, max(0, limit)))


def _jobs_to_load(connection: apsw.Connection) -> list[Job]:
    rows = list(connection.execute(_READS["live_jobs"]))
    ended = [
        row
        for state in JobState
        if state.terminal
        for row in connection.execute(_READS["newest_jobs_in_state"], (state.value, ENDED_JOBS_LOADED))
    ]
    ended.sort(key=lambda row: row[2], reverse=True)
    rows += ended[:ENDED_JOBS_LOADED]
    rows.sort(key=lambda row: row[2])
    return [_checked_job(*row) for row in rows]


def _checked_job(doc: str, crc: int, seq: int, job_id: str, state: str, epoch: int) -> Job:
    job = documents.JOB.read(doc, crc)
    if (job.seq, job.id, job.state.value, job.epoch) != (seq, job_id, state, epoch):
        raise StoreUnusable(
            f"job {job_id}: its columns (number {seq}, {state}, epoch {epoch}) contradict its document"
            f" (number {job.seq}, {job.state.value}, epoch {job.epoch})",
            hint="restore the database from a copy; the disk may be failing",
        )
    return job

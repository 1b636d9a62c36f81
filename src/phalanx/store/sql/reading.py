"""Queries for either database. No function writes, or leaves a transaction open."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from phalanx.core.access.audit import AuditLine
from phalanx.core.ids import JobId, NodeId, UserId
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.records import ATTEMPTS, IDEMPOTENCY, JOBS, RESERVATIONS, RecordKind
from phalanx.core.state.world import World
from phalanx.core.work.job import Job
from phalanx.core.work.job_file.labels import LabelFilter
from phalanx.core.work.states import JobState
from phalanx.ports.store import JobFilter, JobOrder, Viewer
from phalanx.store.errors import StoreUnusable
from phalanx.store.loading import ENDED_JOBS_LOADED, KEYS_LOADED, build_world
from phalanx.store.sql.documents import Row, decode, key_values
from phalanx.store.sql.kinds import AUDIT, HISTORY
from phalanx.store.sql.queries import Dialect

K = TypeVar("K")
R = TypeVar("R")
_INTEGER_MAX: Final = 2**63 - 1  # of either database
_FEW: Final = 5000  # jobs of a state that are read and sorted in about 20 ms


class Execute(Protocol):
    """Runs one statement and returns its rows."""

    def __call__(self, sql: str, values: Row = (), /) -> Iterable[Any]:
        """Run it with its values bound."""
        ...


@dataclass(frozen=True, slots=True)
class SqlReader:
    """A connection for reading, and its dialect."""

    dialect: Dialect
    execute: Execute

    def rows(self, name: str, values: Row = ()) -> list[Any]:
        """All rows of a named query."""
        return list(self.execute(self.dialect.reads[name], values))


def records(look: SqlReader, kind: RecordKind[K, R], name: str, values: Row = ()) -> list[R]:
    """All records of a named query."""
    return [decode(kind, doc, crc) for doc, crc in look.rows(name, values)]


def number(look: SqlReader, name: str) -> int:
    """The number that a named query returns; 0 for none."""
    found = look.rows(name)
    return int(found[0][0] or 0) if found else 0


def load_world(look: SqlReader) -> World:
    """Load the world from one snapshot."""
    look.rows("begin_look")
    try:
        return build_world(
            lambda kind: _records_to_load(look, kind),
            last_job_seq=number(look, "last_job_seq"),
            last_history_seq=number(look, "last_history_seq"),
        )
    finally:
        look.rows("end_look")


def _records_to_load(look: SqlReader, kind: RecordKind[Any, Any]) -> Iterable[Any]:
    if kind is JOBS:
        return _jobs_to_load(look)
    if kind is IDEMPOTENCY:
        return reversed(records(look, IDEMPOTENCY, "newest_idempotency", (KEYS_LOADED,)))
    queries = {ATTEMPTS: "live_attempts", RESERVATIONS: "live_reservations"}
    return records(look, kind, queries.get(kind, f"all {kind.table}"))


def list_jobs(look: SqlReader, wanted: JobFilter) -> list[Job]:
    """Jobs by filter, in its order. With one condition besides the states, or one order, the cost depends on `limit`, not on the number of jobs.

    With more, jobs are read by the condition that finds few of them, and sorted; if none does, in the order of the list.
    """
    limit = max(0, min(wanted.limit, _INTEGER_MAX))
    column, way = f'"{wanted.order.attribute}"', "ASC" if wanted.ascending else "DESC"
    reads = look.dialect.reads
    by_state = reads["seqs_in_state" if wanted.ended_since_s is None else "seqs_of_recent_ends"]
    parts: list[str] = []
    bound: list[Any] = []
    for state in sorted(wanted.states or set(JobState)):
        conditions = _conditions(wanted, state)
        if conditions is None:
            continue
        where = "".join(f" AND {condition} {_places(look.dialect, value)}" for condition, value in conditions)
        values = [one for _, value in conditions for one in key_values(value)]
        labels = list(wanted.labels)
        first = labels.pop(_rare_label(look, labels)) if _goes_by_label(look, wanted, state) else None
        for more, more_values in (*map(look.dialect.has_label, labels), *_seen_by(look.dialect, wanted.visible_to)):
            where += f" AND {more}"
            values += more_values
        if first is None:
            sql = by_state.format(column=column, way=way, where=where, index=_index(look, wanted, state))
        else:
            by_number = "job_seq" if wanted.order is JobOrder.NUMBER else f"jobs.{column}"
            text = "" if first[1] is None else f" AND text = {look.dialect.placeholder}"
            sql = reads["seqs_of_label"].format(
                column=column, way=way, text=text, where=where.replace(" AND seq ", " AND job_seq "), order=by_number
            )
            bound += [one for one in first if one is not None]
        parts.append(f"SELECT * FROM ({sql}) AS part")  # noqa: S608  # our own SQL; values are bound
        bound += [state.value, *values, limit]
    if not parts:
        return []
    seqs = " UNION ALL ".join(parts)
    order = f"seq {way}" if wanted.order is JobOrder.NUMBER else f"value {way}, seq {way}"
    found = look.execute(reads["jobs_of_seqs"].format(seqs=seqs, column=column, way=way, order=order), (*bound, limit))
    return [decode(JOBS, doc, crc) for doc, crc in found]


def _goes_by_label(look: SqlReader, wanted: JobFilter, state: JobState) -> bool:
    """Whether a state's part is read by its first label: where the state has many jobs. PostgreSQL has statistics to choose by itself."""
    if (
        not wanted.labels
        or "matches" not in look.dialect.reads
        or not state.terminal
        or wanted.ended_since_s is not None
    ):
        return False
    found = list(look.execute(look.dialect.reads["state_size"], (state.value, _FEW)))
    return bool(found) and int(found[0][0]) >= _FEW


def _rare_label(look: SqlReader, labels: list[LabelFilter]) -> int:
    """The place of the first label that few jobs have; of the first one if all are common."""
    for place, (name, text) in enumerate(labels if len(labels) > 1 else ()):
        more = "" if text is None else f" AND text = {look.dialect.placeholder}"
        values = (name, _FEW) if text is None else (name, text, _FEW)
        found = list(look.execute(look.dialect.reads["label_size"].format(text=more), values))
        if int(found[0][0]) < _FEW:
            return place
    return 0


def _seen_by(dialect: Dialect, viewer: Viewer | None) -> list[tuple[str, list[Any]]]:
    """The condition that a caller sees all of a job, with its values."""
    if viewer is None:
        return []
    user, projects = viewer
    places = ", ".join(dialect.placeholder for _ in projects)
    of_projects = f" OR project IN ({places})" if projects else ""
    return [(f'("user" = {dialect.placeholder}{of_projects})', [user, *sorted(projects)])]


def label_values(look: SqlReader, name: str, ended_since_s: float, viewer: Viewer | None) -> dict[JobId, str]:
    """The value of a label of each job that has it and had not ended before. The cost depends on the number of jobs with the label."""
    values: list[Any] = [name, ended_since_s]
    where = ""
    for condition, more in _seen_by(look.dialect, viewer):
        where += f" AND {condition}"
        values += more
    return {
        JobId(id_): text
        for id_, text in look.execute(look.dialect.reads["label_values"].format(where=where), tuple(values))
    }


def _conditions(wanted: JobFilter, state: JobState) -> list[tuple[str, Any]] | None:
    """The conditions on the jobs of a state, each with its values; None if no job of the state can meet them."""
    found: list[tuple[str, Any]] = [(f'"{name}" =', value) for name, value in _equalities(wanted)]
    if wanted.before_seq is not None:
        found.append(("seq <", wanted.before_seq))
    if wanted.ended_since_s is not None:
        found.append(("ended_s >=", wanted.ended_since_s))
    if wanted.after is not None:
        value, seq = wanted.after
        sign = ">" if wanted.ascending else "<"
        same = dict(_equalities(wanted), state=state.value).get(wanted.order.attribute)  # of all jobs in this part
        if wanted.order is JobOrder.NUMBER or same == value:
            found.append((f"seq {sign}", seq))
        elif same is None:
            found.append((f'("{wanted.order.attribute}", seq) {sign}', (value, seq)))
        elif (same > str(value)) is not wanted.ascending:
            return None
    return found


def _equalities(wanted: JobFilter) -> list[tuple[str, str]]:
    pairs = (("user", wanted.user), ("project", wanted.project), ("queue", wanted.queue), ("name", wanted.name))
    return [(name, value) for name, value in pairs if value is not None]


def _index(look: SqlReader, wanted: JobFilter, state: JobState) -> str:
    """The index that SQLite shall use for a state's part: it has no statistics to choose among several."""
    equalities = _equalities(wanted)
    order = wanted.order.attribute
    reads = look.dialect.reads
    if "matches" not in reads or wanted.ended_since_s is not None:
        return ""
    if not equalities or (len(equalities) == 1 and order in ("seq", "state", equalities[0][0])):
        return ""
    for name, value in equalities:
        found = list(look.execute(reads["matches"].format(column=f'"{name}"'), (state.value, value, _FEW)))
        if not found or found[0][0] < _FEW:
            return f" INDEXED BY jobs_by_{name}"
    walked = equalities[0][0] if order in ("seq", "state") else order
    return f" INDEXED BY jobs_by_{walked}"


def _places(dialect: Dialect, value: object) -> str:
    places = ", ".join(dialect.placeholder for _ in key_values(value))
    return f"({places})" if isinstance(value, tuple) else places


def list_states(look: SqlReader, first_seq: int, count: int) -> list[tuple[JobId, JobState]]:
    """Ids and states of jobs, in submit order. Reads only columns: ten thousand take some milliseconds."""
    end = min(first_seq + max(0, count), _INTEGER_MAX)
    return [(JobId(id_), JobState(state)) for id_, state in look.rows("states", (first_seq, end))]


def count_jobs(look: SqlReader) -> dict[JobState, int]:
    """Number of jobs in each state, including states without jobs."""
    counts = dict.fromkeys(JobState, 0)
    counts.update((JobState(state), count) for state, count in look.rows("job_counts"))
    return counts


def list_history(
    look: SqlReader, job_id: JobId | None, node_id: NodeId | None, after: int, limit: int
) -> list[HistoryLine]:
    """History lines with seq > after, oldest first."""
    names = {(False, False): "history", (True, False): "history_of_job", (False, True): "history_of_node"}
    name = names.get((job_id is not None, node_id is not None), "history_of_job_and_node")
    ids = tuple(one for one in (job_id, node_id) if one is not None)
    return records(look, HISTORY, name, (*ids, after, max(0, limit)))


def list_audit(look: SqlReader, after: int | None, user: UserId | None, since_s: float, limit: int) -> list[AuditLine]:
    """Lines of the audit trail, oldest first."""
    name = user or ""
    values = (since_s, name, name, max(0, limit))
    if after is None:
        return records(look, AUDIT, "newest_audit", values)
    return records(look, AUDIT, "audit", (after, *values))


def _jobs_to_load(look: SqlReader) -> list[Job]:
    rows = look.rows("live_jobs")
    ended = [
        row
        for state in JobState
        if state.terminal
        for row in look.rows("newest_jobs_in_state", (state.value, ENDED_JOBS_LOADED))
    ]
    ended.sort(key=lambda row: row[2], reverse=True)
    rows += ended[:ENDED_JOBS_LOADED]
    rows.sort(key=lambda row: row[2])
    return [_checked_job(*row) for row in rows]


def _checked_job(doc: str, crc: int, seq: int, job_id: str, state: str, epoch: int) -> Job:
    job = decode(JOBS, doc, crc)
    if (job.seq, job.id, job.state.value, job.epoch) != (seq, job_id, state, epoch):
        raise StoreUnusable(
            f"job {job_id}: its columns (number {seq}, {state}, epoch {epoch}) contradict its document"
            f" (number {job.seq}, {job.state.value}, epoch {job.epoch})",
            hint="restore the database from a backup; the disk may be failing",
        )
    return job

-- The tables of most records follow from their declarations (core.state.records) and are created before these statements.
-- A record is one JSON document encoded by msgspec, with columns for what is searched or constrained.
-- `crc` is the CRC-32 of the document's bytes: SQLite has no page checksums, so a flipped bit would otherwise not be detected.

CREATE UNIQUE INDEX tokens_by_hash ON tokens (sha256);
-- A starting head loads reservations that have not ended; ended ones can be read by name.
CREATE INDEX reservations_live ON reservations (id) WHERE ended = 0;

-- `seq` is the rowid, with which every index ends: lists are sorted by it, newest first.
CREATE TABLE jobs (
    seq      INTEGER PRIMARY KEY,
    id       TEXT NOT NULL UNIQUE,
    state    TEXT NOT NULL,
    user     TEXT NOT NULL,
    project  TEXT NOT NULL,
    queue    TEXT NOT NULL,
    name     TEXT NOT NULL,
    submit_s REAL NOT NULL,
    ended_s  REAL,
    epoch    INTEGER NOT NULL,
    gpu_milli INTEGER NOT NULL,
    doc      TEXT NOT NULL,
    crc      INTEGER NOT NULL
) STRICT;
-- Lists are queried state by state (reads.sql): each index serves a filter and a sort order, so that no list has to sort or to skip jobs.
-- The columns behind `seq` let a list in one order skip what another filter leaves out, without reading the table.
CREATE INDEX jobs_by_state ON jobs (state);
CREATE INDEX jobs_by_user ON jobs (state, user, seq, project, queue, name);
CREATE INDEX jobs_by_project ON jobs (state, project, seq, user, queue, name);
CREATE INDEX jobs_by_queue ON jobs (state, queue, seq, user, project, name);
CREATE INDEX jobs_by_name ON jobs (state, name, seq, user, project, queue);
CREATE INDEX jobs_by_gpu_milli ON jobs (state, gpu_milli, seq, user, project, queue, name);
-- Jobs that ended lately, whenever they were submitted.
CREATE INDEX jobs_by_end ON jobs (ended_s) WHERE ended_s IS NOT NULL;

CREATE TABLE attempts (
    job_id TEXT NOT NULL REFERENCES jobs (id),
    epoch  INTEGER NOT NULL,
    state  TEXT NOT NULL,
    doc    TEXT NOT NULL,
    crc    INTEGER NOT NULL,
    PRIMARY KEY (job_id, epoch)
) STRICT;
-- At most one live attempt of a job (DESIGN 3, invariant 4); a starting head also lists live attempts by it.
CREATE UNIQUE INDEX attempts_live ON attempts (job_id) WHERE state <> 'ended';

CREATE TABLE history (
    seq     INTEGER PRIMARY KEY,
    job_id  TEXT,
    node_id TEXT,
    doc     TEXT NOT NULL,
    crc     INTEGER NOT NULL
) STRICT;
CREATE INDEX history_by_job ON history (job_id) WHERE job_id IS NOT NULL;
CREATE INDEX history_by_node ON history (node_id) WHERE node_id IS NOT NULL;

-- `number`: insertion order of the keys.
CREATE TABLE idempotency (
    number INTEGER PRIMARY KEY,
    user   TEXT NOT NULL,
    key    TEXT NOT NULL,
    job_id TEXT NOT NULL REFERENCES jobs (id),
    doc    TEXT NOT NULL,
    crc    INTEGER NOT NULL,
    UNIQUE (user, key)
) STRICT;

-- The audit trail: a chain of HMACs (core.access.audit), committed together with the changes that it records.
CREATE TABLE audit (
    seq  INTEGER PRIMARY KEY,
    at_s REAL NOT NULL,
    user TEXT NOT NULL,
    doc  TEXT NOT NULL,
    crc  INTEGER NOT NULL
) STRICT;

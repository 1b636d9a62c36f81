-- Queries of readers and of a starting head, by name.

-- name: begin_look
-- Begins a snapshot for several queries.
BEGIN;

-- name: end_look
COMMIT;

-- name: standings
-- CROSS JOIN: SQLite begins with the ids, which are few.
SELECT jobs.id, jobs.seq, jobs.state, jobs.epoch, attempts.epoch
FROM json_each(?) AS wanted CROSS JOIN jobs ON jobs.id = wanted.value
LEFT JOIN attempts ON attempts.job_id = jobs.id AND attempts.state <> 'ended';

-- name: last_history_seq
SELECT max(seq) FROM history;

-- name: last_job_seq
SELECT max(seq) FROM jobs;

-- name: live_jobs
SELECT doc, crc, seq, id, state, epoch FROM jobs WHERE state IN ('pending', 'running') ORDER BY seq;

-- name: newest_jobs_in_state
SELECT doc, crc, seq, id, state, epoch FROM jobs WHERE state = ? ORDER BY seq DESC LIMIT ?;

-- name: live_attempts
SELECT attempts.doc, attempts.crc
FROM attempts JOIN jobs ON jobs.id = attempts.job_id
WHERE attempts.state <> 'ended' ORDER BY jobs.seq;

-- name: newest_idempotency
SELECT doc, crc FROM idempotency ORDER BY number DESC LIMIT ?;

-- name: seqs_in_state
-- One state's part of a list. Names of columns and indexes, and `{where}`, are from a fixed set (reading.py), never a caller's text.
SELECT seq, {column} AS value FROM jobs{index} WHERE state = ?{where} ORDER BY {column} {way}, seq {way} LIMIT ?;

-- name: seqs_of_recent_ends
-- The same for jobs that ended lately. The + keeps SQLite from the indexes by state, which have all jobs that ever ended.
SELECT seq, {column} AS value FROM jobs WHERE +state = ?{where} ORDER BY +{column} {way}, +seq {way} LIMIT ?;

-- name: matches
-- How many jobs of a state one filter finds, counted up to a limit.
SELECT count(*) FROM (SELECT 1 FROM jobs AS counted WHERE state = ? AND {column} = ? LIMIT ?);

-- name: seqs_of_label
-- One state's part of a list of the jobs with a label, read by the label.
SELECT jobs.seq AS seq, jobs.{column} AS value FROM job_labels CROSS JOIN jobs ON jobs.seq = job_seq
WHERE label = ?{text} AND +state = ?{where} ORDER BY {order} {way}, job_seq {way} LIMIT ?;

-- name: state_size
-- How many jobs a state has, counted up to a limit.
SELECT count(*) FROM (SELECT 1 FROM jobs WHERE state = ? LIMIT ?);

-- name: label_size
-- How many jobs have a label, counted up to a limit.
SELECT count(*) FROM (SELECT 1 FROM job_labels WHERE label = ?{text} LIMIT ?);

-- name: label_values
SELECT id, text FROM job_labels CROSS JOIN jobs ON jobs.seq = job_seq
WHERE label = ? AND (ended_s IS NULL OR ended_s >= ?){where};

-- name: jobs_of_seqs
SELECT jobs.doc, jobs.crc FROM (SELECT seq, value FROM ({seqs}) ORDER BY {order} LIMIT ?) AS found
CROSS JOIN jobs ON jobs.seq = found.seq ORDER BY found.value {way}, found.seq {way};

-- name: states
SELECT id, state FROM jobs WHERE seq >= ? AND seq < ? ORDER BY seq;

-- name: job_counts
SELECT state, count(*) FROM jobs GROUP BY state;

-- name: attempts_of_job
SELECT doc, crc FROM attempts WHERE job_id = ? ORDER BY epoch;

-- name: newest_attempts
SELECT doc, crc FROM attempts WHERE (job_id, epoch) IN (
    SELECT job_id, max(epoch) FROM attempts WHERE job_id IN (SELECT value FROM json_each(?)) GROUP BY job_id
);

-- name: history
SELECT doc, crc FROM history WHERE seq > ? ORDER BY seq LIMIT ?;

-- name: history_of_job
SELECT doc, crc FROM history WHERE job_id = ? AND seq > ? ORDER BY seq LIMIT ?;

-- name: history_of_node
SELECT doc, crc FROM history WHERE node_id = ? AND seq > ? ORDER BY seq LIMIT ?;

-- name: history_of_job_and_node
SELECT doc, crc FROM history WHERE job_id = ? AND node_id = ? AND seq > ? ORDER BY seq LIMIT ?;

-- name: live_reservations
SELECT doc, crc FROM reservations WHERE ended = 0 ORDER BY id;

-- name: token_by_hash
SELECT doc, crc FROM tokens WHERE sha256 = ?;

-- name: audit
SELECT doc, crc FROM audit WHERE seq > ? AND at_s >= ? AND (? = '' OR user = ?) ORDER BY seq LIMIT ?;

-- name: newest_audit
SELECT doc, crc FROM (SELECT * FROM audit WHERE at_s >= ? AND (? = '' OR user = ?) ORDER BY seq DESC LIMIT ?) ORDER BY seq;

-- name: audit_tip
SELECT doc, crc FROM audit ORDER BY seq DESC LIMIT 1;

-- name: schema
-- The applied migrations.
SELECT number, name, sha256 FROM migrations ORDER BY number;

-- Queries of readers and of a starting head, by name.

-- name: begin_look
-- Begins a snapshot for several queries.
BEGIN;

-- name: end_look
COMMIT;

-- name: standing
SELECT jobs.seq, jobs.state, jobs.epoch, attempts.epoch
FROM jobs LEFT JOIN attempts ON attempts.job_id = jobs.id AND attempts.state <> 'ended'
WHERE jobs.id = ?;

-- name: last_story_seq
SELECT max(seq) FROM story;

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
SELECT doc, crc FROM idempotency ORDER BY rowid DESC LIMIT ?;

-- name: job
SELECT doc, crc FROM jobs WHERE id = ?;

-- name: newest_seqs_in_state
-- One state's part of a list; `{where}`: further conditions from a fixed set (reading.py), never a caller's text.
SELECT seq FROM jobs WHERE state = ?{where} ORDER BY seq DESC LIMIT ?;

-- name: jobs_of_seqs
SELECT doc, crc FROM jobs WHERE seq IN (SELECT seq FROM ({seqs}) ORDER BY seq DESC LIMIT ?) ORDER BY seq DESC;

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

-- name: story
SELECT doc, crc FROM story WHERE seq > ? ORDER BY seq LIMIT ?;

-- name: story_of_job
SELECT doc, crc FROM story WHERE job_id = ? AND seq > ? ORDER BY seq LIMIT ?;

-- name: story_of_node
SELECT doc, crc FROM story WHERE node_id = ? AND seq > ? ORDER BY seq LIMIT ?;

-- name: story_of_job_and_node
SELECT doc, crc FROM story WHERE job_id = ? AND node_id = ? AND seq > ? ORDER BY seq LIMIT ?;

-- name: nodes
SELECT doc, crc FROM nodes ORDER BY id;

-- name: queues
SELECT doc, crc FROM queues ORDER BY id;

-- name: spent
SELECT doc, crc FROM spent ORDER BY queue;

-- name: reservations
SELECT doc, crc FROM reservations WHERE ended = 0 ORDER BY id;

-- name: reservation
SELECT doc, crc FROM reservations WHERE id = ?;

-- name: calibrations
SELECT doc, crc FROM calibrations ORDER BY id;

-- name: calibration
SELECT doc, crc FROM calibrations WHERE id = ?;

-- name: all_failure_rules
SELECT doc, crc FROM failure_rules ORDER BY id;

-- name: failure_rules
SELECT doc, crc FROM failure_rules WHERE id = ?;

-- name: projects
SELECT doc, crc FROM projects ORDER BY id;

-- name: users
SELECT doc, crc FROM users ORDER BY id;

-- name: user
SELECT doc, crc FROM users WHERE id = ?;

-- name: tokens
SELECT doc, crc FROM tokens ORDER BY created_s, id;

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

-- name: counts
SELECT 'user', (SELECT count(*) FROM users) UNION ALL SELECT 'project', (SELECT count(*) FROM projects)
UNION ALL SELECT 'token', (SELECT count(*) FROM tokens) UNION ALL SELECT 'queue', (SELECT count(*) FROM queues)
UNION ALL SELECT 'spent', (SELECT count(*) FROM spent) UNION ALL SELECT 'reservation', (SELECT count(*) FROM reservations)
UNION ALL SELECT 'calibration', (SELECT count(*) FROM calibrations) UNION ALL SELECT 'rules', (SELECT count(*) FROM failure_rules)
UNION ALL SELECT 'node', (SELECT count(*) FROM nodes)
UNION ALL SELECT 'job', (SELECT count(*) FROM jobs) UNION ALL SELECT 'attempt', (SELECT count(*) FROM attempts)
UNION ALL SELECT 'key', (SELECT count(*) FROM idempotency) UNION ALL SELECT 'story', (SELECT count(*) FROM story)
UNION ALL SELECT 'audit', (SELECT count(*) FROM audit);

-- name: all_reservations
SELECT doc, crc FROM reservations ORDER BY id;

-- name: page_of_jobs
SELECT doc, crc, seq FROM jobs WHERE seq > ? ORDER BY seq LIMIT ?;

-- name: page_of_attempts
SELECT doc, crc, job_id, epoch FROM attempts WHERE (job_id, epoch) > (?, ?) ORDER BY job_id, epoch LIMIT ?;

-- name: page_of_keys
SELECT doc, crc, rowid FROM idempotency WHERE rowid > ? ORDER BY rowid LIMIT ?;

-- name: page_of_audit
SELECT doc, crc, seq FROM audit WHERE seq > ? ORDER BY seq LIMIT ?;

-- name: page_of_story
SELECT doc, crc, seq FROM story WHERE seq > ? ORDER BY seq LIMIT ?;

-- Queries of readers and of a starting head, by name.

-- name: settle
-- Configures a connection, and reads the server's properties. `on` waits for the disk of the server and for its synchronous standbys, if
-- any. The stricter `remote_apply` is kept.
SELECT current_setting('server_encoding'), pg_is_in_recovery(), current_setting('fsync'),
    set_config('search_path', 'phalanx', false),
    set_config('synchronous_commit', CASE current_setting('synchronous_commit') WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, false),
    set_config('tcp_keepalives_idle', '5', false), set_config('tcp_keepalives_interval', '2', false), set_config('tcp_keepalives_count', '3', false),
    set_config('statement_timeout', %s, false), set_config('lock_timeout', %s, false),
    set_config('idle_in_transaction_session_timeout', %s, false), set_config('default_transaction_read_only', %s, false);

-- name: patience
-- For backup and restore, whose disk may be slow between two pages.
SELECT set_config('idle_in_transaction_session_timeout', '0', false);

-- name: begin_look
-- Begins a snapshot for several queries.
BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY;

-- name: end_look
COMMIT;

-- name: begin_commit
-- One message of the simple protocol, for one round trip. No pipeline: idle_in_transaction_session_timeout did not apply to sessions that
-- idled after one (seen on PostgreSQL 15.19 with psycopg 3.3), so a frozen head would keep the locks.
-- The leader's row is locked until the end of the transaction: a takeover (FOR UPDATE) waits for it, and later commits read the new term.
-- KEY SHARE does not block the leader's renewals, which change no key: a commit of ten thousand jobs may take longer than a lease.
BEGIN; SELECT term FROM leader FOR KEY SHARE; SELECT id FROM last_commit FOR UPDATE; SELECT max(seq) FROM history;

-- name: confirm
-- Data that is visible after a broken connection may be on this server only. The row locks of `begin_commit` come after the commit in
-- question in the server's log, so this COMMIT waits for the disk and the standbys for both.
SET LOCAL statement_timeout = 0; COMMIT;

-- name: evict
-- Ends sessions that hold the leader's row and wait for their client, which was suspended or disconnected: one of them, or 0 for all.
-- Active sessions end by themselves. Those that wait for a synchronous standby must not be ended: their commit would be reported as done.
SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'relation' AND relation = 'leader'::regclass AND granted AND wait_event_type = 'Client' AND pid <> pg_backend_pid()
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND %s IN (0, pid);

-- name: standings
SELECT jobs.id, jobs.seq, jobs.state, jobs.epoch, attempts.epoch
FROM jobs LEFT JOIN attempts ON attempts.job_id = jobs.id AND attempts.state <> 'ended'
WHERE jobs.id = ANY (%s);

-- name: last_history_seq
SELECT max(seq) FROM history;

-- name: last_job_seq
SELECT max(seq) FROM jobs;

-- name: live_jobs
SELECT doc, crc, seq, id, state, epoch FROM jobs WHERE state IN ('pending', 'running') ORDER BY seq;

-- name: newest_jobs_in_state
SELECT doc, crc, seq, id, state, epoch FROM jobs WHERE state = %s ORDER BY seq DESC LIMIT %s;

-- name: live_attempts
SELECT attempts.doc, attempts.crc
FROM attempts JOIN jobs ON jobs.id = attempts.job_id
WHERE attempts.state <> 'ended' ORDER BY jobs.seq;

-- name: newest_idempotency
SELECT doc, crc FROM idempotency ORDER BY number DESC LIMIT %s;

-- name: seqs_in_state
-- One state's part of a list. Names of columns, and `{where}`, are from a fixed set (reading.py), never a caller's text. `{index}` is empty:
-- the planner has statistics.
SELECT seq, {column} AS value FROM jobs{index} WHERE state = %s{where} ORDER BY {column} {way}, seq {way} LIMIT %s;

-- name: seqs_of_recent_ends
-- The same for jobs that ended lately. OFFSET 0 keeps the planner from the order of the indexes by state, which have all jobs that ever ended.
SELECT seq, {column} AS value FROM (SELECT * FROM jobs WHERE state = %s{where} OFFSET 0) AS jobs ORDER BY {column} {way}, seq {way} LIMIT %s;

-- name: label_values
SELECT id, text FROM job_labels JOIN jobs ON jobs.seq = job_seq
WHERE label = %s AND (ended_s IS NULL OR ended_s >= %s){where};

-- name: jobs_of_seqs
SELECT doc, crc FROM jobs WHERE seq = ANY (ARRAY(SELECT seq FROM ({seqs}) AS parts ORDER BY {order} LIMIT %s))
ORDER BY {column} {way}, seq {way};

-- name: states
SELECT id, state FROM jobs WHERE seq >= %s AND seq < %s ORDER BY seq;

-- name: job_counts
SELECT state, count(*) FROM jobs GROUP BY state;

-- name: attempts_of_job
SELECT doc, crc FROM attempts WHERE job_id = %s ORDER BY epoch;

-- name: newest_attempts
SELECT doc, crc FROM attempts WHERE (job_id, epoch) IN (
    SELECT job_id, max(epoch) FROM attempts WHERE job_id IN (SELECT json_array_elements_text(%s::json)) GROUP BY job_id
);

-- name: history
SELECT doc, crc FROM history WHERE seq > %s ORDER BY seq LIMIT %s;

-- name: history_of_job
SELECT doc, crc FROM history WHERE job_id = %s AND seq > %s ORDER BY seq LIMIT %s;

-- name: history_of_node
SELECT doc, crc FROM history WHERE node_id = %s AND seq > %s ORDER BY seq LIMIT %s;

-- name: history_of_job_and_node
SELECT doc, crc FROM history WHERE job_id = %s AND node_id = %s AND seq > %s ORDER BY seq LIMIT %s;

-- name: live_reservations
SELECT doc, crc FROM reservations WHERE ended = 0 ORDER BY id;

-- name: token_by_hash
SELECT doc, crc FROM tokens WHERE sha256 = %s;

-- name: audit
SELECT doc, crc FROM audit WHERE seq > %s AND at_s >= %s AND (%s::text = '' OR "user" = %s) ORDER BY seq LIMIT %s;

-- name: newest_audit
SELECT doc, crc FROM (SELECT * FROM audit WHERE at_s >= %s AND (%s::text = '' OR "user" = %s) ORDER BY seq DESC LIMIT %s) AS newest ORDER BY seq;

-- name: audit_tip
SELECT doc, crc FROM audit ORDER BY seq DESC LIMIT 1;

-- name: schema
-- The applied migrations.
SELECT number, name, sha256 FROM migrations ORDER BY number;

-- name: heads_connected
SELECT application_name FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name LIKE 'phalanx%' AND application_name <> 'phalanx-backup';

-- Statements of `commit`, by name. All are idempotent except `add_story` and `add_audit`, which refuse an existing line.

-- name: put_user
INSERT INTO users (id, role, disabled, doc, crc) VALUES (%s, %s, %s, %s, %s)
ON CONFLICT (id) DO UPDATE SET role = excluded.role, disabled = excluded.disabled, doc = excluded.doc, crc = excluded.crc;

-- name: put_project
INSERT INTO projects (id, doc, crc) VALUES (%s, %s, %s)
ON CONFLICT (id) DO UPDATE SET doc = excluded.doc, crc = excluded.crc;

-- name: put_queue
INSERT INTO queues (id, doc, crc) VALUES (%s, %s, %s)
ON CONFLICT (id) DO UPDATE SET doc = excluded.doc, crc = excluded.crc;

-- name: put_spent
INSERT INTO spent (queue, doc, crc) VALUES (%s, %s, %s)
ON CONFLICT (queue) DO UPDATE SET doc = excluded.doc, crc = excluded.crc;

-- name: remove_queue
DELETE FROM queues WHERE id = %s;

-- name: remove_spent
DELETE FROM spent WHERE queue = %s;

-- name: put_reservation
INSERT INTO reservations (id, ended, doc, crc) VALUES (%s, %s, %s, %s)
ON CONFLICT (id) DO UPDATE SET ended = excluded.ended, doc = excluded.doc, crc = excluded.crc;

-- name: put_calibration
INSERT INTO calibrations (id, doc, crc) VALUES (%s, %s, %s)
ON CONFLICT (id) DO UPDATE SET doc = excluded.doc, crc = excluded.crc;

-- name: put_failure_rules
INSERT INTO failure_rules (id, doc, crc) VALUES (%s, %s, %s)
ON CONFLICT (id) DO UPDATE SET doc = excluded.doc, crc = excluded.crc;

-- name: put_token
INSERT INTO tokens (id, "user", sha256, created_s, doc, crc) VALUES (%s, %s, %s, %s, %s, %s)
ON CONFLICT (id) DO UPDATE SET
    "user" = excluded."user", sha256 = excluded.sha256, created_s = excluded.created_s, doc = excluded.doc, crc = excluded.crc;

-- name: put_node
INSERT INTO nodes (id, state, doc, crc) VALUES (%s, %s, %s, %s)
ON CONFLICT (id) DO UPDATE SET state = excluded.state, doc = excluded.doc, crc = excluded.crc;

-- name: remove_node
DELETE FROM nodes WHERE id = %s;

-- name: put_job
INSERT INTO jobs (seq, id, state, "user", project, queue, name, submit_s, ended_s, epoch, doc, crc)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
ON CONFLICT (id) DO UPDATE SET
    state = excluded.state, "user" = excluded."user", project = excluded.project, queue = excluded.queue, name = excluded.name,
    submit_s = excluded.submit_s, ended_s = excluded.ended_s, epoch = excluded.epoch, doc = excluded.doc, crc = excluded.crc;

-- name: put_attempt
INSERT INTO attempts (job_id, epoch, state, doc, crc) VALUES (%s, %s, %s, %s, %s)
ON CONFLICT (job_id, epoch) DO UPDATE SET state = excluded.state, doc = excluded.doc, crc = excluded.crc;

-- name: put_idempotency
INSERT INTO idempotency ("user", key, job_id, doc, crc) VALUES (%s, %s, %s, %s, %s)
ON CONFLICT ("user", key) DO UPDATE SET job_id = excluded.job_id, doc = excluded.doc, crc = excluded.crc;

-- name: add_story
INSERT INTO story (seq, job_id, node_id, doc, crc) VALUES (%s, %s, %s, %s, %s);

-- name: remember_commit
UPDATE last_commit SET id = %s;

-- name: take_term
-- FOR UPDATE, because an UPDATE of columns outside the key would not wait for commits (begin_commit).
WITH free AS (SELECT one FROM leader FOR UPDATE)
UPDATE leader SET term = term + 1, holder = '', url = '', until_s = 0 FROM free WHERE leader.one = free.one RETURNING term;

-- name: add_audit
INSERT INTO audit (seq, at_s, "user", doc, crc) VALUES (%s, %s, %s, %s, %s);

-- name: put_word
-- A restore, recorded for heads that lead later (store.lost_numbers).
INSERT INTO shared (name, value) VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET value = excluded.value;

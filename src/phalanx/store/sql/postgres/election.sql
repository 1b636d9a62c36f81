-- Leader election. Times are the database's clock; only differences of times are used for decisions.

-- name: patience
SELECT set_config('statement_timeout', %s, false), set_config('lock_timeout', %s, false);

-- name: look
SELECT term, beat, holder, url, lease_s, grants_s, since_s, renewed_s,
    greatest(0, long_leases_until_s - extract(epoch FROM clock_timestamp())::float8)
FROM leader;

-- name: leads_now
SELECT url FROM leader WHERE holder <> '' AND renewed_s > extract(epoch FROM clock_timestamp()) - 2 * lease_s;

-- name: claim
-- Leases that the previous leader granted may outlast the new leader's lease, so they stay recorded. FOR UPDATE waits for a commit of the
-- old leader in progress (begin_commit); an UPDATE of columns outside the key would not.
WITH free AS (SELECT one FROM leader WHERE term = %(term)s AND beat = %(beat)s FOR UPDATE)
UPDATE leader
SET long_leases_until_s = greatest(long_leases_until_s, extract(epoch FROM clock_timestamp())::float8 + leader.grants_s),
    term = term + 1, beat = beat + 1, holder = %(holder)s, url = %(url)s, lease_s = %(lease_s)s, grants_s = %(grants_s)s,
    since_s = extract(epoch FROM clock_timestamp()), renewed_s = extract(epoch FROM clock_timestamp())
FROM free WHERE leader.one = free.one AND term = %(term)s AND beat = %(beat)s
RETURNING term;

-- name: end_sessions
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE application_name = %(session)s AND usename = current_user AND datname = current_database() AND pid <> pg_backend_pid();

-- name: renew
UPDATE leader SET beat = beat + 1, renewed_s = extract(epoch FROM clock_timestamp())
WHERE term = %(term)s AND holder = %(holder)s RETURNING beat;

-- name: release
UPDATE leader SET beat = beat + 1, holder = '' WHERE term = %(term)s AND holder = %(holder)s;

-- name: grant_long
UPDATE leader SET long_leases_until_s = greatest(long_leases_until_s, extract(epoch FROM clock_timestamp())::float8 + %(lease_s)s)
WHERE term = %(term)s AND holder = %(holder)s RETURNING beat;

-- name: say
INSERT INTO heads (name, head_id, url, version, account, token_sha256, started_s, seen_s)
VALUES (%(name)s, %(head_id)s, %(url)s, %(version)s, %(user)s, %(token_sha256)s, %(started_s)s, extract(epoch FROM clock_timestamp()))
ON CONFLICT (name) DO UPDATE SET head_id = excluded.head_id, url = excluded.url, version = excluded.version,
    account = excluded.account, token_sha256 = excluded.token_sha256, started_s = excluded.started_s, seen_s = excluded.seen_s;

-- name: leave
DELETE FROM heads WHERE name = %(name)s AND head_id = %(head_id)s;

-- name: heads
SELECT name, head_id, url, version, account, token_sha256, started_s,
    greatest(0, extract(epoch FROM clock_timestamp())::float8 - seen_s)
FROM heads WHERE seen_s > extract(epoch FROM clock_timestamp()) - 7 * 86400 ORDER BY name;

-- name: offer
INSERT INTO shared (name, value) VALUES (%(name)s, %(value)s) ON CONFLICT DO NOTHING;

-- name: shared
SELECT name, value FROM shared ORDER BY name;

-- name: replace
INSERT INTO shared (name, value) VALUES (%(name)s, %(value)s) ON CONFLICT (name) DO UPDATE SET value = excluded.value;

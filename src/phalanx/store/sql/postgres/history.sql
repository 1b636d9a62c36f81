-- The chunks of the history (history_table.py). A head writes only while it leads.

-- name: put
INSERT INTO history_chunks (kind, series, begin_s, pending, data)
SELECT %s, %s, %s, %s, %s WHERE EXISTS (SELECT 1 FROM leader WHERE term = %s)
ON CONFLICT (kind, series, begin_s) DO UPDATE SET pending = excluded.pending, data = excluded.data;

-- name: read
SELECT kind, series, begin_s, pending, data FROM history_chunks
WHERE kind = %s AND series = %s AND begin_s >= %s AND begin_s < %s ORDER BY begin_s;

-- name: pending
SELECT kind, series, begin_s, pending, data FROM history_chunks
WHERE pending AND kind = %s AND begin_s < %s ORDER BY begin_s, series LIMIT %s;

-- name: drop
DELETE FROM history_chunks WHERE kind = %s AND begin_s < %s;

-- name: keep_newest
DELETE FROM history_chunks WHERE (kind, series, begin_s) IN (
    SELECT kind, series, begin_s FROM history_chunks WHERE kind = %s ORDER BY begin_s DESC, series DESC OFFSET %s
);

-- name: size
SELECT pg_total_relation_size('history_chunks');

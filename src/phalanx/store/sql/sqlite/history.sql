-- The chunks of the history (history_file.py).

-- name: put
INSERT INTO chunks (kind, series, begin_s, pending, data) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (kind, series, begin_s) DO UPDATE SET pending = excluded.pending, data = excluded.data;

-- name: read
SELECT kind, series, begin_s, pending, data FROM chunks
WHERE kind = ? AND series = ? AND begin_s >= ? AND begin_s < ? ORDER BY begin_s;

-- name: pending
SELECT kind, series, begin_s, pending, data FROM chunks
WHERE pending AND kind = ? AND begin_s < ? ORDER BY begin_s, series LIMIT ?;

-- name: drop
DELETE FROM chunks WHERE kind = ? AND begin_s < ?;

-- name: keep_newest
DELETE FROM chunks WHERE kind = ? AND rowid IN (
    SELECT rowid FROM chunks WHERE kind = ? ORDER BY begin_s DESC, series DESC LIMIT -1 OFFSET ?
);

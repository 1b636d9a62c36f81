-- Statements of `commit`, of a takeover and of a restore, by name. Those of records follow from their declarations (queries.py).

-- name: remember_commit
UPDATE last_commit SET id = %s;

-- name: take_term
-- FOR UPDATE, because an UPDATE of columns outside the key would not wait for commits (begin_commit).
WITH free AS (SELECT one FROM leader FOR UPDATE)
UPDATE leader SET term = term + 1, holder = '', url = '', until_s = 0 FROM free WHERE leader.one = free.one RETURNING term;

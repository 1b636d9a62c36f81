-- The operators' own failure rules: one document. Until now a row of table calibrations.

CREATE TABLE failure_rules (
    id  TEXT PRIMARY KEY NOT NULL,
    doc TEXT NOT NULL,
    crc INTEGER NOT NULL
) STRICT;
DELETE FROM calibrations WHERE id = 'failure-rules';

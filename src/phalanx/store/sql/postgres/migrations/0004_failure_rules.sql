-- The operators' own failure rules: one document. Until now a row of table calibrations.

CREATE TABLE failure_rules (
    id  text COLLATE "C" PRIMARY KEY,
    doc text NOT NULL,
    crc bigint NOT NULL
);
DELETE FROM calibrations WHERE id = 'failure-rules';

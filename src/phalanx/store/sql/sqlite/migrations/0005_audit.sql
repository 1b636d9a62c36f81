-- The audit trail: a chain of HMACs (core.access.audit), committed together with the changes that it records.

CREATE TABLE audit (
    seq  INTEGER PRIMARY KEY,
    at_s REAL NOT NULL,
    user TEXT NOT NULL,
    doc  TEXT NOT NULL,
    crc  INTEGER NOT NULL
) STRICT;

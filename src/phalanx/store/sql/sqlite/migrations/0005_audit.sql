-- Who changed what, from where, and how it ended: a chain of HMACs (core.access.audit), written with what it tells of.

CREATE TABLE audit (
    seq  INTEGER PRIMARY KEY,
    at_s REAL NOT NULL,
    user TEXT NOT NULL,
    doc  TEXT NOT NULL,
    crc  INTEGER NOT NULL
) STRICT;

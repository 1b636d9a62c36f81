-- Who changed what, from where, and how it ended: a chain of HMACs (core.access.audit), written with what it tells of.

CREATE TABLE audit (
    seq    bigint PRIMARY KEY,
    at_s   double precision NOT NULL,
    "user" text COLLATE "C" NOT NULL,
    doc    text NOT NULL,
    crc    bigint NOT NULL
);

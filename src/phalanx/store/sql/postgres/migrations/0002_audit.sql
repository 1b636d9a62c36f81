-- The audit trail: a chain of HMACs (core.access.audit), committed together with the changes that it records.

CREATE TABLE audit (
    seq    bigint PRIMARY KEY,
    at_s   double precision NOT NULL,
    "user" text COLLATE "C" NOT NULL,
    doc    text NOT NULL,
    crc    bigint NOT NULL
);

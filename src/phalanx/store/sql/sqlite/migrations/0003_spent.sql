-- Usage of each queue, for its budget and the fair share. Committed with the attempt that ended.

CREATE TABLE spent (
    queue TEXT PRIMARY KEY NOT NULL,
    doc   TEXT NOT NULL,
    crc   INTEGER NOT NULL
) STRICT;

-- What each queue has used: for its budget and the fair share. Written with the attempt that ended.

CREATE TABLE spent (
    queue TEXT PRIMARY KEY NOT NULL,
    doc   TEXT NOT NULL,
    crc   INTEGER NOT NULL
) STRICT;

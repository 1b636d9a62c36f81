-- What the last calibration measured: one document for the fleet.

CREATE TABLE calibrations (
    id  TEXT PRIMARY KEY NOT NULL,
    doc TEXT NOT NULL,
    crc INTEGER NOT NULL
) STRICT;

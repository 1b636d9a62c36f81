-- The result of the last calibration: one document for the fleet.

CREATE TABLE calibrations (
    id  TEXT PRIMARY KEY NOT NULL,
    doc TEXT NOT NULL,
    crc INTEGER NOT NULL
) STRICT;

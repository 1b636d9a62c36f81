-- Reservations of nodes. A starting head loads those that have not ended; ended ones can be read by name.

CREATE TABLE reservations (
    id    TEXT PRIMARY KEY NOT NULL,
    ended INTEGER NOT NULL,
    doc   TEXT NOT NULL,
    crc   INTEGER NOT NULL
) STRICT;
CREATE INDEX reservations_live ON reservations (id) WHERE ended = 0;

-- Nodes set aside for a time. A starting head reads those that have not ended; the others stay for whoever asks by name.

CREATE TABLE reservations (
    id    TEXT PRIMARY KEY NOT NULL,
    ended INTEGER NOT NULL,
    doc   TEXT NOT NULL,
    crc   INTEGER NOT NULL
) STRICT;
CREATE INDEX reservations_live ON reservations (id) WHERE ended = 0;

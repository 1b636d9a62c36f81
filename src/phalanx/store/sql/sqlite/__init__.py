"""SQLite through apsw: one file, one writer, any number of readers."""

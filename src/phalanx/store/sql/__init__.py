"""SQL stores: what is common to dialects, and SQLite through apsw."""

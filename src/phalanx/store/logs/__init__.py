"""Output streams of attempts, kept in files or in memory."""

"""Output streams of attempts, stored in files."""

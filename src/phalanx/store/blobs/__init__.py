"""Uploaded archives, by their hash."""

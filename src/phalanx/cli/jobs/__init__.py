"""Verbs about jobs: asking for one, watching it, changing it, fetching what it made."""

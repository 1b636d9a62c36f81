"""Advice after a job: a table of checks over what it asked for and what it used."""

"""Measurements of the real thing. Each module prints a table for people, or `--json`; nothing here asserts a time."""

"""Whole days in virtual time."""

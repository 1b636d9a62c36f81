"""Invariants under generated histories."""

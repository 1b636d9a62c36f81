"""Snapshot, plan, events and commands."""

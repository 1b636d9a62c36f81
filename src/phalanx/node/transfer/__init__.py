"""Bulk data between node and head: checkpoints, outputs, logs, shared storage."""

"""Snapshot in, plan out: order, quota, placement, explanation."""

"""Replays of workload traces in virtual time with the production policies, and their reports."""
